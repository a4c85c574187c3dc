"""Clients that stop reading an array, and clients that leave before they are told of one: nothing of theirs stays."""

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message

from routed_experts.server.http import stored_arrays
from routed_experts.server.http.engine import ServerState
from routed_experts.server.http.references import ROWS_PATH
from routed_experts.server.http.routes import router
from routed_experts.server.outputs.array_store import ArrayStore, StoreError
from routed_experts.server.outputs.folders import default_folder
from tests.contract.edge import Edge
from tests.e2e.harness import wait_until

ARRAY = np.zeros((8, 1 << 15, 8), np.int16)  # 4 MiB, more than sockets hold
LIMIT = 5 * ARRAY.nbytes


@contextmanager
def serving(store: ArrayStore) -> Iterator[uvicorn.Server]:
    """Our route in uvicorn, as vLLM runs it; its address is that of the only server."""
    app = FastAPI()
    app.include_router(router)
    app.state.routed_experts = ServerState(store=store)
    app.state.server = server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server does not start", 60)
        yield server
    finally:
        server.should_exit = True
        thread.join()


def connect(server: uvicorn.Server, method: str, key: str) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(60)
    sock.connect(server.servers[0].sockets[0].getsockname())
    sock.sendall(f"{method} {ROWS_PATH}/{key} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return sock


def held_bytes(folder: Path) -> int:
    """What files of the folder take on it, those included that were deleted and that this process still has open."""
    found = {}
    for path in [*folder.rglob("*.npy"), *Path("/proc/self/fd").iterdir()]:
        try:
            if str(folder) in os.path.realpath(path):
                about = path.stat()
                found[about.st_ino] = about.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(found.values())


def test_s2_the_limit_holds_with_clients_that_stop_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 of them, whose arrays are deleted meanwhile."""
    monkeypatch.setattr(stored_arrays, "STALLED_S", 1e9)
    store, stalled = ArrayStore(tmp_path, LIMIT), 0
    with serving(store) as server, ExitStack() as stack:
        for _ in range(30):
            try:
                key = store.put(ARRAY).id
            except StoreError:
                continue
            stalled += 1
            assert stack.enter_context(connect(server, "GET", key)).recv(12) == b"HTTP/1.1 200"
            assert stack.enter_context(connect(server, "DELETE", key)).recv(12) == b"HTTP/1.1 204"
            assert held_bytes(tmp_path) <= LIMIT
        assert 0 < stalled < 5
        stack.close()
        wait_until(lambda: store.sweep() == held_bytes(tmp_path) == 0, lambda: store.used_bytes, 60)


def test_s2_a_response_whose_client_takes_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its connection, which the client does not close."""
    monkeypatch.setattr(stored_arrays, "STALLED_S", 0.2)
    store = ArrayStore(tmp_path, LIMIT)
    with serving(store) as server, ExitStack() as stack:
        for _ in range(3):
            key = store.put(ARRAY).id
            assert stack.enter_context(connect(server, "GET", key)).recv(12) == b"HTTP/1.1 200"
            store.delete(key)
        wait_until(lambda: store.sweep() == held_bytes(tmp_path) == 0, lambda: store.used_bytes, 60)
        wait_until(lambda: not server.server_state.connections, "connections are left", 60)


@pytest.mark.parametrize(
    ("waiting", "taken", "is_aborted"),
    [
        (1 << 20, [1 << 16, 1 << 16, 1 << 16], False),
        (1 << 20, [1 << 16, 1 << 16, (1 << 16) - 1], True),
        (0, [0, 0], False),  # a slow disk
    ],
)
def test_clients_that_read_slowly(
    monkeypatch: pytest.MonkeyPatch, waiting: int, taken: list[int], is_aborted: bool
) -> None:
    """64 KiB in 30 s are enough."""
    transport = Mock(**{"get_write_buffer_size.return_value": waiting})

    async def sleep(seconds: float) -> None:
        assert seconds == 30
        if not taken:
            raise asyncio.CancelledError
        transport.get_write_buffer_size.return_value -= taken.pop(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    response = stored_arrays._ArrayResponse(iter(()))
    response.transport, response.num_sent = transport, waiting
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(response._watch())
    assert transport.abort.called == is_aborted


class Client:
    """Asks for an answer as uvicorn's connections do, and leaves before a message of it, or after steps of the loop.

    Attributes:
        taken: what it was sent before it left.
    """

    def __init__(self, message: int | None = None, step: int | None = None) -> None:
        self.taken: list[dict[str, Any]] = []
        self._message, self._step = message, step
        self._has_left = asyncio.Event()

    async def ask(self, app: ASGIApp, **asked: Any) -> None:
        bodies = [json.dumps({"generated": 20, **asked}).encode()]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            await self._has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if len(self.taken) == self._message:
                self._has_left.set()
            if not self._has_left.is_set():
                self.taken.append(dict(message))

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/long", "headers": headers, "query_string": b""}
        leaving = asyncio.create_task(self._leave())
        await app({**scope, "asgi": {"spec_version": "2.3"}}, receive, send)
        leaving.cancel()

    async def _leave(self) -> None:
        if self._step is not None:
            for _ in range(self._step):
                await asyncio.sleep(0)
            self._has_left.set()

    @property
    def is_told(self) -> bool:
        return any(b'"url"' in message.get("body", b"") for message in self.taken)

    @property
    def has_all(self) -> bool:
        return bool(self.taken) and not self.taken[-1].get("more_body", "status" in self.taken[-1])


@pytest.mark.parametrize("rows", [40, 3000], ids=["one line", "many lines"])
@pytest.mark.parametrize("stream", [True, False])
def test_s5_clients_that_leave_around_the_end_leave_nothing(rows: int, stream: bool) -> None:
    """Wherever they leave; arrays stay for those who were told of them."""
    folder = default_folder(f"test-{os.getpid()}")
    edge = Edge(rows, folder)
    edge.store.open()
    if rows > 40:  # the prompt does not fit: it comes in lines
        edge.store.max_bytes = 30 * 48 * 8 * 2
    try:
        for moment in range(500):
            client = Client(message=moment) if stream else Client(step=moment)
            asyncio.run(client.ask(edge.app(), stream=stream))
            edge.store.writer.submit(lambda: None).result(60)
            files = [*folder.rglob("*.npy")]
            assert client.is_told == bool(files), f"{moment}: {client.taken[-1:]}"
            if client.has_all:
                break
            for path in files:
                edge.store.delete(path.parent.name + path.stem)
        assert client.is_told
        assert moment > 5
    finally:
        shutil.rmtree(folder)
