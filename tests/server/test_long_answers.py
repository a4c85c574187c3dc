"""What a long answer takes of the process: little by little, and hardly more memory than its rows."""

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.encoding import Encoder
from routed_experts.server.http.response import CollectedRows, RoutedResponse, respond
from routed_experts.server.http.streaming import SSERewriter
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import RequestOutput
from tests.server.test_response import Choice, Response, choice, output, request
from tests.server.turns import another_task

L, K, EXPERTS = 48, 8, 128
PROMPT, TOKENS = 8000, 201
RAW = (PROMPT + TOKENS - 1) * L * K * 2
WAYS = [(False, "application/msgpack", form) for form in ("object", "npy", "raw", "list")]
WAYS += [(stream, "*/*", form) for stream in (False, True) for form in ("object", "raw", "list")]


def rows_of(count: int) -> np.ndarray:
    return np.ones((count, L, K), dtype=np.int16)


class Answer:
    """An answer of many rows, most of them the prompt's; the others come one by one."""

    def __init__(self, stream: bool, form: Any, accept: str) -> None:
        self.options = RoutingOptions(format=form)
        self.encoder = Encoder(form, "int16", (L, K), EXPERTS)
        self._stream, self._accept = stream, accept

    async def parts(self) -> AsyncIterator[bytes | str]:
        """What goes to the client, in the pieces in which it is made."""
        buffer = RowBuffer()
        buffer.push(0, rows_of(PROMPT))
        if self._stream:
            aligner = SSERewriter(self.options, self.encoder, 1, str)
            async for line in aligner.rewrite(self._chunks(aligner.watch(self._outputs(buffer)))):
                yield line
            return
        for token in range(TOKENS - 1):
            buffer.push(PROMPT + token, rows_of(1))
        rows = CollectedRows(self.options, (L, K))
        rows.collect(output(PROMPT, choice(TOKENS, buffer)))
        answer = RoutedResponse(Response(choices=[Choice(index=0)]), rows, self.encoder, is_list=False)
        del buffer, rows
        async for part in (await respond(answer, request(self._accept))).body_iterator:
            yield part

    async def _outputs(self, buffer: RowBuffer) -> AsyncIterator[RequestOutput]:
        whole = output(PROMPT, choice(1, buffer))
        for token in range(TOKENS):
            finish = "length" if token == TOKENS - 1 else None
            whole.outputs = [choice(1, buffer, finish=finish)]  # type: ignore[arg-type]
            yield whole
            buffer.push(PROMPT + token, rows_of(1))

    async def _chunks(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[str]:
        async for _ in outputs:
            yield 'data: {"choices":[{"index":0,"text":"a"}]}\n\n'


@pytest.mark.parametrize(("stream", "accept", "form"), WAYS)
def test_no_answer_is_encoded_at_one_go(stream: bool, accept: str, form: Any) -> None:
    """Between any two parts of about 64 KiB of rows, another task gets its turn."""

    async def run() -> None:
        answer = Answer(stream, form, accept)
        encoded, turns_before = 0, 0
        async with another_task() as turns:
            async for part in answer.parts():
                rows = answer.encoder.sent.rows - encoded
                assert rows * L * K * 2 <= 100 << 10
                assert len(part) <= 320 << 10
                assert not encoded or rows <= 1 or turns.count > turns_before
                encoded, turns_before = answer.encoder.sent.rows, turns.count
        assert encoded * L * K * 2 == RAW

    asyncio.run(run())


@pytest.mark.parametrize(("stream", "accept", "form"), WAYS)
def test_the_peak_of_memory(stream: bool, accept: str, form: Any) -> None:
    """With the rows themselves, which are there until they are sent."""

    async def run() -> None:
        async for _ in Answer(stream, form, accept).parts():
            pass

    asyncio.run(run())  # what is made once is none of the answer's
    gc.collect()
    tracemalloc.start()
    try:
        asyncio.run(run())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * RAW <= peak <= 1.5 * RAW
