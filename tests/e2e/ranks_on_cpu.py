"""`routed-experts` with MoE layers whose ranks exchange their tokens, on a CPU.

    python -m tests.e2e.ranks_on_cpu serve ... -dp 2

vLLM's communicator for CPUs lacks the two collectives of that, and its experts for CPUs take every id for one of their
own; both are mended here. Not part of the server.
"""

import sys
from typing import Any

import torch
import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from routed_experts.server.cli.main import main


def _all_gatherv(self: CpuCommunicator, tensors: list[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
    """Of each of `tensors` those of all ranks, of which the ranks have as many rows as `sizes` says."""
    assert dim == 0
    whole = []
    for tensor in tensors:
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        whole.append(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))
    return whole


def _reduce_scatterv(self: CpuCommunicator, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    whole = tensor.clone()
    torch.distributed.all_reduce(whole, group=self.device_group)
    return whole.split(sizes)[self.rank_in_group].clone()


_apply = CPUUnquantizedExperts.apply


def _apply_own(self: CPUUnquantizedExperts, **arguments: Any) -> None:
    """What the other ranks' experts would add is theirs to add."""
    if (own := arguments["expert_map"]) is not None:
        ids = own[arguments["topk_ids"].long()]
        arguments["topk_weights"] = arguments["topk_weights"].masked_fill(ids < 0, 0)
        arguments["topk_ids"] = ids.clamp(min=0).to(arguments["topk_ids"].dtype)
    _apply(self, **arguments)


# At import, because the workers are processes of their own that import this module again.
CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv
CPUUnquantizedExperts.apply = _apply_own

if __name__ == "__main__":
    sys.exit(main())
