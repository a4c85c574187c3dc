"""Buffers rows between the engine's outputs and the responses."""

import math
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from routed_experts.capture.message import OPT_IN_ARG, OptIn, Unpacker, request_of_prompt
from routed_experts.capture.stats import STATS_OUTPUT_ID, EngineStats
from routed_experts.protocol.codec import UNKNOWN, Rows
from routed_experts.server.outputs.kv_handoff import put_rows
from routed_experts.server.vllm_api import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    OutputProcessor,
    OutputProcessorOutput,
    RequestState,
    SamplingParams,
    get_logger,
)

logger = get_logger(__name__)


_JOINED_ROWS = 64
"""Single rows that wait, as in a response that is not streamed, are joined into one array when there are this many:
code that handles a long response loops over its arrays while other requests wait."""
_ROOM_BYTES = 1 << 20
"""Size of the memory map that rows are joined in. On the heap they would share pages with other responses, and the C
library would return all of it to the system at once, in the middle of some later request."""


def opt_in(params: SamplingParams, prompt_start: int) -> None:
    """Has the engine send the rows of the request that `params` are for, its prompt's from `prompt_start` on."""
    asked = OptIn(prompt_start, os.urandom(16), shared=params.n > 1)
    params.extra_args = {**(params.extra_args or {}), OPT_IN_ARG: asked.encode()}


class RowBuffer:
    """The rows of one choice that arrived from the engine and were not taken yet.

    It rides on the choice's outputs as `CompletionOutput.routed_experts`, so it lives as long as they do, and
    merged outputs lose nothing: they carry the same buffer.

    Every array comes with the position of its first row. A gap before it is filled with -1, and rows that were there
    before are dropped, so that each row that is taken belongs to the position that it is taken for.

    Args:
        request_id: for the log.

    Attributes:
        num_lost: how many rows did not arrive.
    """

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_end",
        "_first",
        "_joined",
        "_offers",
        "_request_id",
        "_room",
        "_shape",
        "num_lost",
    )

    def __init__(self, request_id: str = "") -> None:
        self.num_lost = 0
        self._request_id = request_id
        self._shape: tuple[int, ...] = ()
        self._offers: dict[str, RowBuffer] = {}  # prompt rows by other choice, until its own first row
        self._arrays: list[Rows] = []  # not empty ones, each beginning where the one before it ends
        self._first = self._end = -1  # positions of the first row in them and after the last; -1 before any came
        self._joined = 0  # how many of the first arrays are large enough
        self._room: Rows | None = None  # the last of these is its beginning

    @property
    def end(self) -> int:
        """Position after the last row that has arrived, without prompts of other choices; -1 before any."""
        return self._end

    def push(self, start: int, rows: Rows) -> None:
        """Adds `rows` ([n, L, K]) at position `start`. A few rows that wait are copied, so that they do not keep the
        engine's message alive.
        """
        if start != self._end:
            if self._end < 0 and self._offers:
                self._accept(start)
            if self._end < 0:
                self._first = self._end = start
                self._shape = rows.shape[1:]
            elif start > self._end:
                self._append(self._lost(self._end, start - self._end))
            else:
                rows = rows[self._end - start :]
        if len(rows):
            self._append(rows)

    def push_prompt(self, sender: str, is_own: bool, start: int, rows: Rows) -> None:
        """As `push`, of rows of the prompt that the engine sent before the first token of the choice `sender`, this one
        or another of the same prompt. Its own go before those of others.

        Engines that have some of the choices each send the prompt, in parts of their own. Those of each are kept apart:
        this choice comes after the whole prompt of its own engine, and maybe after a part of another's.
        """
        if is_own:
            self._offers.clear()
            self.push(start, rows)
        elif self._end < 0:
            self._offers.setdefault(sender, RowBuffer(self._request_id)).push(start, rows)

    def _accept(self, end: int) -> None:
        """Begins with the prompt of another choice: one that is complete up to position `end`, else the longest."""
        best = max(self._offers.values(), key=lambda offer: (offer.end == end, offer.end))
        self._offers.clear()
        self._first = self._end = best._first
        self._shape = best._shape
        self.num_lost += best.num_lost
        for rows in best._arrays:
            self._append(rows)

    def _append(self, rows: Rows) -> None:
        arrays = self._arrays
        self._end += len(rows)
        if arrays:  # not where each row is taken as it comes
            if self._joined < len(arrays):
                arrays[-1] = own(arrays[-1])
            rows = own(rows)
        arrays.append(rows)
        if len(rows) >= _JOINED_ROWS:
            self._joined, self._room = len(arrays), None
        elif len(arrays) - self._joined >= _JOINED_ROWS:
            self._join()

    def _join(self) -> None:
        small = self._arrays[self._joined :]
        count = sum(map(len, small))
        used = 0 if self._room is None else len(self._arrays[self._joined - 1])
        if self._room is None or used + count > len(self._room):
            self._room, used = _room_for(small[0], count), 0
            self._joined += 1
        np.concatenate(small, out=self._room[used : used + count])
        self._arrays[self._joined - 1 :] = [self._room[: used + count]]

    def _lost(self, start: int, count: int) -> Rows:
        logger.error(
            "Request %r: %d rows from position %d on did not arrive and are sent as -1.", self._request_id, count, start
        )
        self.num_lost += count
        return np.full((count, *self._shape), UNKNOWN, dtype=np.int16)

    def take(self, first: int, end: int, shape: tuple[int, int] | None = None) -> list[Rows]:
        """The rows from position `first` to `end` in order, or fewer if they have not arrived. Rows before `first` are
        dropped.

        Args:
            shape: (L, K), once no more can arrive: rows that are missing up to `end` are -1 then.
        """
        if self._end < 0 and self._offers:  # no row of its own has come
            self._accept(end)
        arrays = self._arrays
        if self._first == first and self._end == end and len(arrays) == 1:  # nearly always
            self._arrays, self._first, self._joined, self._room = [], end, 0, None
            return arrays
        self._joined, self._room = 0, None
        taken, at = [], first
        if at < self._first:
            at = min(self._first, end)
            if at > first:
                taken.append(self._lost(first, at - first))
        _, arrays = split(arrays, max(at - self._first, 0))
        some, arrays = split(arrays, max(end - at, 0))
        at += sum(map(len, some))
        taken += some
        if arrays and arrays[0] is not self._arrays[-len(arrays)]:
            arrays[0] = arrays[0].copy()  # a view would keep the rows before it
        self._arrays = arrays
        self._first = self._end - sum(map(len, self._arrays))
        if shape is not None and at < end:
            self._shape = shape
            taken.append(self._lost(at, end - at))
        return taken


