"""The load generator against a real server that knows when it sent what, and the clock that CPU time is read from.

How long anything takes is not tested, as it depends on what else the machine does; what comes before what is.
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import orjson
import pytest

from bench import http_load
from bench.http_answers import Expected, Routing
from bench.http_load import Clients
from bench.http_server import Server, cpu_seconds
from bench.shapes import TOKEN_CHARS, token_text

pytestmark = pytest.mark.release

ROUTING = Routing(2, 2, 8)
STREAMS = 6
LIMIT_S = 120  # for what should take a moment
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Seen:
    """A request as the server saw it, by the clock of all processes.

    Attributes:
        made: when each of its tokens was sent.
        left: when the client, which had read all of it, closed the connection.
    """

    received: float
    made: list[float] = field(default_factory=list)
    left: float = 0.0


class Words:
    """A server of streams of words. The first id of a prompt says which request it is.

    Each of the first `STREAMS` requests has one word at once, and the others when all of them have one and the client
    has left the stream before. Other requests have all of theirs at once.
    """

    def __init__(self) -> None:
        self.seen: dict[int, Seen] = {}
        self.begun = threading.Barrier(STREAMS)
        self._left = [threading.Event() for _ in range(STREAMS)]
        self._threads: list[threading.Thread] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self) -> None:
        """Until the last of the clients' ends was seen."""
        for thread in self._threads:
            thread.join(LIMIT_S)

    def close(self) -> None:
        self._socket.close()
        self.begun.abort()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(threading.BrokenBarrierError):
            raw = b""
            while b"\r\n\r\n" not in raw or not raw.endswith(b"}"):
                data = connection.recv(1 << 16)
                if not data:
                    return
                raw += data
            body = orjson.loads(raw.partition(b"\r\n\r\n")[2])
            index, count = body["prompt"][0], body["max_tokens"]
            seen = self.seen[index] = Seen(time.perf_counter())
            connection.sendall(HEAD)
            self._say(connection, seen, 1)
            if index < STREAMS:
                self.begun.wait(LIMIT_S)
                assert index == 0 or self._left[index - 1].wait(LIMIT_S)
            self._say(connection, seen, count - 1)
            connection.sendall(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
            seen.left = time.perf_counter()
            if index < STREAMS:
                self._left[index].set()

    def _say(self, connection: socket.socket, seen: Seen, count: int) -> None:
        for _ in range(count):
            text = token_text(len(seen.made))
            seen.made.append(time.perf_counter())
            connection.sendall(_chunk(b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % text.encode()))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextmanager
def serving() -> Iterator[tuple[Words, Server]]:
    """The server, and what the load generator needs to know of it; a process that sleeps has its CPU time."""
    words = Words()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield words, Server(process, words.port, None, 1)  # type: ignore[arg-type]
    finally:
        process.kill()
        process.wait()
        words.close()


def test_times_and_counts() -> None:
    requests = [http_load.Request(0.0, "stream", [i], True, Expected(1, 5, 1, "none")) for i in range(STREAMS)]
    requests.append(http_load.Request(0.5, "long", [STREAMS], True, Expected(1, 2, 1, "none"), apart=True))
    clients = Clients(2)
    try:
        for _ in range(2):  # the processes serve one run after another
            with serving() as (words, server):
                began = time.perf_counter()
                load = clients.run(server, requests, ROUTING, TOKEN_CHARS)
                words.wait()
                check_times(words, load, began)
    finally:
        clients.stop()


def check_times(words: Words, load: http_load.Load, began: float) -> None:
    """Every time is that of its event: it lies between others that must come before and after it."""
    assert [result.answer.fault for result in load.results] == [""] * (STREAMS + 1)
    for index, result in enumerate(load.results):
        seen = words.seen[index]
        assert began + (0.5 if result.role == "long" else 0) <= result.sent <= seen.received
        (times,) = result.answer.tokens
        assert all(made <= came for made, came in zip(seen.made, times, strict=True))
        assert times == sorted(times)
        assert times[-1] <= result.answer.last <= seen.left
        if result.role == "stream":
            # The first words were on their way before stream 0 could end, so they are read in the same round at the
            # latest; stream 1 ends in a later one.
            assert times[0] <= words.seen[1].left
    assert 0 < load.busy < 1
    assert 0 <= load.api_cpu < 1  # that process sleeps


def test_clients_stop_in_the_middle_of_a_run() -> None:
    clients = Clients(1)
    with serving() as (words, server):
        request = http_load.Request(0.0, "stream", [0], True, Expected(1, 2000, 1, "none"))

        def run() -> None:
            with suppress(EOFError):
                clients.run(server, [request], ROUTING, TOKEN_CHARS)

        thread = threading.Thread(target=run)
        thread.start()
        while not words.begun.n_waiting:  # alone, it is never answered
            time.sleep(0.01)
        clients.stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_cpu_seconds_are_those_of_the_process() -> None:
    script = "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time(), flush=True)\ninput()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = float(process.stdout.readline())
    assert cpu_seconds(process.pid) == pytest.approx(said, abs=0.05)
    process.communicate("\n")
