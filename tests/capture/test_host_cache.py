"""Rows that live and die with the KV of their tokens, against a dictionary of slots."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.pending_rows import PendingRows
from routed_experts.protocol.codec import UNKNOWN

BLOCKS, BLOCK, L, K = 8, 4, 2, 3
SLOTS = BLOCKS * BLOCK
SLOT = st.integers(0, SLOTS - 1) | st.sampled_from([-1, -2, SLOTS, 1 << 40])
SLOT_LIST = st.lists(SLOT, max_size=6, unique=True)
BLOCK_ID = st.integers(0, BLOCKS - 1) | st.sampled_from([-1, BLOCKS, 1 << 40])


def cache_of() -> HostCache:
    """The memory is not cleared at the start: what lies there may look like ids."""
    cache = HostCache(num_blocks=BLOCKS, block_size=BLOCK)
    cache._allocate((L, K))
    cache._rows[:] = 3
    return cache


def rows_of(values: list[int]) -> np.ndarray:
    """Rows [n, L, K], each filled with its value."""
    return np.repeat(np.array(values, dtype=np.int16), L * K).reshape(-1, L, K)


def array(slots: list[int]) -> np.ndarray:
    return np.array(slots, dtype=np.int64)


def read(cache: HostCache, blocks: list[int], first: int, end: int) -> list[int]:
    rows = np.full((end - first, L, K), 99, dtype=np.int16)
    cache.read(array(blocks), first, rows)
    assert (rows == rows[:, :1, :1]).all()
    values = [int(value) for value in rows[:, 0, 0]]
    rows[:] = 98  # a copy, not a view
    return values


@settings(max_examples=250, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_the_cache_is_a_dictionary_of_slots(data: st.DataObject) -> None:
    """Slots and blocks outside the KV cache, such as vLLM's padding, are never written and have no
    rows. Rows that wait are those of when they began to, and it is told once which of them are
    unknown."""
    caches: list[tuple[HostCache, dict[int, int]]] = [
        (cache_of(), {}),
        (HostCache(BLOCKS, BLOCK), {}),
    ]
    waiting: list[tuple[PendingRows, list[int], list[int]]] = []
    for step in range(data.draw(st.integers(1, 8))):
        cache, known = caches[data.draw(st.integers(0, 1))]
        match data.draw(
            st.sampled_from(
                ["write", "write", "write", "forget", "copy_from", "copy_blocks", "wait"]
            )
        ):
            case "write":
                slots = data.draw(SLOT_LIST)
                values = [100 * step + i for i in range(len(slots))]
                cache.write(array(slots), rows_of(values))
                known.update((s, v) for s, v in zip(slots, values, strict=True) if 0 <= s < SLOTS)
            case "forget":
                slots = data.draw(SLOT_LIST)
                cache.forget(array(slots))
                for slot in slots:
                    known.pop(slot, None)
            case "copy_from":
                slots = data.draw(SLOT_LIST)
                sources = data.draw(st.lists(SLOT, min_size=len(slots), max_size=len(slots)))
                other, theirs = caches[0]
                copied = [
                    (slot, theirs.get(source)) for slot, source in zip(slots, sources, strict=True)
                ]
                cache.copy_from(other, array(sources), array(slots))
                put(known, copied)
            # all sources are read before any destination is written, as vLLM copies the KV
            case "copy_blocks":
                targets = data.draw(st.lists(BLOCK_ID, min_size=1, max_size=3, unique=True))
                pairs = [(data.draw(BLOCK_ID), target) for target in targets]
                copied = [
                    (b * BLOCK + at, known.get(a * BLOCK + at))
                    for a, b in pairs
                    for at in range(BLOCK)
                ]
                cache.copy_blocks(pairs)
                put(known, copied)
            case "wait" if cache.row_shape == (L, K):
                (blocks, first, end), told = drawn_sequence(data), list[int]()
                held = data.draw(st.integers(0, end - first))
                pieces = [rows_of([7] * held), end - first - held]
                pending = PendingRows(
                    cache, first, pieces, array(blocks), partial(unknown_in, told)
                )
                waiting.append(
                    (pending, [7] * held + rows_in(known, blocks, first + held, end), told)
                )
    for pending, values, told in waiting:
        positions = [pending.start + at for at, value in enumerate(values) if value == UNKNOWN]
        taken = list[int]()
        while len(pending):
            start, rows = pending.take(data.draw(st.sampled_from([L * K * 2, 5 * L * K * 2, None])))
            assert start + len(rows) == pending.start
            taken += rows[:, 0, 0].tolist()
        assert (taken, sorted(told)) == (values, positions)
    cache, known = caches[1] if data.draw(st.booleans()) else caches[0]
    assert cache.are_written(array([*range(-2, SLOTS + 2)])).tolist() == [
        s in known for s in range(-2, SLOTS + 2)
    ]
    assert cache.used_bytes == len(known) * L * K * 2
    blocks, first, end = drawn_sequence(data)
    assert (
        read(cache, blocks, first, end)
        == read(cache, blocks, first, end)
        == rows_in(known, blocks, first, end)
    )


def drawn_sequence(data: st.DataObject) -> tuple[list[int], int, int]:
    """A block table, and the first and last position to be read."""
    blocks = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=5))
    end = data.draw(st.integers(0, len(blocks) * BLOCK))
    return blocks, data.draw(st.integers(0, end)), end


def rows_in(known: dict[int, int], blocks: list[int], first: int, end: int) -> list[int]:
    return [
        known.get(blocks[at // BLOCK] * BLOCK + at % BLOCK, UNKNOWN) for at in range(first, end)
    ]


def unknown_in(told: list[int], blocks: np.ndarray, first: int, rows: np.ndarray) -> None:
    told += (np.flatnonzero(rows[:, 0, 0] == UNKNOWN) + first).tolist()


def put(known: dict[int, int], copied: list[tuple[int, int | None]]) -> None:
    for slot, value in copied:
        known.pop(slot, None)
        if value is not None and 0 <= slot < SLOTS:
            known[slot] = value


def test_a_block_without_rows_is_not_moved() -> None:
    """Most copies are of Mamba states, whose blocks have a thousand slots and no row."""
    cache = cache_of()
    cache.write(array([6 * BLOCK]), rows_of([1]))
    before = cache._rows[6].copy()
    cache._rows[1] = 9
    cache.copy_blocks([(1, 6)])
    assert np.array_equal(cache._rows[6], before)
    assert read(cache, [6], 0, 1) == [UNKNOWN]


def test_invalid_block_tables() -> None:
    """Too short for the rows, or with a block that does not exist: nothing is read from the nearest
    one."""
    cache = cache_of()
    for end in (5, 6):
        with pytest.raises(ValueError, match="block table"):
            read(cache, [1], 2, end)
    for block in (-1, BLOCKS):
        with pytest.raises(ValueError, match="there is none of"):
            read(cache, [1, block], 0, 8)
