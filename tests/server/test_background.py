"""What runs beside requests: a failure is logged, and does not end it."""

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from routed_experts.server.http import background
from routed_experts.server.http.process.plugin import sweep
from routed_experts.server.outputs.array_store import ArrayStore

SECONDS = 0.01


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def test_a_sweep_of_the_store_that_fails_is_logged_and_the_next_one_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    store = ArrayStore(tmp_path)
    outcomes: Iterator[Exception | None] = iter([OSError("no such device"), OSError("again"), None])
    swept = asyncio.Event()
    sweep_store = store.sweep

    def failing_sweep() -> int:
        if (error := next(outcomes, None)) is not None:
            raise error
        loop.call_soon_threadsafe(swept.set)
        return sweep_store()

    async def run() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        task = background.repeat("Deleting expired arrays", SECONDS, partial(sweep, store))
        await asyncio.wait_for(swept.wait(), 60)
        task.cancel()

    loop: asyncio.AbstractEventLoop
    monkeypatch.setattr(store, "sweep", failing_sweep)
    asyncio.run(run())
    assert [record.getMessage() for record in log.records] == [
        "Deleting expired arrays failed; the server goes on."
    ] * 2
