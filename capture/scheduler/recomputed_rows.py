"""The experts that tokens had whose KV was lost: it is computed again under them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from routed_experts.capture.scheduler.row_source import RowSource
from routed_experts.capture.scheduler.step import BlockTable, LostKV, Recomputing
from routed_experts.capture.wire.message import PlacedRows
from routed_experts.protocol.codec import Rows


class RecomputedRows:
    """Keeps the rows of requests that are preempted, or whose load of KV fails.

    In 16 bits, a router may choose otherwise in another batch. As it is given these rows, they and
    the new KV agree. Where this is off, nothing is kept.
    """

    def __init__(self, source: RowSource, *, is_on: bool) -> None:
        self.is_on = is_on
        self._source = source
        self._lost: dict[str, LostKV] = {}

    def __len__(self) -> int:
        return len(self._lost)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._lost

    def lose(self, request_id: str, num_rows: int) -> None:
        """Called when a request loses KV, while it has its blocks. `num_rows` rows were sent,
        counted from position 0 on."""
        if not self.is_on:
            return
        before = self._lost.get(request_id)
        if before is None:
            table = self._source.block_table(request_id)
            rows = self._source.ids_before(num_rows, table)
        else:
            # Not from the host cache, which may still have others' rows in its slots.
            rows = before.rows
        # A new one, so that steps which ran for the one before do not end it.
        self._lost[request_id] = LostKV(rows)

    def add(self, request_id: str, first: int, ids: Rows, table: BlockTable) -> None:
        """Called when a request that has lost KV is sent the rows `ids` from position `first` on,
        of a step that was scheduled before. `table`: its block table then, if these are the first
        rows that it is sent."""
        if not self.is_on:
            return
        lost = self._lost.get(request_id)
        if lost is None:
            lost = LostKV(self._source.ids_before(first, table))
            self._lost[request_id] = lost
        lost.rows = np.concatenate([lost.rows, ids])

    def schedule(self, scheduled: Any, requests: Mapping[str, Any]) -> Recomputing:
        """Called when a step has been scheduled (vLLM's `SchedulerOutput`), before its requests are
        advanced."""
        recomputing = Recomputing()
        if not self._lost:
            return recomputing
        num_scheduled = scheduled.num_scheduled_tokens
        for request_id in num_scheduled.keys() & self._lost.keys():
            lost = self._lost[request_id]
            start = requests[request_id].num_computed_tokens
            end = start + num_scheduled[request_id]
            if start < len(lost.rows):
                recomputing.rows[request_id] = PlacedRows(start, lost.rows[start:end])
            if end >= len(lost.rows):
                recomputing.ends[request_id] = lost
        return recomputing

    def arrive(self, ends: Mapping[str, LostKV]) -> None:
        """Called when a step has arrived, and requests that lost KV in it are known."""
        for request_id, lost in ends.items():
            if self._lost.get(request_id) is lost:
                del self._lost[request_id]

    def forget(self, request_id: str) -> None:
        """Called when a request has ended."""
        self._lost.pop(request_id, None)

    def forget_all(self) -> None:
        """Called when later steps may use other weights."""
        self._lost.clear()
