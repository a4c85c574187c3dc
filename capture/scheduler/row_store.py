"""The rows of KV that is kept outside the KV cache, indexed the way that KV is."""

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.scheduler.host_cache import HostCache, Mask, Slots, within


class RowStore:
    """Chunks of rows, one for each chunk of KV that is copied out of the KV cache and back into it.

    A *store slot* is where the row of a token in a chunk is: chunk x tokens of a chunk + index of the
    token. Evicted chunks need no cleanup: the next chunk overwrites them.
    """

    def __init__(self, num_chunks: int, chunk_tokens: int, has_weights: bool = False) -> None:
        self.chunk_tokens = chunk_tokens
        self._num_chunks = num_chunks
        self._rows = HostCache(num_chunks, chunk_tokens, has_weights)
        self._is_complete: Mask = np.zeros(num_chunks, dtype=np.bool_)

    @property
    def used_bytes(self) -> int:
        return self._rows.used_bytes

    def is_complete(self, chunk: int) -> bool:
        """Whether every row of a chunk is there."""
        return 0 <= chunk < self._num_chunks and bool(self._is_complete[chunk])

    def have_rows(self, store_slots: Slots) -> Mask:
        """Which of `store_slots` ([n]; -1 has none) have rows."""
        return self._rows.are_written(store_slots)

    def keep(self, cache: HostCache, slots: Slots, chunks: NDArray[np.int64]) -> None:
        """Copies the rows of `slots` ([n x tokens of a chunk]) of the host cache to `chunks` ([n]),
        those of them that exist."""
        inside = within(chunks, self._num_chunks)
        slots = slots.reshape(-1, self.chunk_tokens)[inside].reshape(-1)
        chunks = chunks[inside]
        store_slots = chunks[:, None] * self.chunk_tokens + np.arange(self.chunk_tokens)
        store_slots = store_slots.reshape(-1)
        self._rows.copy_from(cache, slots, store_slots)
        have = self.have_rows(store_slots).reshape(-1, self.chunk_tokens)
        self._is_complete[chunks] = have.all(axis=1)

    def fill(self, cache: HostCache, slots: Slots, store_slots: Slots) -> None:
        """Makes `slots` ([n]) of the host cache what `store_slots` ([n]; -1 has no row) are."""
        cache.copy_from(self._rows, store_slots, slots)
