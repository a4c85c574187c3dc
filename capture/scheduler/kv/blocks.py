"""Blocks of the KV cache, and which of them have KV without its rows."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def slots_of(
    block_table: NDArray[np.int64], first: int, end: int, block_size: int
) -> NDArray[np.int64]:
    """The KV slots [end - first] of positions `first` to `end` of a sequence, whose blocks are
    `block_table` ([blocks], from position 0 on)."""
    positions = np.arange(first, end)
    return block_table[positions // block_size] * block_size + positions % block_size


def blocks_of(slots: NDArray[np.int64], block_size: int) -> list[int]:
    """The ids of the blocks of `slots` ([n]), which follow each other in a block table."""
    blocks = slots // block_size
    is_first_of_block = np.diff(blocks, prepend=-1) != 0
    ids: list[int] = blocks[is_first_of_block].tolist()
    return ids


class BlocksWithoutRows:
    """The blocks whose KV was loaded without some of its rows, as of the next step.

    A prefix hit of a request that needs rows ends before the first of them. The host cache cannot
    say this when a step is scheduled: rows of earlier steps are still on their way to it.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def mark(self, loaded: Iterable[int], without_rows: Iterable[int]) -> None:
        """Called when a load is decided: KV is loaded into the blocks `loaded`, some of which then
        lack rows."""
        self._blocks -= set(loaded)
        self._blocks.update(without_rows)

    def copy(self, pairs: Collection[tuple[int, int]]) -> None:
        """Called for the (source, destination) block ids that a step copies. All sources are read
        before any destination is written."""
        copied = {destination for source, destination in pairs if source in self._blocks}
        self._blocks -= {destination for _, destination in pairs}
        self._blocks |= copied

    def computed(self, blocks: Collection[int]) -> None:
        """Called for blocks all of whose slots a step computes."""
        self._blocks.difference_update(blocks)

    def cut(self, hit: Sequence[int]) -> int:
        """How many of the blocks `hit`, which follow each other in a prefix hit, come before the
        first without rows."""
        for count, block in enumerate(hit):
            if block in self._blocks:
                return count
        return len(hit)
