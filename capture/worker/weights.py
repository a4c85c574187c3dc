"""Refuses MoE layers whose weights cannot be captured exactly, though their ids can."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.platforms import current_platform

from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.wire.rows import NO_WEIGHTS_FLAG
from routed_experts.capture.worker.moe_layers import MoELayers
from routed_experts.capture.worker.refusals import routes_in_kernel


def check_weights(layers: MoELayers, is_eager: bool) -> None:
    """Raises `UnsupportedConfig` for layers whose weights cannot be captured."""
    for runner in layers.runners:
        if routes_in_kernel(runner):
            raise UnsupportedConfig(
                f"The MoE kernel of layer {runner.layer_id} routes by itself, and says which experts but not their "
                "weights: choose another one with --moe-backend, for example --moe-backend triton (marlin for MXFP4), "
                f"or serve without weights ({NO_WEIGHTS_FLAG})."
            )
    # The kernel overwrites them, and says so neither to torch.compile nor to anybody else.
    if layers.shape.weights_on_input and current_platform.is_cpu() and not is_eager:
        raise UnsupportedConfig(
            f"The model's weights multiply the experts' input, and compiled code for CPUs overwrites them: add "
            f"--enforce-eager, or serve without weights ({NO_WEIGHTS_FLAG})."
        )


def check_weights_are_kept(runner: MoERunner) -> None:
    """Refuses a layer whose experts' kernel changes its weights, in vLLM's own first step before it
    is ready.

    For layers whose weights are not copied before that kernel runs. The method is replaced on the
    instance, until it has run once.
    """
    experts = runner.routed_experts
    forward = experts.forward_modular

    def forward_modular(*args: Any, topk_weights: torch.Tensor, **kwargs: Any) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return forward(*args, topk_weights=topk_weights, **kwargs)
        before = topk_weights.clone()
        output = forward(*args, topk_weights=topk_weights, **kwargs)
        # NaN is equal to itself
        if not torch.equal(before.view(torch.uint8), topk_weights.view(torch.uint8)):
            raise UnsupportedConfig(
                f"The MoE kernel of layer {runner.layer_id} changes the weights that it is given: choose another one "
                f"with --moe-backend, or serve without weights ({NO_WEIGHTS_FLAG})."
            )
        vars(experts).pop("forward_modular", None)  # microbatches come here at once
        return output

    experts.forward_modular = forward_modular
