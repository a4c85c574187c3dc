"""Buffers rows between the engine's outputs and the responses."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from routed_experts.capture.wire.envelope import CAUSES, SMALL_ARRAY_BYTES, STATS, Unpacker
from routed_experts.capture.wire.message import (
    OPT_IN_ARG,
    PROMPT_ROWS,
    Cause,
    OptIn,
    RowsOutput,
    UnknownRows,
)
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.protocol.codec import UNKNOWN, Rows
from routed_experts.server.outputs.prefill_param import put_rows
from routed_experts.server.vllm_api import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    OutputProcessor,
    OutputProcessorOutput,
    RequestState,
    SamplingParams,
    VLLMValidationError,
    get_logger,
)

logger = get_logger(__name__)

Causes = Counter[Cause]
"""Numbers of unknown rows. Those with `Cause.FAULT` are not counted."""
_NO_CAUSES: Causes = Counter()


def causes_of(buffers: Iterable["RowBuffer"], joined: bool) -> Causes:
    """Why rows of the choices of one prompt are unknown. Its own rows count once, with `joined` for
    each choice."""
    prompt: Causes = Counter()
    choices: Causes = Counter()
    for buffer in buffers:
        prompt = prompt + buffer.prompt_causes if joined else prompt | buffer.prompt_causes
        choices += buffer.own_causes
    return prompt + choices


def opt_in(
    params: SamplingParams,
    prompt_start: int,
    weights: bool = False,
    at_end: bool = False,  # whether rows are needed at the end only
    prompt_id: bytes | None = None,  # of a request that is one of the prompt's
) -> None:
    """Opts the request in: the engine sends its rows from position `prompt_start` on, perhaps with
    their weights."""
    # where a stop string ends a request, the engine does not know in time
    final_only = at_end and not params.stop
    shared = params.n > 1 or prompt_id is not None
    asked = OptIn(prompt_start, prompt_id or os.urandom(16), shared, weights, final_only)
    params.extra_args = {**(params.extra_args or {}), OPT_IN_ARG: asked.encode()}


class RowBuffer:
    """The rows of one choice that arrived from the engine and were not taken yet.

    The outputs of the choice carry it as `CompletionOutput.routed_experts`. So it lives as long as
    they do, and merged outputs lose no rows.

    Every array arrives with the position of its first row. A gap before it is filled with -1, and
    repeated rows are dropped.
    """

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_first",
        "_offers",
        "_request_id",
        "_shape",
        "end",
        "num_lost",
        "own_causes",
        "prompt_causes",
    )

    def __init__(self, request_id: str = "") -> None:
        self.num_lost = 0  # rows that did not arrive
        # Why the engine does not know some rows of the prompt, and of the choice. Not changed in
        # place.
        self.prompt_causes = self.own_causes = _NO_CAUSES
        self._request_id = request_id
        self._shape: tuple[int, ...] = ()
        # prompt rows from other choices, until the first own row
        self._offers: dict[str, RowBuffer] = {}
        self._arrays: list[Rows] = []  # contiguous and not empty
        self._first = -1  # position of the first row; -1 at first
        # after the last row that has arrived, without prompts from other choices; -1 at first
        self.end = -1

    def push(self, start: int, rows: Rows) -> None:
        """Adds `rows` ([n, L, K]) at position `start`. Copies few rows that wait, to free the
        engine's message."""
        if start != self.end:
            if self.end < 0 and self._offers:
                self._accept(start)
            if self.end < 0:
                self._first = self.end = start
                self._shape = rows.shape[1:]
            elif start > self.end:
                self._append(self._lost(self.end, start - self.end))
            else:
                rows = rows[self.end - start :]
        if len(rows):
            self._append(rows)

    def push_prompt(self, sender: str, is_own: bool, start: int, rows: Rows) -> None:
        """As `push`, for prompt rows that the engine sent with the choice `sender` of the same
        prompt. Rows of this choice (`is_own`) take precedence.

        With data parallelism, each engine sends the prompt in its own parts. They are kept apart by
        sender, because this choice may start after the whole prompt of its engine and a part of
        another's.
        """
        if is_own:
            self._offers.clear()
            self.push(start, rows)
        elif self.end < 0:
            self._offers.setdefault(sender, RowBuffer(self._request_id)).push(start, rows)

    def _accept(self, end: int) -> None:
        """Starts with the prompt rows from another choice: complete ones up to `end`, else the
        longest."""
        best = max(self._offers.values(), key=lambda offer: (offer.end == end, offer.end))
        self._offers.clear()
        self._first = self.end = best._first
        self._shape = best._shape
        self.num_lost += best.num_lost
        for rows in best._arrays:
            self._append(rows)

    def _append(self, rows: Rows) -> None:
        self.end += len(rows)
        if self._arrays:  # never in a stream that is read at once
            self._arrays[-1] = owned_copy(self._arrays[-1])
            rows = owned_copy(rows)
        self._arrays.append(rows)

    def _lost(self, start: int, count: int) -> Rows:
        logger.error(
            "Request %r: %d rows from position %d on did not arrive and are sent as -1.",
            self._request_id,
            count,
            start,
        )
        self.num_lost += count
        return np.full((count, *self._shape), UNKNOWN, dtype=np.int16)

    def take(self, first: int, end: int, shape: tuple[int, int] | None = None) -> list[Rows]:
        """Takes the rows from position `first` to `end`, or fewer if they have not arrived. Drops
        rows before `first`.

        `shape` is (L, K) if no more rows can arrive. Rows that are missing up to `end` are then -1.
        """
        if self.end < 0 and self._offers:  # no own row has arrived
            self._accept(end)
        arrays = self._arrays
        if self._first == first and self.end == end and len(arrays) == 1:  # the usual case
            self._arrays, self._first = [], end
            return arrays
        taken, at = [], first
        if at < self._first:
            at = min(self._first, end)
            if at > first:
                taken.append(self._lost(first, at - first))
        _, arrays = split_at(arrays, max(at - self._first, 0))
        some, arrays = split_at(arrays, max(end - at, 0))
        at += sum(map(len, some))
        taken += some
        if arrays and arrays[0] is not self._arrays[-len(arrays)]:
            arrays[0] = arrays[0].copy()  # a view would keep the rows before it alive
        self._arrays = arrays
        self._first = self.end - sum(map(len, self._arrays))
        if shape is not None and at < end:
            self._shape = shape
            taken.append(self._lost(at, end - at))
        return taken


