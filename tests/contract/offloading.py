"""vLLM's own `OffloadingConnector` around `engine`, both of its sides: what is ours moves KV, and
that is all."""

from copy import copy
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput

from routed_experts.capture.scheduler.kv.children import OffloadChild
from routed_experts.capture.scheduler.kv.offloading import OffloadedRows
from tests.contract.engine import Core
from tests.contract.loads import Slot, TracingExecutor, engine_with, slots_of, take_out
from tests.e2e.offload_on_cpu import LateWorker

NAME = "OffloadingConnector"
DERIVED = "OffloadingOfTheTests"
_CHUNK_BYTES = 4096  # to which vLLM rounds a chunk of a few blocks


class DerivedConnector(OffloadingConnector):  # type: ignore[misc]
    """Somebody's own, which moves blocks as vLLM's does."""


KVConnectorFactory.register_connector(DERIVED, __name__, "DerivedConnector")


class SlotWorker(LateWorker):
    """Copies slots of the executor's KV."""

    def __init__(self, executor: TracingExecutor, blocks_per_chunk: int) -> None:
        super().__init__(chance=0.4)
        self._executor = executor
        self._blocks_per_chunk = blocks_per_chunk
        self._chunks: dict[tuple[int, int], list[Slot]] = {}

    def copy(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, is_load: bool) -> None:
        places = [
            (chunk, index)
            for chunk in cpu.chunk_ids.tolist()
            for index in range(self._blocks_per_chunk)
        ]
        first = gpu.block_indices[0] % self._blocks_per_chunk
        blocks = gpu.block_ids.tolist()
        for block, number in zip(blocks, places[first : first + len(blocks)], strict=True):
            if is_load:
                self._executor.put(block, self._chunks[number])
            else:
                self._chunks[number] = self._executor.get(slots_of(block))


class OffloadingExecutor(TracingExecutor):
    """Calls the connector's worker side as vLLM's model runners do."""

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        super().initialize_from_config(kv_cache_configs)
        vllm_config = self.vllm_config
        config = vllm_config.kv_transfer_config
        self._names: list[str] = []  # of the children; of one alone, none
        if config.kv_connector == "MultiConnector":
            children = config.kv_connector_extra_config["connectors"]
            self._names = [child["kv_connector"] for child in children]
            child = children[self._names.index(NAME)]
            vllm_config = copy(vllm_config)
            vllm_config.kv_transfer_config = KVTransferConfig(engine_id=config.engine_id, **child)
        self.connector = OffloadingConnector(
            vllm_config, KVConnectorRole.WORKER, kv_cache_configs[0]
        )
        side = self.connector.connector_worker
        self.worker = side.worker = SlotWorker(self, side.spec.blocks_per_chunk)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        metadata = take_out(scheduler_output, OffloadingConnectorMetadata)
        self.connector.bind_connector_metadata(metadata)
        self.connector.handle_preemptions(metadata)
        result = super().execute_model(scheduler_output, non_block)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        assert self._output is not None
        report = self._output.kv_connector_output or KVConnectorOutput()
        _, received = self.connector.get_finished(scheduler_output.finished_req_ids)
        report.finished_recving = (report.finished_recving or set()) | received
        report.kv_connector_worker_meta = self._done()
        self._output.kv_connector_output = report
        return result

    def _done(self) -> Any:
        """What the connector did in this step, as its whole tells it."""
        done = self.connector.build_connector_worker_meta()
        if done is None or not self._names:
            return done
        return MultiKVConnectorWorkerMetadata(
            tuple(done if name == NAME else None for name in self._names)
        )


def engine_that_offloads(
    chunks: int = 40,
    blocks_per_chunk: int = 1,
    connectors: tuple[str, ...] = (NAME,),
    answers: bool = False,
    **options: Any,
) -> Core:
    """An engine that keeps so many chunks of KV outside its KV cache, with those of `answers` or
    without."""
    extra = {"cpu_bytes_to_use": chunks * _CHUNK_BYTES, "blocks_per_chunk": blocks_per_chunk}
    ours = {"kv_connector_extra_config": {**extra, "offload_prompt_only": not answers}}
    children = [
        {"kv_connector": name, **(ours if name in (NAME, DERIVED) else {})} for name in connectors
    ]
    return engine_with(*children, executor=OffloadingExecutor, **options)


def rows_of(core: Core) -> OffloadedRows:
    (child,) = (
        child for child in core.capture.external_kv.children if isinstance(child, OffloadChild)
    )
    return child.rows


def keys_kept(core: Core) -> list[bytes]:
    """The chunks that are there, by vLLM's account, or soon will be; the oldest first."""
    connectors = getattr(core.scheduler.connector, "_connectors", [core.scheduler.connector])
    (connector,) = (child for child in connectors if isinstance(child, OffloadingConnector))
    return list(connector.scheduler.manager._policy.chunks)


def num_loaded(core: Core) -> int:
    return int(core.model_executor.worker.num_loaded)


def check_keys(core: Core) -> None:
    """From now on, that rows are kept of the chunks that vLLM keeps, and of no others, whenever a
    step is scheduled."""
    schedule = core.scheduler.schedule

    def checked(*args: Any, **kwargs: Any) -> SchedulerOutput:
        step = schedule(*args, **kwargs)
        assert set(rows_of(core)._chunks) == set(keys_kept(core))
        return step

    core.scheduler.schedule = checked
