"""Which blocks lack rows, beside a host cache in which the same happens to the rows themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.kv.blocks import BlocksWithoutRows, blocks_of, slots_of

BLOCK, BLOCKS = 3, 5


def slots_of_block(block: int) -> NDArray[np.int64]:
    return np.arange(block * BLOCK, (block + 1) * BLOCK)


class Caches:
    """What is tested, and the rows: ids in one host cache, ids that have weights in another."""

    def __init__(self) -> None:
        self.blocks = BlocksWithoutRows()
        self.ids = HostCache(BLOCKS, BLOCK)
        self.weights = HostCache(BLOCKS, BLOCK)
        self.compute(range(BLOCKS))

    def compute(self, blocks: range | list[int]) -> None:
        self.blocks.computed(blocks)
        for block in blocks:
            self.write(self.ids, slots_of_block(block))
            self.write(self.weights, slots_of_block(block))

    def load(self, block: int, num_ids: int, num_weights: int) -> None:
        """A load into a block, with so many ids and weights."""
        self.blocks.mark(
            [block],
            without_ids=[block] * (num_ids < BLOCK),
            without_weights=[block] * (num_weights < BLOCK),
        )
        for cache, count in ((self.ids, num_ids), (self.weights, num_weights)):
            cache.forget(slots_of_block(block))
            self.write(cache, slots_of_block(block)[:count])

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        self.blocks.copy(pairs)
        self.ids.copy_blocks(pairs)
        self.weights.copy_blocks(pairs)

    def write(self, cache: HostCache, slots: NDArray[np.int64]) -> None:
        cache.write(slots, np.zeros((len(slots), 1, 1), dtype=np.int16))

    def lacking(self, cache: HostCache) -> set[int]:
        return {
            block for block in range(BLOCKS) if not cache.are_written(slots_of_block(block)).all()
        }


BLOCK_IDS = st.integers(0, BLOCKS - 1)
LOADS = st.tuples(st.just("load"), BLOCK_IDS, st.integers(0, BLOCK), st.integers(0, BLOCK))
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
            block, num_ids, num_weights = what
            caches.load(block, num_ids, min(num_ids, num_weights))
        elif name == "copy":
            caches.copy(*what)
        else:
            caches.compute(*what)
    for cache, needs_weights in ((caches.ids, False), (caches.weights, True)):
        lacking = caches.lacking(cache)
        usable = caches.blocks.cut(hit, needs_weights)
        assert not lacking & set(hit[:usable])
        assert usable == len(hit) or hit[usable] in lacking
    assert bool(caches.blocks) == bool(caches.lacking(caches.weights))


def test_a_block_that_is_loaded_again_with_its_rows_lacks_none() -> None:
    blocks = BlocksWithoutRows()
    blocks.mark([1], without_ids=[1], without_weights=[1])
    blocks.mark([1], without_ids=[], without_weights=[])
    assert blocks.cut([1], needs_weights=False) == 1
    assert blocks.cut([1], needs_weights=True) == 1


@pytest.mark.parametrize(("first", "end"), [(0, 9), (2, 7), (3, 3), (5, 6)])
def test_slots_of_positions_and_their_blocks(first: int, end: int) -> None:
    table = np.array([4, 0, 2])
    slots = slots_of(table, first, end, BLOCK)
    assert slots.tolist() == [
        table[position // BLOCK] * BLOCK + position % BLOCK for position in range(first, end)
    ]
    blocks = [int(slot) // BLOCK for slot in slots]
    assert blocks_of(slots, BLOCK) == list(dict.fromkeys(blocks))
