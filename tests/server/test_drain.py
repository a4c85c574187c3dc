"""What is answered while the server stops.

Servers that stop with requests under way are in `tests/e2e/test_stopping.py`.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from starlette.datastructures import State
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from routed_experts.server.http.drain import Drain, DrainMiddleware, _only_reads

LIMIT_S = 60.0
"""For what takes a moment, or for ever: a machine may be busy."""


def test_health_is_refused_wherever_the_server_is_mounted() -> None:
    for method, path, reads in (
        ("GET", "/metrics", True),
        ("GET", "/health", False),
        ("GET", "/ping", False),
        ("GET", "/llm/health", False),
        ("GET", "/llm/metrics", True),
        ("POST", "/v1/completions", False),
    ):
        assert _only_reads({"type": "http", "method": method, "path": path}) is reads, path


class Stopping:
    """A server whose requests wait at a gate, and what happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_running = asyncio.Event()
        self.gate = asyncio.Event()
        self.drain = Drain()
        self.engine: Any = SimpleNamespace(
            shutdown=lambda timeout: self.events.append("engine stopped"),
            output_handler=None,
            output_processor=SimpleNamespace(propagate_error=self._end),
        )
        app: ASGIApp = self._answer
        self.app = DrainMiddleware(app, self.drain)
        server = uvicorn.Server(uvicorn.Config(app))
        self.drain.guard(self.engine, State({"server": server}))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.is_running.set()
        await self.gate.wait()
        await PlainTextResponse("here")(scope, receive, send)
        self.events.append("answered")

    def _end(self, error: Exception) -> None:
        self.events.append(str(error.__cause__ or error.args[0]))
        self.gate.set()

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://server")

    async def until_it_refuses(self, client: httpx.AsyncClient) -> httpx.Response:
        async with asyncio.timeout(LIMIT_S):
            while self.drain.until is None:
                await asyncio.sleep(0.01)
            return await client.post("/v1/completions")


def test_the_engine_is_stopped_once_running_requests_have_ended_and_new_ones_get_503() -> None:
    async def run() -> None:
        stopping = Stopping()
        async with stopping.client() as client:
            running = asyncio.create_task(client.post("/v1/completions"))
            await stopping.is_running.wait()
            ending = asyncio.create_task(asyncio.to_thread(stopping.engine.shutdown, timeout=99))
            refused = await stopping.until_it_refuses(client)
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["Retry-After"]) <= 99
            assert refused.headers["Connection"] == "close"
            assert "The server is stopping" in refused.json()["error"]["message"]
            assert stopping.events == []
            stopping.gate.set()
            assert (await running).text == "here"
            await ending
        assert stopping.events == ["answered", "engine stopped"]

    asyncio.run(run())


def test_what_does_not_finish_in_time_is_ended_before_the_engine_is() -> None:
    async def run() -> None:
        stopping = Stopping()
        async with stopping.client() as client:
            running = asyncio.create_task(client.post("/v1/completions"))
            await stopping.is_running.wait()
            await asyncio.to_thread(stopping.engine.shutdown, timeout=0)
            await running
        (why, *after) = stopping.events
        assert "The server is stopping" in why
        assert after == ["answered", "engine stopped"]

    asyncio.run(run())


def test_the_event_loop_does_not_wait_for_its_own_requests() -> None:
    """vLLM stops the engine once more when the server has ended."""

    async def run() -> None:
        stopping = Stopping()
        stopping.drain.under_way = 1
        stopping.engine.shutdown(timeout=LIMIT_S)
        assert stopping.events == ["engine stopped"]

    asyncio.run(run())
