"""What is answered while the server stops."""

import asyncio
import os
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import State
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routed_experts.server.http import drain as drain_module
from routed_experts.server.http.connection import watch_connections
from routed_experts.server.http.drain import (
    TRANSITIONS,
    Drain,
    DrainMiddleware,
    Phase,
    _in_event_loop,
    _only_reads,
    _Port,
)
from routed_experts.server.inprocess.api_processes import _start
from routed_experts.server.shared import SHARED, Shared
from tests.documentation import transitions_in
from tests.e2e.harness import wait_until

LIMIT_S = 30.0
"""For what takes a moment, or for ever: a machine may be busy."""


def test_health_is_refused_wherever_the_server_is_mounted() -> None:
    for method, path, root_path, reads in (
        ("GET", "/metrics", "", True),
        ("GET", "/health", "", False),
        ("GET", "/health", "/llm", False),
        ("GET", "/llm/health", "/llm", False),
        ("GET", "/llm/metrics", "/llm", True),
        ("POST", "/v1/completions", "", False),
    ):
        scope = {"type": "http", "method": method, "path": path, "root_path": root_path}
        assert _only_reads(scope) is reads, path


def test_only_the_thread_of_the_event_loop_must_not_wait_for_requests() -> None:
    async def in_both_threads() -> tuple[bool, bool]:
        return _in_event_loop(), await asyncio.to_thread(_in_event_loop)

    assert asyncio.run(in_both_threads()) == (True, False)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def shared_with(count: int, listening: socket.socket) -> tuple[list[Shared], Connection]:
    """What so many API processes get of the first one, and the end of a pipe that says that the
    engine lives."""
    none_listens, listens = Pipe(duplex=False)
    none_may_close, may_close = Pipe(duplex=False)
    engines_live, alive = Pipe(duplex=False)
    processes = [
        Shared(listening.dup(), copy_of(listens), none_listens, copy_of(may_close), engines_live)
        for _ in range(count)
    ]
    for end in (listens, may_close, none_may_close):
        end.close()
    return processes, alive


def copy_of(end: Connection) -> Connection:
    return Connection(os.dup(end.fileno()), readable=False)


def test_the_last_of_several_processes_closes_the_port_for_all(listening: socket.socket) -> None:
    address = listening.getsockname()
    (first, last), _ = shared_with(2, listening)
    assert not first.stop_listening()
    with socket.create_connection(address) as waiting:
        (connection,) = last.stop_listening()
        assert not is_open(address), "clients wait for nobody"
        connection.sendall(b"here")
        assert waiting.recv(4) == b"here"
    connection.close()


def test_the_first_process_takes_no_client_from_the_last_that_listens(
    listening: socket.socket,
) -> None:
    """It closes the port only for processes that were killed: it cannot answer anybody."""
    address = listening.getsockname()
    processes: list[Shared] = []

    def start(manager: Any, args: Namespace, sock: socket.socket) -> None:
        shared = getattr(args, SHARED)
        processes.append(
            replace(
                shared,
                listening=sock.dup(),
                listens=copy_of(shared.listens),
                may_close=copy_of(shared.may_close),
            )
        )

    _start(start, SimpleNamespace(), args=Namespace(), sock=listening)
    (last,) = processes
    with socket.create_connection(address) as waiting:
        last.listens.close()
        time.sleep(0.2)  # the first process has seen it
        (connection,) = last.stop_listening()
        with connection:
            connection.sendall(b"here")
            assert waiting.recv(4) == b"here"
    assert not is_open(address)


def test_the_first_process_closes_the_port_of_processes_that_were_killed(
    listening: socket.socket,
) -> None:
    """Though it holds the socket still."""
    address = listening.getsockname()
    context = get_context("fork")
    processes: list[Any] = []

    def start(manager: Any, args: Namespace, sock: socket.socket) -> None:
        for _ in range(2):
            processes.append(context.Process(target=time.sleep, args=(600,), daemon=True))
            processes[-1].start()

    _start(start, SimpleNamespace(), args=(args := Namespace()), sock=listening)
    assert not vars(args), "the first process keeps its end of the pipe"
    processes[0].kill()
    for _ in range(50):
        assert is_open(address)
    processes[1].kill()
    wait_until(lambda: not is_open(address), "clients wait for nobody")


