"""Follows what a KV connector loads, whose rows are those that came with the KV, or has requests
compute it instead."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    KnownConnector,
    KVSource,
    lease_of,
    used_by,
)
from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.kv.blocks import BlocksWithoutRows, blocks_of, slots_of
from routed_experts.capture.scheduler.kv.children import (
    Child,
    Load,
    OffloadChild,
    TransferChild,
)
from routed_experts.capture.scheduler.kv.loads import KVLoad
from routed_experts.capture.scheduler.kv.needs import RowNeeds
from routed_experts.capture.scheduler.kv.offloading import (
    OffloadedRows,
    OffloadStore,
    OnUnexpected,
)
from routed_experts.capture.scheduler.kv.pulls import Pulls
from routed_experts.capture.scheduler.request_rows import RequestRows
from routed_experts.capture.wire.message import Cause

# `__name__` begins with "routed_experts". A child of vLLM's logger, which is configured.
logger = init_logger(f"vllm.{__name__}")


class LocalHit(NamedTuple):
    """What vLLM's lookup in the prefix cache returns."""

    blocks: KVCacheBlocks
    num_tokens: int
    # of hybrid models; of others always 0 and False
    shared_prefix_boundary: int
    is_divergent: bool


class Offer(NamedTuple):
    """What a KV connector was last asked about: vLLM passes the blocks of a load in a later
    call."""

    request_id: str
    num_local: int  # tokens of the request's prefix hit, behind which the load begins


class NoExternalKV:
    """In place of `ExternalKVTracker` without a KV connector."""

    used_bytes = 0

    def __init__(self) -> None:
        self.pulls = Pulls(None)  # of this engine: a process may have several

    def pop_loads(self, *step: Any) -> list[Load]:
        return []

    def pop_stores(self, step: SchedulerOutput) -> list[OffloadStore]:
        return []

    def truncate_prefix_hit(self, request: Request, hit: LocalHit) -> LocalHit:
        return hit