class BufferedRequestState(RequestState):
    """vLLM's state of a request, with a row buffer that it puts on each output.

    vLLM would collect rows until the request finishes, and lose rows when it merges outputs for a
    slow reader. Can go when vLLM streams routed experts.
    """

    buffer: RowBuffer | None  # for the response; None if the client did not ask for rows
    record: Any  # the `RecordedChoice` for the server's record; None if the request is not recorded
    buffers: tuple[RowBuffer, ...]  # those of the two that there are

    @classmethod
    def give(cls, state: RequestState, buffer: RowBuffer | None, record: Any = None) -> None:
        """Gives `state` buffers by changing its class, because vLLM creates the state itself."""
        state.__class__ = cls
        state.buffer, state.record = buffer, record
        state.buffers = tuple(each for each in (buffer, record) if each is not None)

    def _new_completion_output(self, *args: Any) -> CompletionOutput:
        output = _new_completion_output(self, *args)
        if self.buffer is not None:
            output.routed_experts = self.buffer
        if self.record is not None and output.finish_reason is not None:
            record, self.record = self.record, None
            record.finish(self, output.finish_reason)
        return output


_new_completion_output = RequestState._new_completion_output


class NoRecorder:
    """Records nothing; see `http.recording.Recorder`."""

    def begin(self, request: EngineCoreRequest, parent: Any) -> Any:
        """Opts in a choice's request that is to be recorded, before it goes to the engine; else
        None. Never raises."""
        return None

    def leave_out(self, reason: str) -> None:
        """Records no further requests of the current task, and counts that once."""


