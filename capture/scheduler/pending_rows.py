"""Rows of a sequence that wait to be sent: rows at hand, and rows that are still to be read from
the host cache."""

from collections.abc import Callable

import numpy as np

from routed_experts.capture.scheduler.host_cache import BlockIds, HostCache, Mask
from routed_experts.capture.wire.message import PlacedRows
from routed_experts.protocol.codec import UNKNOWN, Rows, Steps

Piece = Rows | int
"""Rows at hand, or a number of rows to read from the host cache."""

ReportUnknown = Callable[[BlockIds, int, Rows], None]
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
        block_ids: BlockIds,
        report_unknown: ReportUnknown,
        *,
        ids_only: bool = False,  # whether rows of a cache with weights are given without them
        steps: Steps | None = None,  # of all these rows, if they are given with their steps
    ) -> None:
        self.start = start
        self._cache = cache
        self._pieces = _not_empty(pieces)
        self._block_ids = block_ids
        self._report_unknown = report_unknown
        self._ids_only = ids_only
        self._steps = steps
        self._end = start + sum(map(_size, self._pieces))
        # in the host cache
        self.row_bytes = cache.row_shape[0] * cache.row_shape[1] * np.dtype(np.int16).itemsize
        if any(isinstance(piece, int) for piece in self._pieces):
            cache.wait(self, block_ids[start // cache.block_size :])

    def __len__(self) -> int:
        return self._end - self.start

    @property
    def nbytes(self) -> int:
        return len(self) * self.row_bytes

    def take(self, num_bytes: int | None = None) -> PlacedRows:
        """The next rows, of at most `num_bytes`; all that are left if that is None."""
        count = len(self)
        if num_bytes is not None:
            count = min(num_bytes // self.row_bytes, count)
        start = self.start
        rows = self._joined(self._pop(count), start, count)
        if self._ids_only:
            rows = np.ascontiguousarray(self._cache.ids(rows))
        if self._steps is None:
            return PlacedRows(start, rows)
        steps = self._steps[:count]
        self._steps = self._steps[count:]
        return PlacedRows(start, rows, steps)

    def _pop(self, count: int) -> list[Piece]:
        """Takes off the first `count` rows."""
        popped: list[Piece] = []
        self.start += count
        while count > 0:
            piece = self._pieces.pop(0)
            if _size(piece) > count:
                piece, rest = _split(piece, count)
                self._pieces.insert(0, rest)
            popped.append(piece)
            count -= _size(piece)
        return popped

    def _joined(self, pieces: list[Piece], start: int, count: int) -> Rows:
        """The `count` rows of `pieces`, the first of which is that of position `start`."""
        if len(pieces) == 1 and not isinstance(pieces[0], int):
            return pieces[0]  # no copy
        rows = np.empty((count, *self._cache.row_shape), dtype=np.int16)
        filled = 0
        for piece in pieces:
            out = rows[filled : filled + _size(piece)]
            if isinstance(piece, int):
                self._read(start + filled, out)
            else:
                out[:] = piece
            filled += len(out)
        return rows

    def _read(self, first: int, out: Rows) -> None:
        """Fills `out` with the rows from position `first` on."""
        self._cache.read(self._block_ids, first, out)
        if (out[:, 0, 0] == UNKNOWN).any():
            self._report_unknown(self._block_ids, first, out)

    def before_write(self, is_written: Mask) -> None:
        """Called by the host cache before it writes into blocks ([number of blocks], True for those
        that it writes into). Reads the rows in them, and those between them."""
        pieces: list[Piece] = []
        first = self.start
        for piece in self._pieces:
            if isinstance(piece, int):
                pieces += self._read_written(first, piece, is_written)
            else:
                pieces.append(piece)
            first += _size(piece)
        self._pieces = _not_empty(pieces)

    def _read_written(self, first: int, count: int, is_written: Mask) -> list[Piece]:
        """What becomes of `count` rows from position `first` on that are still to be read."""
        size = self._cache.block_size
        end = first + count
        first_block = first // size
        end_block = -(-end // size)
        written = np.flatnonzero(is_written[self._block_ids[first_block:end_block]]).tolist()
        if not written:
            return [count]
        read_first = max((first_block + written[0]) * size, first)
        read_end = min((first_block + written[-1] + 1) * size, end)
        rows = np.empty((read_end - read_first, *self._cache.row_shape), dtype=np.int16)
        self._read(read_first, rows)
        return [read_first - first, rows, end - read_end]


def _size(piece: Piece) -> int:
    return piece if isinstance(piece, int) else len(piece)


def _not_empty(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if _size(piece)]


def _split(piece: Piece, count: int) -> tuple[Piece, Piece]:
    """The first `count` rows of a piece that has more, and the others."""
    if isinstance(piece, int):
        return count, piece - count
    return piece[:count], piece[count:]