class BufferedRequestState(RequestState):
    """vLLM's record of a request whose rows are taken off, and put on each of its outputs as a buffer.

    vLLM would collect the rows until the request finishes, and keep the last ones only when outputs merge for a slow
    reader. Until vLLM streams routed experts.
    """

    buffer: RowBuffer

    @classmethod
    def give(cls, state: RequestState, buffer: RowBuffer) -> None:
        """Makes `state` one whose outputs carry `buffer`. vLLM makes it itself, and cannot be given a subclass."""
        state.__class__ = cls
        state.buffer = buffer

    def _new_completion_output(self, *args: Any) -> CompletionOutput:
        output = _new_completion_output(self, *args)
        output.routed_experts = self.buffer
        return output


_new_completion_output = RequestState._new_completion_output


class AllRequests(Protocol):
    """What asks for the rows of all requests; see `arrays.EveryRequest`."""

    is_on: bool

    def fill(self, outputs: Iterable[Any]) -> None:
        """Makes buffers on outputs arrays."""


class RowBuffers:
    """Takes rows, and the engine's numbers, off the engine's outputs.

    Attributes:
        on_stats: called with the numbers.
        every_request: None if requests opt in one by one.
    """

    def __init__(self, processor: OutputProcessor) -> None:
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.every_request: AllRequests | None = None
        self._processor = processor
        self._add: Callable[..., None] = processor.add_request
        self._process: Callable[..., OutputProcessorOutput] = processor.process_outputs
        self._unpacker = Unpacker()

    @classmethod
    def install(cls, processor: OutputProcessor) -> "RowBuffers":
        """Replaces `processor.process_outputs` and `add_request`, once for each processor: AsyncLLM makes its
        OutputProcessor itself, so it cannot be given a subclass."""
        installed = vars(processor).get("process_outputs")
        if installed is not None:
            return installed.__self__
        buffers = cls(processor)
        processor.process_outputs = buffers.process_outputs
        processor.add_request = buffers.add_request
        return buffers

    def __len__(self) -> int:
        """Choices under way that rows have come for."""
        return sum(_has_begun(state) for state in self._processor.request_states.values())

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """vLLM's `add_request`, which each choice of a prompt passes just before it goes to the engine."""
        put_rows(request, request_index)
        self._add(request, prompt, parent_req, request_index, *args, **kwargs)

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], engine_core_timestamp: Any = None, *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        """vLLM's `process_outputs`, of which the rows were taken off."""
        if engine_core_outputs and engine_core_outputs[0].request_id == STATS_OUTPUT_ID:  # they are nowhere else
            self._take_stats(engine_core_outputs.pop(0))
        states = self._processor.request_states
        for output, start, rows in self._unpacker.unpack(engine_core_outputs, engine_core_timestamp):
            if (state := states.get(output.request_id)) is not None:
                _buffer_of(state).push(start, rows)
            elif (sender := request_of_prompt(output.request_id)) is not None:
                self._take_prompt(sender, start, rows)
        processed = self._process(engine_core_outputs, engine_core_timestamp, *args, **kwargs)
        if self.every_request is not None:  # an engine without tasks that read from it returns its outputs
            self.every_request.fill(processed.request_outputs)
        return processed

    def _take_prompt(self, sender: str, start: int, rows: Rows) -> None:
        """Gives a prompt's rows to the request that they were sent with, and to all others of it that have none; those
        share one array.

        The request that the engine sent them with may have been aborted meanwhile, and the others not. They come once
        from each engine that has some of the requests (data parallelism), and again with requests whose prompt was
        computed with other weights.
        """
        states, parents = self._processor.request_states, self._processor.parent_requests
        state = states.get(sender)
        rows = own(rows)
        parent = state.parent_req if state is not None else parents.get(_parent_of(sender))
        for each in (sender,) if parent is None else parent.child_requests:
            if (state := states.get(each)) is not None:
                _buffer_of(state).push_prompt(sender, each == sender, start, rows)

    def _take_stats(self, output: EngineCoreOutput) -> None:
        if self.on_stats is not None:
            self.on_stats(EngineStats.decode(output.kv_transfer_params))


