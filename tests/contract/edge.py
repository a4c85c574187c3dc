"""Routes that answer with rows as vLLM's do, to what an engine would have sent."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from routed_experts.protocol.models import RoutingOptions, parse_options
from routed_experts.server.http.answers.response import CollectedRows, RoutedResponse, respond
from routed_experts.server.http.answers.streaming import SSERewriter
from routed_experts.server.http.arrays.references import ReferenceMaker
from routed_experts.server.http.encoding.encoding import Encoder
from routed_experts.server.http.vllm_http import with_cancellation
from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput
from tests.server import known

L, K, EXPERTS = 48, 8, 128


class _Choice(BaseModel):
    index: int = 0
    text: str = "a"
    finish_reason: str = "length"
    routed_experts: None = None


class _Completion(BaseModel):
    id: str = "cmpl-1"
    choices: list[_Choice] = [_Choice()]
    kv_transfer_params: None = None


class Edge:
    """Answers of `num_rows` rows by reference."""

    def __init__(self, num_rows: int, folder: Path) -> None:
        self.store = ArrayStore(folder)
        self._rows = np.random.default_rng(0).integers(0, EXPERTS, (num_rows, L, K), dtype=np.int16)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.state.args = SimpleNamespace()
        app.add_api_route("/long", with_cancellation(self.long), methods=["POST"])
        return app

    async def long(self, raw_request: Request) -> Response:
        """An answer of all rows."""
        body = await raw_request.json()
        options = parse_options(
            {"return_routed_experts": True, "routed_experts_delivery": "reference"}
        )
        assert options is not None
        references = ReferenceMaker(self.store)
        outputs = self._outputs(body["generated"], at_once=not body["stream"])
        if body["stream"]:
            aligner = SSERewriter(options, encoder_of(options), 1, str, delivery=references)
            return await respond(aligner.rewrite(_chunks(aligner.watch(outputs))), raw_request)
        collected = CollectedRows(options, (L, K))
        async for _ in collected.collect_from(outputs):
            pass
        answer = RoutedResponse(_Completion(), collected, encoder_of(options), False, references)
        return await respond(answer, raw_request)

    async def _outputs(self, generated: int, at_once: bool) -> AsyncIterator[RequestOutput]:
        """The prompt's rows in one piece, and `generated` that come one by one; one output for all
        or one a token."""
        buffer, prompt_len = RowBuffer(), len(self._rows) - generated
        buffer.push(0, self._rows[:prompt_len])
        if not at_once:
            yield output_of(prompt_len, buffer, 1)
        for token, row in enumerate(self._rows[prompt_len:], 1):
            buffer.push(prompt_len + token - 1, row[np.newaxis].copy())
            if not at_once:
                yield output_of(prompt_len, buffer, 1, "length" if token == generated else None)
            await asyncio.sleep(0)
        if at_once:
            yield output_of(prompt_len, buffer, generated + 1, "length")


def encoder_of(options: RoutingOptions) -> Encoder:
    return known.encoder_of(options, (L, K), EXPERTS)


def output_of(
    prompt_len: int, buffer: RowBuffer, tokens: int, finish: str | None = None
) -> RequestOutput:
    choice = CompletionOutput(
        0, "a", [1] * tokens, None, None, routed_experts=buffer, finish_reason=finish
    )  # type: ignore[arg-type]
    return RequestOutput(
        "r", None, [*range(prompt_len)], None, [choice], finished=finish is not None
    )


async def _chunks(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[str]:
    async for output in outputs:
        finish = json.dumps(output.outputs[0].finish_reason)
        yield f'data: {{"id":"1","choices":[{{"index":0,"text":"a","finish_reason":{finish},"logprobs":null}}]}}\n\n'
    yield "data: [DONE]\n\n"
