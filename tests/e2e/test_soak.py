"""A minute of mixed load with aborts; `python -m bench.soak` is the long one."""

import pytest

from bench import soak
from tests.e2e.harness import ON_GPU, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_minute_of_everything(server: Server) -> None:
    for _ in range(3):  # what is taken once may be taken late
        seen = soak.run(server.url, server.process.pid, "tiny", seconds=60)
        if seen.slope(with_worker=False) < 20 and seen.slope() < 100:
            break
    assert set(seen.answers) == {"200", "400", "left"}, seen.answers
    assert not any(seen.counters.values()), seen.counters
    files, threads = seen.growth()
    assert files <= 10
    assert threads <= 10
    assert any(sample[-1] for sample in seen.samples) or ON_GPU, "the worker was not found"
    assert seen.slope(with_worker=False) < 20
    assert seen.slope() < 100
