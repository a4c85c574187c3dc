"""Keeps the rows of KV that vLLM's `OffloadingConnector` offloads to host memory.

A *store* copies chunks of KV out of the KV cache, a *load* copies them back. A chunk is one block
or several. The rows of a chunk have the same number in the row store as their KV has in vLLM's.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
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
from routed_experts.capture.scheduler.kv.needs import RowNeeds
from routed_experts.capture.scheduler.row_store import RowStore

OnUnexpected = Callable[[str, int], None]
"""Called with an unexpected action of a KV connector, and the number of rows that are unknown
because of it."""

_NO_CHUNK = -1


@dataclass(frozen=True)
class OffloadStore:
    """Rows to copy out together with KV that is stored."""

    row_store: RowStore
    slots: NDArray[np.int64]  # [n x tokens of a chunk], of the KV cache
    chunks: NDArray[np.int64]  # [n], where they go
    # whether the KV is copied before the step runs, because the step reuses its blocks
    runs_before_step: bool

    def apply(self, cache: HostCache) -> None:
        self.row_store.keep(cache, self.slots, self.chunks)


@dataclass(frozen=True)
class OffloadLoad:
    """Rows to copy back together with KV that is loaded."""

    row_store: RowStore
    slots: NDArray[np.int64]  # [n], of the KV cache
    # [n], the index in the row store of each slot's row; -1 if it has none
    sources: NDArray[np.int64]

    def are_known(self) -> NDArray[np.bool_]:
        """[n], True for slots whose rows are known."""
        return self.row_store.have_rows(self.sources)

    def apply(self, cache: HostCache) -> None:
        self.row_store.fill(cache, self.slots, self.sources)


class _PreparedLoad(NamedTuple):
    """What vLLM's manager was asked to load last."""

    request_id: str
    keys: list[OffloadKey]  # of chunks of our KV cache group, in the order of the sequence


class _PreparedStore(NamedTuple):
    """What vLLM's manager was asked to store, for the step that is being scheduled."""

    spec: LoadStoreSpec  # where it goes; the same object as in the step's metadata
    keys: list[OffloadKey]  # of the chunks in `spec`, in their order


_NO_LOAD = _PreparedLoad("", [])


