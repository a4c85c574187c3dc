"""Rows of KV that is offloaded, against a dictionary of places."""

import random

import numpy as np
import pytest

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.row_store import RowStore
from routed_experts.capture.wire.message import Cause
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


@pytest.mark.parametrize("seed", range(8))
def test_the_store_is_a_dictionary_of_places(seed: int) -> None:
    """Chunks that do not exist are not kept, nor is another in their place; slots without rows are
    kept without."""
    rng = random.Random(seed)
    for _ in range(50):
        store, kept = RowStore(CHUNKS, CHUNK), {}
        assert store.used_bytes == 0
        for _ in range(rng.randrange(5)):
            missing = set(rng.sample(range(SLOTS), rng.choice([0, 0, 1, 3])))
            cache = cache_of(set(range(SLOTS)) - missing)
            chunks = rng.sample(CHUNK_IDS, rng.randrange(4))
            slots = rng.sample(range(SLOTS), len(chunks) * CHUNK)
            for _ in range(rng.choice([0, 0, 2]) if slots else 0):
                slots[rng.randrange(len(slots))] = rng.choice([-1, SLOTS])
            store.keep(cache, array(slots), array(chunks))
            for index, chunk in enumerate(chunks):
                for at, slot in enumerate(slots[index * CHUNK : (index + 1) * CHUNK]):
                    if 0 <= chunk < CHUNKS:
                        kept.pop(chunk * CHUNK + at, None)
                        if 0 <= slot < SLOTS and slot not in missing:
                            kept[chunk * CHUNK + at] = slot
        assert store.used_bytes == len(kept) * L * K * 2
        for chunk in CHUNK_IDS:
            assert store.is_complete(chunk) == all(
                chunk * CHUNK + at in kept for at in range(CHUNK)
            )
        assert store.have_rows(array(PLACES)).tolist() == [place in kept for place in PLACES]
        places = rng.sample(PLACES, 20)
        slots = rng.sample(range(SLOTS), 20)
        cache = cache_of(set(range(SLOTS)))
        store.fill(cache, array(slots), array(places), Cause.FAULT)
        rows = np.empty((SLOTS, L, K), dtype=np.int16)
        cache.read(np.arange(SLOTS // BLOCK), 0, rows)
        expected = np.arange(SLOTS)
        expected[slots] = [kept.get(place, UNKNOWN) for place in places]
        assert np.array_equal(rows, np.broadcast_to(expected[:, None, None], rows.shape))
