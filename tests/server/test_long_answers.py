"""What a long answer takes of the process: little by little, and hardly more memory than its
rows."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from anyio.to_thread import current_default_thread_limiter

from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.answers.response import CollectedRows, RoutedResponse, respond
from routed_experts.server.http.answers.streaming import SSERewriter
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import RequestOutput
from tests.protocol.answers import peak_of
from tests.server.known import another_task, buffer_of, choice, encoder_of, output
from tests.server.test_response import Choice, Response, request

L, K, EXPERTS = 48, 8, 128
PROMPT, TOKENS = 2000, 101
RAW = (PROMPT + TOKENS - 1) * L * K * 2


def rows_of(count: int) -> np.ndarray:
    return np.ones((count, L, K), dtype=np.int16)


class Answer:
    """An answer of many rows, most of them the prompt's; the others come one by one."""

    def __init__(self, way: tuple[bool, str, Any], *, histogram: bool = False) -> None:
        self._is_streamed, self._accept, form = way
        self._options = RoutingOptions(format=form, histogram=histogram)
        self.encoder = encoder_of(self._options, (L, K), EXPERTS)

    async def parts(self) -> AsyncIterator[bytes | str]:
        """What goes to the client, in the pieces in which it is made."""
        buffer = buffer_of((0, rows_of(PROMPT)))
        if self._is_streamed:
            aligner = SSERewriter(self._options, self.encoder, 1, str)
            async for line in aligner.rewrite(self._chunks(aligner.watch(self._outputs(buffer)))):
                yield line
            return
        for token in range(TOKENS - 1):
            buffer.push(PROMPT + token, rows_of(1))
        rows = CollectedRows(self._options, (L, K))
        rows.collect(output(PROMPT, choice(TOKENS, buffer)))
        answer = RoutedResponse(
            Response(choices=[Choice(index=0)]), rows, self.encoder, is_list=False
        )
        del buffer, rows
        async for part in (await respond(answer, request(self._accept))).body_iterator:
            yield part

    async def _outputs(self, buffer: RowBuffer) -> AsyncIterator[RequestOutput]:
        whole = output(PROMPT)
        for token in range(TOKENS):
            whole.outputs = [choice(1, buffer, finish="length" if token == TOKENS - 1 else None)]
            yield whole
            buffer.push(PROMPT + token, rows_of(1))

    async def _chunks(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[str]:
        async for _ in outputs:
            yield 'data: {"choices":[{"index":0,"text":"a"}]}\n\n'


@pytest.mark.parametrize(
    "way",
    [
        (False, "application/msgpack", "npy"),
        (False, "*/*", "list"),
        (True, "*/*", "object"),
    ],
)
def test_no_answer_is_encoded_at_one_go_or_kept_whole(way: tuple[bool, str, Any]) -> None:
    """Another task gets its turn between any two parts, in a stream at least every 640 KiB. The
    memory is that of the rows themselves, which are there until they are sent, and little more."""

    async def run() -> None:
        answer = Answer(way)
        since, turns_before = 0, 0
        async with another_task() as turns:
            async for part in answer.parts():
                assert len(part) <= 320 << 10
                since = len(part) if turns.count > turns_before else since + len(part)
                assert since <= (640 << 10 if way[0] else len(part))
                turns_before = turns.count
        assert answer.encoder.counts.rows * L * K * 2 == RAW

    asyncio.run(run())  # what is made once is none of the answer's
    gc.collect()
    assert 0.9 * RAW <= peak_of(lambda: asyncio.run(run()))[1] <= 1.5 * RAW


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_that_end_together_take_no_thread_of_other_routes(is_streamed: bool) -> None:
    async def read(answer: Answer) -> None:
        async for _ in answer.parts():
            pass

    async def run() -> None:
        shared = current_default_thread_limiter()
        answers = [Answer((is_streamed, "*/*", "object"), histogram=True) for _ in range(3)]
        reading = [asyncio.create_task(read(answer)) for answer in answers]
        while not all(task.done() for task in reading):
            assert shared.borrowed_tokens == 0
            await asyncio.sleep(0)
        await asyncio.gather(*reading)

    asyncio.run(run())