def _has_begun(state: RequestState) -> bool:
    return type(state) is BufferedRequestState and state.buffer.end >= 0


def _buffer_of(state: RequestState) -> RowBuffer:
    if type(state) is not BufferedRequestState:
        BufferedRequestState.give(state, RowBuffer(state.external_req_id))
    buffer: RowBuffer = state.buffer
    return buffer


def own(rows: Rows) -> Rows:
    """`rows` for code that keeps them. A few rows are copied, because they are views of a message with all requests'
    rows; many rows came in an array of their own."""
    return rows if rows.base is None or len(rows) >= _JOINED_ROWS else rows.copy()


def _room_for(rows: Rows, count: int) -> Rows:
    """An array in memory of its own for rows like `rows`, at least `count` of them."""
    row_bytes = rows.itemsize * math.prod(rows.shape[1:])
    count = max(_ROOM_BYTES // row_bytes, count)
    memory = mmap.mmap(-1, count * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype=rows.dtype).reshape(count, *rows.shape[1:])


def _parent_of(child_id: str) -> str:
    """The request that a request of `n` > 1 belongs to, by how vLLM names it."""
    return child_id.partition("_")[2]


def split(arrays: list[Rows], count: int) -> tuple[list[Rows], list[Rows]]:
    """The first `count` rows of `arrays`, and the rest."""
    first: list[Rows] = []
    for index, rows in enumerate(arrays):
        if len(rows) > count:
            if count <= 0:
                return first, arrays[index:]
            return [*first, rows[:count]], [rows[count:], *arrays[index + 1 :]]
        first.append(rows)
        count -= len(rows)
    return first, []