class OffloadedRows:
    """Follows the loads and stores of an `OffloadingConnector` on the scheduler's side.

    Chunks are reached only through the manager's `lookup`, `prepare_load` and `prepare_store`,
    which are replaced on the instance, as vLLM has no events. Rows are copied with their KV, in the
    same order, so they always belong to the same computation. Stores that end after a reset write
    to chunks to which no key leads.

    A chunk can be loaded only after its store has completed. The KV connector learns of that after
    the output of the step that stored it has arrived, when its rows are already in the row store.
    So a lookup knows whether a chunk has rows.
    """

    def __init__(
        self,
        scheduler: OffloadingConnectorScheduler,
        needs: RowNeeds,
        *,
        kv_group: int,
        block_size: int,
        has_weights: bool,
        on_unexpected: OnUnexpected,  # rows become unknown then, which is always correct
    ) -> None:
        manager = scheduler.manager
        assert isinstance(manager, CPUOffloadingManager)
        self._needs = needs
        self._kv_group = kv_group
        self._block_size = block_size
        self._on_unexpected = on_unexpected
        groups = [group.group_idx for group in scheduler.config.kv_group_configs]
        self._group_index = groups.index(kv_group)
        chunk_tokens = block_size * scheduler.config.blocks_per_chunk
        self.row_store = RowStore(manager._num_chunks, chunk_tokens, has_weights)
        # by key, the chunks whose rows are in the row store, or will be
        self._chunks: dict[OffloadKey, int] = {}
        self._prepared_stores: list[_PreparedStore] = []
        self._prepared_load = _NO_LOAD
        manager.lookup = partial(self._lookup, manager.lookup)
        manager.prepare_load = partial(self._prepare_load, manager.prepare_load)
        manager.prepare_store = partial(self._prepare_store, manager.prepare_store)
        manager.reset_cache = partial(self._reset_cache, manager.reset_cache)

    # ---- what a step loads and stores ----

    def pop_load(self, request_id: str, slots: NDArray[np.int64], first: int) -> OffloadLoad:
        """The load that was prepared last, into `slots` ([n]) of the positions from `first` on."""
        prepared = self._prepared_load
        self._prepared_load = _NO_LOAD
        chunk_tokens = self.row_store.chunk_tokens
        positions = np.arange(first, first + len(slots))
        # [n], which of the prepared chunks each position is in; a load may begin within the first
        index = positions // chunk_tokens - first // chunk_tokens
        if prepared.request_id != request_id or index[-1] + 1 != len(prepared.keys):
            self._on_unexpected("loads other KV than it prepared", len(slots))
            nowhere = np.full(len(slots), -1, dtype=np.int64)
            return OffloadLoad(self.row_store, slots, nowhere)
        numbers = [self._chunks.get(key, _NO_CHUNK) for key in prepared.keys]
        chunks = np.array(numbers, dtype=np.int64)[index]  # [n]
        sources = np.where(
            chunks != _NO_CHUNK, chunks * chunk_tokens + positions % chunk_tokens, -1
        )
        return OffloadLoad(self.row_store, slots, sources)

    def pop_stores(self, metadata: OffloadingConnectorMetadata) -> list[OffloadStore]:
        """The stores of a scheduled step, whose metadata the KV connector has made."""
        keys_by_spec = {id(store.spec): store.keys for store in self._prepared_stores}
        self._prepared_stores = []
        flushed = metadata.jobs_to_flush or ()
        stores = []
        for job_id, job in metadata.store_jobs.items():
            keys = keys_by_spec.get(id(job.dst_spec), [])
            slots = self._slots_of(job.src_spec)
            chunks = self._chunks_of(job.dst_spec, keys)
            if chunks is None or len(slots) != len(chunks) * self.row_store.chunk_tokens:
                self._forget_all("stores other KV than it prepared")
                continue
            if not chunks:
                continue
            self._chunks |= chunks
            numbers = np.array(list(chunks.values()), dtype=np.int64)
            stores.append(OffloadStore(self.row_store, slots, numbers, job_id in flushed))
        return stores

    def _slots_of(self, source: Any) -> NDArray[np.int64]:
        """The slots [n] of a store's blocks of our KV cache group; `source` is vLLM's
        `GPULoadStoreSpec`."""
        sizes = source.group_sizes  # blocks of each group, one group after the other
        first = sum(sizes[: self._group_index])
        end = first + sizes[self._group_index]
        blocks = source.block_ids[first:end].astype(np.int64)
        slots = blocks[:, None] * self._block_size + np.arange(self._block_size)
        return slots.reshape(-1)

    def _chunks_of(
        self, destination: LoadStoreSpec, keys: list[OffloadKey]
    ) -> dict[OffloadKey, int] | None:
        """By key, where a store's chunks of our KV cache group go. None if vLLM prepared no such
        store."""
        if not isinstance(destination, CPULoadStoreSpec):
            return None
        numbers = destination.chunk_ids.tolist()
        if not keys or len(keys) != len(numbers):
            return None
        return {
            key: number for key, number in zip(keys, numbers, strict=True) if self._is_ours(key)
        }

    def _forget_all(self, action: str) -> None:
        """Makes the rows of all chunks unknown: an unknown store may have overwritten any chunk."""
        self._on_unexpected(action, len(self._chunks) * self.row_store.chunk_tokens)
        self._chunks.clear()

    def _is_ours(self, key: OffloadKey) -> bool:
        """Whether a chunk is of the KV cache group by whose slots rows are stored."""
        return get_offload_group_idx(key) == self._kv_group

    # ---- in place of the manager's methods, which are `original` ----

    def _lookup(self, original: Any, key: OffloadKey, context: ReqContext) -> LookupResult:
        """Reports a miss for chunks without the rows that the request needs: only KV before is
        loaded."""
        result: LookupResult = original(key, context)
        if result is not LookupResult.HIT or not self._is_ours(key):
            return result
        end = context.get_offload_key_position(key)
        if end is not None and end <= self._needs.first_row(context.req_id):
            return result
        chunk = self._chunks.get(key, _NO_CHUNK)
        return result if self.row_store.is_complete(chunk) else LookupResult.MISS

    def _prepare_load(
        self, original: Any, keys: Collection[OffloadKey], context: ReqContext
    ) -> LoadStoreSpec:
        ours = [key for key in keys if self._is_ours(key)]
        self._prepared_load = _PreparedLoad(context.req_id, ours)
        spec: LoadStoreSpec = original(keys, context)
        return spec

    def _prepare_store(
        self, original: Any, keys: Collection[OffloadKey], context: ReqContext
    ) -> PrepareStoreOutput | None:
        output: PrepareStoreOutput | None = original(keys, context)
        if output is None:
            return None
        for key in output.evicted_keys:
            self._chunks.pop(key, None)
        self._prepared_stores.append(_PreparedStore(output.store_spec, output.keys_to_store))
        return output

    def _reset_cache(self, original: Any) -> None:
        self._chunks.clear()
        original()
