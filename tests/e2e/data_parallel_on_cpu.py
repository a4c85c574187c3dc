"""`routed-experts` on CPU with data parallelism of a MoE model, for which vLLM lacks two exchanges
between CPUs.

    python -m tests.e2e.data_parallel_on_cpu serve ... --data-parallel-size 2

Ranks, their coordinator and the client that chooses among them are vLLM's own, as are the exchanges
that are built of torch.distributed here. Not part of the server.
"""

import sys
from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from routed_experts.server.cli.main import main


def _all_gatherv(
    self: CpuCommunicator, tensors: Any, dim: int = 0, sizes: list[int] | None = None
) -> Any:
    """What all ranks have, of `sizes` rows each, one after the other; of each of several tensors."""
    if isinstance(tensors, list):
        return [_all_gatherv(self, tensor, dim, sizes) for tensor in tensors]
    assert dim == 0
    sizes = sizes or [len(tensors)] * self.world_size
    padded = tensors.new_zeros(max(sizes), *tensors.shape[1:])
    padded[: len(tensors)] = tensors
    gathered = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(
    self: CpuCommunicator, tensor: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """This rank's part of the sum of what all ranks have."""
    assert dim == 0
    total = tensor.clone()
    distributed.all_reduce(total, group=self.device_group)
    parts = total.split(sizes or len(tensor) // self.world_size)  # type: ignore[no-untyped-call]
    part: torch.Tensor = parts[self.rank_in_group]
    return part.clone()


# At import, because the engines are processes of their own that import this module again.
CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv

if __name__ == "__main__":
    sys.exit(main())