def test_api_processes_learn_of_an_engine_that_is_killed(listening: socket.socket) -> None:
    """At once, though its workers live on for a while, and hold what they got of it."""
    context = get_context("fork")
    workers, started = Pipe(duplex=False)

    def run_engine() -> None:
        worker = context.Process(target=time.sleep, args=(600,))
        worker.start()
        started.send(worker.pid)
        time.sleep(600)

    engine = context.Process(target=run_engine, name="EngineCore")
    engine.start()
    worker = workers.recv()
    copies: list[Connection] = []

    def start(manager: Any, args: Namespace, sock: socket.socket) -> None:
        copies.append(
            Connection(os.dup(getattr(args, SHARED).engines_live.fileno()), writable=False)
        )

    _start(start, SimpleNamespace(), args=Namespace(), sock=listening)
    (engines_live,) = copies
    assert not engines_live.poll(0.2)
    engine.kill()
    readable = engines_live.poll(LIMIT_S)
    assert os.path.exists(f"/proc/{worker}")
    os.kill(worker, signal.SIGKILL)
    assert readable


def vllms_server(config: uvicorn.Config) -> uvicorn.Server:
    """As vLLM makes it for one of several API processes: it accepts connections itself."""
    launcher = pytest.importorskip("vllm.entrypoints.launchers.launcher")
    server: uvicorn.Server = launcher.NoSignalServer(config, peer_loads=([0], 0))
    return server


class Stopping:
    """A server that stops as vLLM's does, around an application that answers at once."""

    def __init__(
        self, listening: socket.socket, kind: Callable[[uvicorn.Config], uvicorn.Server]
    ) -> None:
        self.drain = Drain()
        app = DrainMiddleware(PlainTextResponse("here"), self.drain)
        self.server = kind(uvicorn.Config(app, lifespan="off", log_config=None))
        self.engine: Any = SimpleNamespace(
            shutdown=self._end_engine, add_request=None, output_handler=None
        )
        self.engine.output_processor = SimpleNamespace(propagate_error=lambda error: None)
        self.listening = listening
        self.address = listening.getsockname()
        self.was_open = False
        self.watchdog_looks = False

    def _end_engine(self, timeout: float) -> None:
        self.was_open = is_open(self.address)
        # vLLM's finds that the engine is dead, and does not know that it is told to end
        if self.watchdog_looks:
            self.server.should_exit = True
            time.sleep(0.5)

    async def start(self) -> None:
        (shared,), self.alive = shared_with(1, self.listening)
        args = Namespace(**{SHARED: shared})
        self.drain.guard(self.engine, State({"server": self.server}), args)
        self.serving = asyncio.create_task(self.server.serve(sockets=[self.listening]))
        while not self.server.started:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """What vLLM does on SIGTERM."""
        await asyncio.to_thread(self.engine.shutdown, timeout=20)
        assert self.was_open, "clients are not told to come back while the engine stops"
        self.server.should_exit = True
        self.serving.cancel()
        with suppress(asyncio.CancelledError):
            await self.serving
        await self.server.shutdown()


