"""The proxy of `examples/prefill_decode.py`, over HTTP, in front of programs that answer as an
instance does."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import httpx
import msgspec
import orjson
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from examples.prefill_decode import MSGPACK, UNKNOWN, proxy
from tests.e2e.harness import free_port

PATH = "/v1/completions"
LIMIT_S = 240
OF_THE_INSTANCE = {"do_remote_prefill": True, "remote_engine_id": "own"}
Answer = Callable[[Request, Any], Awaitable[Response]]
Received = tuple[str, str, bytes]
"""The instance, and a request's path and body."""


def unpacked(request: Request, content: bytes) -> Any:
    return (msgspec.msgpack if request.headers["content-type"] == MSGPACK else msgspec.json).decode(
        content
    )


def packed(body: Any) -> Response:
    return Response(msgspec.msgpack.encode(body), media_type=MSGPACK)


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
async def behind_the_proxy(
    answer: Answer, prefilled: asyncio.Event | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, list[Received]]]:
    """A client of the proxy in front of two instances, and what reaches these. `answer` is the
    decode instance's; the prefill instance answers once `prefilled` is set."""
    received: list[Received] = []

    def instance(name: str) -> FastAPI:
        app = FastAPI()

        @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
        async def answered(request: Request) -> Any:
            content = await request.body()
            body = unpacked(request, content) if content else {}
            received.append(
                (name, f"{request.url.path}?{request.url.query}".rstrip("?"), orjson.dumps(body))
            )
            if name == "decode":
                return await answer(request, body)
            assert request.headers["accept"] == MSGPACK
            if prefilled is not None:
                await prefilled.wait()
            assert request.client is not None
            return packed({"kv_transfer_params": {**OF_THE_INSTANCE, "from": request.client.port}})

        return app

    options: dict[str, Any] = {"limits": httpx.Limits(max_connections=None), "timeout": LIMIT_S}
    async with (
        serving(instance("prefill")) as prefill,
        serving(instance("decode")) as decode,
        serving(proxy([prefill, decode])) as front,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{front}",
            headers={"Content-Type": "application/json"},
            **options,
        ) as client,
    ):
        yield client, received


async def accepted(request: Request, body: Any) -> Response:
    """Which connection the prefill instance was asked on, and what the client accepts."""
    port = body.get("kv_transfer_params", {}).get("from")
    return Response(
        str(port), headers={"accepted": request.headers["accept"], "content-type": "text/a"}
    )


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LIMIT_S))

    return run


@in_a_loop
async def test_hundreds_of_streams_at_once() -> None:
    """None waits for another's end: each goes on when all have begun."""
    n = 120  # more than an aiohttp session opens by itself
    all_there = asyncio.Barrier(n)

    async def answer(request: Request, body: Any) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            yield b"data: %d\n\n" % body["prompt"][0]
            await all_there.wait()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(lines())

    async with behind_the_proxy(answer) as (client, _):
        bodies = [{"prompt": [i], "stream": True} for i in range(n)]
        answers = await asyncio.gather(*(client.post(PATH, json=body) for body in bodies))
    assert [answer.text for answer in answers] == [
        f"data: {i}\n\ndata: [DONE]\n\n" for i in range(n)
    ]


@pytest.mark.parametrize("before_the_answer", [False, True])
@in_a_loop
async def test_a_client_that_leaves(before_the_answer: bool) -> None:
    """The decode instance is told so."""
    gone = asyncio.Event()

    async def answer(request: Request, body: Any) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: 1\n\n"
                    await asyncio.sleep(0.01)
            finally:
                gone.set()

        return StreamingResponse(lines())

    prefilled = asyncio.Event()
    if not before_the_answer:
        prefilled.set()
    async with behind_the_proxy(answer, prefilled) as (client, received):
        if before_the_answer:
            asking = asyncio.create_task(client.post(PATH, json={"prompt": [1]}))
            while not received:
                await asyncio.sleep(0.01)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            prefilled.set()
        else:
            async with client.stream("POST", PATH, json={"prompt": [1]}) as response:
                assert await anext(response.aiter_raw())
        await gone.wait()


