"""Puts rows on the chunks of a stream whose tokens they belong to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi.concurrency import run_in_threadpool

from routed_experts.protocol.models import RoutingOptions
from routed_experts.server import MAX_RESPONSE_BYTES
from routed_experts.server.encoding import LINE_BYTES, Encoder, LostRowsError, Rows
from routed_experts.server.metrics import count_answer
from routed_experts.server.row_feeds import RowFeed, own, split, unknown_rows
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput, get_logger

logger = get_logger(__name__)

T = TypeVar("T", RequestOutput, tuple[int, RequestOutput])

_DATA = "data: "
_FIRST_CHOICE = '"choices":[{'
"""How vLLM's chunks begin their choice. Nothing that a client sent can hold it: quotes are escaped in JSON texts."""
_INDEX = '"index":'
"""What the choice begins with; its place in the order of the response follows."""
_OWN_FIELD = '"routed_experts":null,'


class StreamLimitError(Exception):
    """A stream would hold more routing than the server allows."""


@dataclass(slots=True)
class _Choice:
    """A choice's place in its stream.

    Attributes:
        begin: what its chunks say first of their choice.
        prompt_len: tokens of its prompt.
        next_row: absolute position of the first row that is neither in `pending` nor sent.
        generated: tokens that outputs have brought so far.
        pending: rows whose tokens the next chunk of this choice brings, or held-back chunks before it would have.
        counted: rows for the histogram of the choice.
        finished: whether the next chunk of this choice has its `finish_reason`.
        row: a known one alone, in place of `pending`. Nearly all chunks bring one, and each step taken for it weighs
            more than the row: between two chunks of a stream, all others put its code and data out of the caches.
        takes_row: whether the next output may leave one there: the prompt's rows, and all others before, were sent.
    """

    begin: str
    prompt_len: int
    next_row: int
    generated: int = 0
    feed: RowFeed | None = None
    pending: list[Rows] = field(default_factory=list)
    counted: list[Rows] = field(default_factory=list)
    finished: bool = False
    row: Rows | None = None
    takes_row: bool = False

    def take_row(self, choice: CompletionOutput) -> bool:
        """Whether an output of the choice brings one token and one row, which is `row` then."""
        feed = self.feed
        if feed is None or choice.routed_experts is not feed or choice.finish_reason is not None:
            return False
        if len(choice.token_ids) != 1 or (row := feed.take_row()) is None:
            return False
        choice.routed_experts = None
        self.row, self.takes_row = row, False
        self.generated += 1
        self.next_row += 1
        return True


@dataclass(slots=True)
class _Prompt:
    """The rows of a prompt, which the first of its choices brings: sent once, with the first chunk of any of them.

    Attributes:
        owner: the choice that brought them.
        next_row: position of the first of `rows`.
        rows: not sent yet; None where there is nothing to send any more.
        counted: rows for the histogram.
        was_counted: whether the histogram was sent.
    """

    owner: _Choice
    next_row: int
    rows: list[Rows] | None = None
    counted: list[Rows] = field(default_factory=list)
    was_counted: bool = False