class RowBuffers:
    """Takes rows and counters off the engine's outputs."""

    def __init__(self, processor: OutputProcessor) -> None:
        self.on_stats: Callable[[EngineStats], None] | None = None  # receives the counters
        # the `arrays.InProcessCapture`; None if requests opt in one by one
        self.every_request: Any = None
        self.recorder = NoRecorder()
        self.num_failed_reports = 0  # counters and causes of unknown rows that could not be read
        self._processor = processor
        self._add: Callable[..., None] = processor.add_request
        self._process: Callable[..., OutputProcessorOutput] = processor.process_outputs
        self._abort: Callable[..., list[str]] = processor.abort_requests
        self._unpacker = Unpacker()

    @classmethod
    def install(cls, processor: OutputProcessor) -> "RowBuffers":
        """Replaces `processor.process_outputs`, `add_request` and `abort_requests`, once per
        processor. A subclass is not possible, because AsyncLLM creates its OutputProcessor
        itself."""
        installed = vars(processor).get("process_outputs")
        if installed is not None:
            return installed.__self__
        buffers = cls(processor)
        processor.process_outputs = buffers.process_outputs
        processor.add_request = buffers.add_request
        processor.abort_requests = buffers.abort_requests
        return buffers

    def __len__(self) -> int:
        """Number of running choices with rows."""
        states = self._processor.request_states.values()
        begun = (
            type(state) is BufferedRequestState and any(each.end >= 0 for each in state.buffers)
            for state in states
        )
        return sum(begun)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """vLLM's `add_request`; each choice of a prompt passes it just before it goes to the
        engine."""
        put_rows(request, request_index)
        states = self._processor.request_states
        if (running := states.get(request.request_id)) is not None:
            self._check_is_more(running)
            self._add(request, prompt, parent_req, request_index, *args, **kwargs)
            return
        record = self.recorder.begin(request, parent_req)
        self._add(request, prompt, parent_req, request_index, *args, **kwargs)
        asked = OptIn.of(request.sampling_params)
        state = states[request.request_id]
        state.final_only = asked is not None and asked.final_only
        state.prompt_id = None if asked is None else asked.prompt_id
        if asked is not None:
            # Before any output: of those that vLLM merges for a slow reader, up to 0.30 the first
            # one's buffer stays.
            buffer = (
                RowBuffer(state.external_req_id) if record is None or record.client_asks else None
            )
            BufferedRequestState.give(state, buffer, record)

    def _check_is_more(self, running: RequestState) -> None:
        """Raises unless a request with the id of a running one is more of its prompt, which is
        streamed in.

        vLLM gives each request an id of its own, unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is
        set. Then two of one id would end its engine. One that was aborted runs until the engine has
        sent the rows of its end.
        """
        if not running.streaming_input:
            raise VLLMValidationError(
                f"The request id {running.external_req_id!r} is in use by a request that has not ended, or is ending. "
                "Use another id.",
                parameter="request_id",
            )

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """vLLM's `abort_requests`. Choices whose rows come at the end do not end here, but with the
        engine's answer to the abort, which brings the rows of the tokens that they have."""
        aborted: list[str] = []
        for given in request_ids:
            ids = self._choices_of(given, internal)
            waiting = [
                each
                for each in ids
                if getattr(self._processor.request_states.get(each), "final_only", False)
            ]
            aborted += waiting
            if not waiting:
                aborted += self._abort([given], internal)
            elif others := [each for each in ids if each not in waiting]:
                aborted += self._abort(others, True)
        return aborted

    def _choices_of(self, request_id: str, internal: bool) -> list[str]:
        """The ids of running choices for which an id stands in vLLM's `abort_requests`."""
        processor = self._processor
        ids = [request_id] if internal else processor.external_req_ids.get(request_id, [])
        parents = processor.parent_requests
        return [
            child
            for each in ids
            for child in (parents[each].child_requests if each in parents else [each])
        ]

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> OutputProcessorOutput:
        """vLLM's `process_outputs`, after the rows are taken off."""
        notes = self._unpacker.open(engine_core_outputs, engine_core_timestamp)
        if notes:
            self._take_notes(notes)
        states = self._processor.request_states
        for output, start, rows in self._unpacker.rows(engine_core_outputs):
            state = states.get(output.request_id)
            if state is None and (brings := RowsOutput.of(output)) is not None:
                if brings.kind == PROMPT_ROWS:
                    self._take_prompt(brings.prompt_id, brings.request_id, start, rows)
                else:
                    state = self._state(brings.prompt_id, brings.request_id)
            if state is not None:
                for buffer in _buffers_of(state):
                    buffer.push(start, rows)
        processed = self._process(engine_core_outputs, engine_core_timestamp, *args, **kwargs)
        if self.every_request is not None:  # LLMEngine returns its outputs
            for output in processed.request_outputs:
                self.every_request.fill(output)
        return processed

    def _take_notes(self, notes: Mapping[str, Any]) -> None:
        """Takes causes and counters. Exceptions must not end vLLM's output handler, and with it the
        server."""
        try:
            self._take_causes(notes.get(CAUSES, ()))
            if STATS in notes and self.on_stats is not None:
                self.on_stats(EngineStats(**notes[STATS]))
        except Exception:
            if self.num_failed_reports == 0:
                logger.exception(
                    "A report of the engine cannot be read. Further ones are counted only."
                )
            self.num_failed_reports += 1

    def _take_prompt(self, prompt_id: bytes, sender: str, start: int, rows: Rows) -> None:
        """Gives a prompt's rows to the choice `sender`, and to all other choices of the prompt.
        They share one array.

        `sender` may have been aborted, and the others not. With data parallelism the rows arrive
        once from each engine, and after new weights again with choices that start later.
        """
        rows = owned_copy(rows)
        for each, buffer in self._buffers_of_prompt(prompt_id, sender):
            buffer.push_prompt(sender, each == sender, start, rows)

    def _buffers_of_prompt(self, prompt_id: bytes, sender: str) -> Iterator[tuple[str, RowBuffer]]:
        """The id and buffer of each running choice of the prompt of `sender`."""
        states, parents = self._processor.request_states, self._processor.parent_requests
        state = states.get(sender)
        # vLLM names a choice of `n` > 1 `<index>_<parent>`.
        parent = state.parent_req if state is not None else parents.get(sender.partition("_")[2])
        for each in (sender,) if parent is None else parent.child_requests:
            if (state := self._state(prompt_id, each)) is not None:
                for buffer in _buffers_of(state):
                    yield each, buffer

    def _state(self, prompt_id: bytes, request_id: str) -> RequestState | None:
        """The state of a running choice of this prompt; None if another request has its id by
        now."""
        state = self._processor.request_states.get(request_id)
        return state if state is not None and state.prompt_id == prompt_id else None

    def _take_causes(self, causes: Any) -> None:
        for unknown in itertools.starmap(UnknownRows, causes):
            found = Counter({Cause(unknown.cause): unknown.num_rows})
            if unknown.is_prompt:  # with data parallelism, each engine sends it
                for _, buffer in self._buffers_of_prompt(unknown.prompt_id, unknown.request_id):
                    buffer.prompt_causes = buffer.prompt_causes | found
            elif (state := self._state(unknown.prompt_id, unknown.request_id)) is not None:
                for buffer in _buffers_of(state):
                    buffer.own_causes = buffer.own_causes + found


