"""Refuses MoE layers whose routing cannot be captured exactly.

Configurations are refused before the model is loaded, by the table in `capture/engine/config.py`.
What only the loaded model shows is refused here: a class of routers by a line in `REFUSED_ROUTERS`,
other layers by an entry of `REFUSED_LAYERS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.seams import cpu_kernels
from routed_experts.capture.seams.engine import can_report_choice

REFUSED_ROUTERS: dict[str, str] = {
    "ZeroExpertRouter": "has zero experts, whose ids vLLM replaces by 0",
}
"""By the name of a router's class, or of one that it derives from: why its ids are not those of the
experts that were chosen. Also a line in `capture/seams/required.py`, as vLLM may rename a class."""


@dataclass(frozen=True)
class LayerRefusal:
    applies: Callable[[MoERunner], bool]  # true for a layer to refuse
    # the reason, and what to change; {layer}, {router} and {kernel} stand for those of the layer
    message: str


REFUSED_LAYERS: tuple[LayerRefusal, ...] = (
    LayerRefusal(
        lambda layer: layer.moe_config.sp_size > 1 and layer.moe_config.dp_size == 1,
        "Layer {layer} spreads the tokens of a step over the tensor-parallel ranks, but vLLM says how with data "
        "parallelism only: choose another --moe-backend, or remove --enable-expert-parallel.",
    ),
    LayerRefusal(
        # since vLLM 0.33
        lambda layer: getattr(layer.routed_experts, "expert_substitution", None) is not None,
        "Layer {layer} replaces experts (expert_substitution), which changes ids in place: its routing cannot be "
        "captured.",
    ),
    LayerRefusal(
        # InternS2-Mobius, by names of its layers
        lambda layer: ".meta_mlp." in layer.layer_name,
        "Decoder layers of the model share MoE layers, which rows cannot express.",
    ),
    LayerRefusal(
        # ERNIE-4.5-VL, by names of its layers
        lambda layer: ".text_experts" in layer.layer_name or ".vision_experts" in layer.layer_name,
        "The model routes text and image tokens in different MoE layers, which rows cannot express.",
    ),
    LayerRefusal(
        lambda layer: routes_in_kernel(layer) and monolithic_experts(layer) is None,
        "The MoE kernel {kernel} of layer {layer} routes by itself and does not say how: choose another one with "
        "--moe-backend, for example --moe-backend triton (marlin for MXFP4).",
    ),
    LayerRefusal(
        lambda layer: not layer.is_monolithic and not isinstance(layer.router, BaseRouter),
        "The router {router} of layer {layer} cannot be captured.",
    ),
    LayerRefusal(
        lambda layer: not layer.is_monolithic and layer.router.capture_fn is not None,
        "The router of layer {layer} is captured by something else already: only one can be.",
    ),
)


def check_layer(layer: MoERunner) -> None:
    """Raises `UnsupportedConfig` for a layer whose ids cannot be captured."""
    for cls in type(layer.router).__mro__:
        if cls.__name__ in REFUSED_ROUTERS:
            raise UnsupportedConfig(
                f"Layer {layer.layer_id} {REFUSED_ROUTERS[cls.__name__]}: its routing cannot be captured."
            )
    for refusal in REFUSED_LAYERS:
        if refusal.applies(layer):
            raise UnsupportedConfig(
                refusal.message.format(
                    layer=layer.layer_id,
                    router=type(layer.router).__name__,
                    kernel=type(_fused_experts(layer)).__name__,
                )
            )


def routes_in_kernel(layer: MoERunner) -> bool:
    """Whether the experts' kernel chooses the experts, in place of the layer's router. Kernels of
    older versions of vLLM for CPUs do so too, and are captured otherwise (`cpu_kernels`)."""
    return bool(layer.is_monolithic and not cpu_kernels.routes_itself(layer))


def monolithic_experts(layer: MoERunner) -> FusedMoEExpertsMonolithic | None:
    """The kernel of a layer that routes by itself; None if it cannot report its choice."""
    experts = _fused_experts(layer)
    if isinstance(experts, FusedMoEExpertsMonolithic) and can_report_choice(experts):
        return experts
    return None


def _fused_experts(layer: MoERunner) -> Any:
    kernel = getattr(getattr(layer._quant_method, "moe_kernel", None), "impl", None)
    return getattr(kernel, "fused_experts", None)
