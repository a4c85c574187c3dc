"""KV that a connector loads: its slots have no rows but those that came with it, and requests that ask for rows may do
without it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from routed_experts.capture.engine.connectors import MULTI, RECOMPUTE, Kind, used_by
from routed_experts.capture.rows import UNKNOWN, Rows
from routed_experts.capture.split import RequestRows

LocalHit = tuple[KVCacheBlocks, int, int, bool]
"""What a lookup in the prefix cache gives: blocks, tokens, and two things about hybrid models."""


@dataclass(frozen=True)
class Load:
    """What becomes of the host cache when KV is loaded.

    Attributes:
        slots: [n], all that are loaded.
        rows: [m <= n, L, K], of the first of them; the others are not known.
    """

    slots: NDArray[np.int64]
    rows: Rows | None


class Loads:
    """Watches a connector's scheduler side.

    vLLM asks the connector how many tokens it could load, allocates blocks for them, and tells it (a load of no tokens
    is none). There is no other way for KV from outside into a block, so that both methods are replaced on the instance.
    For a `MultiConnector` it is the outer one.

    A load is decided when a step is scheduled, while steps before it may still write rows into the same slots. So its
    slots become unwritten when that step arrives (`take`), before its rows.
    """

    def __init__(
        self,
        connector: Any,
        config: KVTransferConfig,
        kv_cache_manager: KVCacheManager,
        kv_group: int,
        block_size: int,
        tracked: Mapping[str, RequestRows],
        policy: str,
    ) -> None:
        self._connector = connector
        self._used = [child for child in used_by(config) if child is not None]
        self._is_multi = config.kv_connector == MULTI
        self._writes_behind_hit = all(child.writes_behind_hit for child in self._used)
        self._kv_cache_manager = kv_cache_manager
        self._kv_group = kv_group
        self._block_size = block_size
        self._tracked = tracked
        self._recompute = policy == RECOMPUTE
        self._asked: tuple[str, int] = "", 0
        self._loads: list[Load] = []
        self._handed: dict[str, Rows] = {}  # by request, the rows of its prompt that came with it
        self._rowless: set[int] = set()  # blocks some of whose rows were not computed here, as of the step to come
        self._get_num_new_matched_tokens = connector.get_num_new_matched_tokens
        self._update_state_after_alloc = connector.update_state_after_alloc
        connector.get_num_new_matched_tokens = self._ask
        connector.update_state_after_alloc = self._load

    def hand(self, request_id: str, rows: Rows) -> None:
        """Keeps the rows [n, L, K] of the KV that another instance has for a request, from position 0 on."""
        self._handed[request_id] = rows

    def forget(self, request_id: str) -> None:
        """Called when a request has ended."""
        self._handed.pop(request_id, None)

    def take(self, step: SchedulerOutput, requests: Mapping[str, Request]) -> list[Load]:
        """What is loaded with, or before, a step that has been scheduled.

        Called before its requests are advanced.
        """
        loads, self._loads = self._loads, []
        if self._rowless:
            for source, destination in step.kv_cache_block_copies or ():
                if source in self._rowless:
                    self._rowless.add(destination)
            for request_id, count in step.num_scheduled_tokens.items():
                start = requests[request_id].num_computed_tokens
                first, end = -(-start // self._block_size), -(-(start + count) // self._block_size)
                if first < end:  # a block whose first slot is computed is computed as a whole
                    blocks = self._manager.req_to_blocks[request_id][first:end]
                    self._rowless.difference_update(block.block_id for block in blocks)
        return loads

    def cap_local(self, request: Request, hit: LocalHit) -> LocalHit:
        """A prefix hit up to the first block without rows that the request needs; hybrid models have no such cut."""
        blocks, _, boundary, diverged = hit
        if not self._rowless or len(blocks.blocks) > 1:
            return hit
        first = self._first_needed(request) // self._block_size if self._needs_rows(request) else len(blocks.blocks[0])
        for index, block in enumerate(blocks.blocks[0][first:], first):
            if block.block_id in self._rowless:
                num_tokens = index * self._block_size
                cut = self._kv_cache_manager.truncate_computed_blocks(blocks, num_tokens)
                return cut, num_tokens, min(boundary, num_tokens), diverged
        return hit

    @property
    def _manager(self) -> Any:
        return self._kv_cache_manager.coordinator.single_type_managers[self._kv_group]

    def _needs_rows(self, request: Request) -> bool:
        return self._recompute and request.request_id in self._tracked

    def _first_needed(self, request: Request) -> int:
        """Position of the first row that the request has not been sent."""
        return self._tracked[request.request_id].next_row

    def _ask(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        """All or nothing: connectors take it badly if less is loaded than they offered, but none at all is common."""
        self._asked = request.request_id, num_local
        count, is_async = self._get_num_new_matched_tokens(request, num_local)
        if not count or not self._needs_rows(request) or self._kind(request) is Kind.TRANSFER:
            return count, is_async
        return (count, is_async) if num_local + count <= self._first_needed(request) else (0, False)

    def _kind(self, request: Request) -> Kind:
        """Of the connector that a request's KV would come from."""
        if not self._is_multi:
            return self._used[0].kind
        return self._used[self._connector._requests_to_connector[request.request_id]].kind

    def _load(self, request: Request, blocks: KVCacheBlocks, count: int) -> None:
        self._update_state_after_alloc(request, blocks, count)
        if not count:
            return
        asked, num_local = self._asked
        assert asked == request.request_id, "KV is loaded that nobody was asked for"
        rows = self._handed.pop(request.request_id, None) if self._kind(request) is Kind.TRANSFER else None
        table = np.array([block.block_id for block in blocks.blocks[self._kv_group]], dtype=np.int64)
        if not self._writes_behind_hit:
            self._add(table, 0, num_local, None)
        self._add(table, num_local, num_local + count, rows)

    def _add(self, table: NDArray[np.int64], first: int, end: int, rows: Rows | None) -> None:
        """Keeps account of a load of positions `first` to `end`, of which there may be `rows`, from position 0 on."""
        positions = np.arange(first, end)
        is_known = np.zeros(end - first, dtype=np.bool_)
        if rows is not None:
            rows = rows[first:end]
            is_known[: len(rows)] = (rows != UNKNOWN).all(axis=(1, 2))
        blocks = table[positions // self._block_size]
        self._loads.append(Load(blocks * self._block_size + positions % self._block_size, rows))
        self._rowless.difference_update(blocks.tolist())
        self._rowless.update(blocks[~is_known].tolist())