def _buffers_of(state: RequestState) -> tuple[RowBuffer, ...]:
    if type(state) is not BufferedRequestState:
        BufferedRequestState.give(state, RowBuffer(state.external_req_id))
    buffers: tuple[RowBuffer, ...] = state.buffers
    return buffers


_CUT_SHORT = (None, "abort", "error")


def is_complete(finish_reason: str | None) -> bool:
    """Whether every token of a choice but the last has a row, so that a row which has not arrived
    is sent as -1. True also for reasons that vLLM may add: a row too many is counted as missing, a
    row too few would be silently lost."""
    return finish_reason not in _CUT_SHORT


def owned_copy(rows: Rows) -> Rows:
    """`rows` for code that keeps them. Copies small arrays, which are views of the rows of all
    requests; see `pack`."""
    return rows if rows.base is None or rows.nbytes > SMALL_ARRAY_BYTES else rows.copy()


def split_at(arrays: list[Rows], count: int) -> tuple[list[Rows], list[Rows]]:
    first: list[Rows] = []
    for index, rows in enumerate(arrays):
        if len(rows) > count:
            if count <= 0:
                return first, arrays[index:]
            return [*first, rows[:count]], [rows[count:], *arrays[index + 1 :]]
        first.append(rows)
        count -= len(rows)
    return first, []
