"""Puts rows on the chunks of a stream whose tokens they belong to."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import orjson
from fastapi.concurrency import run_in_threadpool
from numpy.typing import NDArray

from routed_experts.capture.rows import with_unknown
from routed_experts.capture.split import split_at_prompt
from routed_experts.server.encoding import LARGE_BYTES, Encoder
from routed_experts.server.row_feeds import RowFeed
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput, get_logger

logger = get_logger(__name__)

T = TypeVar("T", RequestOutput, tuple[int, RequestOutput])
Rows = NDArray[np.int16]

_DATA = "data: "


@dataclass
class _Choice:
    """A choice's place in its stream.

    Attributes:
        generated: tokens that outputs have brought so far.
        next_row: absolute position of the first row that is not in `pending` or sent yet.
        pending: rows whose tokens the next chunk of this choice brings, or held-back chunks before it would have.
    """

    next_row: int
    generated: int = 0
    feed: RowFeed | None = None
    pending: list[Rows] = field(default_factory=list)


@dataclass
class _Prompt:
    """The rows of a prompt: sent once, with the first chunk of any of its choices."""

    rows: Rows | None = None
    captured: bool = False


class StreamAligner:
    """Watches the engine's outputs going into vLLM's stream generator and adds rows to the chunks coming out.

    vLLM makes at most one chunk for each output, after it has taken that output and before it takes the next. So
    what an output brought belongs to the next chunk of its choice.

    Args:
        encoder: how the request wants its arrays.
        shape: (L, K) of the served model.
        num_choices: `n`, choices for each prompt.
        preface_chunks: chunks that the generator sends before the first one that brings tokens.
    """

    def __init__(self, encoder: Encoder, shape: tuple[int, int], num_choices: int, preface_chunks: int = 0) -> None:
        self._encoder = encoder
        self._shape = shape
        self._options = encoder.options
        self._num_choices = num_choices
        self._preface_chunks = preface_chunks
        self._choices: dict[int, _Choice] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._large = False

    async def watch(self, results: AsyncIterator[T]) -> AsyncIterator[T]:
        """`results`, unchanged but for the feeds, which are taken off.

        Raises:
            codec.CodecError: rows that the request's dtype cannot hold.
        """
        async for result in results:
            prompt_index, output = result if isinstance(result, tuple) else (0, result)
            for choice in output.outputs:
                self._take(prompt_index, output, choice)
            yield result

    async def rewrite(self, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        """`chunks`, server-sent events, with the rows that belong to each."""
        async for chunk in chunks:
            if self._large:
                rewritten = await run_in_threadpool(self._with_rows, chunk)
                self._large = rewritten is chunk  # nothing was added yet
                yield rewritten
            else:
                yield self._with_rows(chunk)

    def _take(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> None:
        prompt_len = len(output.prompt_token_ids or ())
        start = self._options.prompt_start
        key = prompt_index * self._num_choices + choice.index
        state = self._choices.setdefault(key, _Choice(next_row=start))
        if isinstance(choice.routed_experts, RowFeed):
            state.feed = choice.routed_experts
            choice.routed_experts = None
        state.generated += len(choice.token_ids)
        end = prompt_len + state.generated - 1
        complete = choice.finish_reason in ("stop", "length", "repetition")
        rows = state.feed.take_until(end - start) if state.feed is not None else None
        if rows is None:
            if not complete:
                return
            rows = np.empty((0, *self._shape), dtype=np.int16)
        if complete and state.next_row + len(rows) < end:
            lost = end - state.next_row - len(rows)
            logger.error("Request %s: %d rows did not arrive and are sent as -1.", output.request_id, lost)
            rows = with_unknown(rows, len(rows) + lost)
        self._encoder.check(rows)
        self._large = self._large or rows.nbytes > LARGE_BYTES
        if self._options.layout == "split" and state.next_row < prompt_len:
            prompt_rows, rows = split_at_prompt(rows, state.next_row, prompt_len)
            state.next_row += len(prompt_rows)
            self._capture_prompt(prompt_index, prompt_rows)
        elif self._options.layout == "split" and start == prompt_len:
            self._capture_prompt(prompt_index, rows[:0])
        if len(rows):
            state.pending.append(rows)
            state.next_row += len(rows)

    def _capture_prompt(self, prompt_index: int, rows: Rows) -> None:
        prompt = self._prompts.setdefault(prompt_index, _Prompt())
        if not prompt.captured:
            prompt.rows, prompt.captured = rows, True

    def _with_rows(self, chunk: str) -> str:
        if not chunk.startswith(_DATA + "{"):
            return chunk
        body = orjson.loads(chunk[len(_DATA) :])
        choices = body.get("choices")
        if not choices:
            return chunk
        added = False
        key = choices[0]["index"]
        prompt = self._prompts.get(key // self._num_choices)
        if prompt is not None and prompt.rows is not None:
            body["prompt_routed_experts"] = self._encoder(prompt.rows, self._options.prompt_start)
            prompt.rows = None
            added = True
        if self._preface_chunks > 0:
            self._preface_chunks -= 1
        elif (choice := self._choices.get(key)) is not None and choice.pending:
            rows = choice.pending[0] if len(choice.pending) == 1 else np.concatenate(choice.pending)
            choices[0]["routed_experts"] = self._encoder(rows, choice.next_row - len(rows))
            choice.pending = []
            added = True
        return f"{_DATA}{orjson.dumps(body).decode()}\n\n" if added else chunk
