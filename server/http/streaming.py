"""Adds rows to the chunks of a stream: each row to the chunk whose tokens made it known."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from fastapi.concurrency import run_in_threadpool

from routed_experts.capture.seams.http import OWN_FIELD
from routed_experts.protocol.codec import Rows
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server import MAX_RESPONSE_BYTES
from routed_experts.server.http.encoding import LINE_BYTES, Encoder, LostRowsError, joined
from routed_experts.server.http.metrics import count_response
from routed_experts.server.http.references import Delivery
from routed_experts.server.outputs.row_buffer import Causes, RowBuffer, causes_of, is_complete, owned_copy, split_at
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput, get_logger

logger = get_logger(__name__)

T = TypeVar("T", RequestOutput, tuple[int, RequestOutput])

_DATA = "data: "
_BEGIN_OF_CHUNK = len(_DATA) + 1  # index of the first field
_FIRST_CHOICE = '"choices":[{'  # before the choice; client text cannot contain it, because JSON escapes quotes
_INDEX = '"index":'  # first field of a choice
_UNFINISHED = '"finish_reason":null'  # in each chunk of a choice but the last
_PAUSE_BYTES = 512 << 10  # of lines that are sent without a pause, which takes longer than to make one


class StreamLimitError(Exception):
    """The stream exceeds `--routed-experts-max-response-bytes`."""


@dataclass(slots=True)
class _Choice:
    """State of one choice."""

    begin: str  # first characters of the choice in its chunks
    prompt: "_Prompt"
    next_row: int  # absolute position of the next row to send
    end: int  # position after the last row that the tokens so far make known
    buffer: RowBuffer  # rows that arrived and were not sent
    finish: str | None = None  # `finish_reason` of the last output
    counted: list[Rows] = field(default_factory=list)  # for the histogram
    is_referred: bool = False  # whether the reference was sent

    @property
    def is_complete(self) -> bool:
        """Whether the choice has finished and all its rows are due."""
        return is_complete(self.finish)


@dataclass(slots=True)
class _Prompt:
    """State of one prompt. Its rows are sent once, with the first chunk of any of its choices."""

    length: int  # in tokens
    is_pending: bool  # until the rows are sent or counted; False in the joined layout
    source: _Choice | None = None  # whose buffer has the rows
    counted: list[Rows] = field(default_factory=list)  # for the histogram
    was_counted: bool = False  # whether the histogram was sent


@dataclass(eq=False)
class SSERewriter:
    """Takes rows off the outputs that enter vLLM's stream generator, and adds them to the chunks that leave it.

    vLLM makes at most one chunk per output, before it reads the next output. So the rows of an output belong to the
    next chunk of its choice.
    """

    options: RoutingOptions
    encoder: Encoder
    num_choices: int  # per prompt
    error_event: Callable[[Exception], str]  # makes the JSON text of an error event
    preface_chunks: int = 0  # that the generator sends before the first tokens
    max_bytes: int = MAX_RESPONSE_BYTES  # of routing in the stream
    has_own_field: bool = False  # whether the generator's chunks have vLLM's own routing field (null)
    delivery: Delivery = field(default_factory=Delivery)
    _choices: dict[int, _Choice] = field(default_factory=dict, init=False)
    _prompts: dict[int, _Prompt] = field(default_factory=dict, init=False)

    @property
    def _is_joined(self) -> bool:
        return self.options.rows and self.options.layout == "joined"

    async def watch(self, results: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yields `results` after taking off their row buffers."""
        choices, num_choices, at_end = self._choices, self.num_choices, self.options.at_end
        async for result in results:
            prompt_index, output = result if isinstance(result, tuple) else (0, result)
            for choice in output.outputs:
                state = choices.get(prompt_index * num_choices + choice.index)
                if state is None:
                    state = self._begin(prompt_index, output, choice)
                state.end += len(choice.token_ids)
                buffer, choice.routed_experts = choice.routed_experts, None
                if at_end and choice.finish_reason is None:
                    continue
                if isinstance(buffer, RowBuffer):
                    state.buffer = buffer
                state.finish = choice.finish_reason
                if (prompt := state.prompt).is_pending and (state.buffer.end >= prompt.length or state.is_complete):
                    prompt.source = prompt.source or state
            yield result

    def _begin(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> _Choice:
        key, length = prompt_index * self.num_choices + choice.index, len(output.prompt_token_ids or ())
        prompt = self._prompts.setdefault(prompt_index, _Prompt(length, is_pending=not self._is_joined))
        next_row = self.options.prompt_start if self._is_joined else length
        state = _Choice(f"{_INDEX}{key},", prompt, next_row, length - 1, RowBuffer(output.request_id))
        self._choices[key] = state
        return state

    def rewrite(self, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        """Adds rows to `chunks` (server-sent events). An error ends the stream with an error event and `[DONE]`."""
        return self._with_rows_at_end(chunks) if self.options.at_end else self._with_rows(chunks)

    async def _with_rows(self, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        """`chunks`, each with the rows that its tokens made known."""
        state: _Choice | None = None
        async with self._ending(chunks) as failure:
            async for chunk in chunks:
                if (begin := chunk.find(_FIRST_CHOICE)) < 0:
                    yield chunk
                    continue
                begin += len(_FIRST_CHOICE)
                if self.has_own_field:
                    chunk = chunk.replace(OWN_FIELD, "", 1)
                if state is None or not chunk.startswith(state.begin, begin):
                    index = _index_of_choice(chunk, begin)
                    state, prompt = self._choices.get(index), self._prompts.get(index // self.num_choices)
                prompt_rows = self._take_prompt(prompt) if prompt is not None and prompt.is_pending else None
                rows: list[Rows] = []
                if self.preface_chunks > 0:
                    self.preface_chunks -= 1
                elif state is not None:
                    rows = self._take(state)
                    if state.finish is not None and self.options.histogram:
                        chunk = await self._with_histograms(chunk, state)
                if prompt_rows is None and not rows:
                    yield chunk
                elif prompt_rows is None and len(rows) == len(rows[0]) == 1 and not self.options.histogram:  # most
                    assert state is not None
                    fields = self._fields("routed_experts", rows.pop(), state.next_row - 1)
                    yield f"{chunk[:begin]}{fields}{chunk[begin:]}"
                else:
                    next_row = state.next_row if state is not None else 0
                    async for line in self._lines(chunk, prompt_rows, rows, next_row):
                        yield line
        for line in failure:
            yield line

    async def _with_rows_at_end(self, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        """`chunks`, the last of each choice with its rows or references to them."""
        async with self._ending(chunks) as failure:
            async for chunk in chunks:
                if not self.has_own_field and _UNFINISHED in chunk:  # most
                    yield chunk
                    continue
                chunk = chunk.replace(OWN_FIELD, "", 1) if self.has_own_field else chunk
                begin = chunk.find(_FIRST_CHOICE)
                state = self._choices.get(_index_of_choice(chunk, begin + len(_FIRST_CHOICE))) if begin >= 0 else None
                if state is None or state.finish is None:
                    yield chunk
                    continue
                prompt_rows = self._take_prompt(state.prompt) if state.prompt.is_pending else None
                rows = self._take(state)
                if self.options.histogram:
                    chunk = await self._with_histograms(chunk, state)
                chunk, prompt_rows, rows = await self._with_references(chunk, state, prompt_rows, rows)
                async for line in self._lines(chunk, prompt_rows, rows, state.next_row):
                    yield line
                self.delivery.mark_sent()
        for line in failure:
            yield line

    @asynccontextmanager
    async def _ending(self, chunks: AsyncIterator[str]) -> AsyncIterator[list[str]]:
        """Counts what was sent in its body, and frees all rows. Gives the events that end the stream after an error."""
        failure: list[str] = []
        try:
            yield failure
        except Exception as error:
            is_ours = isinstance(error, LostRowsError | StreamLimitError)
            logger.error("The stream ended with an error: %s", error, exc_info=not is_ours)
            failure += [f"{_DATA}{self.error_event(error)}\n\n", f"{_DATA}[DONE]\n\n"]
        finally:
            self.delivery.delete_unsent()
            count_response(self.encoder, *(self._lost() if self.encoder.counts.missing else (0, Counter())))
            self._choices.clear()  # the traceback of a cancelled stream keeps this object alive
            self._prompts.clear()
            close = getattr(chunks, "aclose", None)  # aborts a running request in the engine
            if close is not None:
                await close()

    def _lost(self) -> tuple[int, Causes]:
        """How many rows did not arrive, and why the engine does not know others."""
        states, causes = self._choices.values(), Causes()
        for prompt in self._prompts.values():
            causes += causes_of((each.buffer for each in states if each.prompt is prompt), self._is_joined)
        return sum(each.buffer.num_lost for each in states), causes

    def _take_prompt(self, prompt: _Prompt) -> list[Rows] | None:
        """Takes the rows of a pending prompt; None if they have not arrived or are not sent."""
        source = prompt.source
        if source is None:
            return None
        prompt.is_pending = False
        shape = self.encoder.row_shape if source.is_complete else None
        rows = source.buffer.take(self.options.prompt_start, prompt.length, shape)
        if self.options.histogram:
            prompt.counted += rows
        return rows if self.options.rows else None

    def _take(self, state: _Choice) -> list[Rows]:
        """Takes the rows to send with the next chunk of a choice: none before those of its prompt."""
        if state.prompt.is_pending:
            return []
        options, first = self.options, state.next_row
        shape = self.encoder.row_shape if state.is_complete else None
        rows = state.buffer.take(first, state.end, shape)
        state.next_row += sum(map(len, rows))
        if options.histogram:
            rows = [*map(owned_copy, rows)]
            prompt, own_rows = state.prompt, rows
            if self._is_joined and first < prompt.length:
                before, own_rows = split_at(rows, prompt.length - first)
                prompt.source = prompt.source or state
                if prompt.source is state:
                    prompt.counted += before
            state.counted += own_rows
        if not options.rows:
            return []
        if rows or not self._is_joined or first > options.prompt_start:
            return rows
        # A joined response without rows has one empty array.
        is_due = (state.buffer.end >= 0 or state.is_complete) and (state.finish is not None or self.has_own_field)
        return [joined([], self.encoder.row_shape)] if is_due else []

    async def _with_references(
        self, chunk: str, state: _Choice, prompt_rows: list[Rows] | None, rows: list[Rows]
    ) -> tuple[str, list[Rows] | None, list[Rows]]:
        """`chunk` with references to the rows that are stored, and the others, to be sent inline."""
        arrays = []
        if not state.is_referred:
            state.is_referred = True
            arrays.append(("routed_experts", state.next_row - sum(map(len, rows)), rows))
        if prompt_rows is not None:
            arrays.append(("prompt_routed_experts", self.options.prompt_start, prompt_rows))
        num_bytes = sum(part.nbytes for *_, parts in arrays for part in parts)
        num_arrays, refer = len(arrays) * len(self.encoder.named_encoders()), self.delivery.references
        made, _ = await self.delivery.run(num_arrays, num_bytes, refer, self.encoder, arrays)
        for (name, *_), references in zip(arrays, made, strict=True):
            chunk = _with_fields(chunk, references)
            if references and name == "routed_experts":
                rows = []
            elif references:
                prompt_rows = None
        return chunk, prompt_rows, rows

    async def _lines(
        self, chunk: str, prompt_rows: list[Rows] | None, rows: list[Rows], next_row: int
    ) -> AsyncIterator[str]:
        """`chunk` with its rows up to position `next_row`, and those of its prompt if it carries them. If they exceed a
        line, chunks without text come before it."""
        has_prompt, prompt_rows = prompt_rows is not None, prompt_rows or []
        rows = [*map(owned_copy, rows)]  # a slow reader must not keep the engine's message alive
        num_prompt, num_rows = sum(map(len, prompt_rows)), sum(map(len, rows))
        first_prompt_row, first, num_bytes = self.options.prompt_start, next_row - num_rows, 0
        # A line may have two arrays, and both counts are rounded up.
        is_mixed = num_prompt and num_rows
        fit = max(2 * self.encoder.rows_in(LINE_BYTES // 2) - 2, 2) if is_mixed else self.encoder.rows_in(LINE_BYTES)
        count = max(-(-(num_prompt + num_rows) // fit), 1)
        blank = _without_text(chunk) if count > 1 else ""
        for line in range(count):
            text, of_prompt, of_choice = blank if line < count - 1 else chunk, "", ""
            if has_prompt and (line == 0 or prompt_rows):
                # Fewer rows than lines: one row in each of the first lines, because clients expect the prompt first.
                size = _rows_of_line(num_prompt, line, count) if num_prompt >= count else 1
                piece, prompt_rows = split_at(prompt_rows, size)
                array = joined(piece, self.encoder.row_shape)
                of_prompt = self._fields("prompt_routed_experts", array, first_prompt_row)
                first_prompt_row += len(array)
            piece, rows = split_at(rows, _rows_of_line(num_rows, line, count))
            if piece:
                array = joined(piece, self.encoder.row_shape)
                of_choice = self._fields("routed_experts", array, first)
                first += len(array)
            yield _with_texts(text, of_prompt, of_choice)
            num_bytes += len(of_prompt) + len(of_choice)
            if num_bytes > _PAUSE_BYTES:  # others wait meanwhile
                num_bytes = 0
                await asyncio.sleep(0)

    def _fields(self, name: str, rows: Rows, start: int) -> str:
        fields = self.encoder.fields(name, rows, start)
        if self.encoder.num_bytes <= self.max_bytes:
            return fields
        raise StreamLimitError("the routing of this response is larger than --routed-experts-max-response-bytes")

    async def _with_histograms(self, chunk: str, state: _Choice) -> str:
        """`chunk` with the histogram of a finished choice and, once, of its prompt."""
        counted = {"routed_experts_histogram": state.counted}
        if not state.prompt.was_counted:
            state.prompt.was_counted = True
            counted["prompt_routed_experts_histogram"] = state.prompt.counted
        return _with_fields(chunk, await run_in_threadpool(self._histograms, counted))

    def _histograms(self, counted: dict[str, list[Rows]]) -> dict[str, Any]:
        """The histograms of arrays. Frees the arrays here too, because that takes time."""
        histograms: dict[str, Any] = {}
        for name, arrays in counted.items():
            histograms[name] = self.encoder.histogram(arrays)
            arrays.clear()
        return histograms


def _with_fields(chunk: str, values: dict[str, Any]) -> str:
    """`chunk` with `values` before other fields: those of its choice, and at the top level those of the prompt."""

    def texts(of_prompt: bool) -> str:
        named = ((name, value) for name, value in values.items() if name.startswith("prompt_") is of_prompt)
        return "".join(f'"{name}":{msgspec.json.encode(value).decode()},' for name, value in named)

    return _with_texts(chunk, texts(of_prompt=True), texts(of_prompt=False))


def _with_texts(chunk: str, of_prompt: str, of_choice: str) -> str:
    """`chunk` with fields, each with a comma behind it, at its top level and in its choice, before others."""
    begin = chunk.index(_FIRST_CHOICE) + len(_FIRST_CHOICE)
    return f"{chunk[:_BEGIN_OF_CHUNK]}{of_prompt}{chunk[_BEGIN_OF_CHUNK:begin]}{of_choice}{chunk[begin:]}"


def _index_of_choice(chunk: str, begin: int) -> int:
    """`index` of the choice whose first field is at `begin`."""
    return int(chunk[begin + len(_INDEX) : chunk.index(",", begin)])


def _rows_of_line(count: int, line: int, num_lines: int) -> int:
    """Number of `count` rows in a line. If there are fewer rows than lines, the last lines have them."""
    return (line + 1) * count // num_lines - line * count // num_lines


def _without_text(chunk: str) -> str:
    """A chunk of the same choice without tokens."""
    body = msgspec.json.decode(chunk[len(_DATA) :])
    blank: dict[str, Any] = {"text": "", "delta": {}}
    choice = {
        name: value if name == "index" else blank.get(name, [] if isinstance(value, list) else None)
        for name, value in body["choices"][0].items()
        if name not in _LAST_LINE_FIELDS
    }
    kept = {name: value for name, value in body.items() if name not in _LAST_LINE_FIELDS}
    return f"{_DATA}{msgspec.json.encode({**kept, 'choices': [choice]}).decode()}\n\n"


_LAST_LINE_FIELDS = {
    *("usage", "metrics", "system_fingerprint", "prompt_token_ids", "prompt_text", "mm_placeholders"),
    *("prompt_routed_experts_histogram", "routed_experts_histogram", "kv_transfer_params"),
    *("routed_experts", "routed_expert_weights"),  # references, where other rows do not fit the store
    *("prompt_routed_experts", "prompt_routed_expert_weights"),
}
"""Fields that only the last of several lines has."""
