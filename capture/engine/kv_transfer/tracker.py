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

from routed_experts.capture.engine.kv_transfer.connectors import MULTI, RECOMPUTE, Kind, lease_of, reads_back, used_by
from routed_experts.capture.engine.kv_transfer.offloading import Forgot, OffloadedRows, OffloadLoad, OffloadStore
from routed_experts.capture.engine.kv_transfer.remote_prefill import RemotePrefillRows
from routed_experts.capture.handoff import WireRows
from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.split import RequestRows
from routed_experts.protocol.codec import UNKNOWN

_PIECE_ROWS = 256

LocalHit = tuple[KVCacheBlocks, int, int, bool]
"""What a lookup in the prefix cache gives: blocks, tokens, and two things about hybrid models."""


@dataclass(frozen=True)
class KVLoad:
    """What becomes of the host cache when KV is loaded.

    Attributes:
        slots: [n], all that are loaded.
        rows: [m <= n, L, K], of the first of them; the others are not known.
    """

    slots: NDArray[np.int64]
    rows: WireRows | None

    def apply(self, cache: HostCache) -> None:
        """Takes the rows that came with the KV; they are of the cache's row shape (`receive_rows`)."""
        cache.forget(self.slots)
        if self.rows is None:
            return
        slots = self.slots[: len(self.rows)]
        for first in range(0, len(slots), _PIECE_ROWS):  # each stays in the processor's cache until it is written
            piece = slice(first, first + _PIECE_ROWS)
            cache.write(slots[piece], self.rows[piece].astype(np.int16))


