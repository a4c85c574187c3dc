"""Clients that stop reading an array, and clients that leave before they are told of one: nothing
of theirs stays."""

import asyncio
import json
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message

from routed_experts.server.http.arrays.references import ROWS_PATH, ReferenceMaker
from routed_experts.server.http.connection import watch_connections
from routed_experts.server.http.engine import ServerState
from routed_experts.server.http.routes.routes import router
from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.outputs.folders import default_folder
from tests.contract import middleware as operators
from tests.contract.edge import Edge
from tests.e2e.harness import wait_until
from tests.protocol.answers import peak_of

ARRAY = np.zeros((8, 1 << 15, 8), np.int16)  # 4 MiB, more than sockets hold
LIMIT = 5 * ARRAY.nbytes


@contextmanager
def running(app: FastAPI, log_level: str = "warning") -> Iterator[uvicorn.Server]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level=log_level))
    thread = Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server does not start", 60)
        yield server
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving(store: ArrayStore) -> Iterator[uvicorn.Server]:
    """Our route in uvicorn, as vLLM runs it; its address is that of the only server."""
    app = FastAPI()
    app.include_router(router)
    watch_connections(app)
    app.state.routed_experts = ServerState(store=store)
    with running(app) as server:
        yield server


def connect(server: uvicorn.Server, method: str, key: str) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(60)
    sock.connect(server.servers[0].sockets[0].getsockname())
    sock.sendall(f"{method} {ROWS_PATH}/{key} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return sock


def held_bytes(folder: Path) -> int:
    """What files of the folder take on it, those included that were deleted and that this process
    still has open."""
    sizes = {}
    for path in [*folder.rglob("*.npy"), *Path("/proc/self/fd").iterdir()]:
        try:
            if str(folder) in os.path.realpath(path):
                status = path.stat()
                sizes[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(sizes.values())


def test_the_limit_holds_with_clients_that_stop_reading(
    tmp_path: Path,
) -> None:
    """30 of them, whose arrays are deleted meanwhile: nothing is kept for them."""
    store = ArrayStore(tmp_path, LIMIT)
    with serving(store) as server, ExitStack() as stack:
        for _ in range(30):
            key = store.put(ARRAY).id
            sock = stack.enter_context(connect(server, "GET", key))
            assert sock.recv(12) == b"HTTP/1.1 200"
            assert stack.enter_context(connect(server, "DELETE", key)).recv(12) == b"HTTP/1.1 204"
            assert held_bytes(tmp_path) <= LIMIT
        assert store.used_bytes == held_bytes(tmp_path) == 0
        assert received(sock) < ARRAY.nbytes, "a part was taken for the whole"


def received(sock: socket.socket) -> int:
    """How many bytes come until the connection ends."""
    count = 0
    with suppress(ConnectionResetError):
        while part := sock.recv(1 << 20):
            count += len(part)
    return count


CLAIMS = (
    b"{'descr': '<i2', 'fortran_order': False, 'shape': (999999999999999, 999999999999999, 8), }\n"
)


@pytest.mark.parametrize(
    "content",
    [
        b"\x93NUMPY\x01\x00" + len(CLAIMS).to_bytes(2, "little") + CLAIMS,
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + CLAIMS,
        b"nonsense",
    ],
    ids=["more rows than bytes", "a header of four billion bytes", "no array"],
)
def test_a_file_that_claims_more_than_it_has_costs_nothing(tmp_path: Path, content: bytes) -> None:
    store = ArrayStore(tmp_path, LIMIT)
    stored = store.put(ARRAY)
    stored.path.write_bytes(content)
    with serving(store) as server, connect(server, "GET", stored.id) as sock:
        answer, peak = peak_of(lambda: sock.recv(4096))
    assert answer.startswith(b"HTTP/1.1 500")
    assert peak < 1 << 20


def test_a_pipe_in_place_of_an_array_holds_nobody_up(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path, LIMIT)
    stored, other = store.put(ARRAY), store.put(ARRAY)
    stored.path.unlink()
    os.mkfifo(stored.path)
    with serving(store) as server, ExitStack() as stack:
        socks = [stack.enter_context(connect(server, "GET", stored.id)) for _ in range(50)]
        assert {sock.recv(12) for sock in socks} == {b"HTTP/1.1 500"}
        assert stack.enter_context(connect(server, "GET", other.id)).recv(12) == b"HTTP/1.1 200"


class Client:
    """Asks for an answer as uvicorn's connections do, and leaves before a message of it, or after
    steps of the loop.

    Attributes:
        taken: what it was sent before it left.
        disconnected: whether it has left, as uvicorn's object for a request says it.
    """

    def __init__(self, message: int | None = None, step: int | None = None) -> None:
        self.taken: list[dict[str, Any]] = []
        self.disconnected = False
        self._message, self._step = message, step
        self._has_left = asyncio.Event()
        self._bodies: list[bytes] = []

    async def ask(self, app: ASGIApp, **fields: Any) -> None:
        self._bodies = [json.dumps({"generated": 20, **fields}).encode()]
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/long",
            "headers": headers,
            "query_string": b"",
        }
        leaving = asyncio.create_task(self._leave_after_steps())
        await app({**scope, "asgi": {"spec_version": "2.3"}}, self.receive, self.send)
        leaving.cancel()

    async def receive(self) -> Message:
        if self._bodies:
            return {"type": "http.request", "body": self._bodies.pop()}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.taken) == self._message:
            self.leave()
        if not self.disconnected:
            self.taken.append(dict(message))

    def leave(self) -> None:
        self.disconnected = True
        self._has_left.set()

    async def _leave_after_steps(self) -> None:
        if self._step is not None:
            for _ in range(self._step):
                await asyncio.sleep(0)
            self.leave()

    @property
    def is_told(self) -> bool:
        """Whether a reference can be read in what it was sent: in a line of a stream, or in a whole
        JSON object."""
        text = b"".join(message.get("body", b"") for message in self.taken).decode()
        if not text.startswith("data: "):
            return text.count("{") == text.count("}") and '"url"' in text
        return any('"url"' in line for line in text.splitlines())

    @property
    def has_all(self) -> bool:
        return bool(self.taken) and not self.taken[-1].get("more_body", "status" in self.taken[-1])


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, as that of a server."""
    path = default_folder(f"test-{os.getpid()}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("rows", [40, 3000], ids=["one line", "many lines"])
@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_around_the_end_leave_nothing(
    folder: Path, rows: int, stream: bool
) -> None:
    """Wherever they leave; arrays stay for those who were told of them."""
    edge = Edge(rows, folder)
    edge.store.open()
    if rows > 40:  # the prompt does not fit: it comes in lines
        edge.store._objects.max_bytes = 30 * 48 * 8 * 2
    for moment in range(500):
        client = Client(message=moment) if stream else Client(step=moment)
        asyncio.run(client.ask(edge.app(), stream=stream))
        edge.store.writer.submit(lambda: None).result(60)
        files = [*folder.rglob("*.npy")]
        assert client.is_told == bool(files), f"{moment}: {client.taken[-1:]}"
        if client.has_all:
            break
        for path in files:
            edge.store.delete(path.stem)
    assert client.is_told
    assert moment > 5


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("array", [0, 1])
def test_clients_that_leave_while_an_array_is_written_leave_nothing(
    folder: Path, stream: bool, array: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is one of which nobody has the id before it is written."""
    edge, client = Edge(40, folder), Client()
    put = edge.store._objects.put
    written: list[str] = []
    has_left = Event()

    async def ask() -> None:
        loop = asyncio.get_running_loop()

        def put_slowly(name: str, *args: Any) -> None:
            if len(written) == array:
                loop.call_soon_threadsafe(client.leave)
                assert has_left.wait(60)  # nobody waits for the array any more
            put(name, *args)
            written.append(name)

        monkeypatch.setattr(edge.store._objects, "put", put_slowly)
        await client.ask(edge.app(), stream=stream)
        has_left.set()

    asyncio.run(ask())
    edge.store.writer.submit(lambda: None).result(60)
    assert len(written) == 2
    assert not client.is_told
    assert held_bytes(folder) == edge.store.used_bytes == 0


