"""A minute of mixed load with aborts; `python -m bench.soak` is the long one."""

import pytest

from bench import soak
from tests.e2e.harness import Server

pytestmark = pytest.mark.e2e


def test_a_minute_of_everything(server: Server) -> None:
    """The bound on memory is loose, because a minute is short: what is lost by the request shows all the same."""
    seen = soak.run(server.url, server.process.pid, "tiny", seconds=60)
    assert set(seen.answers) == {"200", "400", "left"}, seen.answers
    assert not any(seen.counters.values()), seen.counters
    files, threads = seen.growth()
    assert files <= 10
    assert threads <= 10
    assert seen.slope() < 30, f"{seen.slope():.1f} MiB a minute more"
