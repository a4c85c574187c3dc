"""The rows of KV that is kept outside the KV cache, by the place of their KV."""

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.scheduler.host_cache import HostCache, within
from routed_experts.capture.wire.message import Cause


class RowStore:
    """A place for rows for each place for KV: chunks of KV are copied out of the KV cache and back
    into it, and so are their rows. Evicted chunks need no cleanup: the next chunk overwrites
    them."""

    def __init__(self, num_chunks: int, chunk_tokens: int, has_weights: bool = False) -> None:
        self.chunk_tokens = chunk_tokens
        self._num_chunks = num_chunks
        self._rows = HostCache(num_chunks, chunk_tokens, has_weights)
        self._is_complete: NDArray[np.bool_] = np.zeros(num_chunks, dtype=np.bool_)
        # whole, with all weights
        self._has_all_weights: NDArray[np.bool_] = np.zeros(num_chunks, dtype=np.bool_)

    @property
    def used_bytes(self) -> int:
        return self._rows.used_bytes

    def is_complete(self, chunk: int, with_weights: bool = False) -> bool:
        """Whether every row of a chunk is there, and has its weights."""
        has_all = self._has_all_weights if with_weights else self._is_complete
        return 0 <= chunk < self._num_chunks and bool(has_all[chunk])

    def have_rows(self, places: NDArray[np.int64], with_weights: bool = False) -> NDArray[np.bool_]:
        """Which of `places` ([n], chunk x its tokens + token; or -1) have rows, with their
        weights."""
        have = self._rows.are_written(places)
        return have & ~self._rows.missing_weights(places) if with_weights else have

    def keep(self, cache: HostCache, slots: NDArray[np.int64], chunks: NDArray[np.int64]) -> None:
        """Copies the rows of `slots` ([n x tokens of a chunk]) to `chunks` ([n]), those that
        exist."""
        inside = within(chunks, self._num_chunks)
        slots, chunks = slots.reshape(-1, self.chunk_tokens)[inside].reshape(-1), chunks[inside]
        places = (chunks[:, None] * self.chunk_tokens + np.arange(self.chunk_tokens)).reshape(-1)
        self._rows.copy_from(cache, slots, places)
        for all_have, with_weights in ((self._is_complete, False), (self._has_all_weights, True)):
            all_have[chunks] = (
                self.have_rows(places, with_weights).reshape(-1, self.chunk_tokens).all(axis=1)
            )

    def fill(
        self, cache: HostCache, slots: NDArray[np.int64], places: NDArray[np.int64], cause: Cause
    ) -> None:
        """Makes `slots` ([n]) what `places` ([n], as for `have_rows`) are; unwritten for `cause`
        without rows."""
        cache.copy_from(self._rows, places, slots, cause)