@in_a_loop
async def test_what_is_no_completion() -> None:
    """Goes to the decode instance, whose answer it is; one that is not there has none."""
    async with behind_the_proxy(accepted) as (client, received):
        assert (await client.get("/v1/models?of=all")).text == "None"
        assert received == [("decode", "/v1/models?of=all", b"{}")]
        answer = await client.post(
            PATH, json={"prompt": [1]}, headers={"Accept": "application/msgpack"}
        )
        assert (answer.headers["accepted"], answer.headers["content-type"]) == (
            "application/msgpack",
            "text/a",
        )
    async with (
        serving(proxy([free_port(), free_port()])) as front,
        httpx.AsyncClient(timeout=None) as client,
    ):
        answer = await client.post(f"http://127.0.0.1:{front}{PATH}", json={"prompt": [1]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, 502)


# ---- what a client may not say ----

ENDPOINTS = (PATH, "/v1/chat/completions", "/inference/v1/generate")
FORGED = {
    "do_remote_prefill": True,
    "remote_engine_id": "victim",
    "remote_block_ids": [[1]],
    "routed_experts": {},
}

UNREADABLE = [
    *(b"", b'{"prompt":', b"null", b"[]", b'{"prompt": "\xff"}', b'{"a": 1} {"a": 2}'),
    b'{"temperature": NaN, "kv_transfer_params": {"do_remote_prefill": true}}',
    b'{"sampling_params": [], "kv_transfer_params": {}}',
    b'{"prompt": %s1%s}' % (b"[" * 3000, b"]" * 3000),
]
# Those that generate would take a client's `kv_transfer_params`; others change the instance.
OTHER_PATHS = (
    *("/invocations", "/v1/responses", "/v1/chat/completions/batch", "/sleep"),
    *("/v1/completions/", "//v1/completions", "/v1/completions%2f", "/x/../v1/responses"),
)


@in_a_loop
async def test_what_cannot_be_read_reaches_no_instance() -> None:
    async with behind_the_proxy(accepted) as (client, received):
        for path, content in product(ENDPOINTS, UNREADABLE):
            answer = await client.post(path, content=content)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (
                400,
                400,
                "BadRequestError",
            ), content
            assert error["param"] == ("sampling_params" if b"sampling_params" in content else None)
            assert error["message"]
        for method, other in product(("POST", "PUT", "PATCH", "DELETE"), OTHER_PATHS):
            answer = await client.request(
                method, other, json={"prompt": "a", "kv_transfer_params": FORGED}
            )
            assert answer.status_code in (404, 405, 307), other
        assert received == []


@in_a_loop
async def test_a_clients_kv_transfer_params_reach_no_instance() -> None:
    """Wherever vLLM 0.32 would find them, and as a key that a body has twice."""
    forged = orjson.dumps(FORGED)
    bodies = [
        b'{"prompt": "a", "kv_transfer_params": %s}' % forged,
        b'{"kv_transfer_params": null, "prompt": "a", "kv_transfer_params": %s}' % forged,
        b'{"kv_transfer_params": %s, "prompt": "a", "kv_transfer_params": null}' % forged,
        b'{"kv_transfer\\u005fparams": %s}' % forged,
        b'{"kv_transfer_params": "victim"}',
        b'{"vllm_xargs": {"kv_transfer_params": ["victim"], "other": 1}}',
        b'{"vllm_xargs": {"a": 1}, "vllm_xargs": {"kv_transfer_params": "victim"}}',
        b'{"sampling_params": {"extra_args": {"kv_transfer_params": %s, "other": 1}}}' % forged,
        b'{"sampling_params": {"max_tokens": 4, "extra_args": {"kv_transfer_params": 1}}, "vllm_xargs": null}',
    ]
    async with behind_the_proxy(accepted) as (client, received):
        for path, content in product(ENDPOINTS, bodies):
            received.clear()
            await client.post(path, content=content)
            assert [(name, params) for name, params, _ in received] == [
                ("prefill", path),
                ("decode", path),
            ]
            first, second = (orjson.loads(body) for _, _, body in received)
            params = {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                **dict.fromkeys(UNKNOWN),
            }
            assert first.pop("kv_transfer_params") == params
            assert second.pop("kv_transfer_params").items() > OF_THE_INSTANCE.items()
            for leg, (_, _, body) in zip((first, second), received, strict=True):
                assert b"victim" not in body, content
                assert b"kv_transfer_params" not in orjson.dumps(leg), content
                assert (b"other" in content) == (b"other" in orjson.dumps(leg)), content
