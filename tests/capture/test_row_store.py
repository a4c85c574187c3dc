"""Rows that are kept where the KV of their tokens is kept."""

import numpy as np
import pytest

from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.row_store import RowStore
from routed_experts.protocol.codec import UNKNOWN

BLOCK, L, K = 4, 2, 3


@pytest.fixture
def cache() -> HostCache:
    """Whose slots have rows that say which slot they are of; those of block 3 have none, nor has slot 5."""
    cache = HostCache(num_blocks=8, block_size=BLOCK, num_layers=L, top_k=K)
    slots = np.array([slot for slot in range(8 * BLOCK) if slot // BLOCK != 3 and slot != 5])
    cache.write(slots, np.broadcast_to(slots[:, None, None], (len(slots), L, K)).astype(np.int16))
    return cache


@pytest.fixture
def store() -> RowStore:
    """For three chunks of two blocks."""
    return RowStore(3, 2 * BLOCK)


def slots_of(*blocks: int) -> np.ndarray:
    return np.concatenate([np.arange(block * BLOCK, (block + 1) * BLOCK) for block in blocks])


def read(cache: HostCache, block: int) -> list[int]:
    rows = np.empty((BLOCK, L, K), dtype=np.int16)
    cache.read(np.array([block]), 0, rows)
    assert (rows == rows[:, :1, :1]).all()
    return [int(row) for row in rows[:, 0, 0]]


def test_what_was_kept_comes_back_elsewhere(cache: HostCache, store: RowStore) -> None:
    store.keep(cache, slots_of(4, 6, 7, 0), np.array([2, 0]))
    cache.forget(np.arange(8 * BLOCK))
    store.fill(cache, slots_of(1, 5), np.arange(2 * 2 * BLOCK, 3 * 2 * BLOCK))
    assert read(cache, 1) == list(range(16, 20))
    assert read(cache, 5) == list(range(24, 28))
    store.fill(cache, np.array([8, 9]), np.array([3, 4]))  # the end of one block and the beginning of the next
    assert read(cache, 2) == [31, 0, UNKNOWN, UNKNOWN]


def test_what_has_no_rows_comes_back_without(cache: HostCache, store: RowStore) -> None:
    store.keep(cache, slots_of(1, 3), np.array([1]))
    assert store.have_rows(np.arange(8, 16)).tolist() == [True, False, True, True] + 4 * [False]
    store.fill(cache, slots_of(6, 7), np.arange(8, 16))
    assert read(cache, 6) == [4, UNKNOWN, 6, 7]
    assert read(cache, 7) == 4 * [UNKNOWN]
    store.fill(cache, slots_of(0), np.array([-1, -1, 8, -1]))
    assert read(cache, 0) == [UNKNOWN, UNKNOWN, 4, UNKNOWN]


def test_nothing_is_there_before_anything_was_kept(cache: HostCache, store: RowStore) -> None:
    assert not store.is_whole(0)
    assert not store.have_rows(np.array([-1, 0])).any()
    store.fill(cache, slots_of(0), np.arange(BLOCK))
    assert read(cache, 0) == 4 * [UNKNOWN]
    assert store.used_bytes == 0


@pytest.mark.parametrize("chunk", [-1, 3, 1 << 40])
def test_chunks_that_do_not_exist(cache: HostCache, store: RowStore, chunk: int) -> None:
    """They are not kept, and the last one is not kept in their place."""
    store.keep(cache, slots_of(4, 6, 1, 2), np.array([chunk, 0]))
    assert [store.is_whole(each) for each in (0, 1, 2, chunk)] == [False, False, False, False]
    places = np.array([0, 2 * 2 * BLOCK, chunk * 2 * BLOCK])
    assert store.have_rows(places).tolist() == [True, False, False]
    store.fill(cache, np.array([0, 1, 2]), places)
    assert read(cache, 0) == [4, UNKNOWN, UNKNOWN, 3]


def test_a_slot_outside_the_kv_cache_is_kept_without_rows(cache: HostCache, store: RowStore) -> None:
    slots = slots_of(4, 6)
    slots[[0, -1]] = -1, 8 * BLOCK
    store.keep(cache, slots, np.array([1]))
    assert store.have_rows(np.arange(8, 16)).tolist() == [False, *6 * [True], False]


def test_a_chunk_is_whole_if_all_of_its_rows_are_there(cache: HostCache, store: RowStore) -> None:
    store.keep(cache, slots_of(4, 6, 1, 2), np.array([0, 1]))
    assert [store.is_whole(chunk) for chunk in range(3)] == [True, False, False]


def test_the_next_chunk_takes_the_place(cache: HostCache, store: RowStore) -> None:
    store.keep(cache, slots_of(4, 6), np.array([0]))
    used = store.used_bytes
    store.keep(cache, slots_of(2, 3), np.array([0]))
    assert store.used_bytes == used // 2
    assert not store.is_whole(0)
    store.fill(cache, slots_of(0, 1), np.arange(8))
    assert read(cache, 0) == [8, 9, 10, 11]
    assert read(cache, 1) == 4 * [UNKNOWN]
    store.keep(cache, slots_of(4, 6), np.array([0]))
    assert store.is_whole(0)