def ask_and_leave(
    server: uvicorn.Server, stream: bool, leave: Callable[[], Any], *, to_the_end: bool = False
) -> bytes:
    """What a client was sent that closes its connection after `leave`; it does not wait for more,
    but `to_the_end`: then it is all that the server sent before it knew."""
    body = json.dumps({"generated": 20, "stream": stream}).encode()
    head = f"POST /long HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(server.servers[0].sockets[0].getsockname()) as sock:
        sock.sendall(head.encode() + body)
        leave()
        if to_the_end:
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(60)
        else:
            sock.setblocking(False)
        received = bytearray()
        with suppress(BlockingIOError, ConnectionResetError):
            while part := sock.recv(1 << 16):
                received += part
    return bytes(received)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_whose_leaving_the_event_loop_has_not_read(
    folder: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection takes what is sent, and nobody reads it."""
    edge, is_ready, has_left = Edge(40, folder), Event(), Event()
    hand_over = ReferenceMaker.hand_over

    def hand_over_late(maker: ReferenceMaker, ids: Collection[str] | None = None) -> None:
        is_ready.set()
        assert has_left.wait(60)
        hand_over(maker, ids)

    monkeypatch.setattr(ReferenceMaker, "hand_over", hand_over_late)
    with running(edge.app()) as server:
        assert b'"url"' not in ask_and_leave(server, stream, is_ready.wait)
        has_left.set()
    edge.store.writer.submit(lambda: None).result(60)
    assert held_bytes(folder) == edge.store.used_bytes == 0


def test_of_hundreds_of_clients_that_leave_at_any_time_nothing_is_left(folder: Path) -> None:
    """But the arrays of those who were told of them."""
    edge = Edge(40, folder)
    dice = random.Random(3)
    moments = [dice.random() * 0.4 for _ in range(300)]
    with running(edge.app()) as server, ThreadPoolExecutor(20) as clients:
        leaving = [
            clients.submit(
                ask_and_leave, server, number % 2 == 0, partial(time.sleep, moment), to_the_end=True
            )
            for number, moment in enumerate(moments)
        ]
        received = b"".join(client.result(60) for client in leaving)

    def unknown() -> list[Path]:
        return [path for path in folder.rglob("*.npy") if path.stem.encode() not in received]

    # A request of a client that left may end after its connection, and deletes then.
    wait_until(lambda: not unknown(), "arrays of which nobody knows are left", 60)


def leave_after_each_step(
    folder: Path, middleware: Any, stream: bool, has_enough: Callable[[Client], bool]
) -> None:
    """In each step of the event loop, the request is cancelled at another place. Nothing is kept,
    until a client `has_enough` when it leaves."""
    edge = Edge(40, folder)
    for step in range(2000):
        client = Client(step=step)
        asyncio.run(client.ask(edge.app(middleware), stream=stream))
        edge.store.writer.submit(lambda: None).result(60)
        if has_enough(client):
            break
        assert held_bytes(folder) == edge.store.used_bytes == 0, step
    assert has_enough(client)
    assert step > 10


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", [None, "passes", "Passes", "holds_back"])
def test_clients_that_leave_after_any_step_leave_nothing(
    folder: Path, stream: bool, name: str | None
) -> None:
    """Nor behind functions and classes of operators."""
    middleware = getattr(operators, name) if name is not None else None
    leave_after_each_step(folder, middleware, stream, lambda client: client.is_told)
