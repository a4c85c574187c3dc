"""Adds rows to the chunks of a stream: each row to the chunk whose tokens made it known.

`StreamedRows` is the state: which rows of which choice have arrived and were sent, so what is due
with a chunk. `SSERewriter` stands around vLLM's generator, and writes what is due into its chunks.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec

from routed_experts.protocol.codec import Rows
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server import MAX_RESPONSE_BYTES
from routed_experts.server.http.arrays.references import THREADS, Delivery, count_references
from routed_experts.server.http.encoding.chunks import DATA, FIRST_CHOICE, UNFINISHED, Chunk
from routed_experts.server.http.encoding.encoding import LINE_BYTES, OWN, Encoder, joined
from routed_experts.server.http.encoding.wire_form import LostRowsError
from routed_experts.server.http.metrics import count_response
from routed_experts.server.outputs.row_buffer import (
    Causes,
    RowBuffer,
    causes_of,
    is_complete,
    num_rows,
    owned_copy,
    split_at,
)
from routed_experts.server.vllm_api import RequestOutput, get_logger

logger = get_logger(__name__)

T = TypeVar("T", RequestOutput, tuple[int, RequestOutput])
Arrays = dict[str, tuple[int, list[Rows]]]
"""By the name of an array: its first position, and its rows."""

_PROMPT = "prompt_routed_experts"
# of lines that are sent between two pauses: a pause takes longer than to make a line
_PAUSE_BYTES = 512 << 10


class StreamLimitError(Exception):
    """The stream exceeds `--routed-experts-max-response-bytes`."""


# ---- the state ----


@dataclass(slots=True)
class Prompt:
    """State of one prompt. Its rows are sent once, with the first chunk of any of its choices."""

    keys: range  # of its choices
    length: int  # in tokens
    is_pending: bool  # until the rows are sent or counted; False in the joined layout
    # in the joined layout, the choice whose rows of the prompt the histogram counts
    counter: "Choice | None" = None
    counted: list[Rows] = field(default_factory=list)  # for the histogram
    was_counted: bool = False  # whether the histogram was sent


@dataclass(slots=True)
class Choice:
    """State of one choice."""

    index: int  # counted over all prompts, as in `Chunk.index`
    prompt: Prompt
    next_row: int  # absolute position of the next row to send
    end: int  # position after the last row that the tokens so far make known
    buffer: RowBuffer  # rows that arrived and were not sent
    finish: str | None = None  # `finish_reason` of the last output
    # Whether nothing but its rows is due before its last chunk: some of them were sent, and so were
    # the prompt's rows and the chunks before the first tokens; and no row is to be counted.
    has_rows_only: bool = False
    counted: list[Rows] = field(default_factory=list)  # for the histogram


class Due(NamedTuple):
    """What goes into a chunk of a choice."""

    prompt_rows: list[Rows] | None  # None: no array
    rows: list[Rows]
    is_last: bool  # of the chunks of its choice


class StreamedRows:
    """The rows of the choices of a stream, until they are sent."""

    def __init__(
        self,
        options: RoutingOptions,
        row_shape: tuple[int, int],
        num_choices: int,
        *,
        preface_chunks: int,
        sends_empty: bool,
    ) -> None:
        self.choices: dict[int, Choice] = {}  # by `Chunk.index`
        # that come before the first tokens, and not before the end
        self._preface_chunks = 0 if options.at_end else preface_chunks
        self._options = options
        self._row_shape = row_shape
        self._num_choices = num_choices  # per prompt
        # whether an array of no rows is sent before the end, too, as vLLM's own generate does
        self._sends_empty = sends_empty
        self._is_joined = options.rows and options.layout == "joined"

    async def watch(self, results: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yields `results` after taking off their row buffers."""
        choices = self.choices
        num_choices = self._num_choices
        at_end = self._options.at_end
        async for result in results:
            prompt_index, output = result if isinstance(result, tuple) else (0, result)
            for choice in output.outputs:
                key = prompt_index * num_choices + choice.index
                if key not in choices:
                    self._begin(prompt_index * num_choices, output)
                state = choices[key]
                state.end += len(choice.token_ids)
                buffer = choice.routed_experts
                choice.routed_experts = None
                if at_end and choice.finish_reason is None:
                    continue
                if isinstance(buffer, RowBuffer):
                    state.buffer = buffer
                state.finish = choice.finish_reason
            yield result

    def _begin(self, first_key: int, output: RequestOutput) -> None:
        """Adds the choices of a prompt."""
        keys = range(first_key, first_key + self._num_choices)
        length = len(output.prompt_token_ids or ())
        prompt = Prompt(keys, length, is_pending=not self._is_joined)
        next_row = self._options.prompt_start if self._is_joined else length
        for key in keys:
            buffer = RowBuffer(output.request_id)
            self.choices[key] = Choice(key, prompt, next_row, length - 1, buffer)

    def take_due(self, choice: Choice) -> Due | None:
        """Takes what is due with a chunk of a choice: the rows that became known with its tokens, or
        at the end all of them, and the prompt's with the first such chunk. None if nothing is.

        vLLM makes at most one chunk per output, before it reads the next output. So the rows of an
        output belong to the next chunk of its choice.
        """
        is_last = choice.finish is not None
        if self._options.at_end and not is_last:
            return None
        prompt_rows = self._take_prompt(choice.prompt) if choice.prompt.is_pending else None
        if self._preface_chunks > 0:
            self._preface_chunks -= 1
            return None if prompt_rows is None else Due(prompt_rows, [], is_last=False)
        rows = self._take(choice)
        if prompt_rows is None and not rows and not is_last:
            return None
        return Due(prompt_rows, rows, is_last)

    def _take_prompt(self, prompt: Prompt) -> list[Rows] | None:
        """Takes the rows of a pending prompt; None if they have not arrived or are not sent."""
        source = self._source_of(prompt)
        if source is None:
            return None
        prompt.is_pending = False
        rows = source.buffer.take(
            self._options.prompt_start, prompt.length, self._shape_at_end(source)
        )
        if self._options.histogram:
            prompt.counted += rows
        return rows if self._options.rows else None

    def _source_of(self, prompt: Prompt) -> Choice | None:
        """The choice whose buffer has the rows of a prompt: one to which they came, before one that
        is complete without, as its rows were lost."""
        choices = [self.choices[key] for key in prompt.keys]
        for choice in choices:
            if choice.buffer.end >= prompt.length:
                return choice
        for choice in choices:
            if is_complete(choice.finish):
                return choice
        return None

    def _take(self, choice: Choice) -> list[Rows]:
        """Takes the rows to send with the next chunk of a choice: none before those of its
        prompt."""
        if choice.prompt.is_pending:
            return []
        first = choice.next_row
        rows = choice.buffer.take(first, choice.end, self._shape_at_end(choice))
        choice.next_row += num_rows(rows)
        if self._options.histogram:
            rows = [*map(owned_copy, rows)]
            self._count(choice, rows, first)
        if not self._options.rows:
            return []
        if not rows and self._is_empty_due(choice):
            return [joined([], self._row_shape)]
        if rows and not self._options.histogram:
            choice.has_rows_only = True
        return rows

    def _count(self, choice: Choice, rows: list[Rows], first: int) -> None:
        """Keeps rows from position `first` on for the histograms."""
        prompt = choice.prompt
        of_prompt, own_rows = split_at(rows, prompt.length - first)
        choice.counted += own_rows
        if of_prompt and (prompt.counter is None or prompt.counter is choice):
            prompt.counter = choice
            prompt.counted += of_prompt

    def _is_empty_due(self, choice: Choice) -> bool:
        """Whether an array of no rows is sent: a joined response without rows has one."""
        if not self._is_joined or choice.next_row > self._options.prompt_start:
            return False
        have_rows_come = choice.buffer.end >= 0 or is_complete(choice.finish)
        return have_rows_come and (choice.finish is not None or self._sends_empty)

    def _shape_at_end(self, choice: Choice) -> tuple[int, int] | None:
        """For `RowBuffer.take`: the shape of rows if no more can arrive."""
        return self._row_shape if is_complete(choice.finish) else None

    def lost(self) -> tuple[int, Causes]:
        """How many rows did not arrive, and why the engine does not know others."""
        causes = Causes()
        for keys in {choice.prompt.keys for choice in self.choices.values()}:
            causes += causes_of((self.choices[key].buffer for key in keys), self._is_joined)
        return sum(choice.buffer.num_lost for choice in self.choices.values()), causes


