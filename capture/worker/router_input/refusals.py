"""Refuses, in the worker, layers whose routers cannot be given an input, though they can be
captured."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm.model_executor.layers.fused_moe.layer import MoERunner

from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.wire.rows import INPUT_FLAG
from routed_experts.capture.worker.moe_layers import MoELayers


@dataclass(frozen=True)
class InputRefusal:
    applies: Callable[[MoERunner], bool]  # true for a layer to refuse
    message: str  # the reason, and what to change; {layer} stands for the layer's number


INPUT_REFUSALS: tuple[InputRefusal, ...] = (
    InputRefusal(
        lambda layer: bool(layer.is_monolithic),
        "The MoE kernel of layer {layer} routes by itself, so its experts cannot be set: choose another one with "
        f"--moe-backend, for example --moe-backend triton (marlin for MXFP4), or remove {INPUT_FLAG}.",
    ),
    InputRefusal(
        lambda layer: layer.moe_config.sp_size > 1,
        "Layer {layer} spreads the tokens of a step over the tensor-parallel ranks, so its router does not see them "
        f"all: choose another --moe-backend, remove --enable-expert-parallel, or remove {INPUT_FLAG}.",
    ),
    InputRefusal(
        lambda layer: layer.moe_config.dp_size > 1 and bool(layer.do_naive_dispatch_combine),
        "The router of layer {layer} sees the tokens of other data-parallel ranks, whose requests this rank does not "
        f"know: choose an --all2all-backend other than allgather_reducescatter, or remove {INPUT_FLAG}.",
    ),
)


def check_input_layers(layers: MoELayers) -> None:
    """Raises `UnsupportedConfig` for layers whose routers cannot be given an input."""
    for layer in layers.runners:
        for refusal in INPUT_REFUSALS:
            if refusal.applies(layer):
                raise UnsupportedConfig(refusal.message.format(layer=layer.layer_id))
