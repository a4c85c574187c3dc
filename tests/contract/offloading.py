"""vLLM's own `OffloadingConnector` around `arithmetic`, both of its sides: what is ours moves KV, and that is all."""

import random
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
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput

from routed_experts.capture.engine.offloading import OffloadedRows
from tests.contract.arithmetic import BLOCK, Core, engine
from tests.contract.loads import Slot, TracingExecutor, _Metadata

NAME = "OffloadingConnector"
_CHUNK_BYTES = 4096  # to which vLLM rounds a chunk of a few blocks


class SlotWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies slots, as late as it may: between being told and having to report a copy nothing may touch its blocks.

    Attributes:
        num_stored, num_loaded: chunks.
    """

    def __init__(self, executor: TracingExecutor, blocks_per_chunk: int) -> None:
        self._executor = executor
        self._blocks_per_chunk = blocks_per_chunk
        self._chunks: dict[tuple[int, int], list[Slot]] = {}
        self._underway: dict[int, tuple[list[int], list[tuple[int, int]], bool]] = {}
        self._done: list[int] = []
        self._dice = random.Random(0)
        self.num_stored = self.num_loaded = 0

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._underway[job_id] = *self._pairs(src_spec, dst_spec), False
        self.num_stored += len(dst_spec.chunk_ids)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._underway[job_id] = *self._pairs(dst_spec, src_spec), True
        self.num_loaded += len(src_spec.chunk_ids)
        return True

    def get_finished(self) -> list[TransferResult]:
        for job_id in [job_id for job_id in self._underway if self._dice.random() < 0.4]:
            self._copy(job_id)
        done, self._done = self._done, []
        return [TransferResult(job_id, True) for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._underway.keys():
            self._copy(job_id)

    def _pairs(self, gpu: GPULoadStoreSpec, cpu: LoadStoreSpec) -> tuple[list[int], list[tuple[int, int]]]:
        assert isinstance(cpu, CPULoadStoreSpec)
        places = [(chunk, index) for chunk in cpu.chunk_ids.tolist() for index in range(self._blocks_per_chunk)]
        first = gpu.block_indices[0] % self._blocks_per_chunk
        blocks = gpu.block_ids.tolist()
        return blocks, places[first : first + len(blocks)]

    def _copy(self, job_id: int) -> None:
        blocks, places, is_load = self._underway.pop(job_id)
        kv, number = self._executor._kv, self._executor._number
        for block, place in zip(blocks, places, strict=True):
            slots = range(block * BLOCK, (block + 1) * BLOCK)
            if is_load:
                for slot, kept in zip(slots, self._chunks[place], strict=True):
                    kv[slot], number[slot] = kept
            else:
                self._chunks[place] = [(kv[slot], number[slot]) for slot in slots]
        self._done.append(job_id)


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
    (rows,) = (rows for rows in core.scheduler.aux_output_connector._loads._offloaded if rows is not None)
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
