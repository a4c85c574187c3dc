"""Records the routing of all requests in files: each line is a response.

A recorded request that does not ask for rows is opted in on its way to the engine, and its rows go
to the file only. One that asks is recorded with the rows that it asks for. A thread writes finished
requests.
"""

import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from threading import Thread
from typing import Any, ClassVar

from pydantic import BaseModel

from routed_experts.capture.wire.message import OPT_IN_ARG, OptIn
from routed_experts.protocol.buckets import is_bucket
from routed_experts.protocol.codec import resolve_dtype
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.encoding import Encoder
from routed_experts.server.http.engine import CapturedEngine
from routed_experts.server.http.metrics import count_dropped, count_recorded
from routed_experts.server.http.response import CollectedRows, RoutedResponse
from routed_experts.server.http.wire_form import LostRowsError, WireForm
from routed_experts.server.outputs.processor import NoRecorder
from routed_experts.server.outputs.record_files import (
    FullError,
    RecordFiles,
    folder_of,
    prepare,
)
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.outputs.sent_files import SentFiles
from routed_experts.server.settings import Settings
from routed_experts.server.vllm_api import (
    CompletionOutput,
    EngineCoreRequest,
    RequestOutput,
    RequestState,
    SamplingParams,
    get_logger,
    rank_of_process,
)

logger = get_logger(__name__)

_RUNNING_BYTES = 512 << 20
"""Limit of the rows that are held for running requests."""
_QUEUE_BYTES = 128 << 20
"""Limit of the rows that wait to be written; a single larger request may wait alone."""
_IDLE_S = 5.0
_CLOSE_S = 5.0
"""How long a server that stops waits for what is not written yet."""

REASONS = ("full", "queue", "memory", "failed", "no_rows", "streamed_input", "beam_search")
"""Why a request is not recorded; `docs/metrics.md` explains each."""

_LEFT_OUT: ContextVar[bool] = ContextVar("routed_experts_left_out", default=False)


class RecordedResponse(BaseModel, extra="allow"):
    """The fields of a line besides rows."""

    choices: list[dict[str, Any]]
    kv_transfer_params: ClassVar[None] = None


@dataclass(eq=False)
class Record:
    request_id: str
    created: int  # Unix time, in seconds
    opt_in: OptIn  # the client's, or the recorder's own
    num_running: int  # number of choices that have not finished
    is_dropped: bool = False
    nbytes: int = 0  # size of the rows so far
    # choices with tokens, and their rows in a buffer
    finished: list[CompletionOutput] = field(default_factory=list)
    model: str | None = None
    prompt_token_ids: list[int] | None = None  # None if the prompt came as embeddings
    prompt_len: int = 0


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

    def finish(self, state: RequestState, finish_reason: str) -> None:
        """Called once, when the choice has its last token or is aborted."""
        try:
            self._recorder.finish(self._record, self, state, finish_reason)
        except Exception as error:  # noqa: BLE001 the response does not depend on it
            self._recorder.fail(error, self._record)


