"""A server that is told to stop: responses under way are finished, or end with an error, and no
process is left.

In releases, the servers are no forks: which processes there are, and who hears of whose end, is what
is tested.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import orjson
import psutil
import pytest

from routed_experts.server.outputs.folders import default_folder
from tests.e2e.harness import (
    ASK,
    CHAT,
    COMPLETIONS,
    SMALL_KV,
    Oracle,
    Server,
    answer_of,
    check,
    free_port,
    prompt_of,
    read_events,
    serving,
    start,
    wait_until,
    wait_until_gone,
)

pytestmark = pytest.mark.e2e

LIMIT_S = 240
MAX_TOKENS = 500  # seconds for 6 requests at once, and not LIMIT_S on a busy machine
FLAGS = (*SMALL_KV, "--max-model-len", "8192", "--kv-cache-memory-bytes", str(64 << 20))


class Request(threading.Thread):
    """A request that is answered in the background.

    Attributes:
        lines: those of the body that have arrived, if it is streamed.
    """

    def __init__(self, server: Server, index: int, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.stream = f"{server.url}{COMPLETIONS}", index % 2 == 0
        self.body = {
            "model": "tiny",
            "prompt": prompt_of(40, index),
            "max_tokens": max_tokens,
            "stream": self.stream,
        }
        self.body |= {"ignore_eos": True, "temperature": 0, **ASK}
        self.has_begun = threading.Event()
        self.lines: list[str] = []
        self.status = 0
        self.start()

    def run(self) -> None:
        with httpx.stream(
            "POST", self.url, json=self.body, timeout=LIMIT_S, verify=False
        ) as response:
            self.status = response.status_code
            for line in filter(None, response.iter_lines()):
                self.lines.append(line)
                self.has_begun.set()

    def ended(self) -> "Request":
        self.join(LIMIT_S)
        assert not self.is_alive(), "a request hangs"
        return self

    def refused(self) -> None:
        """By 503 if nothing was sent before, or else an event in the stream, which ends as others
        do."""
        self.ended()
        if self.stream:
            assert (self.status, self.lines.pop()) == (200, "data: [DONE]")
        else:
            assert self.status == 503
        assert orjson.loads(self.lines[-1].removeprefix("data: "))["error"]["code"] == 503


@contextmanager
def under_way(server: Server, count: int, max_tokens: int) -> Iterator[list[Request]]:
    """So many requests, half of them streamed, that have reached the engine and generate or did."""
    # Counts every prompt once, when its first token comes: unlike the number of running requests,
    # it never falls.
    prefilled = server.metric("vllm:prompt_tokens_total")
    requests = [Request(server, index, max_tokens) for index in range(count)]
    prefilled += sum(len(request.body["prompt"]) for request in requests)
    for request in requests[::2]:
        assert request.has_begun.wait(LIMIT_S), "a stream does not begin"
    wait_until(
        lambda: server.metric("vllm:prompt_tokens_total") >= prefilled,
        lambda: (
            f"a request does not begin: {[(request.status, request.lines[-1:]) for request in requests]}"
        ),
    )
    yield requests
    for request in requests:
        request.ended()


def wait_until_draining(server: Server) -> None:
    with server.client() as client:
        wait_until(lambda: client.get("/health").status_code == 503, "the server does not stop")


def refused(response: httpx.Response) -> None:
    assert response.status_code == 503
    assert 1 <= int(response.headers["Retry-After"]) <= LIMIT_S
    error = response.json()["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert "The server is stopping" in error["message"]


def check_end(server: Server, status: int = 0) -> None:
    """The server ended well, alone and in silence."""
    assert server.process.wait(LIMIT_S) == status
    wait_until_gone(server)
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    "as_users_do",
    [False, pytest.param(True, marks=pytest.mark.release)],
    ids=["fork", "as users do"],
)
def test_responses_under_way_are_finished(
    tiny_model: Path, tmp_path: Path, as_users_do: bool
) -> None:
    """On SIGTERM to the first process, as container engines send it; after a disk that was full for
    a while.

    New clients get 503 until nothing is under way; the store's folder goes.
    """
    flags = (*FLAGS, "--shutdown-timeout", str(LIMIT_S))
    with serving(tiny_model, tmp_path / "log", *flags, as_users_do=as_users_do) as server:
        check_full_disk(server)
        folder = default_folder(str(urlsplit(server.url).port))
        server.complete(prompt="abc", max_tokens=2, **ASK, routed_experts_delivery="reference")
        assert [*folder.iterdir()]
        with under_way(server, 6, max_tokens=MAX_TOKENS) as requests, suspended_engine(server):
            os.kill(server.process.pid, signal.SIGTERM)
            wait_until_draining(server)
            with server.client() as client:
                refused(client.get("/health"))
                refused(client.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"}))
                refused(client.post(CHAT, json={"nothing": "that is read"}))
                assert client.get("/metrics").status_code == 200
            assert any(request.is_alive() for request in requests), (
                "they ended before anything was tried"
            )
        check_end(server)
        assert not folder.exists()
    oracle = Oracle(tiny_model)
    for request in requests:
        assert request.status == 200
        answer = answer_of(
            [*read_events(iter(request.lines))]
            if request.stream
            else orjson.loads(request.lines[0])
        )
        assert (answer.finish_reason, len(answer.tokens)) == ("length", MAX_TOKENS)
        check(answer, oracle)


def check_full_disk(server: Server) -> None:
    """What cannot be logged is lost, and nothing else. Afterwards there is room again."""
    processes, full = processes_of(server), -1
    while server.log.stat().st_size != full:  # something is logged meanwhile
        full = server.log.stat().st_size
        for process in processes:
            # writes fail, as on a full disk
            process.rlimit(psutil.RLIMIT_FSIZE, (full, psutil.RLIM_INFINITY))
    with server.client() as client:
        response = client.post(COMPLETIONS, json={"model": "tiny", "routed_experts_format": "npy"})
    assert response.status_code == 400
    assert server.complete(prompt="abc", max_tokens=2, return_routed_experts=True)[
        "prompt_routed_experts"
    ]
    assert server.log.stat().st_size == full
    for process in processes:
        process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


@contextmanager
def suspended_engine(server: Server) -> Iterator[None]:
    """Nothing that is under way ends meanwhile."""
    (pid,) = set(re.findall(r"\(EngineCore pid=(\d+)\)", server.log.read_text()))
    engine = psutil.Process(int(pid))
    engine.suspend()
    yield
    engine.resume()


def processes_of(server: Server) -> list[psutil.Process]:
    leader = psutil.Process(server.process.pid)
    return [leader, *leader.children(recursive=True)]


@pytest.mark.release
def test_what_does_not_finish_in_time_ends_with_an_error(tiny_model: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--shutdown-timeout", "3")
    with serving(tiny_model, tmp_path / "log", *flags, as_users_do=True) as server:
        stuck = httpx.Client(base_url=server.url, timeout=LIMIT_S, verify=False)
        body = {
            "model": "tiny",
            "prompt": prompt_of(40, 1),
            "max_tokens": 8000,
            "ignore_eos": True,
            "stream": True,
        }
        with (
            under_way(server, 4, max_tokens=8000) as requests,
            stuck.stream("POST", COMPLETIONS, json=body),
        ):
            os.killpg(server.process.pid, signal.SIGINT)
            with suppress(httpx.TransportError):  # it may be over before anybody looks
                wait_until_draining(server)
            for request in requests:
                request.refused()
            check_end(server)


@pytest.mark.release
@pytest.mark.parametrize(
    "how",
    ["SIGTERM", "Ctrl-C again and again"],
)
def test_stopped_while_it_starts(tiny_model: Path, tmp_path: Path, how: str) -> None:
    log = tmp_path / "log"
    process = start(tiny_model, log, *FLAGS, "--port", str(free_port()), as_users_do=True)
    server = Server(tiny_model, "", process, log)
    try:
        wait_until(
            lambda: "(EngineCore pid=" in log.read_text() or process.poll() is not None,
            "no engine is started",
        )
        assert process.poll() is None, log.read_text()
        if how == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGINT)
        while how == "Ctrl-C again and again" and process.poll() is None:
            time.sleep(0.1)  # two that are pending at once are one
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        check_end(server, 130 if how == "Ctrl-C again and again" else 0)
    finally:
        server.stop()