@pytest.mark.parametrize("kind", [uvicorn.Server, vllms_server])
def test_new_clients_do_not_wait_for_one_that_is_connected_and_says_nothing(
    listening: socket.socket, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    address = listening.getsockname()

    async def run() -> None:
        stopping = Stopping(listening, kind)
        await stopping.start()
        with socket.create_connection(address):
            ending = asyncio.create_task(stopping.stop())
            while await asyncio.to_thread(is_answered, address):
                await asyncio.sleep(0.02)
            await ending

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("watchdog_looks", [False, True])
@pytest.mark.parametrize("kind", [uvicorn.Server, vllms_server])
def test_a_client_that_has_connected_when_the_port_closes_is_told_why(
    listening: socket.socket, kind: Any, watchdog_looks: bool
) -> None:
    address = listening.getsockname()

    async def run() -> bytes:
        stopping = Stopping(listening, kind)
        stopping.watchdog_looks = watchdog_looks
        await stopping.start()
        reader, writer = await asyncio.open_connection(*address)
        ending = asyncio.create_task(stopping.stop())
        while await asyncio.to_thread(lets_in, address):
            await asyncio.sleep(0.01)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await ending
        return answer

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: " in head
    assert b"The server is stopping" in body


@pytest.mark.parametrize("kind", [uvicorn.Server, vllms_server])
def test_a_client_that_nobody_has_accepted_when_the_port_closes_is_told_why(
    listening: socket.socket, kind: Any
) -> None:
    """The system would reset its connection."""

    async def run() -> bytes:
        stopping = Stopping(listening, kind)
        await stopping.start()
        stopping.drain.until = time.monotonic() + LIMIT_S
        # no other task runs between the two: the system has the client, and the server has not
        with socket.create_connection(stopping.address, timeout=LIMIT_S) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n")
            await _Port(stopping.server, stopping.drain._shared).close()
            answer = await asyncio.to_thread(client.recv, 1 << 16)
        stopping.server.should_exit = True
        await asyncio.wait([stopping.serving])
        return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 503 ")


def test_a_server_whose_engine_has_died_ends_by_itself(listening: socket.socket) -> None:
    async def run() -> None:
        stopping = Stopping(listening, uvicorn.Server)
        await stopping.start()
        stopping.alive.close()
        await asyncio.wait_for(stopping.serving, LIMIT_S)
        assert not is_open(stopping.address)

    asyncio.run(run())


def test_an_engine_that_was_told_to_end_has_not_died(listening: socket.socket) -> None:
    async def run() -> None:
        stopping = Stopping(listening, uvicorn.Server)
        await stopping.start()
        await stopping.stop()
        stopping.drain.engine_died()
        assert not stopping.drain.has_engine_died

    asyncio.run(run())


def test_an_engine_that_has_died_stays_dead_when_it_is_told_to_end(
    listening: socket.socket,
) -> None:
    """vLLM stops it all the same; who asks meanwhile learns why there is no answer."""

    async def run() -> None:
        stopping = Stopping(listening, uvicorn.Server)
        await stopping.start()
        stopping.drain.engine_died()
        await asyncio.to_thread(stopping.engine.shutdown, timeout=20)
        await asyncio.wait_for(stopping.serving, LIMIT_S)
        assert stopping.drain.phase is Phase.ENGINE_DIED
        assert b"The engine has died" in stopping.drain.refusal().body

    asyncio.run(run())


def test_the_table_of_phases_in_the_docstring_is_the_table_that_is_used() -> None:
    used = {(before.name, after.name) for before, afters in TRANSITIONS.items() for after in afters}
    assert transitions_in(drain_module) == used


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("after", Phase)
def test_a_move_that_is_not_in_the_table_is_not_made(before: Phase, after: Phase) -> None:
    drain = Drain()
    drain.phase = before
    is_in_table = after in TRANSITIONS[before]
    assert drain._move(after) is is_in_table
    assert drain.phase is (after if is_in_table else before)


def test_a_response_that_middleware_holds_back_is_under_way() -> None:
    """The route is done before the client has the first byte."""
    drain = Drain()
    under_way: list[int] = []

    class HoldsBack:
        def __init__(self, app: ASGIApp) -> None:
            self.app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            messages: list[Message] = []

            async def keep(message: Message) -> None:
                messages.append(message)

            await self.app(scope, receive, keep)
            under_way.append(drain.under_way)
            for message in messages:
                await send(message)

    app = FastAPI()
    app.add_api_route("/", lambda: "here")
    app.add_middleware(DrainMiddleware, drain=drain)
    app.add_middleware(HoldsBack)
    watch_connections(app)
    assert TestClient(app).get("/").json() == "here"
    assert (under_way, drain.under_way) == ([1], 0)


def test_a_client_that_does_not_read_an_end_holds_nobody() -> None:
    """The response is done but for what the client would have to read; the server waited for that
    without end."""
    drain = Drain()
    app = DrainMiddleware(PlainTextResponse("x" * 20_000_000), drain)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))

    async def stop(listening: socket.socket, client: socket.socket) -> None:
        await server.startup(sockets=[listening])
        await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.get_running_loop().sock_recv(client, 12)
        while drain.under_way:
            await asyncio.sleep(0.01)
        assert server.server_state.connections, "the client has read everything"
        await _Port(server, shared=None).close()
        async with asyncio.timeout(60):
            await server.shutdown()

    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listening.getsockname())
        client.setblocking(False)
        asyncio.run(stop(listening, client))


def is_answered(address: Any) -> bool:
    """Whether a new client gets an answer; False if it is not let in. Whoever has to wait fails the
    test."""
    try:
        with socket.create_connection(address, timeout=LIMIT_S / 2) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return client.recv(12).startswith(b"HTTP/1.1 ")
    except ConnectionRefusedError:
        return False


def lets_in(address: Any) -> bool:
    """Whether a client gets in at once. The first packet of one that comes just when the port closes
    is dropped, and the system sends it again after a second: nobody here has the time for that."""
    try:
        socket.create_connection(address, timeout=0.2).close()
    except (ConnectionRefusedError, TimeoutError):
        return False
    return True


def is_open(address: Any) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return False
    return True
