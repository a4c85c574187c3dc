"""Which blocks lack rows, beside a host cache in which the same happens to the rows themselves."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.kv.blocks import BlocksWithoutRows

BLOCK, BLOCKS = 3, 5


def slots_of_block(block: int) -> NDArray[np.int64]:
    return np.arange(block * BLOCK, (block + 1) * BLOCK)


class Caches:
    """What is tested, and the rows."""

    def __init__(self) -> None:
        self.blocks = BlocksWithoutRows()
        self.rows = HostCache(BLOCKS, BLOCK)
        self.compute(range(BLOCKS))

    def compute(self, blocks: range | list[int]) -> None:
        self.blocks.computed(blocks)
        for block in blocks:
            self.write(slots_of_block(block))

    def load(self, block: int, num_rows: int) -> None:
        """A load into a block, with so many rows."""
        self.blocks.mark([block], without_rows=[block] * (num_rows < BLOCK))
        self.rows.forget(slots_of_block(block))
        self.write(slots_of_block(block)[:num_rows])

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        self.blocks.copy(pairs)
        self.rows.copy_blocks(pairs)

    def write(self, slots: NDArray[np.int64]) -> None:
        self.rows.write(slots, np.zeros((len(slots), 1, 1), dtype=np.int16))

    def lacking(self) -> set[int]:
        return {
            block
            for block in range(BLOCKS)
            if not self.rows.are_written(slots_of_block(block)).all()
        }


BLOCK_IDS = st.integers(0, BLOCKS - 1)
LOADS = st.tuples(st.just("load"), BLOCK_IDS, st.integers(0, BLOCK))
# vLLM copies into each block once in a step
COPIES = st.lists(st.tuples(BLOCK_IDS, BLOCK_IDS), min_size=1, unique_by=lambda pair: pair[1])
EVENTS = st.one_of(
    LOADS,
    st.tuples(st.just("copy"), COPIES),
    st.tuples(st.just("compute"), st.lists(BLOCK_IDS)),
)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(events=st.lists(EVENTS, max_size=20), hit=st.permutations(range(BLOCKS)))
def test_blocks_lack_rows_where_the_host_cache_does(events: list, hit: list[int]) -> None:
    caches = Caches()
    for name, *what in events:
        if name == "load":
            caches.load(*what)
        elif name == "copy":
            caches.copy(*what)
        else:
            caches.compute(*what)
    lacking = caches.lacking()
    usable = caches.blocks.cut(hit)
    assert not lacking & set(hit[:usable])
    assert usable == len(hit) or hit[usable] in lacking
    assert bool(caches.blocks) == bool(lacking)


def test_a_block_that_is_loaded_again_with_its_rows_lacks_none() -> None:
    blocks = BlocksWithoutRows()
    blocks.mark([1], without_rows=[1])
    blocks.mark([1], without_rows=[])
    assert blocks.cut([1]) == 1
