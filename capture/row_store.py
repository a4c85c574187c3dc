"""The rows of KV that is kept outside the KV cache, each where its KV is."""

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.host_cache import Cause, HostCache, within


class RowStore:
    """A place for rows for each place for KV.

    Chunks of KV are copied out of the KV cache and back into it, and so are their rows. Evicted chunks need no cleanup:
    the next chunk overwrites them. Memory is bounded by the KV that may be kept, and reserved by the operating system
    only as it is written.
    """

    def __init__(self, num_chunks: int, chunk_tokens: int, has_weights: bool = False) -> None:
        self.chunk_tokens = chunk_tokens
        self._num_chunks = num_chunks
        self._rows: HostCache | None = None  # made with the first rows, which say L and K
        self._has_weights = has_weights
        self._is_complete: NDArray[np.bool_] = np.zeros(num_chunks, dtype=np.bool_)
        self._has_all_weights: NDArray[np.bool_] = np.zeros(num_chunks, dtype=np.bool_)  # whole, with all weights

    @property
    def used_bytes(self) -> int:
        """Memory that the rows take."""
        return self._rows.used_bytes if self._rows is not None else 0

    def is_complete(self, chunk: int, with_weights: bool = False) -> bool:
        """Whether every row of a chunk is there, and has its weights."""
        has_all = self._has_all_weights if with_weights else self._is_complete
        return 0 <= chunk < self._num_chunks and bool(has_all[chunk])

    def have_rows(self, places: NDArray[np.int64], with_weights: bool = False) -> NDArray[np.bool_]:
        """Which of `places` ([n], chunk x its tokens + token; or -1) have rows, with their weights."""
        if self._rows is None:
            return np.zeros(len(places), dtype=np.bool_)
        have = self._rows.are_written(places)
        return have & ~self._rows.lack_weights(places) if with_weights else have

    def keep(self, cache: HostCache, slots: NDArray[np.int64], chunks: NDArray[np.int64]) -> None:
        """Copies the rows of `slots` ([n x tokens of a chunk]) to `chunks` ([n]), those that exist."""
        inside = within(chunks, self._num_chunks)
        slots, chunks = slots.reshape(-1, self.chunk_tokens)[inside].reshape(-1), chunks[inside]
        if self._rows is None:
            self._rows = HostCache(self._num_chunks, self.chunk_tokens, *cache.row_shape)
        places = (chunks[:, None] * self.chunk_tokens + np.arange(self.chunk_tokens)).reshape(-1)
        self._rows.copy_from(cache, slots, places)
        self._is_complete[chunks] = self._rows.are_written(places).reshape(-1, self.chunk_tokens).all(axis=1)
        if self._has_weights:
            lack = self._rows.lack_weights(places).reshape(-1, self.chunk_tokens).any(axis=1)
            self._has_all_weights[chunks] = self._is_complete[chunks] & ~lack

    def fill(self, cache: HostCache, slots: NDArray[np.int64], places: NDArray[np.int64], cause: Cause) -> None:
        """Makes `slots` ([n]) what `places` ([n], as for `have_rows`) are: unwritten, where there are no rows, because
        of `cause`."""
        if self._rows is None:
            cache.forget(slots, cause)
        else:
            cache.copy_from(self._rows, places, slots, cause)
