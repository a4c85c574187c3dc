"""Sends the files of recorded routing to a bucket."""

from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from routed_experts.server.outputs.buckets import Bucket
from routed_experts.server.outputs.record_files import RecordFiles
from routed_experts.server.vllm_api import get_logger

logger = get_logger(__name__)

_SEND_AGAIN_S = 60.0
"""After a bucket could not be written to."""


class SentFiles(RecordFiles):
    """Files that one process sends to a bucket when they are complete. Until they are sent, they
    count as files of the folder. A thread sends them, so that recording goes on while the bucket is
    slow or gone."""

    def __init__(self, folder: Path, room: int, url: str, takes_over: bool) -> None:
        super().__init__(folder, room)
        self._bucket = Bucket(url)
        self._bucket.open()
        self._queue: SimpleQueue[Path | None] = SimpleQueue()  # None: the last one was before
        self._unsent: list[Path] = []
        self._is_closing = Event()
        self._has_failed = False
        self._thread = Thread(target=self._send_all, name="routed-experts-send", daemon=True)
        self._thread.start()
        if takes_over:  # what processes of this machine completed and did not send
            for path in sorted(folder.glob("*.jsonl")):
                with suppress(FileNotFoundError):  # another server has just sent it
                    self._add_complete(path, path.stat().st_size)

    def _add_complete(self, path: Path, size: int) -> None:
        super()._add_complete(path, size)
        self._unsent.append(path)
        self._queue.put(path)

    def close(self, seconds: float) -> None:
        self._queue.put(None)
        self._is_closing.set()
        self._thread.join(max(seconds, 0))
        unsent = [path.name for path in self._unsent]
        if unsent:
            logger.error(
                "Stopping: these files of recorded routing were not sent to %s. They stay in %s, "
                "for the next server of this machine that records into the same bucket: %s",
                self._bucket.url,
                self._folder,
                ", ".join(unsent),
            )

    def _send_all(self) -> None:
        """Runs in the thread. A server that stops tries each file once more, while it has time."""
        while (path := self._queue.get()) is not None:
            while not self._try_to_send(path) and not self._is_closing.is_set():
                self._is_closing.wait(_SEND_AGAIN_S)

    def _try_to_send(self, path: Path) -> bool:
        try:
            self._bucket.put_file(path.name, path)
            path.unlink(missing_ok=True)
        except Exception as error:  # noqa: BLE001 the thread tries again
            if path.exists():
                self._log(error)
                return False
            # a server that took over has sent it, or somebody has moved it away
        self._has_failed = False
        self._unsent.remove(path)
        return True

    def _log(self, error: Exception) -> None:
        """The first of several failures in a row."""
        if not self._has_failed:
            logger.error(
                "Recorded routing cannot be sent to %s, and stays in %s until it can: %s",
                self._bucket.url,
                self._folder,
                getattr(error, "strerror", None) or error,
            )
        self._has_failed = True