class StreamAligner:
    """Watches the engine's outputs going into vLLM's stream generator and adds rows to the chunks coming out.

    vLLM makes at most one chunk for each output, after it has taken that output and before it takes the next. So
    what an output brought belongs to the next chunk of its choice.

    Args:
        options: what the request asks for.
        encoder: how it wants its arrays.
        num_experts: of a layer, for histograms.
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
        num_experts: int,
        num_choices: int,
        error_event: Callable[[Exception], str],
        preface_chunks: int = 0,
        max_bytes: int = MAX_RESPONSE_BYTES,
        has_own_field: bool = False,
    ) -> None:
        self._options = options
        self._encoder = encoder
        self._num_experts = num_experts
        self._num_choices = num_choices
        self._error_event = error_event
        self._preface_chunks = preface_chunks
        self._max_bytes = max_bytes
        self._lost = 0
        self._has_own_field = has_own_field
        self._line_rows = encoder.rows_in(LINE_BYTES)
        self._takes_rows = options.rows and not options.histogram and encoder.fmt == "object"
        self._choices: dict[int, _Choice] = {}
        self._prompts: dict[int, _Prompt] = {}

    async def watch(self, results: AsyncIterator[T]) -> AsyncIterator[T]:
        """`results`, unchanged but for the feeds, which are taken off."""
        choices, num_choices = self._choices, self._num_choices
        async for result in results:
            prompt_index, output = result if isinstance(result, tuple) else (0, result)
            for choice in output.outputs:
                state = choices.get(prompt_index * num_choices + choice.index)
                if state is None or not state.takes_row or not state.take_row(choice):
                    self._take(prompt_index, output, choice)
            yield result

    async def rewrite(self, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        """`chunks`, server-sent events, with the rows that belong to each. An error ends them with an event that says
        so, never with a connection that is cut."""
        row_text, sent, max_bytes = self._encoder.row_text, self._encoder.sent, self._max_bytes
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
                    state = self._choices.get(_index_of_choice(chunk, begin))
                if state is not None and (row := state.row) is not None:  # nearly always
                    state.row, state.takes_row = None, True
                    text = row_text(row, state.next_row - 1)
                    row = None  # a reader that stalls would keep the engine's message with it
                    if sent.num_bytes > max_bytes:
                        self._check_size()
                    yield f'{chunk[:begin]}"routed_experts":{text},{chunk[begin:]}'
                    continue
                key = _index_of_choice(chunk, begin)
                rows: list[Rows] = []
                if self._preface_chunks > 0:
                    self._preface_chunks -= 1
                elif state is not None:
                    rows, state.pending = state.pending, rows
                    if state.finished and self._options.histogram:
                        chunk = await self._with_histograms(chunk, key, state)
                        begin = _begin_of_choice(chunk)
                prompt = self._prompts.get(key // self._num_choices)
                if prompt is not None and prompt.rows is not None:
                    for line in self._lines(chunk, prompt, rows, state.next_row if state else 0):
                        yield line
                        await asyncio.sleep(0)  # so that nobody waits for all of a long prompt
                elif not rows or state is None:
                    yield chunk
                elif len(rows) == 1 and len(rows[0]) <= self._line_rows:
                    yield self._with_rows(chunk, begin, rows[0], state.next_row)
                else:
                    for line in self._lines(chunk, None, rows, state.next_row):
                        yield line
                        await asyncio.sleep(0)
                # A chunk before the first one that brings tokens leaves rows pending.
                if state is not None and prompt is not None and prompt.rows is None and not state.pending:
                    state.takes_row = self._takes_rows and state.next_row >= state.prompt_len
        except Exception as error:
            logger.error(
                "A stream was ended: %s", error, exc_info=not isinstance(error, LostRowsError | StreamLimitError)
            )
            yield f"{_DATA}{self._error_event(error)}\n\n"
            yield f"{_DATA}[DONE]\n\n"
        finally:
            count_answer(self._encoder.sent, self._lost)
            self._choices.clear()  # a cancelled stream lives on in its traceback until garbage is collected
            self._prompts.clear()
            close = getattr(chunks, "aclose", None)  # ends the request in the engine, where it has not ended
            if close is not None:
                await close()

    def _take(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> None:
        key = prompt_index * self._num_choices + choice.index
        start = self._options.prompt_start
        state = self._choices.get(key)
        if state is None:
            state = self._choices[key] = _Choice(f"{_INDEX}{key},", len(output.prompt_token_ids or ()), start)
        if isinstance(choice.routed_experts, RowFeed):
            state.feed = choice.routed_experts
        choice.routed_experts = None
        if state.row is not None:
            state.pending.append(own(state.row))
        state.row, state.takes_row = None, False
        state.generated += len(choice.token_ids)
        state.finished = choice.finish_reason is not None
        end = state.prompt_len + state.generated - 1
        arrays = state.feed.take_until(end - start) if state.feed is not None else []
        num_rows = len(arrays[0]) if len(arrays) == 1 else sum(map(len, arrays))
        if choice.finish_reason in ("stop", "length", "repetition"):
            lost = end - state.next_row - num_rows
            if lost > 0:
                logger.error("Request %r: %d rows did not arrive and are sent as -1.", output.request_id, lost)
                arrays = [*arrays, unknown_rows(lost, self._encoder.shape)]
                num_rows += lost
                self._lost += lost
        elif not arrays:
            return
        if state.next_row < state.prompt_len or prompt_index not in self._prompts:
            prompt_rows, arrays = split(arrays, state.prompt_len - state.next_row)
            state.next_row += sum(map(len, prompt_rows))
            num_rows = sum(map(len, arrays))
            self._keep_prompt(prompt_index, state, prompt_rows)
        if num_rows:
            state.next_row += num_rows
            arrays = [own(rows) for rows in arrays]
            if self._options.rows:
                state.pending += arrays
            if self._options.histogram:
                state.counted += arrays

    def _keep_prompt(self, prompt_index: int, state: _Choice, rows: list[Rows]) -> None:
        if self._options.rows and self._options.layout == "joined":
            # An answer without any says so once; and where vLLM has the field, its first chunk has it.
            state.pending += rows if state.finished or self._has_own_field else filter(len, rows)
        prompt = self._prompts.get(prompt_index)
        if prompt is None:
            prompt = self._prompts[prompt_index] = _Prompt(state, self._options.prompt_start)
        if prompt.owner is not state:
            return
        if self._options.rows and self._options.layout == "split":
            prompt.rows = [*(prompt.rows or ()), *rows]
        if self._options.histogram:
            prompt.counted += rows

    def _with_rows(self, chunk: str, begin: int, rows: Rows, next_row: int) -> str:
        """`chunk`, whose choice begins at `begin`, with `rows`, behind which `next_row` is."""
        text = self._encoder.text(rows, next_row - len(rows))
        self._check_size()
        return f'{chunk[:begin]}"routed_experts":{text},{chunk[begin:]}'

    def _lines(self, chunk: str, prompt: _Prompt | None, rows: list[Rows], next_row: int) -> Iterator[str]:
        """`chunk` with the rows of its prompt and its own; before it chunks without text, if they do not fit a line.

        Args:
            next_row: position behind the last of `rows`.
        """
        prompt_rows: list[Rows] = []
        if prompt is not None:
            prompt_rows, prompt.rows = prompt.rows or [], None
        num_prompt, num_rows = sum(map(len, prompt_rows)), sum(map(len, rows))
        fit = self._line_rows
        if num_prompt and num_rows:  # two envelopes, and both numbers are rounded up
            fit = max(2 * self._encoder.rows_in(LINE_BYTES // 2) - 2, 2)
        count = max(-(-(num_prompt + num_rows) // fit), 1)
        first = next_row - num_rows
        blank = _without_text(chunk) if count > 1 else ""
        for line in range(count):
            text = blank if line < count - 1 else chunk
            if prompt is not None and (line == 0 or prompt_rows):
                # Where there are fewer rows than lines, the first lines have them: a client waits for them first.
                piece, prompt_rows = split(prompt_rows, _share(num_prompt, line, count) if num_prompt >= count else 1)
                text = self._with_prompt(text, _joined(piece, self._encoder.shape), prompt)
            piece, rows = split(rows, _share(num_rows, line, count))
            if piece:
                first += sum(map(len, piece))
                text = self._with_rows(text, _begin_of_choice(text), _joined(piece, self._encoder.shape), first)
            yield text

    def _with_prompt(self, chunk: str, rows: Rows, prompt: _Prompt) -> str:
        text = self._encoder.text(rows, prompt.next_row)
        prompt.next_row += len(rows)
        self._check_size()
        at = len(_DATA) + 1
        return f'{chunk[:at]}"prompt_routed_experts":{text},{chunk[at:]}'

    def _check_size(self) -> None:
        if self._encoder.sent.num_bytes > self._max_bytes:
            raise StreamLimitError("the routing of this answer is larger than --routed-experts-max-response-bytes")

    async def _with_histograms(self, chunk: str, key: int, state: _Choice) -> str:
        """`chunk`, the last of a choice, with the choice's histogram and, once, its prompt's."""
        prompt = self._prompts.get(key // self._num_choices)
        at = _begin_of_choice(chunk)
        chunk = f'{chunk[:at]}"routed_experts_histogram":{await self._histogram(state.counted)},{chunk[at:]}'
        if prompt is not None and not prompt.was_counted:
            prompt.was_counted = True
            at = len(_DATA) + 1
            counted = await self._histogram(prompt.counted)
            chunk = f'{chunk[:at]}"prompt_routed_experts_histogram":{counted},{chunk[at:]}'
        return chunk

    async def _histogram(self, arrays: list[Rows]) -> str:
        counted = await run_in_threadpool(self._encoder.histogram, arrays)
        arrays.clear()
        return orjson.dumps(counted).decode()


def _begin_of_choice(chunk: str) -> int:
    """Where the fields of a chunk's choice begin; -1 for other events."""
    at = chunk.find(_FIRST_CHOICE)
    return at + len(_FIRST_CHOICE) if at >= 0 else -1


