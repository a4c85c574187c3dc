"""What is answered while the server stops."""

import asyncio
import socket
from argparse import Namespace
from multiprocessing import Pipe, get_context
from multiprocessing.synchronize import Event
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.responses import PlainTextResponse

from routed_experts.server import LISTENS
from routed_experts.server.http.drain import Drain, DrainMiddleware, _in_event_loop, _only_reads
from routed_experts.server.inprocess.api_processes import _start
from tests.e2e.harness import wait_until


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


def test_the_port_closes_with_the_last_of_several_processes() -> None:
    """H6. Though all of them, and the first one, hold the socket still: `tests/e2e/test_stopping.py` has real ones."""
    context = get_context("fork")
    over, ended = context.Event(), [context.Event() for _ in range(2)]

    def serve(args: Namespace, has_ended: Event) -> None:
        has_ended.wait()
        getattr(args, LISTENS).close()
        over.wait()

    def start(manager: list[Any], args: Namespace, sock: socket.socket) -> None:
        for each in ended:
            manager.append(context.Process(target=serve, args=(args, each), daemon=True))
            manager[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        address, processes = listening.getsockname(), list[Any]()
        _start(start, processes, args=(args := Namespace()), sock=listening)
        assert not vars(args), "the first process keeps its end of the pipe"
        ended[0].set()
        for _ in range(50):
            socket.create_connection(address).close()
        ended[1].set()
        wait_until(lambda: not is_open(address), "clients wait for nobody")
        assert all(process.is_alive() for process in processes)
        over.set()
        for process in processes:
            process.join()


def test_a_process_listens_until_its_own_server_has_closed_the_port() -> None:
    """H6. Who listens on a port that another process has closed logs a traceback for each attempt to accept."""
    drain = Drain()
    none_listens, drain.listens = Pipe(duplex=False)
    server = uvicorn.Server(uvicorn.Config(DrainMiddleware(Starlette(), drain), lifespan="on", log_config=None))
    engine, state = SimpleNamespace(shutdown=lambda timeout: None, output_handler=None), State({"server": server})

    async def stop(listening: socket.socket) -> None:
        drain.guard(engine, state)  # type: ignore[arg-type]
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.shutdown, timeout=5)
        assert is_open(listening.getsockname())
        assert not none_listens.poll(), "it still listens"
        server.should_exit = True
        await serving

    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(stop(listening))
    assert none_listens.poll(), "nobody would close the port"


def test_a_client_that_does_not_read_an_end_holds_nobody() -> None:
    """H6. The response is done but for what the client would have to read; the server waited for that without end."""
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
        await drain._run(SimpleNamespace(output_handler=None), server, 1)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            await server.shutdown()

    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listening.getsockname())
        client.setblocking(False)
        asyncio.run(stop(listening, client))


def is_open(address: Any) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return False
    return True
