"""Rows of a sequence that wait to be sent: rows at hand, and rows that are still to be read from
the host cache."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.wire.message import PlacedRows
from routed_experts.protocol.codec import UNKNOWN, Rows

Piece = Rows | int
"""Rows at hand, or a number of rows to read from the host cache."""

Report = Callable[[NDArray[np.int64], int, Rows], None]
"""Called with a block table, a position, and the rows from there on, some of which are unknown."""


class PendingRows:
    """Rows [n, L, K] (with weights [n, 3L, K]) from position `start` on, to be taken from the
    front."""

    def __init__(
        self,
        cache: HostCache,
        start: int,
        pieces: list[Piece],
        # of the sequence, as far as rows are to be read; those before are not looked at
        block_ids: NDArray[np.int64],
        report: Report,
        ids_only: bool = False,
    ) -> None:
        self.start = start
        self._cache = cache
        self._pieces = [piece for piece in pieces if _size(piece)]
        self._block_ids = block_ids
        self._report = report
        self._ids_only = ids_only
        self._end = start + sum(map(_size, self._pieces))
        self.row_bytes = cache.row_shape[0] * cache.row_shape[1] * np.dtype(np.int16).itemsize
        if any(isinstance(piece, int) for piece in self._pieces):
            cache.wait(self, block_ids[start // cache.block_size :])

    def __len__(self) -> int:
        return self._end - self.start

    @property
    def nbytes(self) -> int:
        return (self._end - self.start) * self.row_bytes

    def take(self, num_bytes: int | None = None) -> PlacedRows:
        """The next rows, of at most `num_bytes`; all that are left if that is None."""
        start, count = self.start, len(self)
        if num_bytes is not None:
            count = min(num_bytes // self.row_bytes, count)
        pieces = []
        while self.start < start + count:
            pieces.append((self.start, self._pop(start + count - self.start)))
        if len(pieces) == 1 and not isinstance(pieces[0][1], int):
            rows = pieces[0][1]  # no copy
        else:
            rows = np.empty((count, *self._cache.row_shape), dtype=np.int16)
            for at, piece in pieces:
                out = rows[at - start :][: _size(piece)]
                if isinstance(piece, int):
                    self._read(at, out)
                else:
                    out[:] = piece
        return PlacedRows(
            start, np.ascontiguousarray(self._cache.ids(rows)) if self._ids_only else rows
        )

    def _pop(self, count: int) -> Piece:
        """Takes off the first piece, or its first `count` rows."""
        piece = self._pieces.pop(0)
        rest: Piece
        if isinstance(piece, int):
            piece, rest = min(piece, count), max(piece - count, 0)
        else:
            piece, rest = piece[:count], piece[count:]
        if _size(rest):
            self._pieces.insert(0, rest)
        self.start += _size(piece)
        return piece

    def _read(self, first: int, out: Rows) -> None:
        self._cache.read(self._block_ids, first, out)
        if (out[:, 0, 0] == UNKNOWN).any():
            self._report(self._block_ids, first, out)

    def before_write(self, blocks: NDArray[np.bool_]) -> None:
        """Reads rows in `blocks` ([number of blocks]), which are about to be written, and those
        between them."""
        size, at, pieces = self._cache.block_size, self.start, list[Piece]()
        for piece in self._pieces:
            end = at + _size(piece)
            own = (
                self._block_ids[at // size : -(-end // size)]
                if isinstance(piece, int)
                else self._block_ids[:0]
            )
            if len(written := np.flatnonzero(blocks[own]).tolist()):
                first, last = (
                    (at // size + index) * size for index in (written[0], written[-1] + 1)
                )
                first, last = max(first, at), min(last, end)
                rows = np.empty((last - first, *self._cache.row_shape), dtype=np.int16)
                self._read(first, rows)
                pieces += [first - at, rows, end - last]
            else:
                pieces.append(piece)
            at = end
        self._pieces = [piece for piece in pieces if _size(piece)]


def _size(piece: Piece) -> int:
    return piece if isinstance(piece, int) else len(piece)
