"""The proxy of `examples/prefill_decode.py`, over HTTP, in front of programs that answer as an instance does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from examples.prefill_decode import proxy
from tests.e2e.harness import free_port

PATH = "/v1/completions"
Lines = Callable[[dict[str, Any]], AsyncIterator[bytes]]


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[int]:
    """The port that `app` is served on, in this event loop."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        await running


@asynccontextmanager
async def behind_the_proxy(lines: Lines) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the proxy, whose decode instance streams `lines` of a request."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Any:
        return {"data": ["tiny"]}

    @app.post(PATH)
    async def answered(request: Request) -> Any:
        try:
            body = await request.json()
        except ValueError:
            return JSONResponse({"error": {"message": "not JSON"}}, 400)
        params = body["kv_transfer_params"]
        if params.get("do_remote_decode"):
            assert request.client is not None
            return {"kv_transfer_params": {"of": body["prompt"], "from": request.client.port}}
        return StreamingResponse(lines(body), media_type="text/event-stream")

    everyone = httpx.Limits(max_connections=None)
    async with (
        serving(app) as port,
        serving(proxy([port, port])) as front,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{front}", limits=everyone, timeout=30) as client,
    ):
        yield client


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_hundreds_of_streams_at_once() -> None:
    """None waits for another's end: each goes on when all have begun."""
    n = 150

    async def test() -> None:
        all_there = asyncio.Barrier(n)

        async def lines(body: dict[str, Any]) -> AsyncIterator[bytes]:
            yield b"data: %d\n\n" % body["kv_transfer_params"]["of"][0]
            await all_there.wait()
            yield b"data: [DONE]\n\n"

        async with behind_the_proxy(lines) as client:
            bodies = [{"prompt": [i], "stream": True} for i in range(n)]
            answers = await asyncio.gather(*(client.post(PATH, json=body) for body in bodies))
        assert [answer.text for answer in answers] == [f"data: {i}\n\ndata: [DONE]\n\n" for i in range(n)]

    run(test())


def test_a_client_that_leaves() -> None:
    """The decode instance is told so."""

    async def test() -> None:
        gone = asyncio.Event()

        async def lines(body: dict[str, Any]) -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: 1\n\n"
                    await asyncio.sleep(0.01)
            finally:
                gone.set()

        async with behind_the_proxy(lines) as client:
            async with client.stream("POST", PATH, json={"prompt": [1], "stream": True}) as answer:
                assert await anext(answer.aiter_raw())
            await asyncio.wait_for(gone.wait(), 10)

    run(test())


async def accepted(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield b"data: %d\n\n" % body["kv_transfer_params"]["from"]


def test_idle_connections_are_let_go() -> None:
    """Before vLLM does, after 5 s: a request on its way when that happens would get 502."""

    async def test() -> None:
        async with behind_the_proxy(accepted) as client:

            async def burst() -> set[str]:
                answers = await asyncio.gather(*(client.post(PATH, json={"prompt": [1]}) for _ in range(20)))
                return {answer.text for answer in answers}

            first = await burst()
            assert first & await burst()
            await asyncio.sleep(4)
            assert not first & await burst()

    run(test())


def test_what_is_no_completion() -> None:
    """Goes to the decode instance, whose answer it is."""

    async def test() -> None:
        async with behind_the_proxy(accepted) as client:
            assert (await client.get("/v1/models?of=all")).json() == {"data": ["tiny"]}
            broken = await client.post(PATH, content='{"prompt":', headers={"Content-Type": "application/json"})
            assert (broken.status_code, broken.json()) == (400, {"error": {"message": "not JSON"}})
            assert (await client.get("/v1/nothing")).status_code == 404

    run(test())
