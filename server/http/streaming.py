"""Adds rows to the chunks of a stream: each row to the chunk whose tokens made it known."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from fastapi.concurrency import run_in_threadpool

from routed_experts.protocol.codec import Rows
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server import MAX_RESPONSE_BYTES
from routed_experts.server.http.encoding import LINE_BYTES, Encoder, LostRowsError, joined
from routed_experts.server.http.metrics import count_response
from routed_experts.server.http.references import Delivery
from routed_experts.server.http.seams import OWN_FIELD
from routed_experts.server.outputs.row_buffer import (
    Causes,
    RowBuffer,
    causes_of,
    is_complete,
    owned_copy,
    split_at,
)
from routed_experts.server.vllm_api import RequestOutput, get_logger

logger = get_logger(__name__)

T = TypeVar("T", RequestOutput, tuple[int, RequestOutput])
Arrays = dict[str, tuple[int, list[Rows]]]
"""By the name of an array: its first position, and its rows."""

_DATA = "data: "
_BEGIN_OF_CHUNK = len(_DATA) + 1  # index of the first field
# before the choice; client text cannot contain it, because JSON escapes quotes
_FIRST_CHOICE = '"choices":[{'
_INDEX = '"index":'  # first field of a choice
_UNFINISHED = '"finish_reason":null'  # in each chunk of a choice but the last
# of lines that are sent without a pause, which takes longer than to make one
_PAUSE_BYTES = 512 << 10


class StreamLimitError(Exception):
    """The stream exceeds `--routed-experts-max-response-bytes`."""


@dataclass(slots=True)
class _Prompt:
    """State of one prompt. Its rows are sent once, with the first chunk of any of its choices."""

    keys: range  # of its choices
    length: int  # in tokens
    is_pending: bool  # until the rows are sent or counted; False in the joined layout
    # whose rows of the prompt the histogram counts in the joined layout
    counter: "_Choice | None" = None
    counted: list[Rows] = field(default_factory=list)  # for the histogram
    was_counted: bool = False  # whether the histogram was sent


@dataclass(slots=True)
class _Choice:
    """State of one choice."""

    prompt: _Prompt
    next_row: int  # absolute position of the next row to send
    end: int  # position after the last row that the tokens so far make known
    buffer: RowBuffer  # rows that arrived and were not sent
    finish: str | None = None  # `finish_reason` of the last output
    counted: list[Rows] = field(default_factory=list)  # for the histogram


@dataclass(eq=False)
class SSERewriter:
    """Takes rows off the outputs that enter vLLM's stream generator, and adds them to the chunks
    that leave it.

    vLLM makes at most one chunk per output, before it reads the next output. So the rows of an
    output belong to the next chunk of its choice.
    """

    options: RoutingOptions
    encoder: Encoder
    num_choices: int  # per prompt
    error_event: Callable[[Exception], str]  # makes the JSON text of an error event
    preface_chunks: int = 0  # that the generator sends before the first tokens
    max_bytes: int = MAX_RESPONSE_BYTES  # of routing in the stream
    # whether the generator's chunks have vLLM's own routing field (null)
    has_own_field: bool = False
    delivery: Delivery = field(default_factory=Delivery)
    _choices: dict[int, _Choice] = field(default_factory=dict, init=False)

    @property
    def _is_joined(self) -> bool:
        return self.options.rows and self.options.layout == "joined"

    async def watch(self, results: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yields `results` after taking off their row buffers."""
        choices, num_choices, at_end = self._choices, self.num_choices, self.options.at_end
        async for result in results:
            prompt_index, output = result if isinstance(result, tuple) else (0, result)
            for choice in output.outputs:
                key = prompt_index * num_choices + choice.index
                if key not in choices:
                    self._begin(prompt_index * num_choices, output)
                state = choices[key]
                state.end += len(choice.token_ids)
                buffer, choice.routed_experts = choice.routed_experts, None
                if at_end and choice.finish_reason is None:
                    continue
                if isinstance(buffer, RowBuffer):
                    state.buffer = buffer
                state.finish = choice.finish_reason
            yield result

    def _begin(self, first_key: int, output: RequestOutput) -> None:
        """Adds the choices of a prompt."""
        keys, length = (
            range(first_key, first_key + self.num_choices),
            len(output.prompt_token_ids or ()),
        )
        prompt = _Prompt(keys, length, is_pending=not self._is_joined)
        next_row = self.options.prompt_start if self._is_joined else length
        self._choices |= {
            key: _Choice(prompt, next_row, length - 1, RowBuffer(output.request_id)) for key in keys
        }

    # Rows with their tokens and rows at the end stand beside each other, line by line.
    async def rewrite(self, chunks: AsyncIterator[str]) -> AsyncIterator[str]:  # noqa: C901
        """Adds rows to `chunks` (server-sent events). An error ends the stream with an error event
        and `[DONE]`."""
        options, failure = self.options, list[str]()
        skips_unfinished = options.at_end and not self.has_own_field
        try:
            async for chunk in chunks:
                begin = chunk.find(_FIRST_CHOICE) + len(_FIRST_CHOICE)
                if begin < len(_FIRST_CHOICE) or (skips_unfinished and _UNFINISHED in chunk):
                    yield chunk
                    continue
                if self.has_own_field:
                    chunk = chunk.replace(OWN_FIELD, "", 1)
                state = self._choices.get(int(chunk[begin + len(_INDEX) : chunk.index(",", begin)]))
                if state is None or (options.at_end and state.finish is None):
                    yield chunk
                    continue
                prompt_rows = self._take_prompt(state.prompt) if state.prompt.is_pending else None
                rows, is_last = list[Rows](), state.finish is not None
                if self.preface_chunks > 0 and not options.at_end:
                    self.preface_chunks, is_last = self.preface_chunks - 1, False
                else:
                    rows = self._take(state)
                if prompt_rows is None and not rows and not is_last:
                    yield chunk
                elif prompt_rows is None and not is_last and len(rows) == len(rows[0]) == 1:  # most
                    fields = self._fields("routed_experts", rows.pop(), state.next_row - 1)
                    yield f"{chunk[:begin]}{fields}{chunk[begin:]}"
                else:
                    arrays = {"routed_experts": (state.next_row - sum(map(len, rows)), rows)}
                    if prompt_rows is not None:
                        arrays["prompt_routed_experts"] = options.prompt_start, prompt_rows
                    values = await self._values(state, arrays) if is_last else {}
                    async for line in self._lines(chunk, values, arrays):
                        yield line
        except Exception as error:
            is_ours = isinstance(error, LostRowsError | StreamLimitError)
            logger.error("The stream ended with an error: %s", error, exc_info=not is_ours)
            failure += [f"{_DATA}{self.error_event(error)}\n\n", f"{_DATA}[DONE]\n\n"]
        finally:
            count_response(
                self.encoder, *(self._lost() if self.encoder.counts.missing else (0, Counter()))
            )
            self._choices.clear()  # the traceback of a cancelled stream keeps this object alive
            close = getattr(chunks, "aclose", None)  # aborts a running request in the engine
            if close is not None:
                await close()
        for line in failure:
            yield line

    def _lost(self) -> tuple[int, Causes]:
        """How many rows did not arrive, and why the engine does not know others."""
        states, causes = self._choices, Causes()
        for keys in {state.prompt.keys for state in states.values()}:
            causes += causes_of((states[key].buffer for key in keys), self._is_joined)
        return sum(state.buffer.num_lost for state in states.values()), causes

    def _take_prompt(self, prompt: _Prompt) -> list[Rows] | None:
        """Takes the rows of a pending prompt; None if they have not arrived or are not sent."""
        states = [self._choices[key] for key in prompt.keys]
        # One that has them, before one that is complete without: its rows were lost.
        found = [each for each in states if each.buffer.end >= prompt.length]
        found = found or [each for each in states if is_complete(each.finish)]
        if not found:
            return None
        source = found[0]
        prompt.is_pending = False
        shape = self.encoder.row_shape if is_complete(source.finish) else None
        rows = source.buffer.take(self.options.prompt_start, prompt.length, shape)
        if self.options.histogram:
            prompt.counted += rows
        return rows if self.options.rows else None

    def _take(self, state: _Choice) -> list[Rows]:
        """Takes the rows to send with the next chunk of a choice: none before those of its
        prompt."""
        if state.prompt.is_pending:
            return []
        options, prompt, first = self.options, state.prompt, state.next_row
        shape = self.encoder.row_shape if is_complete(state.finish) else None
        rows = state.buffer.take(first, state.end, shape)
        state.next_row += sum(map(len, rows))
        if options.histogram:
            rows = [*map(owned_copy, rows)]
            of_prompt, own_rows = split_at(rows, prompt.length - first)
            state.counted += own_rows
            if of_prompt and (prompt.counter is None or prompt.counter is state):
                prompt.counter = state
                prompt.counted += of_prompt
        if not options.rows:
            return []
        if rows or not self._is_joined or first > options.prompt_start:
            return rows
        # A joined response without rows has one empty array.
        is_due = (state.buffer.end >= 0 or is_complete(state.finish)) and (
            state.finish is not None or self.has_own_field
        )
        return [joined([], self.encoder.row_shape)] if is_due else []

    async def _values(self, state: _Choice, arrays: Arrays) -> dict[str, Any]:
        """Fields of the last chunk of a choice: histograms, and references in place of arrays that
        are stored."""
        values: dict[str, Any] = {}
        if self.options.histogram:
            counted = {"routed_experts_histogram": state.counted}
            if not state.prompt.was_counted:
                state.prompt.was_counted = True
                counted["prompt_routed_experts_histogram"] = state.prompt.counted
            values |= await run_in_threadpool(self._histograms, counted)
        if self.options.by_reference:
            num_bytes = sum(part.nbytes for _, parts in arrays.values() for part in parts)
            index = next(key for key, each in self._choices.items() if each is state)
            asked = [
                (name, index if name == "routed_experts" else None, *array)
                for name, array in arrays.items()
            ]
            made, _ = await self.delivery.run(
                num_bytes, self.delivery.references, self.encoder, asked
            )
            for name, references in zip([*arrays], made, strict=True):
                values |= references
                if references:
                    del arrays[name]
        return values

    def _histograms(self, counted: dict[str, list[Rows]]) -> dict[str, Any]:
        """The histograms of arrays. Frees the arrays here too, because that takes time."""
        histograms: dict[str, Any] = {}
        for name, arrays in counted.items():
            histograms[name] = self.encoder.histogram(arrays)
            arrays.clear()
        return histograms

    async def _lines(
        self, chunk: str, values: dict[str, Any], arrays: Arrays
    ) -> AsyncIterator[str]:
        """`chunk` with `values` and `arrays`. If those exceed a line, chunks without text come
        before it."""
        # Copies, because a slow reader must not keep the engine's message alive.
        left = {name: (start, [*map(owned_copy, rows)]) for name, (start, rows) in arrays.items()}
        counts, num_bytes = {name: sum(map(len, rows)) for name, (_, rows) in left.items()}, 0
        fit = self.encoder.rows_in(LINE_BYTES)
        # a line may have two arrays, and both counts are rounded up
        if len(counts) == 2 and all(counts.values()):
            fit = max(2 * self.encoder.rows_in(LINE_BYTES // 2) - 2, 2)
        count = max(-(-sum(counts.values()) // fit), 1)
        blank = _without_text(chunk) if count > 1 else ""
        for line in range(count):
            texts = {}
            for name, (start, rows) in left.items():
                is_first = line == 0 and name != "routed_experts"
                # Rows of a choice end in the last line. Clients expect the prompt's to begin in the
                # first.
                at = line if name == "routed_experts" else count - 1 - line
                piece, rows = split_at(
                    rows, (at + 1) * counts[name] // count - at * counts[name] // count
                )
                if piece or is_first:
                    array = joined(piece, self.encoder.row_shape)
                    texts[name] = self._fields(name, array, start)
                    left[name] = start + len(array), rows
            num_bytes += sum(map(len, texts.values()))
            if line < count - 1:
                yield _with_texts(blank, texts)
            else:
                added = {
                    name: f'"{name}":{msgspec.json.encode(value).decode()},'
                    for name, value in values.items()
                }
                self.delivery.hand_over()
                yield _with_texts(chunk, added | texts)
            if num_bytes > _PAUSE_BYTES:  # others wait meanwhile
                num_bytes = 0
                await asyncio.sleep(0)

    def _fields(self, name: str, rows: Rows, start: int) -> str:
        fields = self.encoder.fields(name, rows, start)
        if self.encoder.num_bytes <= self.max_bytes:
            return fields
        raise StreamLimitError(
            "the routing of this response is larger than --routed-experts-max-response-bytes"
        )


def _with_texts(chunk: str, texts: dict[str, str]) -> str:
    """`chunk` with more fields, each with a comma behind it: a prompt's at its top level, others in
    its choice."""
    begin = chunk.index(_FIRST_CHOICE) + len(_FIRST_CHOICE)
    of_prompt = "".join(text for name, text in texts.items() if name.startswith("prompt_"))
    of_choice = "".join(text for name, text in texts.items() if not name.startswith("prompt_"))
    return f"{chunk[:_BEGIN_OF_CHUNK]}{of_prompt}{chunk[_BEGIN_OF_CHUNK:begin]}{of_choice}{chunk[begin:]}"


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
    *(
        "usage",
        "metrics",
        "system_fingerprint",
        "prompt_token_ids",
        "prompt_text",
        "mm_placeholders",
    ),
    "kv_transfer_params",
}
"""Fields that only the last of several lines has."""
