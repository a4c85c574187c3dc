"""Adds rows to the chunks of a stream: each row to the chunk whose tokens made it known."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi.concurrency import run_in_threadpool

from routed_experts.capture.seams.http import OWN_FIELD
from routed_experts.protocol.codec import Rows
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server import MAX_RESPONSE_BYTES
from routed_experts.server.http.encoding import LINE_BYTES, Encoder, LostRowsError
from routed_experts.server.http.metrics import count_response
from routed_experts.server.http.references import ReferenceMaker
from routed_experts.server.outputs.row_buffer import Causes, RowBuffer, causes_of, is_complete, own, split
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput, get_logger

logger = get_logger(__name__)

T = TypeVar("T", RequestOutput, tuple[int, RequestOutput])

_DATA = "data: "
_BEGIN_OF_CHUNK = len(_DATA) + 1
"""Index of the first field in a chunk."""
_FIRST_CHOICE = '"choices":[{'
"""Start of the choice in vLLM's chunks. Client text cannot contain it, because JSON escapes quotes."""
_INDEX = '"index":'
"""First field of a choice."""
_PAUSE_BYTES = 512 << 10
"""Size of the lines that are sent without a pause, which takes longer than to make one."""
_UNFINISHED = '"finish_reason":null'
"""In each chunk of a choice but the last."""


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


