"""Clients that stop reading an array, and clients that leave before they are told of one: nothing
of theirs stays."""

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message

from routed_experts.server.http.arrays.references import ROWS_PATH
from routed_experts.server.http.engine import ServerState
from routed_experts.server.http.routes.routes import router
from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.outputs.folders import default_folder
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


class Client:
    """Asks for an answer as uvicorn's connections do, and leaves before a message of it, or after
    steps of the loop.

    Attributes:
        sent: what the server sent, also when it did not know yet that the client had left.
    """

    def __init__(self, message: int | None = None, step: int | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
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
        if len(self.sent) == self._message:
            self.leave()
        self.sent.append(dict(message))

    def leave(self) -> None:
        self._has_left.set()

    async def _leave_after_steps(self) -> None:
        if self._step is not None:
            for _ in range(self._step):
                await asyncio.sleep(0)
            self.leave()

    @property
    def is_told(self) -> bool:
        """Whether a reference can be read in what was sent: in a line of a stream, or in a whole JSON
        object."""
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        if not text.startswith("data: "):
            return text.count("{") == text.count("}") and '"url"' in text
        return any('"url"' in line for line in text.splitlines())


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, as that of a server."""
    path = default_folder(f"test-{os.getpid()}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("rows", [40, 3000], ids=["one line", "many lines"])
@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_before_they_are_told_leave_nothing(
    folder: Path, rows: int, stream: bool
) -> None:
    """Wherever they leave; arrays stay once the references were sent."""
    edge = Edge(rows, folder)
    edge.store.open()
    if rows > 40:  # the prompt does not fit: it comes in lines
        edge.store._objects.max_bytes = 30 * 48 * 8 * 2
    for moment in range(500):
        client = Client(message=moment) if stream else Client(step=moment)
        asyncio.run(client.ask(edge.app(), stream=stream))
        edge.store.writer.submit(lambda: None).result(60)
        files = [*folder.rglob("*.npy")]
        assert client.is_told == bool(files), f"{moment}: {client.sent[-1:]}"
        if client.is_told:
            break
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
