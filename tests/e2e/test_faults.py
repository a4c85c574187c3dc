"""What goes wrong around a server: it answers or ends with a reason, and leaves nothing running.

Clients that vanish and readers that stop by the hundred are in `tests/contract/test_clients_that_leave.py`.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest

from tests.e2e.harness import FULL_PRECISION, SMALL_KV, Server, free_port, prompt_of, serving

pytestmark = pytest.mark.e2e

FLAGS = (*SMALL_KV, "--max-model-len", "512")
# Streams that do not end by themselves before something is done to them, however busy the machine is.
LONG_FLAGS = (*SMALL_KV, "--max-model-len", "8192", "--kv-cache-memory-bytes", str(64 << 20))
LIMIT_S = 240


def ended(*argv: str) -> tuple[int, str]:
    """Exit status and output of `routed-experts serve` with arguments that cannot work."""
    command = [sys.executable, "-m", "routed_experts.server.cli", "serve", *argv]
    environment = {**os.environ, **FULL_PRECISION}
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    return process.returncode, process.stdout + process.stderr


def test_a_port_in_use_is_said(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = ended(str(tiny_model), *FLAGS, "--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))
    assert code != 0
    assert "is in use: choose another with --port" in said


def test_a_model_without_weights_is_said(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        if not file.name.endswith(".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    code, said = ended(str(tmp_path), *FLAGS, "--port", str(free_port()))
    assert code != 0
    assert "safetensors" in said or "weights" in said


class Streams:
    """Streams that are read in the background until they end, however that is.

    Attributes:
        ends: the last two events of each, or the connection's error.
    """

    def __init__(self, server: Server, count: int, max_tokens: int) -> None:
        self.ends: list[list[str]] = []
        self._begun = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._read, args=(server.url, index, max_tokens), daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()
        for _ in range(count):
            assert self._begun.acquire(timeout=LIMIT_S), "a stream does not begin"

    def _read(self, url: str, index: int, max_tokens: int) -> None:
        body: dict[str, Any] = {
            **{"model": "tiny", "prompt": prompt_of(40, index), "max_tokens": max_tokens, "ignore_eos": True},
            **{"stream": True, "return_routed_experts": True},
        }
        events: list[str] = []
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S, verify=False) as response:
                for line in filter(None, response.iter_lines()):
                    if not events:
                        self._begun.release()
                    events = [*events[-1:], line]
        except httpx.HTTPError as error:
            events = [type(error).__name__]
        self.ends.append(events)

    def join(self) -> list[list[str]]:
        """How all of them ended; none may hang."""
        deadline = time.monotonic() + LIMIT_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
            assert not thread.is_alive(), "a stream hangs"
        return self.ends


def processes_of(server: Server) -> list[psutil.Process]:
    assert server.process is not None
    leader = psutil.Process(server.process.pid)
    return [leader, *leader.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    """Whether they all end, and none has to be killed."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    return not left


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
def test_a_process_of_the_engine_is_killed(tiny_model: Path, tmp_path: Path, victim: str) -> None:
    """Streams end with an error event, the server ends and its log says why, and nothing is left."""
    with serving(tiny_model, tmp_path / "log", *LONG_FLAGS) as server:
        processes = processes_of(server)
        killed = [process for process in processes if victim in process.name()]
        assert killed, [process.name() for process in processes]
        streams = Streams(server, 4, max_tokens=5000)
        killed[0].kill()
        for error, done in streams.join():
            assert orjson.loads(error.removeprefix("data: "))["error"]["code"] == 500
            assert done == "data: [DONE]"
        server.process.wait(LIMIT_S)
        assert gone(processes)
        assert "EngineDeadError" in server.log.read_text()


def test_a_full_disk_and_an_end_while_streams_run(tiny_model: Path, tmp_path: Path) -> None:
    """What cannot be logged is lost, and nothing else; told to end, the server finishes what it has begun."""
    with serving(tiny_model, tmp_path / "log", *FLAGS, "--shutdown-timeout", str(LIMIT_S)) as server:
        processes = processes_of(server)
        full = server.log.stat().st_size
        for process in processes:
            process.rlimit(psutil.RLIMIT_FSIZE, (full, psutil.RLIM_INFINITY))  # writes fail, as on a full disk
        with server.client() as client:
            refused = client.post("/v1/completions", json={"model": "tiny", "routed_experts_format": "npy"})
        assert refused.status_code == 400
        assert server.complete(prompt="abc", max_tokens=2, return_routed_experts=True)["prompt_routed_experts"]
        assert server.log.stat().st_size == full
        for process in processes:
            process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        streams = Streams(server, 4, max_tokens=150)
        os.kill(server.process.pid, signal.SIGTERM)
        for last, done in streams.join():
            (choice,) = orjson.loads(last.removeprefix("data: "))["choices"]
            assert choice["finish_reason"] == "length"
            assert done == "data: [DONE]"
        assert server.process.wait(LIMIT_S) == 0
        assert gone(processes)


def test_clients_that_vanish_leave_nothing(server: Server) -> None:
    """At every stage, of a real engine: before the first byte, in the prompt's rows, in mid-stream."""
    processes = processes_of(server)
    api = processes[0]

    def vanish(count: int) -> None:
        for index in range(count):
            body = orjson.dumps(
                {
                    **{"model": "tiny", "prompt": prompt_of(index % 50 + 1, index), "max_tokens": 30},
                    **{"ignore_eos": True, "stream": index % 4 > 0, "return_routed_experts": True},
                }
            )
            with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as sock:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                sock.settimeout(LIMIT_S)
                for _ in range(index % 3):
                    sock.recv(4000)

    def settled() -> tuple[int, int]:
        deadline = time.monotonic() + LIMIT_S
        while server.metric("vllm:num_requests_running") > 0 or any(server.state_left().values()):
            assert time.monotonic() < deadline, server.state_left()
            time.sleep(0.2)
        return api.num_fds(), api.num_threads()

    vanish(30)
    files, threads = settled()
    # What is lost with a client is lost in every round; what allocators and caches take at first, in the first ones.
    grown = []
    for _ in range(6):
        memory = sum(process.memory_info().rss for process in processes)
        vanish(60)
        files_after, threads_after = settled()
        grown.append(sum(process.memory_info().rss for process in processes) - memory)
        assert files_after <= files + 5
        assert threads_after <= threads + 2
        if grown[-1] < 4 << 20:
            break
    assert grown[-1] < 4 << 20, f"MiB more after 60 clients, in each round: {[size >> 20 for size in grown]}"
    assert server.complete(prompt="abc", max_tokens=2, return_routed_experts=True)