def _index_of_choice(chunk: str, begin: int) -> int:
    """The place in the response of the choice whose fields begin there."""
    return int(chunk[begin + len(_INDEX) : chunk.index(",", begin)])


def _share(count: int, line: int, num_lines: int) -> int:
    """How many of `count` rows a line has; where there are fewer rows than lines, the last lines have them."""
    return (line + 1) * count // num_lines - line * count // num_lines


def _joined(arrays: list[Rows], shape: tuple[int, int]) -> Rows:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty((0, *shape), dtype=np.int16)


def _without_text(chunk: str) -> str:
    """A chunk of the same choice that brings no tokens."""
    body = orjson.loads(chunk[len(_DATA) :])
    blank: dict[str, Any] = {"text": "", "delta": {}}
    choice = {
        name: value if name == "index" else blank.get(name, [] if isinstance(value, list) else None)
        for name, value in body["choices"][0].items()
        if name not in _ONCE
    }
    kept = {name: value for name, value in body.items() if name not in _ONCE}
    return f"{_DATA}{orjson.dumps({**kept, 'choices': [choice]}).decode()}\n\n"


_ONCE = {
    *("usage", "metrics", "system_fingerprint", "prompt_token_ids", "prompt_text", "mm_placeholders"),
    *("prompt_routed_experts_histogram", "routed_experts_histogram", "kv_transfer_params"),
}
"""What a chunk says once, and no piece before it."""
