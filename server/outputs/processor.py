"""Rows of the engine's messages: taken off, and put into the buffers of the requests they belong to.

`opt_in` asks the engine for rows, `RowBuffers` stands around vLLM's `OutputProcessor`, and
`BufferedRequestState` puts a choice's `RowBuffer` on its outputs.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from routed_experts.capture.wire.envelope import Notes, Unpacker
from routed_experts.capture.wire.message import (
    OPT_IN_ARG,
    PROMPT_ROWS,
    OptIn,
    RowsOutput,
    UnknownRows,
)
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.protocol.codec import Rows
from routed_experts.protocol.routing_input import INPUT_ARG, EncodedInput
from routed_experts.server.outputs.held_input import put_input
from routed_experts.server.outputs.prefill_param import put_rows
from routed_experts.server.outputs.row_buffer import RowBuffer, owned_copy
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


def opt_in(
    params: SamplingParams,
    prompt_start: int,
    *,
    weights: bool = False,
    steps: bool = False,
    at_end: bool = False,  # whether rows are needed at the end only
    own_prompt: bool = False,  # whether each choice's prompt rows are to be its own
    prompt_id: bytes | None = None,  # of a request that is one of the prompt's
) -> None:
    """Opts the request in: the engine sends its rows from position `prompt_start` on, perhaps with
    their weights and steps."""
    is_one_of_several = prompt_id is not None
    prompt_id = prompt_id or os.urandom(16)
    message = OptIn(
        prompt_start,
        prompt_id,
        shared=params.n > 1 or is_one_of_several,
        weights=weights,
        # where a stop string ends a request, the engine does not know in time
        final_only=at_end and not params.stop,
        own_prompt=own_prompt,
        steps=steps,
    )
    params.extra_args = {**(params.extra_args or {}), OPT_IN_ARG: message.encode()}


def refuse_if_streamed_in(request: EngineCoreRequest) -> None:
    """Raises `VLLMValidationError` for a chunk of a prompt that asks for rows, or says which experts
    its tokens take: positions are of whole prompts.

    Before the engine has it. With the error vLLM ends what came before it, in the engine that has
    that, and sends nothing behind it; where an engine refuses a chunk, it does not.
    """
    params = request.sampling_params
    if not request.resumable or params is None:
        return
    if OptIn.of(params) is not None:
        raise VLLMValidationError(
            "Routed experts cannot be returned for a prompt that is streamed in."
        )
    if INPUT_ARG in (params.extra_args or {}):
        raise VLLMValidationError(
            "Experts cannot be given to the tokens of a prompt that is streamed in."
        )


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
        state.buffer = buffer
        state.record = record
        state.buffers = tuple(rows for rows in (buffer, record) if rows is not None)

    def _new_completion_output(self, *args: Any) -> CompletionOutput:
        output = _new_completion_output(self, *args)
        if self.buffer is not None:
            output.routed_experts = self.buffer
        if self.record is not None and output.finish_reason is not None:
            record = self.record
            self.record = None  # before it is told, as that happens once
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
        self.default_input: EncodedInput | None = None  # of requests that do not say theirs
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
        return sum(map(_has_rows, self._processor.request_states.values()))

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
        put_input(request, self.default_input)
        refuse_if_streamed_in(request)
        put_rows(request, request_index)
        states = self._processor.request_states
        if request.request_id in states:  # more of its prompt, which is streamed in
            self._add(request, prompt, parent_req, request_index, *args, **kwargs)
            return
        record = self.recorder.begin(request, parent_req)
        self._add(request, prompt, parent_req, request_index, *args, **kwargs)
        state = states[request.request_id]
        opted_in = OptIn.of(request.sampling_params)
        if opted_in is None:
            state.final_only = False
            state.prompt_id = None
            state.own_prompt = False
            return
        state.final_only = opted_in.final_only
        state.prompt_id = opted_in.prompt_id
        state.own_prompt = opted_in.own_prompt
        client_asks = record is None or record.client_asks
        # Before any output: of those that vLLM merges for a slow reader, up to 0.30 the first
        # one's buffer stays.
        buffer = RowBuffer(state.external_req_id) if client_asks else None
        BufferedRequestState.give(state, buffer, record)

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """vLLM's `abort_requests`. Choices whose rows come at the end do not end here, but with the
        engine's answer to the abort, which brings the rows of the tokens that they have."""
        aborted: list[str] = []
        for request_id in request_ids:
            choices = self._choices_of(request_id, internal)
            waiting = [choice for choice in choices if self._ends_with_its_rows(choice)]
            aborted += waiting
            if not waiting:
                aborted += self._abort([request_id], internal)
            elif others := [choice for choice in choices if choice not in waiting]:
                aborted += self._abort(others, True)
        return aborted

    def _choices_of(self, request_id: str, internal: bool) -> list[str]:
        """The ids of running choices for which an id stands in vLLM's `abort_requests`."""
        processor = self._processor
        ids = [request_id] if internal else processor.external_req_ids.get(request_id, [])
        choices: list[str] = []
        for internal_id in ids:
            parent = processor.parent_requests.get(internal_id)
            choices += [internal_id] if parent is None else parent.child_requests
        return choices

    def _ends_with_its_rows(self, request_id: str) -> bool:
        state = self._processor.request_states.get(request_id)
        return getattr(state, "final_only", False)

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> OutputProcessorOutput:
        """vLLM's `process_outputs`, after the rows are taken off."""
        encoded_notes = self._unpacker.open(engine_core_outputs, engine_core_timestamp)
        if encoded_notes is not None:
            self._take_notes(encoded_notes)
        states = self._processor.request_states
        for output, start, run, place in self._unpacker.rows(engine_core_outputs):
            state = states.get(output.request_id)
            if state is None:
                self._take_tokenless(output, start, run.of(place))
            else:
                for buffer in _buffers_of(state):
                    buffer.push_from(run, place, start)
        processed = self._process(engine_core_outputs, engine_core_timestamp, *args, **kwargs)
        if self.every_request is not None:  # LLMEngine returns its outputs
            for output in processed.request_outputs:
                self.every_request.fill(output)
        return processed

    def _take_tokenless(self, output: EngineCoreOutput, start: int, rows: Rows) -> None:
        """Takes rows of an output that has no tokens, or whose request has ended."""
        rows_output = RowsOutput.of(output)
        if rows_output is None:
            return
        prompt_id = rows_output.prompt_id
        request_id = rows_output.request_id
        if rows_output.kind == PROMPT_ROWS:
            self._take_prompt(prompt_id, request_id, start, rows)
        elif (state := self._state(prompt_id, request_id)) is not None:
            for buffer in _buffers_of(state):
                buffer.push(start, rows)

    def _take_notes(self, encoded: object) -> None:
        """Takes causes and counters. Exceptions must not end vLLM's output handler, and with it the
        server."""
        try:
            notes = Notes.decode(encoded)
            self._take_causes(notes.unknown)
            if notes.stats is not None and self.on_stats is not None:
                self.on_stats(notes.stats)
        except Exception:
            if self.num_failed_reports == 0:
                logger.exception(
                    "A report of the engine cannot be read. Further ones are counted only."
                )
            self.num_failed_reports += 1

    def _take_prompt(self, prompt_id: bytes, sender: str, start: int, rows: Rows) -> None:
        """Gives a prompt's rows to the choice `sender`, and to all other choices of the prompt that
        do not get their own. They share one array.

        `sender` may have been aborted, and the others not. With data parallelism the rows arrive
        once from each engine, and after new weights again with choices that start later.
        """
        rows = owned_copy(rows)
        for request_id, buffer in self._buffers_of_prompt(prompt_id, sender):
            buffer.push_prompt(sender, request_id == sender, start, rows)

    def _buffers_of_prompt(self, prompt_id: bytes, sender: str) -> Iterator[tuple[str, RowBuffer]]:
        """The id and buffer of each running choice that gets the prompt's rows of `sender`."""
        sending = self._processor.request_states.get(sender)
        if sending is not None:
            parent = None if sending.own_prompt else sending.parent_req
        else:
            # vLLM names a choice of `n` > 1 `<index>_<parent>`.
            parent = self._processor.parent_requests.get(sender.partition("_")[2])
        choices = (sender,) if parent is None else parent.child_requests
        for request_id in choices:
            state = self._state(prompt_id, request_id)
            if state is not None:
                for buffer in _buffers_of(state):
                    yield request_id, buffer

    def _state(self, prompt_id: bytes, request_id: str) -> RequestState | None:
        """The state of a running choice of this prompt; None if another request has its id by
        now."""
        state = self._processor.request_states.get(request_id)
        return state if state is not None and state.prompt_id == prompt_id else None

    def _take_causes(self, all_unknown: Iterable[UnknownRows]) -> None:
        for unknown in all_unknown:
            counted = Counter({unknown.cause: unknown.num_rows})
            if unknown.is_prompt:  # with data parallelism, each engine sends it
                for _, buffer in self._buffers_of_prompt(unknown.prompt_id, unknown.request_id):
                    buffer.prompt_causes = buffer.prompt_causes | counted
            elif (state := self._state(unknown.prompt_id, unknown.request_id)) is not None:
                for buffer in _buffers_of(state):
                    buffer.own_causes = buffer.own_causes + counted


def _buffers_of(state: RequestState) -> tuple[RowBuffer, ...]:
    if type(state) is not BufferedRequestState:
        BufferedRequestState.give(state, RowBuffer(state.external_req_id))
    buffers: tuple[RowBuffer, ...] = state.buffers
    return buffers


def _has_rows(state: RequestState) -> bool:
    return type(state) is BufferedRequestState and any(buffer.end >= 0 for buffer in state.buffers)
