"""Routers that choose otherwise in each forward pass, as in 16 bits in another batch, but more often.

Weights stay those of a router's own logits. So a model that is given the experts which were captured
computes the same numbers.
"""

from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.fused_moe.layer import MoERunner

NOISE = 0.3
"""Standard deviation of what is added to logits for the choice. Those of the tiny model have 1."""


def choose_again(worker: Any) -> None:
    """Called in each worker of a started engine (`LLM.collective_rpc`), whose model renormalises a
    softmax of logits and runs eagerly."""
    # Equal in all ranks: those of tensor parallelism route the same tokens.
    noise = torch.Generator().manual_seed(0)
    for module in worker.model_runner.get_model().modules():
        if isinstance(module, MoERunner):
            _disturb(module.router, noise)


def make_stage_ready(worker: Any) -> None:
    """Called in each worker of a started engine with pipeline stages on a CPU.

    Makes what vLLM's runner puts the tensors of the stage before into. vLLM 0.32 makes it when it
    warms up, which its worker for CPUs does not do where the model runs eagerly.
    """
    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


def _disturb(router: Any, noise: torch.Generator) -> None:
    # Behind which the experts are put that requests say, so those stay.
    route = router._compute_routing

    def compute_routing(hidden: Any, logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        off = NOISE * torch.randn(logits.shape, generator=noise)
        weights, ids = route(hidden, logits + off, *args, **options)
        own = logits.gather(1, ids.long()).softmax(dim=1)
        weights.copy_(own)
        return weights, ids

    router._compute_routing = compute_routing
