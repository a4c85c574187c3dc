"""Adds rows to the chunks of a stream, each to the chunk that brings its tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi.concurrency import run_in_threadpool

from routed_experts.protocol.codec import Rows
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server import MAX_RESPONSE_BYTES
from routed_experts.server.http.encoding import LINE_BYTES, Encoder, LostRowsError
from routed_experts.server.http.metrics import count_answer
from routed_experts.server.outputs.row_buffer import RowBuffer, own, split
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput, get_logger

logger = get_logger(__name__)

T = TypeVar("T", RequestOutput, tuple[int, RequestOutput])

_DATA = "data: "
_BEGIN_OF_CHUNK = len(_DATA) + 1
"""Where the fields of a chunk begin."""
_FIRST_CHOICE = '"choices":[{'
"""How vLLM's chunks begin their choice. Nothing that a client sent can hold it: quotes are escaped in JSON texts."""
_INDEX = '"index":'
"""What the choice begins with; its place in the order of the response follows."""
_OWN_FIELD = '"routed_experts":null,'
_COMPLETE = ("stop", "length", "repetition")
"""How choices end whose tokens all have rows, but the last."""


class StreamLimitError(Exception):
    """A stream would hold more routing than the server allows."""


@dataclass(slots=True)
class _Choice:
    """A choice's place in its stream.

    Attributes:
        begin: the first bytes of the choice in its chunks.
        prompt: the prompt of the choice.
        next_row: absolute position of the first row that was not sent with the choice.
        end: position after the last row that its tokens so far make known.
        buffer: rows that wait for the chunk they belong to.
        finish: its `finish_reason`, once an output brought it.
        counted: rows for its histogram.
    """

    begin: str
    prompt: "_Prompt"
    next_row: int
    end: int
    buffer: RowBuffer
    finish: str | None = None
    counted: list[Rows] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether no more rows come, and all of them are due."""
        return self.finish in _COMPLETE


@dataclass(slots=True)
class _Prompt:
    """The rows of a prompt: sent once, with the first chunk of any of its choices.

    Attributes:
        length: its tokens.
        source: the choice whose buffer holds them.
        is_pending: True until they are sent or counted, unless the choices carry them.
        counted: rows for the histogram.
        was_counted: whether the histogram was sent.
    """

    length: int
    is_pending: bool
    source: _Choice | None = None
    counted: list[Rows] = field(default_factory=list)
    was_counted: bool = False


class SSERewriter:
    """Watches the engine's outputs going into vLLM's stream generator and adds rows to the chunks coming out.

    vLLM makes at most one chunk for each output, after it has taken that output and before it takes the next. So
    what an output brought belongs to the next chunk of its choice.

    Args:
        options: what the request asks for.
        encoder: how it wants its arrays.
        num_choices: `n`, choices for each prompt.
        error_event: the text of the event that ends a stream that failed.
        preface_chunks: chunks that the generator sends before the first one that brings tokens.
        max_bytes: most bytes of routing that the whole stream may hold.
        has_own_field: whether the generator's chunks have vLLM's own field for routing, which is null here.
    """

    def __init__(
        self,
        options: RoutingOptions,
        encoder: Encoder,
        num_choices: int,
        error_event: Callable[[Exception], str],
        preface_chunks: int = 0,
        max_bytes: int = MAX_RESPONSE_BYTES,
        has_own_field: bool = False,
    ) -> None:
        self._options = options
        self._encoder = encoder
        self._num_choices = num_choices
        self._error_event = error_event
        self._preface_chunks = preface_chunks
        self._max_bytes = max_bytes
        self._has_own_field = has_own_field
        self._line_rows = encoder.rows_in(LINE_BYTES)
        self._is_joined = options.rows and options.layout == "joined"
        self._choices: dict[int, _Choice] = {}
        self._prompts: dict[int, _Prompt] = {}

    async def watch(self, results: AsyncIterator[T]) -> AsyncIterator[T]:
        """`results`, unchanged but for the buffers, which are taken off."""
        choices, num_choices = self._choices, self._num_choices
        async for result in results:
            prompt_index, output = result if isinstance(result, tuple) else (0, result)
            for choice in output.outputs:
                state = choices.get(prompt_index * num_choices + choice.index)
                if state is None:
                    state = self._begin(prompt_index, output, choice)
                if isinstance(choice.routed_experts, RowBuffer):
                    state.buffer = choice.routed_experts
                choice.routed_experts = None
                state.end += len(choice.token_ids)
                state.finish = choice.finish_reason
                if (prompt := state.prompt).is_pending and (state.buffer.end >= prompt.length or state.is_complete):
                    prompt.source = prompt.source or state
            yield result

    def _begin(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> _Choice:
        key, length = prompt_index * self._num_choices + choice.index, len(output.prompt_token_ids or ())
        prompt = self._prompts.setdefault(prompt_index, _Prompt(length, is_pending=not self._is_joined))
        next_row = self._options.prompt_start if self._is_joined else length
        state = _Choice(f"{_INDEX}{key},", prompt, next_row, length - 1, RowBuffer(output.request_id))
        self._choices[key] = state
        return state

    async def rewrite(self, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        """`chunks` (server-sent events) with rows added. An error ends the stream with an error event and `[DONE]`."""
        state: _Choice | None = None
        try:
            async for chunk in chunks:
                if (begin := chunk.find(_FIRST_CHOICE)) < 0:
                    yield chunk
                    continue
                begin += len(_FIRST_CHOICE)
                if self._has_own_field:
                    chunk = chunk.replace(_OWN_FIELD, "", 1)
                if state is None or not chunk.startswith(state.begin, begin):
                    index = _index_of_choice(chunk, begin)
                    state = self._choices.get(index)
                    prompt = self._prompts.get(index // self._num_choices)
                prompt_rows = self._take_prompt(prompt) if prompt is not None and prompt.is_pending else None
                rows: list[Rows] = []
                if self._preface_chunks > 0:
                    self._preface_chunks -= 1
                elif state is not None:
                    if not state.prompt.is_pending:
                        rows = self._take(state)
                    if self._options.histogram and state.finish is not None:
                        chunk = await self._with_histograms(chunk, state)
                        begin = _begin_of_choice(chunk)
                if prompt_rows is None and len(rows) == 1 and len(rows[0]) <= self._line_rows:  # nearly always
                    assert state is not None
                    start = state.next_row - len(rows[0])
                    yield _insert(chunk, begin, "routed_experts", self._text(rows.pop(), start))
                elif prompt_rows is None and not rows:
                    yield chunk
                else:
                    for line in self._lines(chunk, prompt_rows, rows, state.next_row if state is not None else 0):
                        yield line
                        await asyncio.sleep(0)  # so that other tasks run between the lines of a long prompt
        except Exception as error:
            logger.error(
                "A stream was ended: %s", error, exc_info=not isinstance(error, LostRowsError | StreamLimitError)
            )
            yield f"{_DATA}{self._error_event(error)}\n\n"
            yield f"{_DATA}[DONE]\n\n"
        finally:
            count_answer(self._encoder.sent, sum(state.buffer.num_lost for state in self._choices.values()))
            self._choices.clear()  # a cancelled stream lives on in its traceback until garbage is collected
            self._prompts.clear()
            close = getattr(chunks, "aclose", None)  # ends the request in the engine, where it has not ended
            if close is not None:
                await close()

    def _take_prompt(self, prompt: _Prompt) -> list[Rows] | None:
        """Takes the rows of a pending prompt; None if they have not arrived, or are not sent."""
        source = prompt.source
        if source is None:
            return None
        prompt.is_pending = False
        shape = self._encoder.shape if source.is_complete else None
        rows = source.buffer.take(self._options.prompt_start, prompt.length, shape)
        if self._options.histogram:
            prompt.counted += rows
        return rows if self._options.rows else None

    def _take(self, state: _Choice) -> list[Rows]:
        """Takes the rows that a choice's tokens made known, to be sent with its next chunk."""
        options, first = self._options, state.next_row
        shape = self._encoder.shape if state.is_complete else None
        rows = state.buffer.take(first, state.end, shape)
        state.next_row += sum(map(len, rows))
        if options.histogram:
            rows = [*map(own, rows)]
            prompt, own_rows = state.prompt, rows
            if self._is_joined and first < prompt.length:
                before, own_rows = split(rows, prompt.length - first)
                prompt.source = prompt.source or state
                if prompt.source is state:
                    prompt.counted += before
            state.counted += own_rows
        if not options.rows:
            return []
        if rows or not self._is_joined or first > options.prompt_start:
            return rows
        # A response without rows still carries one empty array.
        is_due = (state.buffer.end >= 0 or state.is_complete) and (state.finish is not None or self._has_own_field)
        return [_joined([], self._encoder.shape)] if is_due else []

    def _lines(self, chunk: str, prompt_rows: list[Rows] | None, rows: list[Rows], next_row: int) -> Iterator[str]:
        """`chunk` with the rows of its prompt and its own; before it chunks without text, if they do not fit a line.

        Args:
            prompt_rows: None if the prompt's array is not sent with this chunk.
            next_row: position after the last of `rows`.
        """
        has_prompt, prompt_rows = prompt_rows is not None, prompt_rows or []
        rows = [*map(own, rows)]  # a reader that stalls keeps them, and not the engine's message
        num_prompt, num_rows = sum(map(len, prompt_rows)), sum(map(len, rows))
        next_prompt_row = self._options.prompt_start
        fit = self._line_rows
        if num_prompt and num_rows:  # two envelopes, and both numbers are rounded up
            fit = max(2 * self._encoder.rows_in(LINE_BYTES // 2) - 2, 2)
        count = max(-(-(num_prompt + num_rows) // fit), 1)
        first = next_row - num_rows
        blank = _without_text(chunk) if count > 1 else ""
        for line in range(count):
            text = blank if line < count - 1 else chunk
            if has_prompt and (line == 0 or prompt_rows):
                # Where there are fewer rows than lines, the first lines have them: a client waits for them first.
                piece, prompt_rows = split(
                    prompt_rows, _rows_of_line(num_prompt, line, count) if num_prompt >= count else 1
                )
                array, begin = _joined(piece, self._encoder.shape), _BEGIN_OF_CHUNK
                text = _insert(text, begin, "prompt_routed_experts", self._text(array, next_prompt_row))
                next_prompt_row += len(array)
            piece, rows = split(rows, _rows_of_line(num_rows, line, count))
            if piece:
                array, begin = _joined(piece, self._encoder.shape), _begin_of_choice(text)
                text = _insert(text, begin, "routed_experts", self._text(array, first))
                first += len(array)
            yield text

    def _text(self, rows: Rows, start: int) -> str:
        text = self._encoder.text(rows, start)
        if self._encoder.sent.num_bytes <= self._max_bytes:
            return text
        raise StreamLimitError("the routing of this answer is larger than --routed-experts-max-response-bytes")

    async def _with_histograms(self, chunk: str, state: _Choice) -> str:
        """`chunk`, the last of a choice, with the choice's histogram and, once, its prompt's."""
        prompt = state.prompt
        counted = await self._histogram(state.counted)
        chunk = _insert(chunk, _begin_of_choice(chunk), "routed_experts_histogram", counted)
        if not prompt.was_counted:
            prompt.was_counted = True
            counted = await self._histogram(prompt.counted)
            chunk = _insert(chunk, _BEGIN_OF_CHUNK, "prompt_routed_experts_histogram", counted)
        return chunk

    async def _histogram(self, arrays: list[Rows]) -> str:
        counted = await run_in_threadpool(self._encoder.histogram, arrays)
        arrays.clear()
        return msgspec.json.encode(counted).decode()


def _insert(chunk: str, at: int, name: str, text: str) -> str:
    """`chunk` with a field, whose value is the JSON `text`, ahead of the fields that begin at `at`."""
    return f'{chunk[:at]}"{name}":{text},{chunk[at:]}'


def _begin_of_choice(chunk: str) -> int:
    """Where the fields of a chunk's choice begin; -1 for other events."""
    at = chunk.find(_FIRST_CHOICE)
    return at + len(_FIRST_CHOICE) if at >= 0 else -1


def _index_of_choice(chunk: str, begin: int) -> int:
    """The place in the response of the choice whose fields begin there."""
    return int(chunk[begin + len(_INDEX) : chunk.index(",", begin)])


def _rows_of_line(count: int, line: int, num_lines: int) -> int:
    """How many of `count` rows a line has; where there are fewer rows than lines, the last lines have them."""
    return (line + 1) * count // num_lines - line * count // num_lines


def _joined(arrays: list[Rows], shape: tuple[int, int]) -> Rows:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty((0, *shape), dtype=np.int16)


def _without_text(chunk: str) -> str:
    """A chunk of the same choice that brings no tokens."""
    body = msgspec.json.decode(chunk[len(_DATA) :])
    blank: dict[str, Any] = {"text": "", "delta": {}}
    choice = {
        name: value if name == "index" else blank.get(name, [] if isinstance(value, list) else None)
        for name, value in body["choices"][0].items()
        if name not in _ONCE
    }
    kept = {name: value for name, value in body.items() if name not in _ONCE}
    return f"{_DATA}{msgspec.json.encode({**kept, 'choices': [choice]}).decode()}\n\n"


_ONCE = {
    *("usage", "metrics", "system_fingerprint", "prompt_token_ids", "prompt_text", "mm_placeholders"),
    *("prompt_routed_experts_histogram", "routed_experts_histogram", "kv_transfer_params"),
}
"""Fields that only the last of several lines repeats."""