class Recorder(NoRecorder):
    """Decides which requests are recorded, and queues their rows for the thread that writes them.

    All methods but those of the thread run in the event loop.
    """

    def __init__(
        self, captured: CapturedEngine, files: RecordFiles, share: float, keeps_tokens: bool
    ) -> None:
        self._captured = captured
        self._files = files
        self._share = share  # of the prompts that are recorded, drawn for each
        self._keeps_tokens = keeps_tokens
        self._random = Random()
        self._is_full = self._is_closed = self._has_failed = False
        self._running_bytes = self._put_bytes = self._taken_bytes = 0
        self._queue: SimpleQueue[Record | None] = SimpleQueue()
        for reason in REASONS:
            count_dropped(reason, 0)  # exported as 0 from the start
        self._thread = Thread(target=self._write_all, name="routed-experts-record", daemon=True)
        self._thread.start()

    def leave_out(self, reason: str) -> None:
        _LEFT_OUT.set(True)
        if self._random.random() < self._share:
            count_dropped(reason)

    def begin(self, request: EngineCoreRequest, parent: Any) -> RecordedChoice | None:
        params = request.sampling_params
        if params is None or self._is_closed or _LEFT_OUT.get():
            return None
        try:
            asked = OptIn.of(params)
            if parent is None:
                record = self._new(request, params, asked, 1)
            else:  # all choices of a prompt, or none
                if not hasattr(parent, "routed_experts_record"):
                    parent.routed_experts_record = self._new(request, params, asked, parent.n)
                record = parent.routed_experts_record
            if record is not None and asked is None:
                request.sampling_params = params = copy(params)  # other choices use the same object
                params.extra_args = {
                    **(params.extra_args or {}),
                    OPT_IN_ARG: record.opt_in.encode(),
                }
            return (
                None
                if record is None
                else RecordedChoice(self, record, client_asks=asked is not None)
            )
        except Exception as error:  # noqa: BLE001 the response does not depend on it
            self.fail(error)
            return None

    def _new(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        asked: OptIn | None,
        num_choices: int,
    ) -> Record | None:
        if self._random.random() >= self._share:
            return None
        if request.resumable or self._is_full:
            count_dropped("streamed_input" if request.resumable else "full")
            return None
        opt_in = asked or OptIn(
            0,
            os.urandom(16),
            shared=num_choices > 1,
            weights=self._captured.info.weights,
            # the engine does not know where a stop string ends a request
            final_only=not params.stop,
            allow_missing=True,
        )
        return Record(
            request.external_req_id or request.request_id, int(time.time()), opt_in, num_choices
        )

    def hold(self, record: Record, num_bytes: int) -> bool:
        """Whether so many more bytes of rows may be held for a running request."""
        if not record.is_dropped and self._running_bytes + num_bytes > _RUNNING_BYTES:
            self._drop(record, "memory")
        if not record.is_dropped:
            record.nbytes += num_bytes
            self._running_bytes += num_bytes
        return not record.is_dropped

    def finish(
        self, record: Record, rows: RowBuffer, state: RequestState, finish_reason: str
    ) -> None:
        """Takes a choice that has ended; with the last one, the record goes into the queue."""
        record.num_running -= 1
        if record.is_dropped:
            return
        if token_ids := [*state.detokenizer.output_token_ids]:
            about = {"routed_experts": rows, "finish_reason": finish_reason}
            record.finished.append(
                CompletionOutput(state.request_index, "", token_ids, None, None, **about)
            )
        if record.num_running:
            return
        record.model, record.prompt_token_ids = state.lora_name, state.prompt_token_ids
        record.prompt_len = state.prompt_len
        queued = self._put_bytes - self._taken_bytes
        if not record.finished:  # aborted before the first token
            self._drop(record, "no_rows")
        elif self._is_closed or (queued and queued + record.nbytes > _QUEUE_BYTES):
            self._drop(record, "queue")
        else:
            self._running_bytes -= record.nbytes
            self._put_bytes += record.nbytes
            self._queue.put(record)

    def _drop(self, record: Record, reason: str) -> None:
        count_dropped(reason)
        self._running_bytes -= record.nbytes
        record.is_dropped, record.nbytes = True, 0
        record.finished.clear()

    def fail(self, error: Exception, record: Record | None = None) -> None:
        """Counts what could not be recorded, and logs the first of several failures in a row."""
        if record is None:
            count_dropped("failed")
        elif not record.is_dropped:
            self._drop(record, "failed")
        self._log(error)

    def _log(self, error: Exception) -> None:
        if not self._has_failed:
            expected = isinstance(error, OSError)
            logger.error(
                "The routing of a request cannot be recorded: %s",
                error,
                exc_info=None if expected else error,
            )
        self._has_failed = True

    def close(self) -> None:
        """Writes queued requests, and completes the file."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.error(
                "The routing of about %d requests was not recorded: the disk is slow.",
                self._queue.qsize(),
            )

    def _write_all(self) -> None:
        """Runs in the thread."""
        is_open = True
        while is_open:
            try:
                if (record := self._queue.get(timeout=_IDLE_S)) is not None:
                    self._write(record)
                is_open = record is not None
            except Empty:
                self._look_for_room()
            try:
                self._files.rotate(at_once=self._is_full or not is_open)
            except Exception as error:  # noqa: BLE001 the thread goes on, and the next request may succeed
                self._log(error)

    def _look_for_room(self) -> None:
        try:
            if self._is_full and self._files.have_gone():
                logger.info("Files of recorded routing were moved away: recording goes on.")
                self._is_full = False
        except Exception as error:  # noqa: BLE001 as above
            self._log(error)

    def _write(self, record: Record) -> None:
        try:
            count_recorded(self._files.write(self._line(record)))
            self._has_failed = False
        except FullError:
            count_dropped("full")
            if not self._is_full:
                logger.warning(
                    "Recorded routing has reached --routed-experts-record-bytes: nothing more is recorded until files "
                    "that this server has written are moved away."
                )
            self._is_full = True
        except Exception as error:  # noqa: BLE001 the next request may succeed
            self.fail(error)
        finally:
            record.finished.clear()
            self._taken_bytes += record.nbytes

    def _line(self, record: Record) -> Iterator[bytes]:
        """A response with the narrowest type that holds its rows, in parts."""
        captured, asked = self._captured, record.opt_in
        finished = sorted(record.finished, key=lambda each: each.index)
        choices = [{"index": each.index, "finish_reason": each.finish_reason} for each in finished]
        about = {"id": record.request_id, "object": "text_completion", "created": record.created}
        about |= {
            "model": record.model or captured.info.model,
            "routed_experts_info": captured.info.model_dump(),
        }
        if self._keeps_tokens:
            about |= (
                {"prompt_token_ids": record.prompt_token_ids}
                if record.prompt_token_ids is not None
                else {}
            )
            choices = [
                {**choice, "token_ids": each.token_ids}
                for choice, each in zip(choices, finished, strict=True)
            ]
        options = RoutingOptions(prompt_start=asked.prompt_start, weights=asked.weights)
        rows = CollectedRows(options, captured.row_shape(options.weights))
        prompt = record.prompt_token_ids or [0] * record.prompt_len
        rows.collect(RequestOutput(record.request_id, None, prompt, None, finished, finished=True))

        def parts(dtype: str) -> Iterator[bytes]:
            form = WireForm(
                dtype=dtype,
                shape=captured.shape,
                num_experts=captured.num_experts,
                has_weights=options.weights,
            )
            encoder = Encoder(form)
            response = RecordedResponse(choices=choices, **about)
            body = RoutedResponse(response, rows, encoder, is_list=False).encode(packed=False)
            return iter([body]) if isinstance(body, bytes) else body

        try:
            line = parts(resolve_dtype("auto", captured.num_experts))
        except LostRowsError:
            line = parts("int16")
        return chain(line, [b"\n"])


def start_recording(captured: CapturedEngine, place: str | Path, settings: Settings) -> None:
    """Starts to record what the engine is asked, until it is shut down."""
    prepare(place)
    folder = folder_of(place)
    engine = captured.engine
    rank, num_processes = rank_of_process(engine.vllm_config)  # which share the room equally
    if is_bucket(place):  # what was found is sent, and is counted until then
        room = settings.routed_experts_record_bytes // num_processes
        files: RecordFiles = SentFiles(folder, room, str(place), takes_over=rank == 0)
    else:
        entries = (entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
        found = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
        room = max(settings.routed_experts_record_bytes - found, 0) // num_processes
        files = RecordFiles(folder, room)
    recorder = Recorder(
        captured,
        files,
        settings.routed_experts_record_share,
        settings.routed_experts_record_tokens,
    )
    captured.buffers.recorder = recorder
    shutdown = engine.shutdown

    def close_and_shut_down(timeout: float | None = None) -> None:
        recorder.close()
        shutdown(timeout=timeout)

    engine.shutdown = close_and_shut_down
    what = (
        "with the token ids of prompts and answers"
        if settings.routed_experts_record_tokens
        else "without token ids"
    )
    share, bound = 100 * settings.routed_experts_record_share, room * num_processes
    text = "The routing of %g %% of all prompts is recorded in %s, %s: at most %d bytes more."
    logger.info(text, share, place, what, bound)
