"""Rows on their way from the engine's outputs to the answers that they belong to."""

import math
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.message import OPT_IN_ARG, OptIn, Unpacker, is_known, request_of_prompt
from routed_experts.capture.stats import STATS_OUTPUT_ID, EngineStats
from routed_experts.protocol.codec import UNKNOWN
from routed_experts.server.handoff import put_rows
from routed_experts.server.vllm_api import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    OutputProcessor,
    OutputProcessorOutput,
    RequestState,
    SamplingParams,
)

Rows = NDArray[np.int16]

_JOINED_ROWS = 64
"""Rows that come one by one and are not taken, those of an answer that is not streamed, are joined when they are so
many: whoever handles a long answer's rows does so array by array, while everybody else waits."""
_ROOM_BYTES = 1 << 20
"""What they are joined in, mapped for them alone. On the heap they would lie with those of other answers, and the C
library would give all back to the system at once, in the middle of whatever frees the last of them."""


def opt_in(params: SamplingParams, prompt_start: int) -> None:
    """Has the engine send the rows of the request that `params` are for, its prompt's from `prompt_start` on."""
    asked = OptIn(prompt_start, os.urandom(16), shared=params.n > 1)
    params.extra_args = {**(params.extra_args or {}), OPT_IN_ARG: asked.encode()}


class RowFeed:
    """The rows of one choice that arrived from the engine and were not taken yet.

    It rides on the choice's outputs as `CompletionOutput.routed_experts`, so it lives as long as they do, and
    merged outputs lose nothing: they carry the same feed.

    Attributes:
        has_begun: whether any have arrived.
        is_known: whether all that came alone are known.
    """

    __slots__ = ("__weakref__", "_arrays", "_joined", "_room", "_taken", "has_begun", "is_known")

    def __init__(self) -> None:
        self._arrays: list[Rows] = []
        self._taken = 0
        self.has_begun = False
        self.is_known = True
        self._joined = 0  # how many of the first arrays are large enough
        self._room: Rows | None = None  # the last of these is its beginning

    def push(self, rows: Rows) -> None:
        """Adds `rows` ([n, L, K]), which follow those before. Where few rows wait for more they are copied, so that
        the message of the engine that they are a view of can go."""
        arrays = self._arrays
        if not arrays:  # always, where each row is taken as it comes
            self.has_begun = True
        else:
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

    def replace(self, rows: Rows) -> None:
        """Puts `rows` in the place of all before, of which none were taken."""
        self._arrays = [rows]
        self._joined, self._room = 0, None

    def take_row(self) -> Rows | None:
        """[1, L, K], if just one row has arrived that was not taken yet, and is known."""
        arrays = self._arrays
        if len(arrays) != 1 or len(arrays[0]) != 1 or not self.is_known:
            return None
        self._taken += 1
        return arrays.pop()

    def take_until(self, total: int) -> list[Rows]:
        """The rows that bring what was taken so far to `total`, or fewer if they have not arrived, in order."""
        arrays, wanted = self._arrays, total - self._taken
        self._joined, self._room = 0, None
        if len(arrays) == 1 and len(arrays[0]) <= wanted:  # nearly always
            self._arrays = []
            self._taken += len(arrays[0])
            return arrays
        taken, rest = split(arrays, max(wanted, 0))
        if taken and rest:
            rest[0] = rest[0].copy()  # a view would keep the rows that were taken
        if rest and len(rest[0]) == 1:
            self.is_known &= is_known(rest[0])
        self._arrays = rest
        self._taken += sum(map(len, taken))
        return taken


class FedRequestState(RequestState):
    """vLLM's record of a request whose rows are taken off, and put on each of its outputs as a feed.

    vLLM would collect the rows until the request finishes, and keep the last ones only when outputs merge for a slow
    reader. Until vLLM streams routed experts.
    """

    feed: RowFeed

    @classmethod
    def give(cls, state: RequestState, feed: RowFeed) -> None:
        """Makes `state` one whose outputs carry `feed`. vLLM makes it itself, and cannot be given a subclass."""
        state.__class__ = cls
        state.feed = feed

    def _new_completion_output(self, *args: Any) -> CompletionOutput:
        output = _new_completion_output(self, *args)
        output.routed_experts = self.feed
        return output


