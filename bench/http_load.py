"""The load generator: processes that send requests over sockets of their own and keep what comes,
with the time.

Nothing is parsed while a run lasts, so that the client takes next to nothing of the machine that
the server runs on.
"""

import gc
import itertools
import multiprocessing
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import orjson

from bench.http_answers import OURS, Answer, Arrivals, Expected, Routing, read
from bench.http_server import MODEL_NAME, Server
from routed_experts.protocol.models import REPLAY

MORE_FIELDS = {
    "at_end": {"routed_experts_stream": "at_end"},
    "narrow": {"routed_experts_dtype": "auto"},
    "reference": {"routed_experts_delivery": "reference"},
}
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
_RECEIVE_BYTES = 1 << 20
_LIMIT_S = 300


@dataclass(frozen=True)
class Request:
    """One request of a run."""

    at: float  # when to send it, in seconds after the run's start
    role: str  # "stream", "other", or one of LONG_ROLES: whom the figures are about
    prompt: list[int]
    stream: bool
    expected: Expected
    # its client process serves no "stream", whose times its answer's size could disturb
    apart: bool = False
    # whether it goes to vLLM's route for tokens, which the front end in Rust returns rows from
    to_generate: bool = False
    more_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def says_experts(self) -> bool:
        return REPLAY in self.more_fields

    def encoded(self) -> bytes:
        """The request as it goes over the wire. The server closes the connection when the answer is
        complete."""
        sampling = {
            "max_tokens": self.expected.new_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        if self.expected.choices > 1:
            sampling |= {"n": self.expected.choices, "temperature": 1}
        body: dict[str, Any] = {"model": MODEL_NAME, "stream": self.stream}
        if self.to_generate:
            body |= {"token_ids": self.prompt, "sampling_params": sampling}
        else:
            body |= {"prompt": self.prompt, **sampling}
        if self.expected.rows in OURS:
            body |= {"return_routed_experts": True, **MORE_FIELDS.get(self.expected.rows, {})}
        kind = "json"
        encode: Callable[[Any], bytes] = orjson.dumps
        if self.says_experts:
            kind = "msgpack"
            encode = msgspec.msgpack.encode
        content = encode(body | self.more_fields)
        head = (
            f"POST {GENERATE if self.to_generate else COMPLETIONS} HTTP/1.1\r\n"
            "Host: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/{kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


@dataclass
class Sent:
    """When a request was sent, and the bytes that came back."""

    at: float
    arrivals: Arrivals


def receive(
    connections: list[socket.socket], requests: list[tuple[float, bytes]], began: float
) -> list[Sent]:
    """Sends each request (when after `began`, what) on its connection, and reads until the server
    has closed them all, for five minutes at most."""
    sent = [Sent(0.0, []) for _ in requests]
    # the next one last
    waiting = sorted(range(len(requests)), key=lambda index: -requests[index][0])
    with selectors.DefaultSelector() as selector:
        open_connections = len(requests)
        while open_connections:
            now = time.perf_counter()
            if now > began + _LIMIT_S:
                raise TimeoutError(f"{open_connections} requests without a complete answer")
            while waiting and began + requests[waiting[-1]][0] <= now:
                index = waiting.pop()
                sent[index].at = time.perf_counter()
                connections[index].sendall(requests[index][1])
                selector.register(connections[index], selectors.EVENT_READ, sent[index].arrivals)
            pause = began + requests[waiting[-1]][0] - time.perf_counter() if waiting else 1.0
            for key, _ in selector.select(max(pause, 0)):
                assert isinstance(key.fileobj, socket.socket)
                try:
                    data = key.fileobj.recv(_RECEIVE_BYTES)
                except ConnectionError:
                    data = b""
                if data:
                    key.data.append((time.perf_counter(), data))
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    open_connections -= 1
    return sent


@dataclass(frozen=True)
class Result:
    """One request's answer, as the figures need it."""

    role: str
    sent: float
    expected: Expected
    answer: Answer


def _client(pipe: Connection) -> None:
    """A client process: for each run, opens connections, sends, receives; and parses when it is
    told to."""
    while True:
        port, requests, routing, token_chars = pipe.recv()
        encoded = [(request.at, request.encoded()) for request in requests]
        try:
            connections = [socket.create_connection(("127.0.0.1", port)) for _ in requests]
            pipe.send("ready")
            began = pipe.recv()
            gc.disable()
            busy = time.process_time()
            sent = receive(connections, encoded, began)
        except (OSError, TimeoutError) as error:
            pipe.send(error)
            continue
        pipe.send(time.process_time() - busy)
        gc.enable()
        pipe.recv()
        results = []
        for request, one in zip(requests, sent, strict=True):
            answer = read(one.arrivals, request.expected, routing, token_chars)
            one.arrivals.clear()
            results.append(Result(request.role, one.at, request.expected, answer))
        pipe.send(results)


@dataclass(frozen=True)
class Load:
    """What a run gave."""

    results: list[Result]
    # the largest share of its time that a client process computed: near 1, it is what was measured
    busy: float
    # CPU seconds of the API processes, from before the first request to after the last answer
    api_cpu: float


class Clients:
    """Client processes that last for the whole benchmark."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, server: Server, requests: list[Request], routing: Routing, token_chars: int
    ) -> Load:
        """Sends the requests to `server`, and reads its CPU time before and after."""
        spread = itertools.cycle(
            range(len(self._pipes) - any(request.apart for request in requests)) or [0]
        )
        lanes: list[list[Request]] = [[] for _ in self._pipes]
        for request in requests:
            lanes[-1 if request.apart else next(spread)].append(request)
        for pipe, lane_requests in zip(self._pipes, lanes, strict=True):
            pipe.send((server.port, lane_requests, routing, token_chars))
        self._all()
        cpu = server.api_cpu_seconds()
        began = time.perf_counter() + 0.05
        for pipe in self._pipes:
            pipe.send(began)
        busy = self._all()
        api_cpu = server.api_cpu_seconds() - cpu
        seconds = time.perf_counter() - began
        for pipe in self._pipes:
            pipe.send("read")
        results = [result for answers in self._all() for result in answers]
        return Load(results, max(busy) / seconds, api_cpu)

    def stop(self) -> None:
        for process in self._processes:  # in the middle of a run too
            process.terminate()
            process.join()

    def _all(self) -> list[Any]:
        results = [pipe.recv() for pipe in self._pipes]
        for one in results:
            if isinstance(one, Exception):
                raise RuntimeError(f"a client process failed: {one!r}")
        return results
