"""Rows that live and die with the KV of their tokens, against a dictionary of slots."""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.pending_rows import PendingRows
from routed_experts.protocol.codec import UNKNOWN, UNKNOWN_STEP
from tests.protocol.answers import peak_of

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


class Cache:
    """A cache, and beside it the dictionary that it has to be: the value of each slot's row."""

    def __init__(self, cache: HostCache) -> None:
        self.cache = cache
        self.known: dict[int, int] = {}

    def write(self, slots: list[int], values: list[int]) -> None:
        self.cache.write(array(slots), rows_of(values), step=values[0] // 100 if values else 0)
        self._put(zip(slots, values, strict=True))

    def forget(self, slots: list[int]) -> None:
        self.cache.forget(array(slots))
        for slot in slots:
            self.known.pop(slot, None)

    def copy_from(self, other: "Cache", sources: list[int], slots: list[int]) -> None:
        copied = [
            (slot, other.known.get(source)) for slot, source in zip(slots, sources, strict=True)
        ]
        self.cache.copy_from(other.cache, array(sources), array(slots))
        self._put(copied)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """All sources are read before any destination is written, as vLLM copies the KV."""
        copied = [
            (target * BLOCK + offset, self.known.get(source * BLOCK + offset))
            for source, target in pairs
            for offset in range(BLOCK)
        ]
        self.cache.copy_blocks(pairs)
        self._put(copied)

    def _put(self, rows: Iterable[tuple[int, int | None]]) -> None:
        for slot, value in rows:
            self.known.pop(slot, None)
            if value is not None and 0 <= slot < SLOTS:
                self.known[slot] = value

    def check_what_it_has(self) -> None:
        slots = [*range(-2, SLOTS + 2)]
        written = self.cache.are_written(array(slots)).tolist()
        assert written == [slot in self.known for slot in slots]
        assert self.cache.used_bytes == len(self.known) * L * K * 2

    def check_read(self, blocks: list[int], first: int, end: int) -> None:
        """And again: reading changes nothing."""
        expected = rows_in(self.known, blocks, first, end)
        assert read(self.cache, blocks, first, end) == expected
        assert read(self.cache, blocks, first, end) == expected
        steps = [UNKNOWN_STEP if value == UNKNOWN else value // 100 for value in expected]
        assert self.cache.steps(array(blocks), first, end - first).tolist() == steps


class Waiting:
    """Rows of a sequence that wait from now on. The first `num_held` are not in the cache any
    more."""

    def __init__(self, cache: Cache, sequence: tuple[list[int], int, int], num_held: int) -> None:
        blocks, first, end = sequence
        held = [7] * num_held
        self._told_unknown: list[int] = []
        self._pending = PendingRows(
            cache.cache,
            first,
            [rows_of(held), end - first - num_held],
            array(blocks),
            partial(unknown_in, self._told_unknown),
        )
        self._values = held + rows_in(cache.known, blocks, first + num_held, end)

    def check(self, limits: Callable[[], int | None]) -> None:
        """Takes all of them, in pieces of at most so many bytes."""
        unknown = [
            position
            for position, value in enumerate(self._values, self._pending.start)
            if value == UNKNOWN
        ]
        taken: list[int] = []
        while len(self._pending):
            start, rows, _ = self._pending.take(limits())
            assert start + len(rows) == self._pending.start
            taken += rows[:, 0, 0].tolist()
        assert taken == self._values
        assert sorted(self._told_unknown) == unknown


OPERATIONS = st.sampled_from(
    ["write", "write", "write", "forget", "copy_from", "copy_blocks", "wait"]
)
PIECE_BYTES = st.sampled_from([L * K * 2, 5 * L * K * 2, None])


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_the_cache_is_a_dictionary_of_slots(data: st.DataObject) -> None:
    """Slots and blocks outside the KV cache, such as vLLM's padding, are never written and have no
    rows. Rows that wait are those of when they began to, and it is told once which of them are
    unknown."""
    caches = [Cache(cache_of()), Cache(HostCache(BLOCKS, BLOCK))]
    waiting: list[Waiting] = []
    for step in range(data.draw(st.integers(1, 8))):
        cache = data.draw(st.sampled_from(caches))
        match data.draw(OPERATIONS):
            case "write":
                slots = data.draw(SLOT_LIST)
                cache.write(slots, [100 * step + index for index in range(len(slots))])
            case "forget":
                cache.forget(data.draw(SLOT_LIST))
            case "copy_from":
                slots = data.draw(SLOT_LIST)
                sources = data.draw(st.lists(SLOT, min_size=len(slots), max_size=len(slots)))
                cache.copy_from(caches[0], sources, slots)
            case "copy_blocks":
                targets = data.draw(st.lists(BLOCK_ID, min_size=1, max_size=3, unique=True))
                cache.copy_blocks([(data.draw(BLOCK_ID), target) for target in targets])
            case "wait" if cache.cache.row_shape == (L, K):
                blocks, first, end = drawn_sequence(data)
                num_held = data.draw(st.integers(0, end - first))
                waiting.append(Waiting(cache, (blocks, first, end), num_held))
    for rows in waiting:
        rows.check(lambda: data.draw(PIECE_BYTES))
    cache = data.draw(st.sampled_from(caches))
    cache.check_what_it_has()
    cache.check_read(*drawn_sequence(data))


def drawn_sequence(data: st.DataObject) -> tuple[list[int], int, int]:
    """A block table, and the first and last position to be read."""
    blocks = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=5))
    end = data.draw(st.integers(0, len(blocks) * BLOCK))
    return blocks, data.draw(st.integers(0, end)), end


def rows_in(known: dict[int, int], blocks: list[int], first: int, end: int) -> list[int]:
    return [
        known.get(blocks[at // BLOCK] * BLOCK + at % BLOCK, UNKNOWN) for at in range(first, end)
    ]


def unknown_in(unknown: list[int], blocks: np.ndarray, first: int, rows: np.ndarray) -> None:
    unknown += (np.flatnonzero(rows[:, 0, 0] == UNKNOWN) + first).tolist()


def test_a_block_without_rows_is_not_moved() -> None:
    """Most copies are of Mamba states, whose blocks have a thousand slots and no row."""
    cache = cache_of()
    cache.write(array([6 * BLOCK]), rows_of([1]))
    before = cache._rows[6].copy()
    cache._rows[1] = 9
    cache.copy_blocks([(1, 6)])
    assert np.array_equal(cache._rows[6], before)
    assert read(cache, [6], 0, 1) == [UNKNOWN]


def test_rows_are_read_without_a_copy_between() -> None:
    """The rows of a long prompt are hundreds of megabytes."""
    num_blocks = 1000
    cache = HostCache(num_blocks=num_blocks, block_size=16)
    rows = np.zeros((num_blocks * 16, 8, 8), np.int16)
    cache.write(np.arange(len(rows)), rows)
    blocks = np.arange(num_blocks)[::-1].copy()
    _, most_bytes = peak_of(lambda: cache.read(blocks, 0, rows))
    assert most_bytes < rows.nbytes / 10


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
