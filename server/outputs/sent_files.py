"""Sends the files of recorded routing to a bucket."""

import logging
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from routed_experts.server.outputs.buckets import Bucket
from routed_experts.server.outputs.rare_log import RareLog
from routed_experts.server.outputs.record_files import RecordFiles
from routed_experts.server.vllm_api import get_logger

logger = get_logger(__name__)

_SEND_AGAIN_S = 60.0
"""How often what a bucket has refused is sent again."""


class SentFiles(RecordFiles):
    """Files that one process sends to a bucket when they are complete. Until they are sent, they
    count as files of the folder. A thread sends them, so that recording goes on while the bucket is
    slow or gone. A file that the bucket refuses holds up no other."""

    def __init__(self, folder: Path, room: int, url: str, takes_over: bool) -> None:
        super().__init__(folder, room)
        self._bucket = Bucket(url)
        self._bucket.open()
        self._queue: SimpleQueue[Path | None] = SimpleQueue()  # None: the last one was before
        # The thread's own: what was tried and is still here, the one tried last at the end.
        self._refused: deque[Path] = deque()
        self._again_at = time.monotonic() + _SEND_AGAIN_S
        # Of a bucket that is gone, each file of a backlog is refused.
        self._failures = RareLog(logger, logging.ERROR)
        self._thread = Thread(target=self._send_all, name="routed-experts-send", daemon=True)
        self._thread.start()
        if takes_over:  # what processes of this machine completed and did not send
            for path in sorted(folder.glob("*.jsonl")):
                with suppress(FileNotFoundError):  # another server has just sent it
                    self._add_complete(path, path.stat().st_size)

    def _add_complete(self, path: Path, size: int) -> None:
        super()._add_complete(path, size)
        self._queue.put(path)

    def close(self, seconds: float) -> None:
        self._queue.put(None)
        self._thread.join(max(seconds, 0))
        unsent = [path.name for path in [*self._sizes] if path.exists()]
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
        is_open = True
        while is_open:
            seconds_left = self._again_at - time.monotonic()
            if seconds_left <= 0:
                self._send_refused()
                continue
            try:
                path = self._queue.get(timeout=seconds_left)
            except Empty:
                continue
            if path is None:
                is_open = False
            else:
                self._send(path)
        for path in [*self._refused]:
            self._send(path)

    def _send_refused(self) -> None:
        """Sends what was refused, up to the first file that is refused again: the bucket may be
        gone. The next time, that file comes last."""
        while self._refused and self._send(self._refused.popleft()):
            pass
        self._again_at = time.monotonic() + _SEND_AGAIN_S

    def _send(self, path: Path) -> bool:
        """Whether a file is no longer here. One that the bucket refuses is sent again later."""
        try:
            self._bucket.put_file(path.name, path)
            path.unlink(missing_ok=True)
        except Exception as error:  # noqa: BLE001 the thread tries again
            if path.exists():
                self._refused.append(path)
                self._failures.log(
                    "%s of recorded routing cannot be sent to %s, and stays in %s until it can: %s",
                    path.name,
                    self._bucket.url,
                    self._folder,
                    getattr(error, "strerror", None) or error,
                )
                return False
            # a server that took over has sent it, or somebody has moved it away
        return True
