"""Rows put into any chunk that vLLM can make: its own models of chunks, with texts that try to look
like JSON."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)

from routed_experts.protocol.codec import decode
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.answers.streaming import SSERewriter
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import RequestOutput
from tests.server.known import encoder_of
from tests.server.test_response import choice, output

SETTINGS = settings(max_examples=40, deadline=None, database=None, derandomize=True)
NASTY = [
    '"choices":[{"index":0,',
    '"choices":[{',
    '"routed_experts":null,',
    "data: [DONE]\n\n",
    '\\"',
    "\u2028",
    "\x00",
    "}",
]
# No lone surrogates: they are no UTF-8, so that neither a tokenizer nor pydantic lets one through.
TEXT = st.lists(st.text(max_size=10) | st.sampled_from(NASTY), max_size=4).map("".join)
PROMPT = 100  # rows of 48 x 8: some lines


@st.composite
def completion_chunk(draw: Any) -> Any:
    stop, finish = draw(st.none() | TEXT | st.integers()), draw(st.none() | TEXT)
    one = CompletionResponseStreamChoice(
        index=0, text=draw(TEXT), stop_reason=stop, finish_reason=finish
    )
    if draw(st.booleans()):
        one.prompt_token_ids, one.token_ids = [1, 2], [3]
    return CompletionStreamResponse(
        id=draw(TEXT), model=draw(TEXT), choices=[one], system_fingerprint=draw(TEXT)
    )


@st.composite
def chat_chunk(draw: Any) -> Any:
    function = DeltaFunctionCall(name=draw(st.none() | TEXT), arguments=draw(st.none() | TEXT))
    calls = (
        [DeltaToolCall(index=0, id=draw(TEXT), function=function)] if draw(st.booleans()) else []
    )
    delta = DeltaMessage(
        content=draw(st.none() | TEXT), reasoning=draw(st.none() | TEXT), tool_calls=calls
    )
    one = ChatCompletionResponseStreamChoice(
        index=0, delta=delta, finish_reason=draw(st.none() | TEXT)
    )
    return ChatCompletionStreamResponse(id=draw(TEXT), model=draw(TEXT), choices=[one])


async def rewritten(chunk: str, form: Any, histogram: bool, rows: np.ndarray) -> list[str]:
    """The lines that the client gets in place of `chunk`, with `rows`, all but one of the
    prompt."""
    buffer = RowBuffer()
    buffer.push(0, rows)

    async def outputs() -> AsyncIterator[RequestOutput]:
        yield output(PROMPT, choice(2, buffer, finish="length"))

    async def chunks() -> AsyncIterator[str]:
        async for _ in aligner.watch(outputs()):
            yield chunk

    options = RoutingOptions(format=form, histogram=histogram)
    aligner = SSERewriter(options, encoder_of(options, (48, 8), 128), 1, str)
    return [line async for line in aligner.rewrite(chunks())]


def taken(body: dict[str, Any], name: str) -> np.ndarray:
    array = body.pop(name, [])
    return decode(array, num_layers=48, top_k=8) if len(array) else np.empty((0, 48, 8), np.int16)


def body_of(line: str) -> dict[str, Any]:
    """The JSON object of one event of a stream."""
    assert line.startswith("data: ")
    assert line.endswith("\n\n")
    assert "\n" not in line[:-2]
    body: dict[str, Any] = orjson.loads(line[len("data: ") :])
    return body


@SETTINGS
@given(
    form=st.sampled_from(["object", "list"]),
    made=completion_chunk() | chat_chunk(),
    unset=st.booleans(),
    histogram=st.booleans(),
)
def test_any_chunk_of_vllms(form: Any, made: Any, unset: bool, histogram: bool) -> None:
    """Without what was added, the last line is vLLM's chunk, and the lines before it say
    nothing."""
    chunk = f"data: {made.model_dump_json(exclude_unset=unset)}\n\n"
    rows = np.random.default_rng(0).integers(0, 128, (PROMPT + 1, 48, 8), dtype=np.int16)
    lines = asyncio.run(rewritten(chunk, form, histogram, rows))
    bodies = [body_of(line) for line in lines]
    prompt_pieces = [taken(body, "prompt_routed_experts") for body in bodies]
    pieces = [taken(body["choices"][0], "routed_experts") for body in bodies]
    assert np.array_equal(np.concatenate([*prompt_pieces, *pieces]), rows)
    assert sum(map(len, pieces)) == 1
    has_histogram = ["prompt_routed_experts_histogram" in body for body in bodies]
    assert has_histogram == [*[False] * (len(bodies) - 1), histogram]
    for body in bodies:
        body.pop("prompt_routed_experts_histogram", None)
        body["choices"][0].pop("routed_experts_histogram", None)
    *before, last = bodies
    assert last == orjson.loads(chunk[len("data: ") :])
    for body in before:
        for name in ("text", "delta", "finish_reason", "token_ids"):
            assert not body["choices"][0].get(name)
