"""Sends the files of recorded routing to a bucket."""

import time
from pathlib import Path

from routed_experts.server.outputs.buckets import Bucket
from routed_experts.server.outputs.record_files import PART, RecordFiles

_SEND_AGAIN_S = 60.0
"""After a bucket could not be written to."""


class SentFiles(RecordFiles):
    """Files that one process sends to a bucket when they are complete. Until they are sent, and
    while the bucket cannot be written to, they count as files of the folder."""

    def __init__(self, folder: Path, room: int, url: str, takes_over: bool) -> None:
        super().__init__(folder, room)
        self._bucket = Bucket(url)
        self._bucket.open()
        self._has_sent = False
        self._send_again = 0.0  # on the monotonic clock, after the bucket could not be written to
        if takes_over:  # what processes of this machine completed and did not send
            self._sizes = {path: path.stat().st_size for path in folder.glob("*.jsonl")}

    def rotate(self, at_once: bool = False) -> None:
        super().rotate(at_once)
        if time.monotonic() < self._send_again and not at_once:
            return
        # Each attempt takes many seconds, in which nothing is recorded.
        self._send_again = time.monotonic() + _SEND_AGAIN_S
        for path in [*self._sizes]:
            if not path.name.endswith(PART):  # one of which half a line could not be undone
                if path.exists():  # else a process that took over has sent it
                    self._bucket.put_file(path.name, path)
                    path.unlink(missing_ok=True)
                del self._sizes[path]
                self._has_sent = True
        self._send_again = 0.0

    def have_gone(self) -> bool:
        has_sent, self._has_sent = self._has_sent, False
        return has_sent