class ExternalKVTracker:
    """Watches a connector's scheduler side.

    vLLM asks the connector how many tokens it could load, allocates blocks for them, and tells it (a load of no tokens
    is none). There is no other way for KV from outside into a block, so that both methods are replaced on the instance.
    For a `MultiConnector` it is the outer one.

    Of an `OffloadingConnector` the rows are kept with the KV, and come back with it (`OffloadedRows`).

    A load is decided when a step is scheduled, while steps before it may still write rows into the same slots. So its
    slots become unwritten when that step arrives (`take`), before its rows.

    Args:
        forgot: called where the connector does something unexpected.

    Attributes:
        handed: the rows of prompts that came with requests; None where no connector's lease is known.
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
        forgot: Forgot,
    ) -> None:
        self._connector = connector
        self._used = [child for child in used_by(config) if child is not None]
        self._is_multi = config.kv_connector == MULTI
        self._writes_behind_hit = all(child.writes_behind_hit for child in self._used)
        children = connector._connectors if self._is_multi else [connector]
        self._offloaded = [
            OffloadedRows.of(child, kv_group, block_size, self._needs_rows_before, forgot) for child in children
        ]
        self._kv_cache_manager = kv_cache_manager
        self._kv_group = kv_group
        self._block_size = block_size
        self._tracked = tracked
        self._forgot = forgot
        self._recompute = policy == RECOMPUTE
        self._asked: tuple[str, int] = "", 0
        self._loads: list[KVLoad | OffloadLoad] = []
        self._reads_back = reads_back(config)
        lease_s = lease_of(config)
        self.handed = RemotePrefillRows(lease_s) if lease_s is not None else None
        self._blocks_without_rows: set[int] = set()  # as of the next step: some of their rows were not computed here
        self._get_num_new_matched_tokens = connector.get_num_new_matched_tokens
        self._update_state_after_alloc = connector.update_state_after_alloc
        connector.get_num_new_matched_tokens = self._ask
        connector.update_state_after_alloc = self._load

    @property
    def keep_rows(self) -> list[bool]:
        """Of which connectors the rows are kept with the KV that they keep."""
        return [rows is not None for rows in self._offloaded]

    @property
    def kept_bytes(self) -> int:
        """Memory that those rows take."""
        return sum(rows.store.used_bytes for rows in self._offloaded if rows is not None)

    def take_stores(self, step: SchedulerOutput) -> list[OffloadStore]:
        """What a step that has been scheduled copies out of the KV cache with its rows, before it runs or after."""
        metadata: Any = step.kv_connector_metadata
        children = metadata.metadata if self._is_multi else [metadata]
        pairs = zip(self._offloaded, children, strict=True)
        return [keep for rows, child in pairs if rows is not None for keep in rows.take_stores(child)]

    def take(self, step: SchedulerOutput, requests: Mapping[str, Request]) -> list[KVLoad | OffloadLoad]:
        """What is loaded with, or before, a step that has been scheduled.

        Called before its requests are advanced.
        """
        if self.handed is not None:
            self.handed.step()
        loads, self._loads = self._loads, []
        if self._blocks_without_rows:
            for source, destination in step.kv_cache_block_copies or ():
                if source in self._blocks_without_rows:
                    self._blocks_without_rows.add(destination)
            for request_id, count in step.num_scheduled_tokens.items():
                start = requests[request_id].num_computed_tokens
                first, end = -(-start // self._block_size), -(-(start + count) // self._block_size)
                if first < end:  # a block whose first slot is computed is computed as a whole
                    blocks = self._manager.req_to_blocks[request_id][first:end]
                    self._blocks_without_rows.difference_update(block.block_id for block in blocks)
        return loads

    def truncate_prefix_hit(self, request: Request, hit: LocalHit) -> LocalHit:
        """A prefix hit up to the first block without rows that the request needs; hybrid models have no such cut."""
        blocks, _, boundary, diverged = hit
        if not self._blocks_without_rows or len(blocks.blocks) > 1:
            return hit
        first = self._first_needed(request) // self._block_size if self._needs_rows(request) else len(blocks.blocks[0])
        for index, block in enumerate(blocks.blocks[0][first:], first):
            if block.block_id in self._blocks_without_rows:
                num_tokens = index * self._block_size
                cut = self._kv_cache_manager.truncate_computed_blocks(blocks, num_tokens)
                return cut, num_tokens, min(boundary, num_tokens), diverged
        return hit

    @property
    def _manager(self) -> Any:
        return self._kv_cache_manager.coordinator.single_type_managers[self._kv_group]

    def _needs_rows(self, request: Request) -> bool:
        return self._recompute and request.request_id in self._tracked

    def _needs_rows_before(self, request_id: str, position: int) -> bool:
        state = self._tracked.get(request_id) if self._recompute else None
        return state is not None and state.next_row < position

    def _first_needed(self, request: Request) -> int:
        """Position of the first row that the request has not been sent."""
        return self._tracked[request.request_id].next_row

    def _ask(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        """All or nothing: connectors take it badly if less is loaded than they offered, but none at all is common."""
        if self.handed is not None:
            self.handed.step()  # before this step decides on loads
            if self.handed.must_wait(request.request_id):
                return None, False
        self._asked = request.request_id, num_local
        count, is_async = self._get_num_new_matched_tokens(request, num_local)
        if count is not None and count < 0:
            # vLLM's ExampleConnector, of a preempted request that hits more than its prompt, which is all that it has.
            # vLLM would compute what is missing again, over blocks of the hit that others read.
            return 0, False
        if count and self._kind(request) is Kind.TRANSFER:
            return (count, is_async) if self._may_pull(request, num_local + count) else (0, False)
        if not count or not self._needs_rows(request):
            return count, is_async
        child = self._child(request)
        if child is not None and self._offloaded[child] is not None:  # which offers only what has rows
            return count, is_async
        return (count, is_async) if num_local + count <= self._first_needed(request) else (0, False)

    def _may_pull(self, request: Request, end: int) -> bool:
        """Whether a request may pull KV up to position `end`.

        NIXL's worker ends the engine where the prefill instance has less than that, or other KV cache groups. What a
        prefill leg is told to read, its scheduler waits for without fetching it, unless the configuration asks for it.
        """
        if self.handed is None:
            return True
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill") and not self._reads_back:
            return False
        groups, num_tokens = params.get("remote_block_ids"), params.get("remote_num_tokens")
        transferred = self._kv_cache_manager.kv_cache_config.transfer_group_ids
        if groups and len(groups) != len(transferred):
            return False
        if num_tokens is not None and -(-num_tokens // self._block_size) < -(-end // self._block_size):
            return False
        # Other groups may hold less than every token. From an instance with larger blocks the prompt is computed again.
        group = transferred.index(self._kv_group) if self._kv_group in transferred else None
        if groups and group is not None and len(groups[group]) * self._block_size < end:
            return False
        return request.request_id not in self._tracked or not self.handed.is_lost(request.request_id)

    def _kind(self, request: Request) -> Kind:
        """Of the connector that a request's KV would come from."""
        child = self._child(request)
        return Kind.STORE if child is None else self._used[child].kind

    def _child(self, request: Request) -> int | None:
        """Index of the connector that a request's KV would come from; None if a `MultiConnector` chose none."""
        return self._connector._requests_to_connector.get(request.request_id) if self._is_multi else 0

    def _load(self, request: Request, blocks: KVCacheBlocks, count: int) -> None:
        self._update_state_after_alloc(request, blocks, count)
        if not count:
            if self.handed is not None:
                self.handed.forget(request.request_id)  # KV is pulled once, or not at all
            return
        asked, num_local = self._asked
        child = self._child(request)
        table = np.array([block.block_id for block in blocks.blocks[self._kv_group]], dtype=np.int64)
        capacity = len(table) * self._block_size
        if asked != request.request_id or child is None or num_local + count > capacity:
            # Where the load begins is not known, so that no row of the request's blocks is.
            self._forgot("loads KV that it was not asked for", capacity)
            if self.handed is not None:
                self.handed.forget(request.request_id)
            self._add(KVLoad(self._slots(table, 0, capacity), None), np.zeros(capacity, dtype=np.bool_))
            return
        if not self._writes_behind_hit:
            self._add(KVLoad(self._slots(table, 0, num_local), None), np.zeros(num_local, dtype=np.bool_))
        slots = self._slots(table, num_local, num_local + count)
        offloaded = self._offloaded[child]
        if offloaded is not None:
            reload = offloaded.take_loaded(request.request_id, slots, num_local)
            self._add(reload, reload.are_known())
            return
        rows = None
        if self.handed is not None and self._kind(request) is Kind.TRANSFER:
            rows = self.handed.begin(request.request_id)
        is_known = np.zeros(count, dtype=np.bool_)
        if rows is not None:
            rows = rows[num_local : num_local + count]
            is_known[: len(rows)] = rows.min(initial=0) > UNKNOWN or (rows != UNKNOWN).all(axis=(1, 2))
        self._add(KVLoad(slots, rows), is_known)

    def _slots(self, table: NDArray[np.int64], first: int, end: int) -> NDArray[np.int64]:
        """Of positions `first` to `end`, given their block table."""
        positions = np.arange(first, end)
        return table[positions // self._block_size] * self._block_size + positions % self._block_size

    def _add(self, load: KVLoad | OffloadLoad, is_known: NDArray[np.bool_]) -> None:
        """Keeps account of a load, and of which ([n]) of its rows are known."""
        self._loads.append(load)
        blocks = load.slots // self._block_size
        self._blocks_without_rows.difference_update(blocks[np.flatnonzero(np.diff(blocks, prepend=-1))].tolist())
        if not is_known.all():
            self._blocks_without_rows.update(np.unique(blocks[~is_known]).tolist())
