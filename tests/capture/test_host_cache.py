"""Rows that live and die with the KV of their tokens."""

import threading
import time

import numpy as np
import pytest

from routed_experts.capture.host_cache import HostCache
from routed_experts.protocol.codec import UNKNOWN

BLOCK, L, K = 4, 2, 3


@pytest.fixture
def cache() -> HostCache:
    return HostCache(num_blocks=8, block_size=BLOCK, num_layers=L, top_k=K)


def rows_of(*positions: int) -> np.ndarray:
    """Rows [n, L, K] that say which position they belong to."""
    return np.stack([np.full((L, K), position, dtype=np.int16) for position in positions])


def slots_of(block_ids: list[int], *positions: int) -> np.ndarray:
    return np.array([block_ids[p // BLOCK] * BLOCK + p % BLOCK for p in positions], dtype=np.int64)


def write(cache: HostCache, block_ids: list[int], *positions: int) -> None:
    cache.write(slots_of(block_ids, *positions), rows_of(*positions))


def read(cache: HostCache, block_ids: list[int], first: int, end: int) -> list[int]:
    rows = np.full((end - first, L, K), 99, dtype=np.int16)
    cache.read(np.array(block_ids, dtype=np.int64), first, rows)
    assert (rows == rows[:, :1, :1]).all()
    return [int(value) for value in rows[:, 0, 0]]


@pytest.mark.parametrize("first", range(15))
def test_reads_follow_the_block_table(cache: HostCache, first: int) -> None:
    """From anywhere in a block to anywhere in the same or a later one, with whole blocks between them."""
    blocks = [5, 0, 7, 2]
    write(cache, blocks, *range(14))
    for end in range(first, 15):
        assert read(cache, blocks, first, end) == [UNKNOWN if at == 14 else at for at in range(first, end)]


def test_slots_that_were_never_written_are_unknown(cache: HostCache) -> None:
    """The memory is not cleared at the start: what lies there may look like ids."""
    cache._rows[:] = 3
    write(cache, [2, 1], 1, 2, 6)
    assert read(cache, [2, 1], 0, 8) == [UNKNOWN, 1, 2, UNKNOWN, UNKNOWN, UNKNOWN, 6, UNKNOWN]


def test_a_step_without_rows(cache: HostCache) -> None:
    cache.write(np.empty(0, dtype=np.int64), np.empty((0, L, K), dtype=np.int16))
    assert read(cache, [0], 0, 1) == [UNKNOWN]


def test_reading_changes_nothing(cache: HostCache) -> None:
    write(cache, [0], 0, 1)
    rows = np.empty((4, L, K), dtype=np.int16)
    cache.read(np.array([0], dtype=np.int64), 0, rows)
    rows[:] = 9
    assert read(cache, [0], 0, 4) == [0, 1, UNKNOWN, UNKNOWN]


def test_a_block_that_is_used_again(cache: HostCache) -> None:
    """New KV overwrites old KV, and new rows old rows."""
    write(cache, [3], 0, 1, 2, 3)
    cache.write(slots_of([3], 0, 1), rows_of(40, 41))
    assert read(cache, [3], 0, 4) == [40, 41, 2, 3]


def test_slots_whose_kv_comes_from_elsewhere(cache: HostCache) -> None:
    write(cache, [3, 1], *range(8))
    cache.forget(slots_of([3, 1], 2, 3, 4))
    assert read(cache, [3, 1], 0, 8) == [0, 1, UNKNOWN, UNKNOWN, UNKNOWN, 5, 6, 7]
    write(cache, [3, 1], 3)
    assert read(cache, [3, 1], 0, 8) == [0, 1, UNKNOWN, 3, UNKNOWN, 5, 6, 7]


OUTSIDE = [-1, -2, 8 * BLOCK, 1 << 40]


@pytest.mark.parametrize("outside", OUTSIDE)
def test_slots_outside_the_kv_cache_are_not_written(cache: HostCache, outside: int) -> None:
    """vLLM's padding has the slot -1, which must not be the last one, nor take the place of a token's."""
    write(cache, [7], *range(BLOCK))
    cache.write(np.array([3, outside, 5]), rows_of(30, 31, 32))
    cache.write(np.array([outside]), rows_of(33))
    assert read(cache, [0, 1], 3, 6) == [30, UNKNOWN, 32]
    assert read(cache, [7], 0, BLOCK) == list(range(BLOCK))


@pytest.mark.parametrize("outside", OUTSIDE)
def test_slots_outside_the_kv_cache_have_no_rows(cache: HostCache, outside: int) -> None:
    write(cache, [7, 0], *range(2 * BLOCK))
    cache.forget(np.array([outside, 1]))
    assert cache.are_written(np.array([outside, 0, 1])).tolist() == [False, True, False]
    assert read(cache, [7, 0], 0, 2 * BLOCK) == [0, 1, 2, 3, 4, UNKNOWN, 6, 7]


@pytest.mark.parametrize("outside", OUTSIDE)
def test_copies_from_and_to_slots_outside_the_kv_cache(cache: HostCache, outside: int) -> None:
    """Without a source there are no rows; without a destination nothing is written."""
    write(cache, [7, 0], *range(2 * BLOCK))
    other = HostCache(num_blocks=2, block_size=BLOCK, num_layers=L, top_k=K)
    write(other, [0, 1], *range(2 * BLOCK))
    cache.copy_from(other, np.array([outside, 1, 2]), np.array([0, outside, 2]))
    assert read(cache, [7, 0], 0, 2 * BLOCK) == [0, 1, 2, 3, UNKNOWN, 5, 2, 7]


@pytest.mark.parametrize("outside", [-1, 8, 1 << 40])
def test_copies_of_blocks_outside_the_kv_cache(cache: HostCache, outside: int) -> None:
    write(cache, [7, 0], *range(2 * BLOCK))
    cache.copy_blocks([(outside, 0), (7, outside), (7, 1)])
    assert read(cache, [7, 0, 1], 0, 3 * BLOCK) == [0, 1, 2, 3, *4 * [UNKNOWN], 0, 1, 2, 3]


def test_a_prefix_that_two_sequences_share(cache: HostCache) -> None:
    write(cache, [1, 2], *range(8))
    cache.write(slots_of([1, 4], 4, 5), rows_of(14, 15))
    assert read(cache, [1, 4], 0, 6) == [0, 1, 2, 3, 14, 15]
    assert read(cache, [1, 2], 0, 6) == [0, 1, 2, 3, 4, 5]


def test_copied_blocks_bring_their_rows(cache: HostCache) -> None:
    write(cache, [1], 0, 1)
    cache.copy_blocks([(1, 6)])
    write(cache, [1], 2)
    assert read(cache, [6], 0, 4) == [0, 1, UNKNOWN, UNKNOWN]
    assert read(cache, [1], 0, 4) == [0, 1, 2, UNKNOWN]


def test_all_sources_are_read_before_any_destination_is_written(cache: HostCache) -> None:
    """As vLLM copies the KV: a chain moves each block's rows by one, and a swap swaps."""
    write(cache, [1], 0)
    write(cache, [2, 2], 4, 5)
    cache.copy_blocks([(1, 2), (2, 3)])
    assert read(cache, [2], 0, 2) == [0, UNKNOWN]
    assert read(cache, [3], 0, 2) == [4, 5]
    cache.copy_blocks([(2, 3), (3, 2)])
    assert read(cache, [3], 0, 2) == [0, UNKNOWN]
    assert read(cache, [2], 0, 2) == [4, 5]


def test_a_block_without_rows_is_not_moved(cache: HostCache) -> None:
    """Most copies are of Mamba states, whose blocks have a thousand slots and no row."""
    write(cache, [6], 0)
    before = cache._rows[6].copy()
    cache._rows[1] = 9
    cache.copy_blocks([(1, 6)])
    assert np.array_equal(cache._rows[6], before)
    assert read(cache, [6], 0, 1) == [UNKNOWN]


def test_a_block_table_that_is_too_short_is_an_error(cache: HostCache) -> None:
    """Fewer rows than asked for would put those that follow at wrong positions."""
    write(cache, [1], 0, 1, 2, 3)
    for end in (5, 6):
        with pytest.raises(ValueError, match="block table"):
            read(cache, [1], 2, end)


@pytest.mark.parametrize("block", [-1, 8])
def test_a_block_that_there_is_none_of_is_an_error(cache: HostCache, block: int) -> None:
    """And not the nearest one that there is."""
    with pytest.raises(ValueError, match="there is none of"):
        read(cache, [1, block], 0, 8)


def test_other_threads_run_while_a_long_prompt_is_read() -> None:
    """It is read beside the scheduler, which must not wait for it."""
    cache = HostCache(num_blocks=4096, block_size=16, num_layers=48, top_k=8)
    cache._written[:] = True
    rows = np.empty((4096 * 16, 48, 8), dtype=np.int16)
    for _ in range(20):  # on a busy machine this thread may not get a processor for so long
        reading = threading.Thread(target=cache.read, args=(np.arange(4096), 0, rows))
        turns = 0
        reading.start()
        while reading.is_alive():
            turns += 1
            time.sleep(0)
        if turns > 20:
            return
    raise AssertionError(f"only {turns} turns during a read")