_new_completion_output = RequestState._new_completion_output


class AllRequests(Protocol):
    """What asks for the rows of all requests; see `arrays.EveryRequest`."""

    is_on: bool

    def fill(self, outputs: Iterable[Any]) -> None:
        """Makes feeds on outputs arrays."""


class RowFeeds:
    """Takes rows, and the engine's numbers, off the engine's outputs.

    Attributes:
        on_stats: called with the numbers.
        every_request: None where requests ask for themselves.
    """

    def __init__(self, processor: OutputProcessor) -> None:
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.every_request: AllRequests | None = None
        self._processor = processor
        self._add: Callable[..., None] = processor.add_request
        self._process: Callable[..., OutputProcessorOutput] = processor.process_outputs
        self._unpacker = Unpacker()

    @classmethod
    def install(cls, processor: OutputProcessor) -> "RowFeeds":
        """Replaces `processor.process_outputs` and `add_request`, once for each processor: AsyncLLM makes its
        OutputProcessor itself, so it cannot be given a subclass."""
        installed = vars(processor).get("process_outputs")
        if installed is not None:
            return installed.__self__
        feeds = cls(processor)
        processor.process_outputs = feeds.process_outputs
        processor.add_request = feeds.add_request
        return feeds

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
        unpacker, states = self._unpacker, self._processor.request_states
        for output, rows in unpacker.unpack(engine_core_outputs, message=engine_core_timestamp):
            if (state := states.get(output.request_id)) is None:
                self._take_prompt(output.request_id, rows)
                continue
            feed = _feed_of(state)
            feed.push(rows)
            if not unpacker.is_known:
                feed.is_known = False
        processed = self._process(engine_core_outputs, engine_core_timestamp, *args, **kwargs)
        if self.every_request is not None:  # an engine without tasks that read from it returns its outputs
            self.every_request.fill(processed.request_outputs)
        return processed

    def _take_prompt(self, output_id: str, rows: Rows) -> None:
        """Gives a prompt's rows to the request that they were sent with, and to all others of it that have none; those
        share one array.

        The request that the engine sent them with may have been aborted meanwhile, and the others not. They come once
        from each engine that has some of the requests (data parallelism), and again with requests whose prompt was
        computed with other weights.
        """
        request_id = request_of_prompt(output_id)
        if request_id is None:
            return  # rows of a request that is gone
        states, parents = self._processor.request_states, self._processor.parent_requests
        state = states.get(request_id)
        rows = own(rows)
        parent = state.parent_req if state is not None else parents.get(_parent_of(request_id))
        for each in (request_id,) if parent is None else parent.child_requests:
            state = states.get(each)
            if state is None:
                continue
            feed = _feed_of(state)
            if not feed.has_begun:
                feed.push(rows)
            elif each == request_id:
                feed.replace(rows)
            if len(rows) == 1:
                feed.is_known &= is_known(rows)

    def _take_stats(self, output: EngineCoreOutput) -> None:
        if self.on_stats is not None:
            self.on_stats(EngineStats.decode(output.kv_transfer_params))


def _has_begun(state: RequestState) -> bool:
    return type(state) is FedRequestState and state.feed.has_begun


def _feed_of(state: RequestState) -> RowFeed:
    if type(state) is not FedRequestState:
        FedRequestState.give(state, RowFeed())
    feed: RowFeed = state.feed
    return feed


def own(rows: Rows) -> Rows:
    """`rows` for somebody who keeps them. If they are few, without the engine's message that they are a view of, which
    has those of all other requests too; many came in a message of their own."""
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


def unknown_rows(count: int, shape: tuple[int, int]) -> Rows:
    """[count, L, K] of -1, for rows that are lost."""
    return np.full((count, *shape), UNKNOWN, dtype=np.int16)
