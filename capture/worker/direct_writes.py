"""Makes a router's top-k kernel write into the device cache itself, which saves a copy."""

import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import (
    FusedTopKRouter,
    dispatch_topk_sigmoid_func,
    dispatch_topk_softmax_func,
)
from vllm.platforms import current_platform

from routed_experts.capture.worker.capturer import ignore


def can_write_directly(runner: MoERunner, dp_size: int) -> bool:
    """Whether the layer's top-k kernel can be given the device cache's view as its output. Only for
    vLLM's default router on CUDA with int32 ids, if it sees only this rank's tokens."""
    return (
        not runner.is_monolithic
        and current_platform.is_cuda()
        and dp_size == 1
        and type(runner.router) is FusedTopKRouter
        and runner._quant_method.topk_indices_dtype in (None, torch.int32)
    )


def write_directly(
    router: FusedTopKRouter, view: torch.Tensor, weights_view: torch.Tensor | None = None
) -> None:
    """Makes the router's top-k kernel write into `view` ([N, K] int32) instead of a tensor of its
    own, and weights into `weights_view` ([N, K] float32).

    A step of more than N tokens raises `RuntimeError`: the kernel would write past their end.
    """
    scores = {"softmax": dispatch_topk_softmax_func, "sigmoid": dispatch_topk_sigmoid_func}
    top_k_kernel = scores[router.scoring_func]()

    def compute_routing(
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert indices_type in (None, torch.int32)
        num_tokens = router_logits.shape[0]
        if num_tokens > view.shape[0]:
            raise RuntimeError(
                f"a step of {num_tokens} tokens does not fit the device cache of {view.shape[0]}"
            )
        ids = view[:num_tokens]
        if weights_view is None:
            weights = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        else:
            weights = weights_view[:num_tokens]
        source_rows = torch.empty_like(ids)
        chosen = top_k_kernel(weights, ids, source_rows, router_logits, router.renormalize)
        return chosen[0], chosen[1]

    # On the instance, because the model creates its routers itself. vLLM's method allocates the
    # kernel's output, and a copy would add a kernel per layer and step. Needed until vLLM lets
    # callers pass the output.
    router._compute_routing = compute_routing
    # Does nothing, but vLLM 0.33 expects every captured router to have a capture function.
    router.set_capture_fn(ignore)
