"""What goes wrong again and again is logged once a minute, with a count of the others."""

import logging
import time

import pytest

from routed_experts.server.outputs import rare_log
from routed_experts.server.outputs.rare_log import RareLog


def test_one_message_an_interval_with_the_number_of_those_between(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of no other test, whose configuration of logs may have disabled it.
    logger = logging.Logger("failures")
    logger.addHandler(caplog.handler)
    log = RareLog(logger, logging.WARNING)
    for number in range(3):
        log.log("Number %d failed.", number)
    passed = rare_log.INTERVAL_S
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed)
    for number in range(3, 5):
        log.log("Number %d failed.", number, exc_info=ValueError("why"))
    first, second = caplog.records
    assert first.getMessage() == "Number 0 failed."
    assert second.getMessage() == "Number 3 failed. (2 more like this were not logged)"
    assert first.levelno == second.levelno == logging.WARNING
    assert (first.exc_info, "why" in caplog.text) == (None, True)