# ---- the stream ----


class SSERewriter:
    """Takes rows off the outputs that enter vLLM's stream generator, and adds them to the chunks
    that leave it."""

    def __init__(
        self,
        options: RoutingOptions,
        encoder: Encoder,
        num_choices: int,  # per prompt
        error_event: Callable[[Exception], str],  # makes the JSON text of an error event
        *,
        preface_chunks: int = 0,  # that the generator sends before the first tokens
        max_bytes: int = MAX_RESPONSE_BYTES,  # of routing in the stream
        # whether the generator's chunks have vLLM's own routing field (null)
        has_own_field: bool = False,
        delivery: Delivery | None = None,
    ) -> None:
        self.encoder = encoder
        self._options = options
        self._rows = StreamedRows(
            options,
            encoder.form.captured_shape,
            num_choices,
            preface_chunks=preface_chunks,
            sends_empty=has_own_field,
        )
        self._error_event = error_event
        self._max_bytes = max_bytes
        self._has_own_field = has_own_field
        self._delivery = delivery or Delivery()
        self._rows_in_line = encoder.form.rows_in(LINE_BYTES)
        # Choices of which nothing but rows is due, by `Chunk.head`; and where the fields of its
        # choice began in the last chunk that went the long way, as in most that follow.
        self._choices_by_head: dict[str, Choice] = {}
        self._choice_begin = len(FIRST_CHOICE)

    def watch(self, results: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yields `results` after taking off their row buffers."""
        return self._rows.watch(results)

    async def rewrite(self, events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        """Adds rows to `events`. An error ends the stream with an error event and `[DONE]`."""
        failure: Exception | None = None
        try:
            async for event in events:
                text = self._in_short(event)
                if text is not None:
                    yield text
                    continue
                async for line in self._with_all(event):
                    yield line
        except Exception as error:
            is_ours = isinstance(error, LostRowsError | StreamLimitError)
            logger.error("The stream ended with an error: %s", error, exc_info=not is_ours)
            failure = error
        finally:
            self._end()
            await events.aclose()  # which aborts a running request in the engine
        if failure is not None:
            yield f"{DATA}{self._error_event(failure)}\n\n"
            yield f"{DATA}[DONE]\n\n"

    def _end(self) -> None:
        """Counts what was sent, and keeps no rows: the traceback of a cancelled stream keeps this
        object alive."""
        lost, causes = self._rows.lost() if self.encoder.counts.missing else (0, Counter())
        count_response(self.encoder, lost, causes)
        self._delivery.end()
        self._rows.choices.clear()
        self._choices_by_head.clear()

    def _without_own_field(self, text: str) -> str:
        """A chunk, or the end of one from its choice on, without vLLM's own field for routing, in
        which it is null."""
        return text.replace('"routed_experts":null,', "", 1) if self._has_own_field else text

    def _in_short(self, event: str) -> str | None:
        """Most chunks: one of which nothing is due before the end, or the chunk with the one row that
        is due with it. None for any other, of which nothing is taken.

        Not a part of `rewrite`, which waits for the next chunk, and must not keep the engine's
        message meanwhile.
        """
        if self._options.at_end:
            return self._without_own_field(event) if UNFINISHED in event else None
        begin = self._choice_begin
        if not event.startswith(FIRST_CHOICE, begin - len(FIRST_CHOICE)):
            return None
        choice = self._choices_by_head.get(event[begin : event.find(",", begin)])
        if choice is None or choice.finish is not None:
            return None
        position = choice.next_row
        row = choice.buffer.take_only_row(position, choice.end)
        if row is None:
            return None
        choice.next_row = position + 1
        run, place = row
        fields = self.encoder.single_row(run, place, position)
        if fields is None:
            fields = self.encoder.fields(OWN, run.of(place), position)
        self._refuse_too_many_bytes()
        rest = self._without_own_field(event[begin:])
        return f"{event[:begin]}{fields}{rest}"

    async def _with_all(self, event: str) -> AsyncIterator[str]:
        """A chunk with all that is due with it."""
        chunk = Chunk(self._without_own_field(event))
        choice = self._rows.choices.get(chunk.index)
        due = None if choice is None else self._rows.take_due(choice)
        if choice is None or due is None:
            yield chunk.text
            return
        arrays: Arrays = {OWN: (choice.next_row - num_rows(due.rows), due.rows)}
        if due.prompt_rows is not None:
            arrays[_PROMPT] = self._options.prompt_start, due.prompt_rows
        values = await self._values(choice, arrays) if due.is_last else {}
        async for line in self._lines(chunk, arrays, values):
            yield line
        if choice.has_rows_only:
            self._choices_by_head[chunk.head] = choice
            self._choice_begin = chunk.choice_begin

    async def _lines(
        self, chunk: Chunk, arrays: Arrays, values: dict[str, Any]
    ) -> AsyncIterator[str]:
        """`chunk` with `arrays` and other fields. If they exceed a line, chunks without tokens come
        before it."""
        num_lines = self._num_lines(arrays)
        blank = chunk.without_tokens() if num_lines > 1 else chunk
        num_bytes = 0  # since the last pause
        for number, fields in enumerate(self._fields_of_lines(arrays, num_lines), 1):
            if number == num_lines:
                self._delivery.hand_over()
                yield _with_fields(chunk, _json_fields(values) | fields)
                return
            yield _with_fields(blank, fields)
            num_bytes += sum(map(len, fields.values()))
            if num_bytes > _PAUSE_BYTES:  # others wait meanwhile
                num_bytes = 0
                await asyncio.sleep(0)

    def _num_lines(self, arrays: Arrays) -> int:
        counts = [num_rows(rows) for _, rows in arrays.values()]
        rows_in_line = self._rows_in_line
        # a line may have two arrays, and both counts are rounded up
        if len(counts) == 2 and all(counts):
            rows_in_line = max(2 * self.encoder.form.rows_in(LINE_BYTES // 2) - 2, 2)
        return max(-(-sum(counts) // rows_in_line), 1)

    def _fields_of_lines(self, arrays: Arrays, num_lines: int) -> Iterator[dict[str, str]]:
        """The fields of each line, by name: of each array about as many rows in each."""
        # Copies, because a slow reader must not keep the engine's message alive.
        left = {
            name: (start, [*map(owned_copy, rows)] if num_lines > 1 else rows)
            for name, (start, rows) in arrays.items()
        }
        sizes = {name: _even_parts(num_rows(rows), num_lines) for name, (_, rows) in arrays.items()}
        if _PROMPT in sizes:
            # Rows of a choice end in the last line. Clients expect the prompt's to begin in the
            # first.
            sizes[_PROMPT].reverse()
        for line in range(num_lines):
            fields = {}
            for name, (start, rows) in left.items():
                piece, rest = split_at(rows, sizes[name][line])
                if piece or (line == 0 and name == _PROMPT):  # which is there though it is empty
                    array = joined(piece, self.encoder.form.captured_shape)
                    fields[name] = self._fields(name, array, start)
                    left[name] = start + len(array), rest
            yield fields

    def _fields(self, name: str, rows: Rows, start: int) -> str:
        fields = self.encoder.fields(name, rows, start)
        self._refuse_too_many_bytes()
        return fields

    def _refuse_too_many_bytes(self) -> None:
        if self.encoder.num_bytes > self._max_bytes:
            raise StreamLimitError(
                "the routing of this response is larger than --routed-experts-max-response-bytes"
            )

    async def _values(self, choice: Choice, arrays: Arrays) -> dict[str, Any]:
        """Fields of the last chunk of a choice: histograms, and references in place of arrays that
        are stored, which are taken out of `arrays`."""
        values: dict[str, Any] = {}
        if self._options.histogram:
            counted = {"routed_experts_histogram": choice.counted}
            if not choice.prompt.was_counted:
                choice.prompt.was_counted = True
                counted["prompt_routed_experts_histogram"] = choice.prompt.counted
            values |= await THREADS.run(self._histograms, counted)
        if self._options.by_reference:
            values |= await self._references(choice, arrays)
        return values

    def _histograms(self, counted: dict[str, list[Rows]]) -> dict[str, Any]:
        """The histograms of arrays. Frees the arrays here too, because that takes time."""
        histograms: dict[str, Any] = {}
        for name, arrays in counted.items():
            histograms[name] = self.encoder.histogram(arrays)
            arrays.clear()
        return histograms

    async def _references(self, choice: Choice, arrays: Arrays) -> dict[str, Any]:
        num_bytes = sum(part.nbytes for _, parts in arrays.values() for part in parts)
        named = [
            (name, choice.index if name == OWN else None, start, rows)
            for name, (start, rows) in arrays.items()
        ]
        made, _ = await self._delivery.run(
            num_bytes, self._delivery.references, self.encoder, named
        )
        count_references(self.encoder, named, made)
        values: dict[str, Any] = {}
        for (name, *_), references in zip(named, made, strict=True):
            values |= references
            if references:
                del arrays[name]
        return values


def _even_parts(count: int, num_parts: int) -> list[int]:
    """The sizes of the parts of `count`."""
    ends = [number * count // num_parts for number in range(num_parts + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def _json_fields(values: dict[str, Any]) -> dict[str, str]:
    return {
        name: f'"{name}":{msgspec.json.encode(value).decode()},' for name, value in values.items()
    }


def _with_fields(chunk: Chunk, fields: dict[str, str]) -> str:
    """A prompt's at the top level, others in the choice."""
    at_top = [text for name, text in fields.items() if name.startswith("prompt_")]
    of_choice = [text for name, text in fields.items() if not name.startswith("prompt_")]
    return chunk.with_fields("".join(of_choice), "".join(at_top))
