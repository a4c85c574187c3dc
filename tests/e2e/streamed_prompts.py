"""Middleware that streams prompts into an engine, as vLLM's own routes do with audio alone.

routed-experts serve ... --middleware tests.e2e.streamed_prompts.StreamsPrompts
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from routed_experts.protocol.routing_input import routing_args

PATH = "/streamed_prompt"


class StreamsPrompts:
    """POST: an answer to `chunks` of a prompt, each of which is streamed in when the one before it
    has its token. GET: what the API process holds of requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        engine = scope["app"].state.engine_client
        if request.method == "GET":
            answer = _held(engine)
        else:
            answer = await _answer(engine, (await request.json())["chunks"])
        await JSONResponse(answer)(scope, receive, send)


def _held(engine: Any) -> dict[str, Any]:
    core = engine.engine_core
    return {
        "requests": len(engine.output_processor.request_states),
        # with data parallelism
        "in_flight": len(getattr(core, "reqs_in_flight", ())),
        "by_engine": sum(getattr(core, "engine_inflight", {}).values()),
    }


async def _answer(engine: Any, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The tokens that are generated behind each chunk, and the error that ends the answer."""
    is_answered = asyncio.Event()
    generated: list[list[int]] = []

    async def sent() -> AsyncIterator[StreamingInput]:
        for chunk in chunks:
            generated.append([])
            is_answered.clear()
            yield StreamingInput({"prompt_token_ids": chunk["prompt"]}, _sampling(chunk))
            await is_answered.wait()

    error = None
    try:
        async for output in engine.generate(sent(), _sampling({}), chunks[0]["id"]):
            (choice,) = output.outputs
            generated[-1] += choice.token_ids
            if choice.finish_reason is not None:
                is_answered.set()
    except Exception as raised:  # noqa: BLE001 which the test looks at
        error = f"{type(raised).__name__}: {raised}"
    return {"generated": generated, "error": error}


def _sampling(chunk: dict[str, Any]) -> SamplingParams:
    rows = chunk.get("rows")
    return SamplingParams(
        max_tokens=chunk.get("max_tokens", 1),
        temperature=0,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if rows is None else routing_args(rows=np.array(rows, np.int16)),
    )
