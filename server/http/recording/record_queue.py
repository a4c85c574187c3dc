"""Records that wait to be written, and the thread that writes them."""

import logging
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread

from routed_experts.server.http.metrics import NotRecorded, count_dropped, count_recorded
from routed_experts.server.http.recording.record_line import Record
from routed_experts.server.outputs.rare_log import RareLog
from routed_experts.server.outputs.record_files import FullError, RecordFiles
from routed_experts.server.vllm_api import get_logger

logger = get_logger(__name__)

_QUEUE_BYTES = 128 << 20
"""Limit of the rows that wait to be written; a single larger request may wait alone."""
_IDLE_S = 5.0
"""How often the thread looks whether its file is old while nothing is to be written."""
_CLOSE_S = 5.0
"""How long a server that stops waits for what is not written yet."""


class FailureLog:
    """Logs why requests are not recorded."""

    def __init__(self) -> None:
        self._log = RareLog(logger, logging.ERROR)

    def failed(self, error: Exception) -> None:
        is_expected = isinstance(error, OSError)
        self._log.log(
            "The routing of a request cannot be recorded: %s",
            error,
            exc_info=None if is_expected else error,
        )


class RecordQueue:
    """The event loop puts records and closes the queue; the thread does the rest."""

    def __init__(
        self,
        files: RecordFiles,
        line_of: Callable[[Record], Iterator[bytes]],
        failures: FailureLog,
    ) -> None:
        self._files = files
        self._line_of = line_of
        self._failures = failures
        self._queue: SimpleQueue[Record | None] = SimpleQueue()  # None: the last one was before
        # Each of these is written by one of the two alone.
        self.is_closed = False  # by the event loop
        # by the thread: the files have their maximum size
        self.is_full = files.room == 0
        if self.is_full:
            logger.warning(
                "Files in the folder take all of --routed-experts-record-bytes: nothing is recorded. "
                "Move them away, and start again."
            )
        self._put_bytes = 0  # by the event loop
        self._taken_bytes = 0  # by the thread
        self._thread = Thread(target=self._run, name="routed-experts-record", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> bool:
        """Whether there is room for a record that has finished. If so, it is written."""
        if self.is_closed:
            return False
        waiting_bytes = self._put_bytes - self._taken_bytes
        if waiting_bytes and waiting_bytes + record.nbytes > _QUEUE_BYTES:
            return False
        self._put_bytes += record.nbytes
        self._queue.put(record)
        return True

    def close(self) -> None:
        """Writes what waits, and completes the file."""
        if self.is_closed:
            return
        self.is_closed = True
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.error(
                "The routing of about %d requests was not recorded: the disk is slow.",
                self._queue.qsize(),
            )

    def _run(self) -> None:
        is_open = True
        while is_open:
            try:
                record = self._queue.get(timeout=_IDLE_S)
            except Empty:  # the open file may be old by now
                pass
            else:
                if record is None:
                    is_open = False
                else:
                    self._write(record)
            self._rotate(at_once=self.is_full or not is_open)

    def _write(self, record: Record) -> None:
        try:
            count_recorded(self._files.write(self._line_of(record)))
        except FullError:
            count_dropped(NotRecorded.FULL)
            self._set_full()
        except Exception as error:  # noqa: BLE001 the next request may succeed
            count_dropped(NotRecorded.FAILED)
            self._failures.failed(error)
        finally:
            record.finished.clear()
            self._taken_bytes += record.nbytes

    def _set_full(self) -> None:
        if not self.is_full:
            logger.warning(
                "Recorded routing has reached --routed-experts-record-bytes: nothing more is "
                "recorded until the server starts again."
            )
        self.is_full = True

    def _rotate(self, at_once: bool) -> None:
        try:
            self._files.rotate(at_once)
        except Exception as error:  # noqa: BLE001 the thread goes on, and the next request may succeed
            self._failures.failed(error)
