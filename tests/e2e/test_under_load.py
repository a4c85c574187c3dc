"""A busy server that is told to stop, or whose engine is killed: nobody waits for ever, and nothing
is left."""

import os
import signal
import time
from pathlib import Path

import orjson
import pytest

from tests.conftest import Cases
from tests.e2e.harness import Oracle, answer_of, check, read_events, serving, wait_until_gone
from tests.e2e.test_stopping import (
    FLAGS,
    LIMIT_S,
    Request,
    check_end,
    processes_of,
    under_way,
    wait_until_draining,
)
from tests.long_runs import times

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROUNDS = times(2)
CLIENTS = 24
MAX_TOKENS = 200
END_LIMIT_S = 30
"""Of requests whose engine is dead."""


def has_whole_answer(request: Request) -> bool:
    """Otherwise it was ended with an error."""
    if not request.stream:
        return request.status == 200
    return "error" not in orjson.loads(request.lines[-2].removeprefix("data: "))


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_under_load(tiny_model: Path, tmp_path: Path, cases: Cases, processes: int) -> None:
    """Every request is answered whole, with its rows."""
    oracle = Oracle(tiny_model)
    flags = (*FLAGS, "--api-server-count", str(processes), "--shutdown-timeout", str(LIMIT_S))
    for index in range(ROUNDS):
        with serving(tiny_model, tmp_path / f"log-{index}", *flags) as server:
            with under_way(server, CLIENTS, max_tokens=MAX_TOKENS) as requests:
                os.kill(server.process.pid, signal.SIGTERM)
                wait_until_draining(server)
            check_end(server)
        for request in requests:
            assert request.status == 200
            lines = iter(request.lines)
            answer = answer_of(
                [*read_events(lines)] if request.stream else orjson.loads(request.lines[0])
            )
            assert (answer.finish_reason, len(answer.tokens)) == ("length", MAX_TOKENS)
            check(answer, oracle)
        cases.add(CLIENTS)


def test_kill_9_of_the_engine_under_load(tiny_model: Path, tmp_path: Path, cases: Cases) -> None:
    """Every client is told, none waits, and no process stays."""
    for index in range(ROUNDS):
        with serving(tiny_model, tmp_path / f"log-{index}", *FLAGS) as server:
            with under_way(server, CLIENTS, max_tokens=5000) as requests:
                engine = next(p for p in processes_of(server) if "EngineCore" in p.name())
                engine.kill()
                killed_at = time.monotonic()
                for request in requests:
                    request.ended()
                assert time.monotonic() - killed_at < END_LIMIT_S
            assert not any(has_whole_answer(request) for request in requests)
            server.process.wait(LIMIT_S)
            wait_until_gone(server)
        cases.add(CLIENTS)
