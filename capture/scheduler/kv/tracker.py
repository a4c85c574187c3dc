"""Tracks KV that a connector loads, whose slots have only the rows that came with it, or lets
requests recompute it."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from routed_experts.capture.engine.connectors import (
    MULTI,
    RECOMPUTE,
    Kind,
    describe,
    lease_of,
    on_load,
    reads_back,
    used_by,
)
from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.kv.offloading import (
    OffloadedRows,
    OffloadLoad,
    OffloadStore,
    OnUnexpected,
    keeps_rows,
)
from routed_experts.capture.scheduler.kv.pulls import Pulls
from routed_experts.capture.scheduler.request_rows import RequestRows
from routed_experts.capture.wire.message import Cause
from routed_experts.capture.wire.prefill_rows import PrefillRows
from routed_experts.capture.wire.rows import missing_weights
from routed_experts.protocol.codec import UNKNOWN

logger = init_logger(f"vllm.routed_experts.{__name__}")

_PIECE_ROWS = 256

LocalHit = tuple[KVCacheBlocks, int, int, bool]
"""Result of a lookup in the prefix cache: blocks, tokens, and two values for hybrid models."""


@dataclass(frozen=True)
class KVLoad:
    """An update of the host cache for loaded KV."""

    slots: NDArray[np.int64]  # [n], all loaded slots
    # m <= n, of the first m slots; the others are unknown. In a cache of rows with weights, those
    # of ids that came without are unknown. `PrefillRowsExchange` has checked their shape.
    rows: PrefillRows | None
    cause: Cause  # why some are unknown
    # Whether it may overwrite what the step writes into the slots, because it runs beside steps.
    ends_late: bool = False

    def are_known(self, with_weights: bool = False) -> NDArray[np.bool_]:
        """[n], True for slots whose rows are known, with their weights."""
        known = np.zeros(len(self.slots), dtype=np.bool_)
        if self.rows is not None and (self.rows.has_weights or not with_weights):
            ids = self.rows.ids
            known[: len(ids)] = ids.min(initial=0) > UNKNOWN or (ids != UNKNOWN).all(axis=(1, 2))
            if with_weights:
                known[: len(ids)] &= ~missing_weights(self.rows.rows)
        return known

    def apply(self, cache: HostCache) -> None:
        cache.forget(self.slots, self.cause)
        if self.rows is None:
            return
        count, height = self.rows.rows.shape[:2]
        buffer = np.full((min(count, _PIECE_ROWS), *cache.row_shape), UNKNOWN, dtype=np.int16)
        # each piece stays in the processor's cache until it is written
        for first in range(0, count, _PIECE_ROWS):
            piece = self.rows.rows[first : first + _PIECE_ROWS]
            buffer[: len(piece), :height] = piece
            slots, rows = self.slots[first : first + len(piece)], buffer[: len(piece)]
            cache.write(slots, rows)
            if (unknown := rows[:, 0, 0] == UNKNOWN).any():  # there too
                cache.forget(slots[unknown], self.cause)


class NoExternalKV:
    """In place of `ExternalKVTracker` without a connector."""

    writes_behind_hit, kept_bytes = True, 0

    def __init__(self) -> None:
        self.pulls = Pulls(None)  # of this engine: a process may have several

    def pop_loads(self, *step: Any) -> list[KVLoad | OffloadLoad]:
        return []

    def pop_stores(self, step: SchedulerOutput) -> list[OffloadStore]:
        return []

    def truncate_prefix_hit(self, request: Request, hit: LocalHit) -> LocalHit:
        return hit


class ExternalKVTracker:
    """Follows the loads of a connector on the scheduler's side.

    vLLM asks the connector how many tokens it can load (`get_num_new_matched_tokens`), allocates
    blocks and passes them (`update_state_after_alloc`). External KV has no other way into a block,
    so both methods are replaced on the instance; for a `MultiConnector`, on the outer one.

    A load is decided when a step is scheduled, while earlier steps may still write rows into the
    same slots. So its slots are cleared when that step's output arrives, before the step's rows are
    written. If a load that runs beside steps overwrites a prefix hit, which this step may be
    computing, they are cleared again after that.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: KVTransferConfig,
        kv_group: int,
        cache: HostCache,
        tracked: Mapping[str, RequestRows],
        on_unexpected: OnUnexpected,
    ) -> None:
        self._connector: Any = scheduler.connector
        self._config = config
        self._kv_cache_manager = scheduler.kv_cache_manager
        self._kv_group = kv_group
        self._block_size = cache.block_size
        self._tracked = tracked
        self._on_unexpected = on_unexpected
        self._recompute = on_load() == RECOMPUTE
        is_hybrid = len(self._kv_cache_manager.kv_cache_config.kv_cache_groups) > 1
        # Otherwise no request that asks for rows gets KV of a store without them: see
        # `truncate_prefix_hit` and `_ask`.
        self._store_cause = (
            Cause.COMPUTED_IF_ASKED if self._recompute and not is_hybrid else Cause.KV_STORE
        )
        needs = (self._first_needed, self._needs_weights)
        about = (
            kv_group,
            cache.block_size,
            cache.has_weights,
            *needs,
            self._store_cause,
            on_unexpected,
        )
        # what is known of each connector, and the rows of its KV, if they are kept
        self._children = [
            (known, OffloadedRows(child.scheduler, *about) if keeps_rows(child) else None)
            for known, child in zip(
                used_by(config), self._each(self._connector, "_connectors"), strict=True
            )
            if known is not None
        ]
        connectors = self._each(self._connector, "_connectors")
        self._offloading = [child for child in connectors if isinstance(child, OffloadingConnector)]
        # The last request that was asked for, its tokens in the prefix cache, and whether it would
        # load beside steps.
        self._asked = "", 0, False
        self._loads: list[KVLoad | OffloadLoad] = []
        self.pulls = Pulls(lease_of(config))
        # As of the next step: blocks with unknown rows, and, if weights are captured, these with
        # blocks whose rows came without weights, which only requests that ask for weights cannot
        # use.
        self._blocks_without: list[set[int]] = [set() for _ in range(1 + cache.has_weights)]
        connector = self._connector
        connector.get_num_new_matched_tokens = partial(
            self._ask, connector.get_num_new_matched_tokens
        )
        connector.update_state_after_alloc = partial(self._load, connector.update_state_after_alloc)
        logger.info(describe(config, on_load(), [rows is not None for _, rows in self._children]))

    @property
    def writes_behind_hit(self) -> bool:
        """Whether no load overwrites blocks of a prefix hit."""
        return all(known.writes_behind_hit for known, _ in self._children)

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows that are kept with KV outside the KV cache."""
        return sum(rows.store.used_bytes for _, rows in self._children if rows is not None)

    def pop_stores(self, step: SchedulerOutput) -> list[OffloadStore]:
        """The stores of a scheduled step, to apply before or after it runs."""
        pairs = zip(self._children, self._each(step.kv_connector_metadata, "metadata"), strict=True)
        return [
            store
            for (_, rows), child in pairs
            if rows is not None
            for store in rows.pop_stores(child)
        ]

    def _each(self, whole: Any, name: str) -> Sequence[Any]:
        """`whole`, or what a `MultiConnector`'s has for each of its connectors."""
        return getattr(whole, name) if self._config.kv_connector == MULTI else [whole]

    def pop_loads(
        self, step: SchedulerOutput, requests: Mapping[str, Request]
    ) -> list[KVLoad | OffloadLoad]:
        """The loads of a scheduled step. Called before the step's requests are advanced."""
        loads, self._loads = self._loads, []
        if any(self._blocks_without):
            late = {block for load in loads if load.ends_late for block in self._blocks(load.slots)}
            copies = step.kv_cache_block_copies or ()
            for blocks in self._blocks_without:
                # All sources are read before any destination is written.
                copied = {destination for source, destination in copies if source in blocks}
                blocks.difference_update(destination for _, destination in copies)
                blocks |= copied
            manager = self._kv_cache_manager.coordinator.single_type_managers[self._kv_group]
            for request_id, count in step.num_scheduled_tokens.items():
                start = requests[request_id].num_computed_tokens
                first, end = -(-start // self._block_size), -(-(start + count) // self._block_size)
                if first < end:  # a block whose first slot is computed is computed as a whole
                    computed = {
                        block.block_id for block in manager.req_to_blocks[request_id][first:end]
                    }
                    for blocks in self._blocks_without:
                        blocks -= computed - late
        return loads

    def truncate_prefix_hit(self, request: Request, hit: LocalHit) -> LocalHit:
        """Truncates a prefix hit at the first block that lacks rows the request needs. Not for
        hybrid models."""
        blocks, _, boundary, diverged = hit
        without = self._blocks_without[self._needs_weights(request.request_id)]
        if not without or len(blocks.blocks) > 1:
            return hit
        first = self._first_needed(request.request_id) // self._block_size
        for index, block in enumerate(blocks.blocks[0][first:], first):
            if block.block_id in without:
                num_tokens = index * self._block_size
                cut = self._kv_cache_manager.truncate_computed_blocks(blocks, num_tokens)
                return cut, num_tokens, min(boundary, num_tokens), diverged
        return hit

    # ---- what requests need ----

    def _asks(self, request_id: str) -> RequestRows | None:
        """The state of a request whose rows are worth computing again."""
        state = self._tracked.get(request_id)
        return None if state is None or state.opt_in.allow_missing else state

    def _first_needed(self, request_id: str) -> int:
        """Position from which on the request computes rows rather than load KV without; beyond all
        if never."""
        state = self._asks(request_id) if self._recompute else None
        return sys.maxsize if state is None else state.first_needed

    def _needs_weights(self, request_id: str) -> bool:
        state = self._asks(request_id) if len(self._blocks_without) > 1 else None
        return state is not None and state.opt_in.weights

    # ---- in place of the connector's methods ----

    def _ask(self, theirs: Any, request: Request, num_local: int) -> tuple[int | None, bool]:
        """Accepts a connector's offer as a whole or not at all: connectors fail if only a part of
        it is loaded."""
        if self.pulls.must_wait(request.request_id):
            return None, False
        count, is_async = theirs(request, num_local)
        self._asked = request.request_id, num_local, is_async
        if not count:
            return count, is_async
        if count < 0:
            # ExampleConnector stores prompts only, and returns this for a preempted request whose
            # prefix hit is longer. vLLM would then recompute the difference, overwriting blocks of
            # the hit that others read.
            return 0, False
        child = self._child(request)
        if self._kind(child) is Kind.TRANSFER:
            is_accepted = self._may_pull(request, num_local + count)
        # which offers only what has rows
        elif child is not None and self._children[child][1] is not None:
            is_accepted = True
        else:
            is_accepted = num_local + count <= self._first_needed(request.request_id)
        return (count, is_async) if is_accepted else (0, False)

    def _may_pull(self, request: Request, end: int) -> bool:
        """Whether a request may pull KV up to position `end`.

        NIXL's worker ends the engine if the prefill instance has fewer blocks, or other KV cache
        groups. Without `bidirectional_kv_xfer`, a prefill request that names remote KV would wait
        for it forever.
        """
        if self.pulls.lease_s is None:
            return True
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill") and not reads_back(self._config):
            return False
        groups, num_tokens = params.get("remote_block_ids"), params.get("remote_num_tokens")
        transferred = self._kv_cache_manager.kv_cache_config.transfer_group_ids
        if groups and len(groups) != len(transferred):
            return False
        if num_tokens is not None and -(-num_tokens // self._block_size) < -(
            -end // self._block_size
        ):
            return False
        # Only this group must hold every token. If the other instance's blocks are larger, the
        # prompt is recomputed.
        group = transferred.index(self._kv_group) if self._kv_group in transferred else None
        if groups and group is not None and len(groups[group]) * self._block_size < end:
            return False
        return not self.pulls.is_late(request.request_id)

    def _child(self, request: Request) -> int | None:
        """Index of the connector from which the request's KV would come; None if a `MultiConnector`
        chose none."""
        is_multi = self._config.kv_connector == MULTI
        return self._connector._requests_to_connector.get(request.request_id) if is_multi else 0

    def _kind(self, child: int | None) -> Kind:
        return Kind.STORE if child is None else self._children[child][0].kind

    def _load(self, theirs: Any, request: Request, blocks: KVCacheBlocks, count: int) -> None:
        theirs(request, blocks, count)
        if not count:
            self.pulls.forget(request.request_id)  # KV is pulled once, or not at all
            return
        for offloading in self._offloading:
            # Until vLLM 0.33, a block that another connector loads into is not one that offloading
            # looks for: it would copy the block out as KV of the request that had it before, whose
            # copy is still to be made.
            allocated = {
                block.block_id for group in blocks.blocks for block in group if not block.is_null
            }
            offloading.scheduler._current_batch_allocated_block_ids |= allocated
        table = np.array(
            [block.block_id for block in blocks.blocks[self._kv_group]], dtype=np.int64
        )
        for load in self._decided(request, table, count):
            self._loads.append(load)
            for with_weights, without in enumerate(self._blocks_without):
                without.difference_update(self._blocks(load.slots))
                without.update(self._blocks(load.slots[~load.are_known(bool(with_weights))]))

    def _decided(
        self, request: Request, table: NDArray[np.int64], count: int
    ) -> Iterator[KVLoad | OffloadLoad]:
        """The loads of `count` tokens into the blocks of `table`."""
        asked, num_local, is_async = self._asked
        child, capacity = self._child(request), len(table) * self._block_size
        if asked != request.request_id or child is None or num_local + count > capacity:
            # The start of the load is unknown, so all rows of the request's blocks become unknown.
            self._on_unexpected("loads KV that it was not asked for", capacity)
            self.pulls.forget(request.request_id)
            yield KVLoad(self._slots(table, 0, capacity), None, Cause.FAULT, ends_late=True)
            return
        is_transfer = self._kind(child) is Kind.TRANSFER
        # running requests that asked for these rows lose them, whatever the policy
        if not self.writes_behind_hit:
            overwrites = Cause.KV_TRANSFER if is_transfer else Cause.KV_STORE
            yield KVLoad(self._slots(table, 0, num_local), None, overwrites, ends_late=is_async)
        slots, offloaded = (
            self._slots(table, num_local, num_local + count),
            self._children[child][1],
        )
        if offloaded is not None:
            yield offloaded.pop_load(request.request_id, slots, num_local)
        elif is_transfer:
            rows = self.pulls.begin(request.request_id)
            rows = rows and rows._replace(rows=rows.rows[num_local : num_local + count])
            yield KVLoad(slots, rows, Cause.KV_TRANSFER)
        else:
            yield KVLoad(slots, None, self._store_cause)

    def _blocks(self, slots: NDArray[np.int64]) -> list[int]:
        """The blocks of `slots`, which follow each other in a block table."""
        blocks = slots // self._block_size
        ids: list[int] = blocks[np.flatnonzero(np.diff(blocks, prepend=-1))].tolist()
        return ids

    def _slots(self, table: NDArray[np.int64], first: int, end: int) -> NDArray[np.int64]:
        """Slots of positions `first` to `end`."""
        positions = np.arange(first, end)
        return (
            table[positions // self._block_size] * self._block_size + positions % self._block_size
        )
