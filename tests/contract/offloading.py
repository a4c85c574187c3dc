"""vLLM's own `OffloadingConnector` around `engine`, both of its sides: what is ours moves KV, and that is all."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput

from routed_experts.capture.engine.kv_transfer.offloading import OffloadedRows
from tests.contract.engine import BLOCK, Core, engine
from tests.contract.loads import Slot, TracingExecutor, _Metadata
from tests.e2e.offload_on_cpu import LateWorker

NAME = "OffloadingConnector"
_CHUNK_BYTES = 4096  # to which vLLM rounds a chunk of a few blocks


class SlotWorker(LateWorker):
    """Copies slots of the executor's KV."""

    def __init__(self, executor: TracingExecutor, blocks_per_chunk: int) -> None:
        super().__init__(chance=0.4)
        self._executor = executor
        self._blocks_per_chunk = blocks_per_chunk
        self._chunks: dict[tuple[int, int], list[Slot]] = {}

    def copy(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, is_load: bool) -> None:
        places = [(chunk, index) for chunk in cpu.chunk_ids.tolist() for index in range(self._blocks_per_chunk)]
        first = gpu.block_indices[0] % self._blocks_per_chunk
        blocks = gpu.block_ids.tolist()
        kv, number = self._executor._kv, self._executor._number
        for block, place in zip(blocks, places[first : first + len(blocks)], strict=True):
            slots = range(block * BLOCK, (block + 1) * BLOCK)
            if is_load:
                for slot, kept in zip(slots, self._chunks[place], strict=True):
                    kv[slot], number[slot] = kept
            else:
                self._chunks[place] = [(kv[slot], number[slot]) for slot in slots]


class OffloadingExecutor(TracingExecutor):
    """Calls the connector's worker side as vLLM's model runners do."""

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        super().initialize_from_config(kv_cache_configs)
        config = self.vllm_config.kv_transfer_config
        assert config is not None
        self._is_multi = config.kv_connector == "MultiConnector"
        vllm_config = self.vllm_config
        if self._is_multi:
            (child,) = (each for each in config.kv_connector_extra_config["connectors"] if each["kv_connector"] == NAME)
            vllm_config = copy(vllm_config)
            vllm_config.kv_transfer_config = KVTransferConfig(engine_id=config.engine_id, **child)
        self.connector = OffloadingConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_configs[0])
        assert self.connector.connector_worker is not None
        self.worker = SlotWorker(self, self.connector.connector_worker.spec.blocks_per_chunk)
        self.connector.connector_worker.worker = self.worker

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        given = scheduler_output.kv_connector_metadata
        children: Sequence[KVConnectorMetadata] = given.metadata if self._is_multi else (given,)
        others = tuple(child for child in children if not isinstance(child, OffloadingConnectorMetadata))
        (metadata,) = (child for child in children if isinstance(child, OffloadingConnectorMetadata))
        scheduler_output.kv_connector_metadata = MultiKVConnectorMetadata(others or (_Metadata([], []),))
        self.connector.bind_connector_metadata(metadata)
        self.connector.handle_preemptions(metadata)
        result = super().execute_model(scheduler_output, non_block)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        assert self._output is not None
        report = self._output.kv_connector_output or KVConnectorOutput()
        _, received = self.connector.get_finished(scheduler_output.finished_req_ids)
        report.finished_recving = (report.finished_recving or set()) | received
        about = self.connector.build_connector_worker_meta()
        if about is not None and self._is_multi:
            about = MultiKVConnectorWorkerMetadata(
                tuple(about if isinstance(child, OffloadingConnectorMetadata) else None for child in children)
            )
        report.kv_connector_worker_meta = about
        self._output.kv_connector_output = report
        return result


def engine_that_offloads(
    chunks: int = 40,
    blocks_per_chunk: int = 1,
    connectors: Sequence[str] = (NAME,),
    role: str = "kv_both",
    extra: dict[str, Any] | None = None,
    **about: Any,
) -> Core:
    """An engine that keeps so many chunks of KV outside its KV cache."""
    extra = {"cpu_bytes_to_use": chunks * _CHUNK_BYTES, "blocks_per_chunk": blocks_per_chunk, **(extra or {})}
    children = [{"kv_connector": name, "kv_role": role} for name in connectors]
    for child in children:
        if child["kv_connector"] == NAME:
            child["kv_connector_extra_config"] = extra
    config = KVTransferConfig(**children[0])
    if len(children) > 1:
        config = KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
        )
    return engine(kv_transfer=config, executor=OffloadingExecutor, **about)


def offloaded_rows(core: Core) -> OffloadedRows:
    """Those that its scheduler follows."""
    (rows,) = (rows for rows in core.capture._loads._offloaded if rows is not None)
    return rows


def keys_kept(core: Core) -> Mapping[bytes, Any]:
    """The chunks that are there, by vLLM's account, or soon will be; by key, the oldest first."""
    connectors = getattr(core.scheduler.connector, "_connectors", [core.scheduler.connector])
    (connector,) = (each for each in connectors if isinstance(each, OffloadingConnector))
    chunks: Mapping[bytes, Any] = connector.scheduler.manager._policy.chunks
    return chunks


def worker_of(core: Core) -> SlotWorker:
    """What copies its KV."""
    executor = core.model_executor
    assert isinstance(executor, OffloadingExecutor)
    return executor.worker
