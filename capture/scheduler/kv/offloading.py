"""Keeps the rows of KV that vLLM's `OffloadingConnector` offloads to host memory."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.row_store import RowStore
from routed_experts.capture.wire.message import Cause

OnUnexpected = Callable[[str, int], None]
"""Called with an unexpected action of a connector, and the number of rows that are unknown because
of it."""


@dataclass(frozen=True)
class OffloadStore:
    """Rows to copy out together with KV that is offloaded."""

    store: RowStore
    slots: NDArray[np.int64]  # [n x tokens of a chunk], of the KV cache
    chunks: NDArray[np.int64]  # [n], where they go
    # whether the KV is copied before the step runs, because the step reuses its blocks
    runs_before_step: bool

    def apply(self, cache: HostCache) -> None:
        self.store.keep(cache, self.slots, self.chunks)


@dataclass(frozen=True)
class OffloadLoad:
    """Rows to copy back together with KV that is loaded."""

    store: RowStore
    slots: NDArray[np.int64]  # [n], of the KV cache
    places: NDArray[np.int64]  # [n], where they are in the store; -1 if they were not kept
    cause: Cause  # why they were not kept
    ends_late = False  # no step writes into these slots before the load has ended

    def are_known(self, with_weights: bool = False) -> NDArray[np.bool_]:
        """[n], True for slots whose rows are known, with their weights."""
        return self.store.have_rows(self.places, with_weights)

    def apply(self, cache: HostCache) -> None:
        self.store.fill(cache, self.slots, self.places, self.cause)


def keeps_rows(connector: Any) -> bool:
    """Not with other connectors, nor with tiers or a third-party manager, whose chunks may come
    from elsewhere."""
    return (
        type(connector) is OffloadingConnector
        and type(connector.scheduler.manager) is CPUOffloadingManager
    )


class OffloadedRows:
    """Follows the loads and stores of an `OffloadingConnector` on the scheduler's side.

    Chunks are reached only through the manager's `lookup`, `prepare_load` and `prepare_store`,
    which are replaced on the instance, as vLLM has no events. Rows are copied with their KV, in the
    same order, so they always belong to the same computation. Stores that end after a reset write
    to chunks to which no key leads.

    A chunk can be loaded only after its store has completed. The connector learns of that after the
    output of the step that stored it has arrived, when its rows are already kept. So a lookup knows
    whether a chunk has rows.
    """

    def __init__(
        self,
        scheduler: OffloadingConnectorScheduler,
        kv_group: int,
        block_size: int,
        has_weights: bool,
        # position of the first row that a request cannot do without
        first_needed: Callable[[str], int],
        needs_weights: Callable[[str], bool],  # whether it needs their weights too
        cause: Cause,  # why a request that needs rows may be given KV without
        on_unexpected: OnUnexpected,  # rows become unknown then, which is always correct
    ) -> None:
        manager = scheduler.manager
        assert isinstance(manager, CPUOffloadingManager)
        self._kv_group = kv_group
        self._block_size = block_size
        self._first_needed = first_needed
        self._needs_weights = needs_weights
        self._cause = cause
        self._on_unexpected = on_unexpected
        groups = [group.group_idx for group in scheduler.config.kv_group_configs]
        self._group_index = groups.index(kv_group)
        chunk_tokens = block_size * scheduler.config.blocks_per_chunk
        self.store = RowStore(manager._num_chunks, chunk_tokens, has_weights)
        self._chunks: dict[OffloadKey, int] = {}  # whose rows are in the store, or will be
        # prepared for the step being scheduled
        self._stores: list[tuple[LoadStoreSpec, list[OffloadKey]]] = []
        # request and keys of the load that was prepared last
        self._loaded: tuple[str, list[OffloadKey]] = "", []
        manager.lookup = partial(self._look_up, manager.lookup)
        manager.prepare_load = partial(self._load, manager.prepare_load)
        manager.prepare_store = partial(self._store, manager.prepare_store)
        manager.reset_cache = partial(self._reset, manager.reset_cache)

    def pop_load(self, request_id: str, slots: NDArray[np.int64], first: int) -> OffloadLoad:
        """The load that was prepared last, into `slots` ([n]) of the positions from `first` on."""
        (prepared_for, keys), self._loaded = self._loaded, ("", [])
        size, positions = self.store.chunk_tokens, np.arange(first, first + len(slots))
        chunks = np.array([self._chunks.get(key, -1) for key in keys], dtype=np.int64)
        index = positions // size - first // size
        if prepared_for != request_id or index[-1] + 1 != len(chunks):
            self._on_unexpected("loads other KV than it prepared", len(slots))
            return OffloadLoad(self.store, slots, np.full(len(slots), -1), Cause.FAULT)
        chunk = chunks[index]
        places = np.where(chunk >= 0, chunk * size + positions % size, -1)
        return OffloadLoad(self.store, slots, places, self._cause)

    def pop_stores(self, metadata: OffloadingConnectorMetadata) -> list[OffloadStore]:
        keys_of = {id(spec): keys for spec, keys in self._stores}
        stores = []
        for job_id, job in metadata.store_jobs.items():
            keys = keys_of.get(id(job.dst_spec), [])
            places = (
                job.dst_spec.chunk_ids.tolist()
                if isinstance(job.dst_spec, CPULoadStoreSpec)
                else []
            )
            kept = {
                key: chunk for key, chunk in zip(keys, places, strict=False) if self._is_ours(key)
            }
            sizes, index = job.src_spec.group_sizes, self._group_index
            blocks = job.src_spec.block_ids[sum(sizes[:index]) : sum(sizes[: index + 1])].astype(
                np.int64
            )
            slots = (blocks[:, None] * self._block_size + np.arange(self._block_size)).reshape(-1)
            chunks = np.array(list(kept.values()), dtype=np.int64)
            if (
                not len(keys) == len(places) > 0
                or len(slots) != len(chunks) * self.store.chunk_tokens
            ):
                # It may overwrite any chunk, so the rows of all chunks become unknown.
                self._on_unexpected(
                    "stores other KV than it prepared", len(self._chunks) * self.store.chunk_tokens
                )
                self._chunks.clear()
                continue
            if not kept:
                continue
            self._chunks |= kept
            stores.append(
                OffloadStore(self.store, slots, chunks, job_id in (metadata.jobs_to_flush or ()))
            )
        self._stores = []
        return stores

    def _is_ours(self, key: OffloadKey) -> bool:
        """Whether a chunk is of the KV cache group by whose slots rows are stored."""
        return get_offload_group_idx(key) == self._kv_group

    def _look_up(self, theirs: Any, key: OffloadKey, context: ReqContext) -> LookupResult:
        """Reports a miss for chunks without the rows or weights that the request needs: only KV
        before is loaded."""
        result: LookupResult = theirs(key, context)
        if result is not LookupResult.HIT or not self._is_ours(key):
            return result
        end = context.get_offload_key_position(key)
        if end is not None and end <= self._first_needed(context.req_id):
            return result
        is_complete = self.store.is_complete(
            self._chunks.get(key, -1), self._needs_weights(context.req_id)
        )
        return result if is_complete else LookupResult.MISS

    def _load(
        self, theirs: Any, keys: Collection[OffloadKey], context: ReqContext
    ) -> LoadStoreSpec:
        self._loaded = context.req_id, [key for key in keys if self._is_ours(key)]
        spec: LoadStoreSpec = theirs(keys, context)
        return spec

    def _store(
        self, theirs: Any, keys: Collection[OffloadKey], context: ReqContext
    ) -> PrepareStoreOutput | None:
        output: PrepareStoreOutput | None = theirs(keys, context)
        if output is not None:
            for key in output.evicted_keys:
                self._chunks.pop(key, None)
            self._stores.append((output.store_spec, output.keys_to_store))
        return output

    def _reset(self, theirs: Any) -> None:
        self._chunks.clear()
        theirs()
