"""Decides which requests are recorded, and collects their rows.

A recorded request that does not ask for rows is opted in on its way to the engine, and its rows go
to the record only. One that asks is recorded with the rows that it asks for. When all choices of a
prompt have finished, its record goes into the queue (`record_queue.py`), whose thread makes a line
of it (`record_line.py`) and writes it into a file (`outputs/record_files.py`).
"""

import os
import time
from contextvars import ContextVar
from copy import copy
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from routed_experts.capture.wire.envelope import RunRows
from routed_experts.capture.wire.message import OPT_IN_ARG, OptIn
from routed_experts.protocol.models import LABEL, STEPS
from routed_experts.protocol.routing_input import EncodedInput
from routed_experts.server.http.engine import CapturedEngine
from routed_experts.server.http.metrics import NotRecorded, count_dropped
from routed_experts.server.http.recording.record_line import Record, line_of
from routed_experts.server.http.recording.record_queue import FailureLog, RecordQueue
from routed_experts.server.outputs.processor import NoRecorder
from routed_experts.server.outputs.record_files import RecordFiles, prepare
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.settings import Settings
from routed_experts.server.vllm_api import (
    CompletionOutput,
    EngineCoreRequest,
    RequestState,
    SamplingParams,
    get_logger,
    rank_of_process,
)

logger = get_logger(__name__)

_RUNNING_BYTES = 512 << 20
"""Limit of the rows that are held for running requests."""

_LEFT_OUT: ContextVar[bool] = ContextVar("routed_experts_left_out", default=False)


class RecordedChoice(RowBuffer):
    """The rows of one choice for the record. If the client asked for rows too, they also go into a
    buffer for it."""

    def __init__(self, recorder: "Recorder", record: Record, client_asks: bool) -> None:
        super().__init__(record.request_id)
        self.client_asks = client_asks
        self._recorder = recorder
        self._record = record

    def push(self, start: int, rows: Any) -> None:
        if self._recorder.hold(self._record, rows.nbytes):
            super().push(start, rows)
        elif self.end >= 0:
            RowBuffer.__init__(self)  # frees the rows before

    def push_from(self, run: RunRows, place: int, start: int) -> None:
        """By `push`, which counts what is held."""
        self.push(start, run.of(place))

    def finish(self, state: RequestState, finish_reason: str) -> None:
        """Called once, when the choice has its last token or is aborted."""
        try:
            self._recorder.finish(self._record, self, state, finish_reason)
        except Exception as error:  # noqa: BLE001 the response does not depend on it
            self._recorder.fail(error, self._record)


