"""vLLM's `OffloadingConnector` on a CPU: what vLLM has for it takes CUDA, so that this copies KV
from one place in the host's memory to another. Everything else is vLLM's own.
"""

import random
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from tests.e2e.harness import ON_GPU


def kv_transfer_config(num_bytes: int, **extra: Any) -> dict[str, Any]:
    """What `--kv-transfer-config` takes, for so much KV, of prompts and of answers."""
    extra_config = {"cpu_bytes_to_use": num_bytes, "offload_prompt_only": False, **extra}
    if not ON_GPU:
        extra_config |= {"spec_name": "OffloadingOnCpu", "spec_module_path": __name__}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra_config,
    }


class LateWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies as late as it may, and in no order: until it reports a copy nothing may touch its
    blocks. `chance` is how likely a copy is done the next time that the worker is asked."""

    def __init__(self, chance: float) -> None:
        self._chance = chance
        self._underway: dict[int, tuple[GPULoadStoreSpec, CPULoadStoreSpec, bool]] = {}
        self._done: list[int] = []
        self._dice = random.Random(0)
        self.num_stored = self.num_loaded = 0  # chunks

    def copy(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, is_load: bool) -> None:
        raise NotImplementedError

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        self._underway[job_id] = src_spec, dst_spec, False
        self.num_stored += len(dst_spec.chunk_ids)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        self._underway[job_id] = dst_spec, src_spec, True
        self.num_loaded += len(src_spec.chunk_ids)
        return True

    def get_finished(self) -> list[TransferResult]:
        for job_id in [job_id for job_id in self._underway if self._dice.random() < self._chance]:
            self._finish(job_id)
        done, self._done = self._done, []
        return [TransferResult(job_id, True) for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._underway.keys():
            self._finish(job_id)

    def _finish(self, job_id: int) -> None:
        self.copy(*self._underway.pop(job_id))
        self._done.append(job_id)


class CopyingWorker(LateWorker):
    """Copies blocks of tensors."""

    def __init__(self, tensors: list[torch.Tensor], num_chunks: int, blocks_per_chunk: int) -> None:
        super().__init__(chance=0.5)
        self.tensors = tensors  # [number of blocks, ...] each, of which blocks are copied
        self._places = num_chunks * blocks_per_chunk
        self._blocks_per_chunk = blocks_per_chunk
        self._kept: dict[int, torch.Tensor] = {}  # by the index of the tensor

    def copy(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, is_load: bool) -> None:
        size = self._blocks_per_chunk
        places = (torch.tensor(cpu.chunk_ids).long()[:, None] * size + torch.arange(size)).reshape(
            -1
        )
        blocks = torch.tensor(gpu.block_ids).long()
        places = places[gpu.block_indices[0] % size :][: len(blocks)]
        for index, tensor in enumerate(self.tensors):
            if index not in self._kept:
                self._kept[index] = torch.empty(self._places, *tensor.shape[1:], dtype=tensor.dtype)
            if is_load:
                tensor[blocks] = self._kept[index][places]
            else:
                self._kept[index][places] = tensor[blocks]


class OffloadingOnCpu(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec with another worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            tensors = [cache.tensor for cache in kv_caches.tensors]
            self._worker = CopyingWorker(tensors, self.num_chunks, self.blocks_per_chunk)
        return self._worker
