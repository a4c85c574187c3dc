"""A short hostile run; `python -m tests.e2e.hostile` does longer ones, with any flags of the server."""

import pytest

from tests.e2e.harness import Oracle, Server
from tests.e2e.hostile import check_alive, send

pytestmark = pytest.mark.e2e


def test_a_short_run(server: Server, oracle: Oracle) -> None:
    statuses, wrong = send(server, count=150, number=0)
    assert not wrong
    assert set(statuses) >= {"200", "400"}
    check_alive(server, oracle)