class Recorder(NoRecorder):
    """Runs in the event loop."""

    def __init__(
        self,
        captured: CapturedEngine,
        files: RecordFiles,
        share: float,
        keeps_tokens: bool,
        *,
        has_steps: bool = False,  # whether those that do not ask for rows are recorded with steps
        label: str = "",  # of requests that do not say theirs
    ) -> None:
        self._captured = captured
        self._share = share  # of the prompts that are recorded, drawn for each
        self._has_steps = has_steps
        self._label = label
        self._random = Random()
        self._running_bytes = 0
        self._failures = FailureLog()
        for reason in NotRecorded:
            count_dropped(reason, 0)  # exported as 0 from the start
        self._queue = RecordQueue(
            files,
            partial(line_of, captured=captured, keeps_tokens=keeps_tokens),
            self._failures,
        )

    def leave_out(self, reason: str) -> None:
        _LEFT_OUT.set(True)
        if self._random.random() < self._share:
            count_dropped(NotRecorded(reason))

    def begin(self, request: EngineCoreRequest, parent: Any) -> RecordedChoice | None:
        params = request.sampling_params
        if params is None or self._queue.is_closed or _LEFT_OUT.get():
            return None
        try:
            return self._begin(request, params, parent)
        except Exception as error:  # noqa: BLE001 the response does not depend on it
            self.fail(error)
            return None

    def _begin(
        self, request: EngineCoreRequest, params: SamplingParams, parent: Any
    ) -> RecordedChoice | None:
        clients_opt_in = OptIn.of(params)
        record = self._record_of(request, params, clients_opt_in, parent)
        if record is None:
            return None
        if clients_opt_in is None:
            _opt_in(request, params, record.opt_in)
        return RecordedChoice(self, record, client_asks=clients_opt_in is not None)

    def _record_of(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        clients_opt_in: OptIn | None,
        parent: Any,
    ) -> Record | None:
        """All choices of a prompt have one record, or none."""
        if parent is None:
            return self._new(request, params, clients_opt_in, num_choices=1)
        if not hasattr(parent, "routed_experts_record"):
            parent.routed_experts_record = self._new(request, params, clients_opt_in, parent.n)
        record: Record | None = parent.routed_experts_record
        return record

    def _new(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        clients_opt_in: OptIn | None,
        num_choices: int,
    ) -> Record | None:
        if self._random.random() >= self._share:
            return None
        if request.resumable:
            count_dropped(NotRecorded.STREAMED_INPUT)
            return None
        if EncodedInput.of(params) is not None:  # its experts are not the router's own choice
            count_dropped(NotRecorded.INPUT)
            return None
        if self._queue.is_full:
            count_dropped(NotRecorded.FULL)
            return None
        return Record(
            request_id=request.external_req_id or request.request_id,
            created=int(time.time()),
            opt_in=clients_opt_in or self._own_opt_in(params, num_choices),
            label=(params.extra_args or {}).get(LABEL, self._label),
            num_running=num_choices,
        )

    def _own_opt_in(self, params: SamplingParams, num_choices: int) -> OptIn:
        return OptIn(
            0,
            os.urandom(16),
            shared=num_choices > 1,
            weights=self._captured.info.weights,
            # the engine does not know where a stop string ends a request
            final_only=not params.stop,
            allow_missing=True,
            steps=self._has_steps,
        )

    def hold(self, record: Record, num_bytes: int) -> bool:
        """Whether so many more bytes of rows may be held for a running request."""
        if record.is_dropped:
            return False
        if self._running_bytes + num_bytes > _RUNNING_BYTES:
            self._drop(record, NotRecorded.MEMORY)
            return False
        record.nbytes += num_bytes
        self._running_bytes += num_bytes
        return True

    def finish(
        self, record: Record, rows: RowBuffer, state: RequestState, finish_reason: str
    ) -> None:
        """Takes a choice that has ended; with the last one, the record goes into the queue."""
        record.num_running -= 1
        if record.is_dropped:
            return
        token_ids = [*state.detokenizer.output_token_ids]
        if token_ids:
            record.finished.append(
                CompletionOutput(
                    index=state.request_index,
                    text="",
                    token_ids=token_ids,
                    cumulative_logprob=None,
                    logprobs=None,
                    routed_experts=rows,
                    finish_reason=finish_reason,
                )
            )
        if not record.num_running:
            record.model = state.lora_name
            record.prompt_token_ids = state.prompt_token_ids
            record.prompt_len = state.prompt_len
            self._finish_record(record)

    def _finish_record(self, record: Record) -> None:
        if not record.finished:  # aborted before the first token
            self._drop(record, NotRecorded.NO_ROWS)
        elif self._queue.put(record):
            self._running_bytes -= record.nbytes
        else:
            self._drop(record, NotRecorded.QUEUE)

    def _drop(self, record: Record, reason: NotRecorded) -> None:
        count_dropped(reason)
        self._running_bytes -= record.nbytes
        record.is_dropped = True
        record.nbytes = 0
        record.finished.clear()

    def fail(self, error: Exception, record: Record | None = None) -> None:
        """Counts what could not be recorded, and logs the first of several failures in a row."""
        if record is None:
            count_dropped(NotRecorded.FAILED)
        elif not record.is_dropped:
            self._drop(record, NotRecorded.FAILED)
        self._failures.failed(error)

    def close(self) -> None:
        """Writes queued requests, and completes the file."""
        self._queue.close()


def _opt_in(request: EngineCoreRequest, params: SamplingParams, opt_in: OptIn) -> None:
    """Asks the engine for rows that the client did not ask for."""
    own_params = copy(params)  # other choices use the same object
    own_params.extra_args = {**(params.extra_args or {}), OPT_IN_ARG: opt_in.encode()}
    request.sampling_params = own_params


def start_recording(captured: CapturedEngine, place: str | Path, settings: Settings) -> None:
    """Starts to record what the engine is asked, until it is shut down."""
    folder = prepare(place)
    engine = captured.engine
    _, num_processes = rank_of_process(engine.vllm_config)
    room = _room_in(folder, settings.routed_experts_record_bytes) // num_processes
    recorder = Recorder(
        captured,
        RecordFiles(folder, room),
        settings.routed_experts_record_share,
        settings.routed_experts_record_tokens,
        has_steps=settings.routed_experts_default.get(STEPS, False),
        label=settings.routed_experts_default.get(LABEL, ""),
    )
    captured.buffers.recorder = recorder
    shutdown = engine.shutdown

    def close_and_shut_down(timeout: float | None = None) -> None:
        recorder.close()
        shutdown(timeout=timeout)

    engine.shutdown = close_and_shut_down
    logger.info(
        "The routing of %g %% of all prompts is recorded in %s, %s: at most %d bytes more.",
        100 * settings.routed_experts_record_share,
        place,
        "with the token ids of prompts and answers"
        if settings.routed_experts_record_tokens
        else "without token ids",
        room * num_processes,
    )


def _room_in(folder: Path, max_bytes: int) -> int:
    """Bytes that all processes of the server may write."""
    used_bytes = sum(
        entry.stat(follow_symlinks=False).st_size
        for entry in os.scandir(folder)
        if entry.is_file(follow_symlinks=False)
    )
    return max(max_bytes - used_bytes, 0)
