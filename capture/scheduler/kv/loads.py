"""What a load of KV does to the host cache."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.wire.message import Cause
from routed_experts.capture.wire.prefill_rows import PrefillRows
from routed_experts.protocol.codec import UNKNOWN

_PIECE_ROWS = 256
"""Rows that are written at once: a piece stays in the processor's cache until it is written."""


@dataclass(frozen=True)
class KVLoad:
    """Makes the slots of loaded KV unknown, but for the rows that came with the KV."""

    slots: NDArray[np.int64]  # [n], all loaded slots
    # m <= n, of the first m slots; the others are unknown. `PrefillRowsExchange` has checked their
    # shape.
    rows: PrefillRows | None
    cause: Cause  # why some are unknown

    def are_known(self) -> NDArray[np.bool_]:
        """[n], True for slots whose rows are known."""
        known: NDArray[np.bool_] = np.zeros(len(self.slots), dtype=np.bool_)
        if self.rows is None:
            return known
        ids = self.rows.rows
        has_all = ids.min(initial=0) > UNKNOWN
        known[: len(ids)] = has_all or (ids != UNKNOWN).all(axis=(1, 2))
        return known

    def apply(self, cache: HostCache) -> None:
        cache.forget(self.slots, self.cause)
        if self.rows is None:
            return
        count = len(self.rows.rows)
        buffer = np.empty((min(count, _PIECE_ROWS), *cache.row_shape), dtype=np.int16)
        for first in range(0, count, _PIECE_ROWS):
            piece = self.rows.rows[first : first + _PIECE_ROWS]
            slots = self.slots[first : first + len(piece)]
            rows = buffer[: len(piece)]
            rows[:] = piece
            cache.write(slots, rows)
            unknown = rows[:, 0, 0] == UNKNOWN  # also where the rows came from
            if unknown.any():
                cache.forget(slots[unknown], self.cause)
