"""How many bytes the arrays of a folder take, which several servers write to and delete from."""

import threading
import time
from collections.abc import Callable

_COUNT_S = 1.0
"""How old a count may be."""
_COUNT_SHARE = 0.02
"""Of the time, what counting may take: a folder with very many arrays is counted less often."""


class FolderBytes:
    """The bytes of all servers when this one counted them, and of this one since then."""

    def __init__(self, count: Callable[[float], int]) -> None:
        self._count = count  # looks at all files, at a Unix time
        # What is being written during a count is in both.
        self._counted = 0
        self._since = 0
        self._writing = 0
        self._count_again = 0.0  # on the monotonic clock
        # One count at a time: two would each take off what was written since the one before. It is
        # taken before `_lock`.
        self._counting = threading.RLock()
        self._lock = threading.Lock()  # for what stands above; free while arrays are written

    @property
    def used(self) -> int:
        return self._counted + self._since

    def count(self) -> None:
        """Counts again. Raises what `count` raises."""
        with self._counting:
            began = time.monotonic()
            with self._lock:
                before = self._since - self._writing
            counted = self._count(time.time())
            ended = time.monotonic()
            with self._lock:
                self._counted = counted
                self._since -= before
                self._count_again = ended + max(_COUNT_S, (ended - began) / _COUNT_SHARE)

    def count_if_old(self) -> None:
        """Counts again, unless another thread did so while this one waited for it."""
        if time.monotonic() < self._count_again:
            return  # without waiting for a count that runs
        with self._counting:
            if time.monotonic() >= self._count_again:
                self.count()

    def reserve(self, size: int, limit: int) -> bool:
        """Whether `size` more bytes fit into the limit. If so, they are counted from now on, and
        `has_written` is called when they are written."""
        with self._lock:
            if self.used + size > limit:
                return False
            self._since += size
            self._writing += size
            return True

    def has_written(self, size: int) -> None:
        with self._lock:
            self._writing -= size

    def take_off(self, size: int) -> None:
        """What was deleted, or could not be written."""
        with self._lock:
            self._since -= size
