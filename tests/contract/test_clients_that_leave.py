"""Clients that vanish and readers that stop: they cost nobody else anything, and leave nothing
behind."""

import gc
import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from routed_experts.server.http.answers.response import CollectedRows
from routed_experts.server.http.answers.streaming import SSERewriter
from routed_experts.server.outputs.processor import BufferedRequestState
from routed_experts.server.outputs.row_buffer import RowBuffer
from tests.conftest import Cases
from tests.contract.served import check, serving
from tests.e2e.harness import (
    ASK,
    Server,
    answers_of,
    answers_of_stream,
    prompt_of,
    read_events,
    wait_until,
)
from tests.long_runs import times

KEPT = (RowBuffer, BufferedRequestState, SSERewriter, CollectedRows)
LIMIT_S = 240


@pytest.fixture(scope="module")
def api(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--max-num-batched-tokens", "256") as server:
        yield server


def connect(server: Server, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(LIMIT_S)
    sock.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return sock


def request(**body: Any) -> bytes:
    content = json.dumps({"model": "tiny", **ASK, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + content


@pytest.fixture(scope="module")
def idle(api: Server) -> dict[str, float]:
    """What the server says of itself before anything: its process has the metrics of other tests'
    servers too."""
    return state_of(api)


def state_of(server: Server) -> dict[str, float]:
    vllms = {name: server.metric(f"vllm:num_requests_{name}") for name in ("running", "waiting")}
    return {**server.state_left(), **vllms}


def settled(server: Server, idle: dict[str, float]) -> None:
    """Returns when nothing is left of any request; fails if that takes long."""
    wait_until(lambda: state_of(server) == idle, lambda: state_of(server), LIMIT_S)


def num_held() -> int:
    """How much this process, which is the server's as well, holds of answers."""
    gc.collect()
    return sum(type(item) in KEPT for item in gc.get_objects())


def at_most(count: Callable[[], int], limit: int) -> None:
    """Waits until there are so few: what was counted as ended may hold something until its task has
    returned."""
    wait_until(lambda: count() <= limit, lambda: f"{count()}, not {limit}", LIMIT_S)


def vanish(server: Server, seed: int, **fields: str) -> None:
    """A client that ends its connection: in its request, before the answer, or anywhere in it;
    sometimes rudely."""
    dice = random.Random(seed)
    body = {
        "n": dice.choice((1, 1, 1, 1, 1, 3)),
        "stream": dice.random() < 0.7,
        "max_tokens": dice.choice((1, 3, 20)),
    }
    body |= fields
    sent = request(
        prompt=prompt_of(dice.choice((1, 20, 60)), seed), temperature=1, ignore_eos=True, **body
    )
    with connect(server) as sock:
        if dice.random() < 0.5:  # the server is told by a reset, not by an end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if dice.random() < 0.1:
            sock.sendall(sent[: dice.randrange(len(sent))])
            return
        sock.sendall(sent)
        wanted = dice.choice((0, 0, 1, 500, 5000, 20_000))
        while wanted > 0 and (data := sock.recv(min(wanted, 4096))):
            wanted -= len(data)


def check_many_vanish(server: Server, idle: dict[str, float], count: int, **fields: str) -> None:
    me = psutil.Process()
    before = num_held()

    def round_of(first: int, last: int) -> None:
        for seed in range(first, last):
            vanish(server, seed, **fields)
        settled(server, idle)

    round_of(0, 100)
    files, threads = me.num_fds(), me.num_threads()
    round_of(100, count)
    at_most(me.num_fds, files + 3)
    at_most(me.num_threads, threads + 10)  # the web framework has up to 40 for what blocks
    at_most(num_held, before)
    (answer,) = answers_of(server.complete(**ASK, prompt=prompt_of(40, 1), max_tokens=5))
    check(answer, tokens=5)


def test_hundreds_of_clients_vanish(api: Server, idle: dict[str, float]) -> None:
    check_many_vanish(api, idle, 250)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "records"),
    [
        pytest.param({}, False, id="inline"),
        pytest.param({"routed_experts_stream": "at_end"}, False, id="at the end"),
        pytest.param({"routed_experts_delivery": "reference"}, False, id="reference"),
        pytest.param({}, True, id="recorded"),
    ],
)
def test_thousands_of_clients_vanish(
    tiny_model: Path, tmp_path: Path, cases: Cases, fields: dict[str, str], records: bool
) -> None:
    """Of each way of delivery, and recorded, which begins to write when an answer ends."""
    flags = ("--routed-experts-record", str(tmp_path)) if records else ()
    count = 100 + times(2400)
    with serving(tiny_model, "--max-num-batched-tokens", "256", *flags) as server:
        check_many_vanish(server, state_of(server), count, **fields)
    cases.add(count)
    assert records == any(file.stat().st_size for file in tmp_path.glob("*.jsonl"))


def test_readers_that_stop(api: Server, idle: dict[str, float]) -> None:
    """Some 7 MB for each, more than sockets hold; one reads on at last, and misses nothing."""
    before = num_held()
    body: dict[str, Any] = {"max_tokens": 30, "n": 5, "temperature": 1, "ignore_eos": True}
    body |= {"routed_experts_layout": "joined", "prompt": prompt_of(900, 7)}
    with ExitStack() as stack:
        stopped = []
        for stream in (True, True, False, False):
            sock = stack.enter_context(connect(api, receive_buffer=4096))
            sock.sendall(request(**body, stream=stream))
            assert sock.recv(12) == b"HTTP/1.1 200"
            stopped.append(sock)
        for seed in range(10):
            (answer,) = answers_of_stream(
                api.stream(**ASK, prompt=prompt_of(40, seed), max_tokens=20)
            )
            check(answer, tokens=20)
        reader = stopped[0]
        received = bytearray()
        while data := reader.recv(1 << 20):
            received += data
        answered = bytes(received).partition(b"\r\n\r\n")[2]
        events = list(read_events(iter(unchunked(answered).decode().splitlines())))
        arrays = [choice.get("routed_experts") for event in events for choice in event["choices"]]
        assert sum(array["shape"][0] for array in arrays if array) == 5 * 929
    settled(api, idle)
    at_most(num_held, before)


def unchunked(body: bytes) -> bytes:
    """What HTTP/1.1's chunks of a body hold."""
    whole, at = bytearray(), 0
    while size := int(body[at : (line := body.index(b"\r\n", at))], 16):
        whole += body[line + 2 : line + 2 + size]
        at = line + 4 + size
    return bytes(whole)
