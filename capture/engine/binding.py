"""Binds the model's MoE layers to the device cache."""

from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter

from capture.capturer import Capturer
from capture.engine.config import UnsupportedConfig


@dataclass(frozen=True)
class MoELayers:
    """The MoE layers of a model, in decoder order."""

    runners: tuple[MoERunner, ...]
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int


def find_moe_layers(model: torch.nn.Module) -> MoELayers:
    """The MoE layers of `model` and what their rows look like.

    Raises:
        UnsupportedConfig: a layer's routing cannot be captured, or the layers do not fit one array.
    """
    runners = sorted((m for m in model.modules() if isinstance(m, MoERunner)), key=lambda m: int(m.layer_id))
    if not runners:
        raise UnsupportedConfig("No MoE layer was found in the model: add --no-enable-return-routed-experts.")
    layer_ids = tuple(int(runner.layer_id) for runner in runners)
    if len(set(layer_ids)) != len(layer_ids):
        raise UnsupportedConfig(f"Several MoE layers share a decoder layer, which rows cannot express: {layer_ids}.")
    for runner in runners:
        _check_capturable(runner)
    shapes = {(runner.moe_config.num_logical_experts, _top_k(runner)) for runner in runners}
    if len(shapes) != 1:
        raise UnsupportedConfig(
            f"The MoE layers differ in experts or top-k, which one array cannot express: {sorted(shapes)}."
        )
    num_experts, top_k = shapes.pop()
    return MoELayers(tuple(runners), layer_ids, num_experts, top_k)


def bind(layers: MoELayers, capturer: Capturer) -> None:
    """Makes every layer write its logical expert ids into its view of the device cache.

    The routers call the function before they map logical to physical ids (expert load balancing), inside the
    opaque MoE operator, so it works under torch.compile and is recorded by graph capture.
    """
    for row, runner in enumerate(layers.runners):
        runner.router.set_capture_fn(capturer.sink(row))


def _check_capturable(runner: MoERunner) -> None:
    router = runner.router
    if runner.is_monolithic:
        raise UnsupportedConfig(
            f"The MoE kernel of layer {runner.layer_id} routes by itself and its choice cannot be read: choose "
            "another one with --moe-backend, for example --moe-backend triton."
        )
    if not isinstance(router, BaseRouter):
        raise UnsupportedConfig(f"The router {type(router).__name__} of layer {runner.layer_id} cannot be captured.")
    if isinstance(router, ZeroExpertRouter):
        raise UnsupportedConfig(
            f"Layer {runner.layer_id} has zero experts, whose ids vLLM replaces by 0: its routing cannot be captured."
        )
    if router.capture_fn is not None:
        raise UnsupportedConfig(
            f"The router of layer {runner.layer_id} is captured by something else already: only one can be."
        )


def _top_k(runner: MoERunner) -> int:
    fused_shared = int(getattr(runner.router, "num_fused_shared_experts", 0))
    return int(runner.router.top_k) - fused_shared
