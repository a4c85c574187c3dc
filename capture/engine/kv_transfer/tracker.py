"""Tracks KV that a connector loads. Its slots have only the rows that came with it; a request that asks for rows may
recompute instead."""

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
from routed_experts.capture.host_cache import Cause, HostCache
from routed_experts.capture.request_rows import RequestRows
from routed_experts.capture.rows import ids_of, lack_weights
from routed_experts.protocol.codec import UNKNOWN

_PIECE_ROWS = 256

LocalHit = tuple[KVCacheBlocks, int, int, bool]
"""Result of a lookup in the prefix cache: blocks, tokens, and two values for hybrid models."""


@dataclass(frozen=True)
class KVLoad:
    """An update of the host cache for loaded KV."""

    slots: NDArray[np.int64]  # [n], all loaded slots
    # [m <= n, L, K], with weights [m, 3L, K], of the first m slots; the others are unknown. In a cache of rows with
    # weights, those of ids that came alone are unknown.
    rows: WireRows | None
    cause: Cause  # why some are unknown
    # Whether it may overwrite what the step writes into the slots, because it runs beside steps.
    ends_late: bool = False

    def apply(self, cache: HostCache) -> None:
        """Writes the rows that came with the KV. `receive_rows` has checked their shape."""
        cache.forget(self.slots, self.cause)
        if self.rows is None:
            return
        count, height = self.rows.shape[:2]
        room = np.full((min(count, _PIECE_ROWS), *cache.row_shape), UNKNOWN, dtype=np.int16)
        for first in range(0, count, _PIECE_ROWS):  # each piece stays in the processor's cache until it is written
            piece = self.rows[first : first + _PIECE_ROWS]
            room[: len(piece), :height] = piece
            slots, rows = self.slots[first : first + len(piece)], room[: len(piece)]
            cache.write(slots, rows)
            if (unknown := rows[:, 0, 0] == UNKNOWN).any():  # there too
                cache.forget(slots[unknown], self.cause)


class NoExternalKV:
    """In place of `ExternalKVTracker` without a connector."""

    writes_behind_hit, kept_bytes = True, 0

    def take(self, *step: Any) -> list[KVLoad | OffloadLoad]:
        return []

    def take_stores(self, step: SchedulerOutput) -> list[OffloadStore]:
        return []

    def truncate_prefix_hit(self, request: Request, hit: LocalHit) -> LocalHit:
        return hit


