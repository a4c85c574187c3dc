"""Rows of KV that is offloaded, against a dictionary of places."""

import random

import numpy as np

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.row_store import RowStore
from routed_experts.protocol.codec import UNKNOWN
from tests.capture.test_host_cache import BLOCK, K, L, array

SLOTS, CHUNK, CHUNKS = 8 * BLOCK, 2 * BLOCK, 3
PLACES = [*range(-1, CHUNKS * CHUNK + 1), 1 << 43]
CHUNK_IDS = [*range(CHUNKS), -1, CHUNKS, 1 << 40]


def cache_of(known: set[int]) -> HostCache:
    """Slots whose rows are filled with the slot's number."""
    cache = HostCache(num_blocks=SLOTS // BLOCK, block_size=BLOCK)
    slots = np.array(sorted(known), dtype=np.int64)
    cache.write(slots, np.broadcast_to(slots[:, None, None], (len(slots), L, K)).astype(np.int16))
    return cache


class Store:
    """A store, and beside it the dictionary that it has to be: the slot whose row is at a place."""

    def __init__(self) -> None:
        self.store = RowStore(CHUNKS, CHUNK)
        self.slot_at: dict[int, int] = {}

    def keep(self, chunks: list[int], slots: list[int], missing: set[int]) -> None:
        """Copies the rows of `slots` into `chunks`, but for those that the cache does not have."""
        cache = cache_of(set(range(SLOTS)) - missing)
        self.store.keep(cache, array(slots), array(chunks))
        for index, chunk in enumerate(chunks):
            if 0 <= chunk < CHUNKS:
                of_chunk = slots[index * CHUNK : (index + 1) * CHUNK]
                self._note(chunk, of_chunk, missing)

    def _note(self, chunk: int, slots: list[int], missing: set[int]) -> None:
        for stored_at, slot in enumerate(slots, chunk * CHUNK):
            self.slot_at.pop(stored_at, None)
            if 0 <= slot < SLOTS and slot not in missing:
                self.slot_at[stored_at] = slot

    def check_what_it_has(self) -> None:
        assert self.store.used_bytes == len(self.slot_at) * L * K * 2
        has_rows = [stored_at in self.slot_at for stored_at in PLACES]
        assert self.store.have_rows(array(PLACES)).tolist() == has_rows
        for chunk in CHUNK_IDS:
            places = range(chunk * CHUNK, (chunk + 1) * CHUNK)
            assert self.store.is_complete(chunk) == all(map(self.slot_at.__contains__, places))

    def check_fill(self, slots: list[int], places: list[int]) -> None:
        """Rows from `places` come into `slots` of a cache, and nothing else in it changes."""
        cache = cache_of(set(range(SLOTS)))
        self.store.fill(cache, array(slots), array(places))
        rows = np.empty((SLOTS, L, K), dtype=np.int16)
        cache.read(np.arange(SLOTS // BLOCK), 0, rows)
        expected = np.arange(SLOTS)
        expected[slots] = [self.slot_at.get(stored_at, UNKNOWN) for stored_at in places]
        assert np.array_equal(rows, np.broadcast_to(expected[:, None, None], rows.shape))


def drawn_slots(rng: random.Random, count: int) -> list[int]:
    """Some of them may be outside the cache, as those of padding."""
    slots = rng.sample(range(SLOTS), count)
    num_outside = rng.choice([0, 0, 2]) if slots else 0
    for _ in range(num_outside):
        slots[rng.randrange(count)] = rng.choice([-1, SLOTS])
    return slots


def test_the_store_is_a_dictionary_of_places() -> None:
    """Chunks that do not exist are not kept, nor is another in their place; slots without rows are
    kept without."""
    rng = random.Random(0)
    for _ in range(100):
        store = Store()
        assert store.store.used_bytes == 0
        for _ in range(rng.randrange(5)):
            missing = set(rng.sample(range(SLOTS), rng.choice([0, 0, 1, 3])))
            chunks = rng.sample(CHUNK_IDS, rng.randrange(4))
            store.keep(chunks, drawn_slots(rng, len(chunks) * CHUNK), missing)
        store.check_what_it_has()
        places = rng.sample(PLACES, 20)
        store.check_fill(rng.sample(range(SLOTS), 20), places)