class ExternalKVTracker:
    """Follows the loads of a KV connector on the scheduler's side.

    vLLM asks the KV connector how many tokens it can load (`get_num_new_matched_tokens`), allocates
    blocks and passes them (`update_state_after_alloc`). External KV has no other way into a block,
    so both methods are replaced on the instance; for a `MultiConnector`, on the outer one.

    A load is decided when a step is scheduled, while earlier steps may still write rows into the
    same slots. So its slots are cleared when that step's output arrives, before the step's rows are
    written. It runs beside steps, none of which writes into these slots before it has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: KVTransferConfig,
        cache: HostCache,
        *,
        kv_group: int,  # the KV cache group by whose slots rows are kept
        tracked: Mapping[str, RequestRows],  # the requests that opted in, by id
        on_unexpected: OnUnexpected,
    ) -> None:
        self._connector: Any = scheduler.connector
        self._is_multi = config.kv_connector == MULTI
        self._kv_cache_manager = scheduler.kv_cache_manager
        self._kv_group = kv_group
        self._block_size = cache.block_size
        self._has_weights = cache.has_weights
        self._on_unexpected = on_unexpected
        self._needs = RowNeeds(tracked)
        self.pulls = Pulls(lease_of(config))
        self.blocks_without_rows = BlocksWithoutRows()
        self._offer = Offer("", 0)
        self._loads: list[Load] = []  # of the step that is being scheduled

        known_connectors = used_by(config)
        connectors = self._of_children(self._connector, "_connectors")
        self.children = [
            self._child(child, known)
            for child, known in zip(connectors, known_connectors, strict=True)
        ]
        self._offloading = [child for child in connectors if isinstance(child, OffloadingConnector)]

        connector = self._connector
        connector.get_num_new_matched_tokens = partial(
            self._limit_offer, connector.get_num_new_matched_tokens
        )
        connector.update_state_after_alloc = partial(
            self._record_load, connector.update_state_after_alloc
        )
        descriptions = dict.fromkeys(child.description for child in self.children)
        logger.info("KV connector %s: %s.", config.kv_connector, "; ".join(descriptions))

    def _child(self, connector: Any, known: KnownConnector | None) -> Child:
        assert known is not None, "an unknown KV connector is refused (`capture/engine/config.py`)"
        if known.source is KVSource.TRANSFER:
            return TransferChild(
                self.pulls,
                self._kv_cache_manager.kv_cache_config,
                kv_group=self._kv_group,
                block_size=self._block_size,
            )
        assert known.source is KVSource.OFFLOAD
        OffloadChild.check(connector)
        rows = OffloadedRows(
            connector.scheduler,
            self._needs,
            kv_group=self._kv_group,
            block_size=self._block_size,
            has_weights=self._has_weights,
            on_unexpected=self._on_unexpected,
        )
        return OffloadChild(rows)

    def _of_children(self, whole: Any, name: str) -> Sequence[Any]:
        """What `whole` has for each child: its attribute `name` if it is a `MultiConnector`'s."""
        return getattr(whole, name) if self._is_multi else [whole]

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that are kept with KV outside the KV cache."""
        return sum(child.used_bytes for child in self.children)

    # ---- what a step does ----

    def pop_loads(self, step: SchedulerOutput, requests: Mapping[str, Request]) -> list[Load]:
        """The loads of a scheduled step. Called before the step's requests are advanced."""
        loads = self._loads
        self._loads = []
        if self.blocks_without_rows:
            if step.kv_cache_block_copies:
                self.blocks_without_rows.copy(step.kv_cache_block_copies)
            for request_id, num_tokens in step.num_scheduled_tokens.items():
                first = requests[request_id].num_computed_tokens
                computed = self._computed_blocks(request_id, first, first + num_tokens)
                self.blocks_without_rows.computed(computed)
        return loads

    def _computed_blocks(self, request_id: str, first: int, end: int) -> set[int]:
        """The blocks that are computed as a whole once positions `first` to `end` of a request are:
        those whose first slot is among them."""
        first_block = -(-first // self._block_size)
        end_block = -(-end // self._block_size)
        if first_block == end_block:
            return set()
        manager = self._kv_cache_manager.coordinator.single_type_managers[self._kv_group]
        blocks = manager.req_to_blocks[request_id][first_block:end_block]
        return {block.block_id for block in blocks}

    def pop_stores(self, step: SchedulerOutput) -> list[OffloadStore]:
        """The stores of a scheduled step, to apply before or after it runs."""
        metadata = self._of_children(step.kv_connector_metadata, "metadata")
        stores: list[OffloadStore] = []
        for child, of_child in zip(self.children, metadata, strict=True):
            stores += child.stores(of_child)
        return stores

    def truncate_prefix_hit(self, request: Request, hit: LocalHit) -> LocalHit:
        """Truncates a prefix hit at the first block that lacks rows the request needs. Not for
        hybrid models."""
        hit = LocalHit(*hit)
        if not self.blocks_without_rows or len(hit.blocks.blocks) > 1:
            return hit
        (blocks,) = hit.blocks.blocks
        first = self._needs.first_row(request.request_id) // self._block_size
        needed = [block.block_id for block in blocks[first:]]
        usable = self.blocks_without_rows.cut(needed)
        if usable == len(needed):
            return hit
        num_tokens = (first + usable) * self._block_size
        return hit._replace(
            blocks=self._kv_cache_manager.truncate_computed_blocks(hit.blocks, num_tokens),
            num_tokens=num_tokens,
        )

    # ---- in place of the KV connector's methods, which are `original` ----

    def _limit_offer(
        self, original: Any, request: Request, num_local: int
    ) -> tuple[int | None, bool]:
        """Accepts a KV connector's offer as a whole or not at all: KV connectors fail if only a
        part of it is loaded."""
        if self.pulls.must_wait(request.request_id):
            return None, False
        count, is_async = original(request, num_local)
        self._offer = Offer(request.request_id, num_local)
        if not count:
            return count, is_async
        child = self._chosen(request)
        if child is None or not child.accepts(request, num_local + count):
            return 0, False
        return count, is_async

    def _chosen(self, request: Request) -> Child | None:
        """The child from which the request's KV would come; None if a `MultiConnector` chose
        none."""
        if not self._is_multi:
            return self.children[0]
        index = self._connector._requests_to_connector.get(request.request_id)
        return None if index is None else self.children[index]

    def _record_load(
        self, original: Any, request: Request, blocks: KVCacheBlocks, count: int
    ) -> None:
        """Records a load of `count` tokens, 0 if nothing is loaded, into some of `blocks`."""
        original(request, blocks, count)
        if not count:
            self.pulls.forget(request.request_id)  # KV is pulled once, or not at all
            return
        self._tell_offloading(blocks)
        table = np.array(
            [block.block_id for block in blocks.blocks[self._kv_group]], dtype=np.int64
        )
        load = self._load_of(request, table, count)
        self._loads.append(load)
        self._mark(load)

    def _tell_offloading(self, blocks: KVCacheBlocks) -> None:
        """Until vLLM 0.33, a block that another KV connector loads into is not one that offloading
        looks for: it would copy the block out as KV of the request that had it before, whose copy
        is still to be made."""
        allocated = {
            block.block_id for group in blocks.blocks for block in group if not block.is_null
        }
        for offloading in self._offloading:
            offloading.scheduler._current_batch_allocated_block_ids |= allocated

    def _load_of(self, request: Request, table: NDArray[np.int64], count: int) -> Load:
        """What a load of `count` tokens into the blocks of `table` ([blocks]) does to rows."""
        offer = self._offer
        child = self._chosen(request)
        capacity = len(table) * self._block_size
        end = offer.num_local + count
        if offer.request_id != request.request_id or child is None or end > capacity:
            # The start of the load is unknown, so all rows of the request's blocks become unknown.
            self._on_unexpected("loads KV that it was not asked for", capacity)
            self.pulls.forget(request.request_id)
            slots = slots_of(table, 0, capacity, self._block_size)
            return KVLoad(slots, None, Cause.FAULT)
        slots = slots_of(table, offer.num_local, end, self._block_size)
        return child.load(request.request_id, slots, offer.num_local)

    def _mark(self, load: Load) -> None:
        """Marks the blocks of a load that lack rows from the next step on."""
        self.blocks_without_rows.mark(
            blocks_of(load.slots, self._block_size),
            without_rows=blocks_of(load.slots[~load.are_known()], self._block_size),
        )