class ExternalKVTracker:
    """Follows the loads of a connector on the scheduler's side.

    vLLM asks the connector how many tokens it can load (`get_num_new_matched_tokens`), allocates blocks and passes them
    (`update_state_after_alloc`). External KV has no other way into a block, so both methods are replaced on the
    instance; for a `MultiConnector`, on the outer one. `OffloadedRows` keeps the rows of an `OffloadingConnector`.

    A load is decided when a step is scheduled, while earlier steps may still write rows into the same slots. So its
    slots are cleared when that step's output arrives, before the step's rows are written. If a load that runs beside
    steps overwrites a prefix hit, which this step may be computing, they are cleared again after that.
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
        forgot: Forgot,  # called if the connector behaves unexpectedly
        has_weights: bool = False,
    ) -> None:
        self._connector = connector
        self._used = [child for child in used_by(config) if child is not None]
        self._is_multi = config.kv_connector == MULTI
        self.writes_behind_hit = all(child.writes_behind_hit for child in self._used)
        children = connector._connectors if self._is_multi else [connector]
        needs_weights = self._needs_weights if has_weights else None
        is_hybrid = len(kv_cache_manager.kv_cache_config.kv_cache_groups) > 1
        # Otherwise no request that asks for rows gets KV of a store without them: see `truncate_prefix_hit` and `_ask`.
        recomputes = policy == RECOMPUTE and not is_hybrid
        self._store_cause = cause = Cause.COMPUTED_IF_ASKED if recomputes else Cause.KV_STORE
        self._offloaded = [
            OffloadedRows.of(child, kv_group, block_size, self._needs_rows_before, needs_weights, cause, forgot)
            for child in children
        ]
        self._kv_cache_manager = kv_cache_manager
        self._kv_group = kv_group
        self._block_size = block_size
        self._tracked = tracked
        self._forgot = forgot
        self._recompute = policy == RECOMPUTE
        self._asked: tuple[str, int] = "", 0
        self._is_async = False  # whether the connector would load beside steps, when last asked
        self._loads: list[KVLoad | OffloadLoad] = []
        self._reads_back = reads_back(config)
        lease_s = lease_of(config)
        # Rows that came with requests; None if no connector's lease is known.
        self.handed = RemotePrefillRows(lease_s) if lease_s is not None else None
        # As of the next step: blocks with unknown rows, and these with blocks whose rows came without weights, which
        # only requests that ask for weights cannot use.
        self._blocks_without_rows: set[int] = set()
        self._blocks_without_weights: set[int] = set()
        self._has_weights = has_weights
        self._get_num_new_matched_tokens = connector.get_num_new_matched_tokens
        self._update_state_after_alloc = connector.update_state_after_alloc
        connector.get_num_new_matched_tokens = self._ask
        connector.update_state_after_alloc = self._load

    @property
    def keep_rows(self) -> list[bool]:
        """For each connector, whether rows are kept with its KV."""
        return [rows is not None for rows in self._offloaded]

    @property
    def kept_bytes(self) -> int:
        """Bytes of those rows."""
        return sum(rows.store.used_bytes for rows in self._offloaded if rows is not None)

    def take_stores(self, step: SchedulerOutput) -> list[OffloadStore]:
        """The stores of a scheduled step, to apply before or after it runs."""
        metadata: Any = step.kv_connector_metadata
        children = metadata.metadata if self._is_multi else [metadata]
        pairs = zip(self._offloaded, children, strict=True)
        return [keep for rows, child in pairs if rows is not None for keep in rows.take_stores(child)]

    def take(self, step: SchedulerOutput, requests: Mapping[str, Request]) -> list[KVLoad | OffloadLoad]:
        """The loads of a scheduled step. Called before the step's requests are advanced."""
        if self.handed is not None:
            self.handed.step()
        loads, self._loads = self._loads, []
        without = [blocks for blocks in (self._blocks_without_rows, self._blocks_without_weights) if blocks]
        if without:
            late = {block for load in loads if load.ends_late for block in self._blocks(load.slots)}
            for source, destination in step.kv_cache_block_copies or ():
                for blocks in without:
                    if source in blocks:
                        blocks.add(destination)
            for request_id, count in step.num_scheduled_tokens.items():
                start = requests[request_id].num_computed_tokens
                first, end = -(-start // self._block_size), -(-(start + count) // self._block_size)
                if first < end:  # a block whose first slot is computed is computed as a whole
                    computed = {block.block_id for block in self._manager.req_to_blocks[request_id][first:end]}
                    for blocks in without:
                        blocks -= computed - late
        return loads

    def truncate_prefix_hit(self, request: Request, hit: LocalHit) -> LocalHit:
        """Truncates a prefix hit at the first block that lacks rows the request needs. Not for hybrid models."""
        blocks, _, boundary, diverged = hit
        needs_weights = self._needs_weights(request.request_id)
        without = self._blocks_without_weights if needs_weights else self._blocks_without_rows
        if not without or len(blocks.blocks) > 1:
            return hit
        first = self._first_needed(request) // self._block_size if self._needs_rows(request) else len(blocks.blocks[0])
        for index, block in enumerate(blocks.blocks[0][first:], first):
            if block.block_id in without:
                num_tokens = index * self._block_size
                cut = self._kv_cache_manager.truncate_computed_blocks(blocks, num_tokens)
                return cut, num_tokens, min(boundary, num_tokens), diverged
        return hit

    @property
    def _manager(self) -> Any:
        return self._kv_cache_manager.coordinator.single_type_managers[self._kv_group]

    def _needs_rows(self, request: Request) -> bool:
        return self._recompute and self._asks(request.request_id) is not None

    def _needs_rows_before(self, request_id: str, position: int) -> bool:
        state = self._asks(request_id) if self._recompute else None
        return state is not None and state.first_needed < position

    def _needs_weights(self, request_id: str) -> bool:
        state = self._asks(request_id) if self._has_weights else None
        return state is not None and state.opt_in.weights

    def _asks(self, request_id: str) -> RequestRows | None:
        """The state of a request whose rows are worth computing again."""
        state = self._tracked.get(request_id)
        return None if state is None or state.opt_in.best_effort else state

    def _first_needed(self, request: Request) -> int:
        """Position of the first row that the request has not been sent."""
        return self._tracked[request.request_id].first_needed

    def _ask(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        """Accepts a connector's offer as a whole or not at all: connectors fail if only a part of it is loaded."""
        if self.handed is not None:
            self.handed.step()  # before this step decides on loads
            if self.handed.must_wait(request.request_id):
                return None, False
        self._asked = request.request_id, num_local
        count, is_async = self._get_num_new_matched_tokens(request, num_local)
        self._is_async = is_async
        if count is not None and count < 0:
            # ExampleConnector stores prompts only, and returns this for a preempted request whose prefix hit is longer.
            # vLLM would then recompute the difference, overwriting blocks of the hit that others read.
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

        NIXL's worker ends the engine if the prefill instance has fewer blocks, or other KV cache groups. Without
        `bidirectional_kv_xfer`, a prefill request that names remote KV would wait for it forever.
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
        # Only this group must hold every token. If the other instance's blocks are larger, the prompt is recomputed.
        group = transferred.index(self._kv_group) if self._kv_group in transferred else None
        if groups and group is not None and len(groups[group]) * self._block_size < end:
            return False
        return self._asks(request.request_id) is None or not self.handed.is_lost(request.request_id)

    def _kind(self, request: Request) -> Kind:
        """Kind of the connector from which the request's KV would come."""
        child = self._child(request)
        return Kind.STORE if child is None else self._used[child].kind

    def _child(self, request: Request) -> int | None:
        """Index of the connector from which the request's KV would come; None if a `MultiConnector` chose none."""
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
            # The start of the load is unknown, so all rows of the request's blocks become unknown.
            self._forgot("loads KV that it was not asked for", capacity)
            if self.handed is not None:
                self.handed.forget(request.request_id)
            unknown = KVLoad(self._slots(table, 0, capacity), None, Cause.FAULT, ends_late=True)
            self._add(unknown, np.zeros(capacity, dtype=np.bool_))
            return
        is_transfer = self._kind(request) is Kind.TRANSFER
        cause = Cause.KV_TRANSFER if is_transfer else self._store_cause
        if not self.writes_behind_hit:  # running requests that asked for these rows lose them, whatever the policy
            overwrites = Cause.KV_TRANSFER if is_transfer else Cause.KV_STORE
            hit = KVLoad(self._slots(table, 0, num_local), None, overwrites, ends_late=self._is_async)
            self._add(hit, np.zeros(num_local, dtype=np.bool_))
        slots = self._slots(table, num_local, num_local + count)
        offloaded = self._offloaded[child]
        if offloaded is not None:
            reload = offloaded.take_loaded(request.request_id, slots, num_local)
            self._add(reload, reload.are_known())
            self._add_without_weights(slots[reload.lack_weights()])
            return
        handed, rows = None, None
        if self.handed is not None and cause is Cause.KV_TRANSFER:
            handed = self.handed.begin(request.request_id)
        is_known = np.zeros(count, dtype=np.bool_)
        if handed is not None:
            rows = handed.rows[num_local : num_local + count]
            ids = ids_of(rows) if handed.has_weights else rows
            is_known[: len(rows)] = ids.min(initial=0) > UNKNOWN or (ids != UNKNOWN).all(axis=(1, 2))
        self._add(KVLoad(slots, rows, cause), is_known)
        if self._has_weights and handed is not None and rows is not None and len(rows):
            slots = slots[: len(rows)]
            self._add_without_weights(slots[lack_weights(rows)] if handed.has_weights else slots)

    def _add_without_weights(self, slots: NDArray[np.int64]) -> None:
        self._blocks_without_weights.update(self._blocks(slots))

    def _blocks(self, slots: NDArray[np.int64]) -> list[int]:
        return np.unique(slots // self._block_size).tolist()

    def _slots(self, table: NDArray[np.int64], first: int, end: int) -> NDArray[np.int64]:
        """Slots of positions `first` to `end`."""
        positions = np.arange(first, end)
        return table[positions // self._block_size] * self._block_size + positions % self._block_size

    def _add(self, load: KVLoad | OffloadLoad, is_known: NDArray[np.bool_]) -> None:
        """Records a load. `is_known`: [n], True for slots whose rows came with it."""
        self._loads.append(load)
        blocks = load.slots // self._block_size
        for without in (self._blocks_without_rows, self._blocks_without_weights):
            without.difference_update(blocks[np.flatnonzero(np.diff(blocks, prepend=-1))].tolist())
            if not is_known.all():
                without.update(np.unique(blocks[~is_known]).tolist())
