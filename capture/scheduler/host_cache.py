"""The rows of every token whose KV is in the KV cache, indexed the way the KV cache is."""

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire.message import Cause
from routed_experts.capture.wire.rows import ids_of
from routed_experts.protocol.codec import UNKNOWN, UNKNOWN_STEP, Rows, Steps

Slots = NDArray[np.int64]
"""[n], KV slots: block id x block size + index in the block."""

BlockIds = NDArray[np.int64]
"""[number of blocks], the block table of a sequence from position 0 on."""

Mask = NDArray[np.bool_]


def within(ids: NDArray[np.int64], count: int) -> Mask:
    """Which of `ids` ([n]) are at least 0 and less than `count`, in one comparison: unsigned, -1 is
    the largest."""
    return ids.view(np.uint64) < count


class Reader(Protocol):
    """Reads rows later: `PendingRows`."""

    def before_write(self, is_written: Mask) -> None:
        """Called before the cache writes into blocks ([number of blocks], True for those)."""


class HostCache:
    """One row for each KV slot, so that a row is valid exactly as long as the KV of its token: new
    rows overwrite old ones as new KV overwrites old KV. Memory is reserved by the operating system
    only as it is written.

    Slots outside the KV cache, such as the -1 that vLLM gives to padding, are never written and
    have no rows.
    """

    def __init__(self, num_blocks: int, block_size: int, has_weights: bool = False) -> None:
        self.block_size = block_size
        self.has_weights = has_weights  # of rows
        # (L, K), or (3L, K) with weights: known with the first rows
        self.row_shape: tuple[int, int] = (0, 0)
        self._readers: WeakSet[Reader] = WeakSet()  # that wait
        # blocks, by a reader
        self._is_awaited: Mask = np.zeros(num_blocks, dtype=np.bool_)
        self._rows: Rows = np.empty((num_blocks, block_size, 0, 0), dtype=np.int16)
        # np.empty holds garbage that looks like ids, so which slots were written is kept beside it.
        self._written: Mask = np.zeros((num_blocks, block_size), dtype=np.bool_)
        self._written_by_slot = self._written.reshape(-1)
        # of written slots
        self._steps: Steps = np.empty(num_blocks * block_size, dtype=np.uint32)
        # of unwritten slots
        self._causes: NDArray[np.uint8] = np.zeros((num_blocks, block_size), dtype=np.uint8)

    def _allocate(self, row_shape: tuple[int, ...]) -> None:
        """Reserves memory, when the shape of rows is known."""
        if self._rows.size:
            return
        height, top_k = row_shape
        self.row_shape = (height, top_k)
        self._rows = np.empty((*self._written.shape, height, top_k), dtype=np.int16)
        # A row as one opaque item: numpy then moves it with one copy and not with a loop over L
        # and K.
        self._row_type = np.dtype((np.void, height * top_k * self._rows.itemsize))
        self._by_slot = self._rows.reshape(self._written.size, -1).view(self._row_type)[:, 0]

    def ids(self, rows: Rows) -> Rows:
        """The ids [n, L, K] in rows of this cache; a view."""
        return ids_of(rows) if self.has_weights else rows

    @property
    def used_bytes(self) -> int:
        """Bytes of rows written so far."""
        height, top_k = self.row_shape
        num_rows = int(np.count_nonzero(self._written))
        return num_rows * height * top_k * self._rows.itemsize

    def write(self, slots: Slots, rows: Rows, step: int = UNKNOWN_STEP) -> None:
        """Stores `rows` ([n, L, K]), which a step of this engine computed, at `slots` ([n])."""
        self._allocate(rows.shape[1:])
        inside = within(slots, self._written.size)
        if not inside.all():
            slots = slots[inside]
            rows = rows[inside]
        self._before_write(slots)
        height, top_k = self.row_shape
        self._by_slot[slots] = rows.reshape(-1, height * top_k).view(self._row_type)[:, 0]
        self._steps[slots] = step
        self._written_by_slot[slots] = True

    def wait(self, reader: Reader, blocks: NDArray[np.int64]) -> None:
        """Calls `reader.before_write` before some of `blocks` are written, as long as the reader
        exists."""
        self._readers.add(reader)
        self._is_awaited[blocks] = True

    def _before_write(self, slots: Slots) -> None:
        blocks = slots // self.block_size
        if self._is_awaited[blocks].any():
            is_written: Mask = np.zeros(len(self._written), dtype=np.bool_)
            is_written[blocks] = True
            for reader in self._readers:
                reader.before_write(is_written)
            self._is_awaited[blocks] = False

    def forget(self, slots: Slots, cause: Cause = Cause.FAULT) -> None:
        """Makes `slots` ([n]) unwritten: their KV is not what their rows were computed with."""
        slots = slots[within(slots, self._written.size)]
        self._before_write(slots)
        self._written_by_slot[slots] = False
        self._causes.reshape(-1)[slots] = cause

    def causes(self, block_ids: BlockIds, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The `Cause` [n] of unknown rows at `positions` ([n]) of a sequence with this block
        table."""
        slots = self._slots(block_ids, positions)
        causes = self._causes.reshape(-1)[slots]
        causes[self._written_by_slot[slots]] = Cause.FAULT
        return causes

    def steps(self, block_ids: BlockIds, first: int, count: int) -> Steps:
        """The steps of the `count` rows from position `first` on of a sequence with this block
        table."""
        slots = self._slots(block_ids, np.arange(first, first + count))
        steps = self._steps[slots]
        steps[~self._written_by_slot[slots]] = UNKNOWN_STEP
        return steps

    def _slots(self, block_ids: BlockIds, positions: NDArray[np.int64]) -> Slots:
        blocks = block_ids[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def are_written(self, slots: Slots) -> Mask:
        """Which of `slots` ([n]) have a row."""
        written: Mask = within(slots, self._written.size)
        written &= self._written_by_slot[np.where(written, slots, 0)]
        return written

    def copy_from(self, other: "HostCache", sources: Slots, slots: Slots) -> None:
        """Makes `slots` ([n]) what `sources` ([n]) of `other` are, written or not. Both have the
        same row shape."""
        inside = within(slots, self._written.size)
        slots = slots[inside]
        sources = sources[inside]
        exist = within(sources, other._written.size)
        causes = np.where(
            exist, other._causes.reshape(-1)[np.where(exist, sources, 0)], Cause.FAULT
        )
        written = other.are_written(sources)
        self._before_write(slots)
        if written.any():
            self._allocate(other.row_shape)
            self._by_slot[slots[written]] = other._by_slot[sources[written]]
            self._steps[slots[written]] = other._steps[sources[written]]
        self._written_by_slot[slots] = written
        self._causes.reshape(-1)[slots] = causes

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Follows vLLM's copies of whole KV blocks, given as (source, destination) block ids: as
        there, all sources are read before any destination is written. Copies of other groups'
        blocks, such as Mamba states, bring no rows."""
        blocks = np.array(pairs, dtype=np.int64).T[:, :, None]  # [2, n, 1]
        sources, slots = (blocks * self.block_size + np.arange(self.block_size)).reshape(2, -1)
        self.copy_from(self, sources, slots)

    def read(self, block_ids: BlockIds, first: int, out: Rows) -> None:
        """Fills `out` ([n, L, K]) with the rows of a sequence from position `first` on; -1 where
        never written. Other threads run meanwhile. Raises if the block table (from position 0 on)
        is too short, or names no block."""
        size = self.block_size
        end = first + len(out)
        if len(block_ids) * size < end:
            raise ValueError(
                f"a block table of {len(block_ids)} blocks does not reach position {end}"
            )
        blocks = block_ids[first // size : -(-end // size)]
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < len(self._rows):
            raise ValueError("a block table names a block that there is none of")
        written = self._written[blocks].reshape(-1)[first % size :][: len(out)]
        if not written.any():
            out[:] = UNKNOWN
            return
        head = min(-first % size, len(out))  # rows before the first whole block
        tail = (len(out) - head) % size  # rows behind the last one
        if head:
            out[:head] = self._rows[blocks[0], first % size :][:head]
        whole = out[head : len(out) - tail].reshape(-1, *self._rows.shape[1:])
        # "clip" writes straight into `whole`; with checks of its own, numpy would make a copy
        # first.
        np.take(self._rows, blocks[bool(head) :][: len(whole)], axis=0, out=whole, mode="clip")
        if tail:
            out[len(out) - tail :] = self._rows[blocks[-1], :tail]
        if not written.all():
            out[~written] = UNKNOWN
