"""Rows of a sequence that wait to be sent: rows at hand, and rows that are still to be read from the host cache."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.message import PlacedRows
from routed_experts.capture.rows import ids_of
from routed_experts.protocol.codec import UNKNOWN, Rows


class CachedRows:
    """Positions `first` to `end` of a sequence in the host cache. What comes before the block of `first` in
    the sequence's block table is not looked at."""

    def __init__(self, cache: HostCache, block_ids: NDArray[np.int64], first: int, end: int) -> None:
        self.cache, self.block_ids, self.first, self.end = cache, block_ids, first, end

    def __len__(self) -> int:
        return self.end - self.first

    def take(self, out: Rows) -> None:
        """Reads the next rows."""
        self.cache.read(self.block_ids, self.first, out)
        self.first += len(out)

    def are_written(self, slots: NDArray[np.int64], blocks: NDArray[np.bool_]) -> bool:
        """Whether some of `slots`, which are in `blocks`, are these rows' own."""
        size = self.cache.block_size
        if blocks[self.block_ids[self.first // size : self.end // size]].any():
            return True
        if not self.end % size:
            return False
        last = self.block_ids[self.end // size] * size  # its sequence goes on writing behind these rows
        return bool(((slots >= last) & (slots < last + self.end % size)).any())


Piece = Rows | CachedRows
Report = Callable[[NDArray[np.int64], int, Rows], None]
"""Called with a block table, a position, and the rows from there on, some of which are unknown."""


class PendingRows:
    """Rows [n, L, K] (with weights [n, 3L, K]) from position `start` on, to be taken from the front."""

    def __init__(
        self, start: int, pieces: list[Piece], shape: tuple[int, int], report: Report, ids_only: bool = False
    ) -> None:
        self.start = start
        self._pieces = [piece for piece in pieces if len(piece)]
        self._shape = shape
        self._report = report
        self._ids_only = ids_only
        self._row_bytes = shape[0] * shape[1] * np.dtype(np.int16).itemsize
        self._length = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        return self._length * self._row_bytes

    def take(self, num_bytes: int | None = None) -> PlacedRows:
        """The next rows, of at most `num_bytes`; all that are left if that is None."""
        count = self._length if num_bytes is None else min(num_bytes // self._row_bytes, self._length)
        start, self.start, self._length = self.start, self.start + count, self._length - count
        first = self._pieces[0] if self._pieces else np.empty((0, *self._shape), np.int16)
        if not isinstance(first, CachedRows) and len(first) >= count:
            rows = first[:count]  # no copy
            self._pieces[:1] = [first[count:]] if len(first) > count else []
        else:
            rows = np.empty((count, *self._shape), dtype=np.int16)
            self._fill(rows, start)
        return PlacedRows(start, np.ascontiguousarray(ids_of(rows)) if self._ids_only else rows)

    def _fill(self, out: Rows, start: int) -> None:
        filled = 0
        while filled < len(out):
            piece = self._pieces[0]
            part = out[filled : filled + len(piece)]
            if isinstance(piece, CachedRows):
                piece.take(part)
                if (part[:, 0, 0] == UNKNOWN).any():
                    self._report(piece.block_ids, start + filled, part)
            else:
                part[:] = piece[: len(part)]
                self._pieces[0] = piece[len(part) :]
            filled += len(part)
            if not len(self._pieces[0]):
                del self._pieces[0]

    def before_write(self, slots: NDArray[np.int64], blocks: NDArray[np.bool_]) -> None:
        """Reads what is about to be overwritten at `slots`, which are in `blocks`."""
        at = self.start
        for index, piece in enumerate(self._pieces):
            count = len(piece)
            if isinstance(piece, CachedRows) and piece.are_written(slots, blocks):
                rows = np.empty((count, *self._shape), dtype=np.int16)
                piece.take(rows)
                if (rows[:, 0, 0] == UNKNOWN).any():
                    self._report(piece.block_ids, at, rows)
                self._pieces[index] = rows
            at += count