class SSERewriter:
    """Takes rows off the outputs that enter vLLM's stream generator, and adds them to the chunks that leave it.

    vLLM makes at most one chunk per output, before it reads the next output. So the rows of an output belong to the
    next chunk of its choice.
    """

    def __init__(
        self,
        options: RoutingOptions,
        encoder: Encoder,
        num_choices: int,  # per prompt
        error_event: Callable[[Exception], str],  # makes the JSON text of an error event
        preface_chunks: int = 0,  # that the generator sends before the first tokens
        max_bytes: int = MAX_RESPONSE_BYTES,  # of routing in the stream
        has_own_field: bool = False,  # whether the generator's chunks have vLLM's own routing field (null)
        references: ReferenceMaker | None = None,  # if the request asks for references
    ) -> None:
        self._options = options
        self._references = references
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
        """Yields `results` after taking off their row buffers."""
        choices, num_choices, at_end = self._choices, self._num_choices, self._options.at_end
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
        key, length = prompt_index * self._num_choices + choice.index, len(output.prompt_token_ids or ())
        prompt = self._prompts.setdefault(prompt_index, _Prompt(length, is_pending=not self._is_joined))
        next_row = self._options.prompt_start if self._is_joined else length
        state = _Choice(f"{_INDEX}{key},", prompt, next_row, length - 1, RowBuffer(output.request_id))
        self._choices[key] = state
        return state

    async def rewrite(self, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        """Adds rows to `chunks` (server-sent events). An error ends the stream with an error event and `[DONE]`."""
        state: _Choice | None = None
        has_rows_later = self._options.at_end and not self._has_own_field
        try:
            async for chunk in chunks:
                if has_rows_later and _UNFINISHED in chunk:
                    yield chunk
                    continue
                if (begin := chunk.find(_FIRST_CHOICE)) < 0:
                    yield chunk
                    continue
                begin += len(_FIRST_CHOICE)
                if self._has_own_field:
                    chunk = chunk.replace(OWN_FIELD, "", 1)
                if state is None or not chunk.startswith(state.begin, begin):
                    index = _index_of_choice(chunk, begin)
                    state = self._choices.get(index)
                    prompt = self._prompts.get(index // self._num_choices)
                if self._options.at_end and (state is None or state.finish is None):
                    yield chunk
                    continue
                prompt_rows = self._take_prompt(prompt) if prompt is not None and prompt.is_pending else None
                rows: list[Rows] = []
                if self._preface_chunks > 0 and not self._options.at_end:
                    self._preface_chunks -= 1
                elif state is not None:
                    if not state.prompt.is_pending:
                        rows = self._take(state)
                    if self._options.histogram and state.finish is not None:
                        chunk = await self._with_histograms(chunk, state)
                        begin = _begin_of_choice(chunk)
                    if self._references is not None:
                        chunk, prompt_rows, rows = await self._refer(self._references, chunk, state, prompt_rows, rows)
                        begin = _begin_of_choice(chunk)
                is_single = prompt_rows is None and len(rows) == 1 and len(rows[0]) <= self._line_rows
                if is_single and self._references is None:  # the usual case
                    assert state is not None
                    start = state.next_row - len(rows[0])
                    yield _insert(chunk, begin, self._fields("routed_experts", rows.pop(), start))
                elif prompt_rows is None and not rows:
                    yield chunk
                else:
                    num_bytes = 0
                    for line in self._lines(chunk, prompt_rows, rows, state.next_row if state is not None else 0):
                        yield line
                        num_bytes += len(line)
                        if num_bytes > _PAUSE_BYTES:  # others wait meanwhile
                            num_bytes = 0
                            await asyncio.sleep(0)
                if self._references is not None:
                    self._references.told()
        except Exception as error:
            logger.error(
                "The stream ended with an error: %s",
                error,
                exc_info=not isinstance(error, LostRowsError | StreamLimitError),
            )
            yield f"{_DATA}{self._error_event(error)}\n\n"
            yield f"{_DATA}[DONE]\n\n"
        finally:
            if self._references is not None and self._references.untold:
                self._references.delete_untold()
            total = self._encoder.total
            count_response(total, *(self._lost() if total.missing else (0, Counter())))
            self._choices.clear()  # the traceback of a cancelled stream keeps this object alive
            self._prompts.clear()
            close = getattr(chunks, "aclose", None)  # aborts a running request in the engine
            if close is not None:
                await close()

    def _lost(self) -> tuple[int, Causes]:
        """How many rows did not arrive, and why the engine does not know others."""
        buffers: dict[int, list[RowBuffer]] = defaultdict(list)  # by prompt
        for index, state in self._choices.items():
            buffers[index // self._num_choices].append(state.buffer)
        num_lost = sum(state.buffer.num_lost for state in self._choices.values())
        causes: Causes = Counter()
        for choices in buffers.values():
            causes += causes_of(choices, self._is_joined)
        return num_lost, causes

    def _take_prompt(self, prompt: _Prompt) -> list[Rows] | None:
        """Takes the rows of a pending prompt; None if they have not arrived or are not sent."""
        source = prompt.source
        if source is None:
            return None
        prompt.is_pending = False
        shape = self._encoder.row_shape if source.is_complete else None
        rows = source.buffer.take(self._options.prompt_start, prompt.length, shape)
        if self._options.histogram:
            prompt.counted += rows
        return rows if self._options.rows else None

    def _take(self, state: _Choice) -> list[Rows]:
        """Takes the rows to send with the next chunk of a choice."""
        options, first = self._options, state.next_row
        shape = self._encoder.row_shape if state.is_complete else None
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
        # A joined response without rows has one empty array.
        is_due = (state.buffer.end >= 0 or state.is_complete) and (state.finish is not None or self._has_own_field)
        return [_joined([], self._encoder.row_shape)] if is_due else []

    async def _refer(
        self, references: ReferenceMaker, chunk: str, state: _Choice, prompt_rows: list[Rows] | None, rows: list[Rows]
    ) -> tuple[str, list[Rows] | None, list[Rows]]:
        """`chunk` with references to the rows. Those that the store cannot take are returned, to be sent inline."""
        arrays = []
        if not state.is_referred:
            state.is_referred = True
            arrays.append(("routed_experts", state.next_row - sum(map(len, rows)), rows))
        if prompt_rows is not None:
            arrays.append(("prompt_routed_experts", self._options.prompt_start, prompt_rows))
        if not arrays:
            return chunk, prompt_rows, rows
        num_bytes = sum(part.nbytes for *_, parts in arrays for part in parts)
        num_arrays = len(arrays) * len(self._encoder.by_name())
        made, failure = await references.run(num_arrays, num_bytes, references.references, self._encoder, arrays)
        for (name, *_), by_name in zip(arrays, made, strict=True):
            if not by_name:
                continue
            if name == "routed_experts":
                chunk, rows = _insert(chunk, _begin_of_choice(chunk), _json_fields(by_name)), []
            else:
                chunk, prompt_rows = _insert(chunk, _BEGIN_OF_CHUNK, _json_fields(by_name)), None
        if failure is not None:
            references.warn_of_inline(failure)
        return chunk, prompt_rows, rows

    def _lines(self, chunk: str, prompt_rows: list[Rows] | None, rows: list[Rows], next_row: int) -> Iterator[str]:
        """`chunk` with its rows up to position `next_row`, and those of its prompt if it carries them. If they exceed a
        line, chunks without text come before it."""
        has_prompt, prompt_rows = prompt_rows is not None, prompt_rows or []
        rows = [*map(own, rows)]  # a slow reader must not keep the engine's message alive
        num_prompt, num_rows = sum(map(len, prompt_rows)), sum(map(len, rows))
        next_prompt_row = self._options.prompt_start
        fit = self._line_rows
        if num_prompt and num_rows:  # a line may have two arrays, and both counts are rounded up
            fit = max(2 * self._encoder.rows_in(LINE_BYTES // 2) - 2, 2)
        count = max(-(-(num_prompt + num_rows) // fit), 1)
        first = next_row - num_rows
        blank = _without_text(chunk) if count > 1 else ""
        for line in range(count):
            text, of_prompt, of_choice = blank if line < count - 1 else chunk, "", ""
            if has_prompt and (line == 0 or prompt_rows):
                # Fewer rows than lines: one row in each of the first lines, because clients expect the prompt first.
                piece, prompt_rows = split(
                    prompt_rows, _rows_of_line(num_prompt, line, count) if num_prompt >= count else 1
                )
                array = _joined(piece, self._encoder.row_shape)
                of_prompt = self._fields("prompt_routed_experts", array, next_prompt_row)
                next_prompt_row += len(array)
            piece, rows = split(rows, _rows_of_line(num_rows, line, count))
            if piece:
                array = _joined(piece, self._encoder.row_shape)
                of_choice = self._fields("routed_experts", array, first)
                first += len(array)
            begin = _begin_of_choice(text)
            yield f"{text[:_BEGIN_OF_CHUNK]}{of_prompt}{text[_BEGIN_OF_CHUNK:begin]}{of_choice}{text[begin:]}"

    def _fields(self, name: str, rows: Rows, start: int) -> str:
        fields = self._encoder.fields(name, rows, start)
        if self._encoder.num_bytes <= self._max_bytes:
            return fields
        raise StreamLimitError("the routing of this response is larger than --routed-experts-max-response-bytes")

    async def _with_histograms(self, chunk: str, state: _Choice) -> str:
        """Adds the histogram of a finished choice and, once, of its prompt to `chunk`."""
        prompt = state.prompt
        counted = await run_in_threadpool(self._histogram, state.counted)
        chunk = _insert(chunk, _begin_of_choice(chunk), f'"routed_experts_histogram":{counted},')
        if not prompt.was_counted:
            prompt.was_counted = True
            counted = await run_in_threadpool(self._histogram, prompt.counted)
            chunk = _insert(chunk, _BEGIN_OF_CHUNK, f'"prompt_routed_experts_histogram":{counted},')
        return chunk

    def _histogram(self, arrays: list[Rows]) -> str:
        """The JSON text of the histogram of `arrays`, which it frees: that takes a while too."""
        counted = self._encoder.histogram(arrays)
        arrays.clear()
        return msgspec.json.encode(counted).decode()


def _insert(chunk: str, at: int, fields: str) -> str:
    """Inserts `fields`, each with a comma behind it, at index `at`, before other fields."""
    return f"{chunk[:at]}{fields}{chunk[at:]}"


def _json_fields(values: dict[str, Any]) -> str:
    """`values` as fields of a JSON object, each with a comma behind it."""
    return msgspec.json.encode(values).decode()[1:-1] + ","


def _begin_of_choice(chunk: str) -> int:
    """Index of the first field of the choice in a chunk that has one."""
    return chunk.index(_FIRST_CHOICE) + len(_FIRST_CHOICE)


def _index_of_choice(chunk: str, begin: int) -> int:
    """`index` of the choice whose first field is at `begin`."""
    return int(chunk[begin + len(_INDEX) : chunk.index(",", begin)])


def _rows_of_line(count: int, line: int, num_lines: int) -> int:
    """Number of `count` rows in a line. If there are fewer rows than lines, the last lines have them."""
    return (line + 1) * count // num_lines - line * count // num_lines


def _joined(arrays: list[Rows], shape: tuple[int, int]) -> Rows:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty((0, *shape), dtype=np.int16)


def _without_text(chunk: str) -> str:
    """A chunk of the same choice without tokens."""
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
    *("routed_experts", "routed_expert_weights"),  # references, where other rows do not fit the store
    *("prompt_routed_experts", "prompt_routed_expert_weights"),
}
"""Fields that only the last of several lines has."""
