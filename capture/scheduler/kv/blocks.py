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
        self.without_ids: set[int] = set()
        # Those without ids, and those whose ids came without weights. The same as `without_ids`
        # where the engine captures no weights.
        self.without_weights: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.without_weights)

    def mark(
        self, loaded: Iterable[int], *, without_ids: Iterable[int], without_weights: Iterable[int]
    ) -> None:
        """Called when a load is decided: KV is loaded into the blocks `loaded`, some of which then
        lack ids or weights."""
        blocks = set(loaded)
        self.without_ids -= blocks
        self.without_weights -= blocks
        self.without_ids.update(without_ids)
        self.without_weights.update(without_weights)

    def copy(self, pairs: Collection[tuple[int, int]]) -> None:
        """Called for the (source, destination) block ids that a step copies. All sources are read
        before any destination is written."""
        destinations = {destination for _, destination in pairs}
        for blocks in (self.without_ids, self.without_weights):
            copied = {destination for source, destination in pairs if source in blocks}
            blocks -= destinations
            blocks |= copied

    def computed(self, blocks: Collection[int]) -> None:
        """Called for blocks all of whose slots a step computes."""
        self.without_ids.difference_update(blocks)
        self.without_weights.difference_update(blocks)

    def cut(self, hit: Sequence[int], needs_weights: bool) -> int:
        """How many of the blocks `hit`, which follow each other in a prefix hit, come before the
        first without ids, or without weights if the request `needs_weights`."""
        unusable = self.without_weights if needs_weights else self.without_ids
        for count, block in enumerate(hit):
            if block in unusable:
                return count
        return len(hit)
