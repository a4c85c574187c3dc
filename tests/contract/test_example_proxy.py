"""The proxy of `examples/prefill_decode.py`, over HTTP, in front of programs that answer as an instance does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
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
    async def models(of: str) -> Any:
        return {"data": [of]}

    @app.post(PATH)
    async def answered(request: Request) -> Any:
        try:
            body = await request.json()
        except ValueError:
            return JSONResponse({"error": {"message": "not JSON"}}, 400)
        params = body["kv_transfer_params"]
        if params.get("do_remote_decode"):
            assert request.headers.get("accept") != "application/msgpack"
            await asyncio.sleep(body.get("prefill_s", 0))
            assert request.client is not None
            return {"kv_transfer_params": {"of": body["prompt"], "from": request.client.port}}
        return StreamingResponse(lines(body), headers={"accepted": request.headers["accept"], "content-type": "text/a"})

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


@pytest.mark.parametrize("before_the_answer", [False, True])
def test_a_client_that_leaves(before_the_answer: bool) -> None:
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
            if before_the_answer:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(PATH, json={"prompt": [1], "prefill_s": 1}, timeout=0.3)
            else:
                async with client.stream("POST", PATH, json={"prompt": [1]}) as answer:
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
            assert (await client.get("/v1/models?of=all")).json() == {"data": ["all"]}
            broken = await client.post(PATH, content='{"prompt":', headers={"Content-Type": "application/json"})
            assert (broken.status_code, broken.json()) == (400, {"error": {"message": "not JSON"}})
            packed = await client.post(PATH, json={"prompt": [1]}, headers={"Accept": "application/msgpack"})
            assert (packed.headers["accepted"], packed.headers["content-type"]) == ("application/msgpack", "text/a")

    run(test())


def test_an_instance_that_is_not_there() -> None:
    async def test() -> None:
        async with serving(proxy([free_port(), free_port()])) as front, httpx.AsyncClient() as client:
            answer = await client.post(f"http://127.0.0.1:{front}{PATH}", json={"prompt": [1]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, 502)

    run(test())
