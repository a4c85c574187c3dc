"""Finds the MoE layers of a model, and what their rows look like."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

from routed_experts.capture.engine.config import BOUNDED_REPLAY
from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.worker.capturer import RowShape
from routed_experts.capture.worker.refusals import check_layer


@dataclass(frozen=True)
class MoELayers:
    """The MoE layers of this worker's part of a model, in decoder order."""

    runners: tuple[MoERunner, ...]
    shape: RowShape


def find_moe_layers(model: torch.nn.Module) -> MoELayers:
    """The MoE layers of `model` and the shape of their rows; a pipeline stage may have none.

    Raises `UnsupportedConfig` for layers whose routing cannot be captured
    (`capture/worker/refusals.py`), or that do not fit one array.
    """
    if getattr(model, "decoder_replay_layers", None) is not None:
        raise UnsupportedConfig(BOUNDED_REPLAY)
    if any(isinstance(module, RoutedExpertsCaptureSource) for module in model.modules()):
        raise UnsupportedConfig(
            "The model's fused MoE layers (MegaMoE) route in their kernel, which is not captured: choose another one "
            "with --moe-backend."
        )
    runners = _runners(model)
    for runner in runners:
        check_layer(runner)
    shape = _row_shape(
        layer_ids=[int(runner.layer_id) for runner in runners],
        sizes={(int(runner.moe_config.num_logical_experts), _top_k(runner)) for runner in runners},
        weights_scale=tuple(
            float(getattr(runner, "routed_scaling_factor", 1.0)) for runner in runners
        ),
        weights_on_input=any(
            runner.routed_experts.apply_router_weight_on_input for runner in runners
        ),
    )
    return MoELayers(runners, shape)


def has_parts(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether an MoE layer among `modules` is sequence-parallel: each tensor-parallel rank routes a
    part of the tokens. Each model decides this itself; not all follow vLLM's configuration."""
    return any(
        isinstance(module, MoERunner) and module.moe_config.sp_size > 1 for module in modules
    )


def returns_sorted(runners: Sequence[MoERunner], device: torch.device) -> bool:
    """Whether all these routers return a token's experts with the largest weight first.

    vLLM's fused top-k on CUDA takes the largest score again and again, and its weights rise with
    its scores. All else is not promised: routers with a bias sort by biased scores, those with
    groups sort nothing, nor do those on CPUs, and kernels that route by themselves have an order of
    their own.
    """
    if device.type != "cuda":
        return False
    return all(
        type(runner.router) is FusedTopKRouter and not runner.is_monolithic for runner in runners
    )


def _runners(model: torch.nn.Module) -> tuple[MoERunner, ...]:
    """The layers with a router, in decoder order; refuses those of encoders."""
    runners = {
        name: module for name, module in model.named_modules() if isinstance(module, MoERunner)
    }
    # of multimodal models
    towers = tuple(f"{name}." for name in getattr(model, "_tower_model_names", ()))
    if any(name.startswith(towers) for name in runners):
        raise UnsupportedConfig(
            "The model's encoder of images, video or audio has MoE layers, which route no tokens."
        )
    return tuple(sorted(runners.values(), key=lambda runner: int(runner.layer_id)))


def _top_k(runner: MoERunner) -> int:
    """How many experts the router chooses. Fused shared experts, to which every token goes, are
    counted by some routers."""
    num_shared = int(getattr(runner.router, "num_fused_shared_experts", 0))
    return int(runner.router.top_k) - num_shared


def _row_shape(
    *,
    layer_ids: Sequence[int],
    sizes: set[tuple[int, int]],  # experts and top-k of these layers
    weights_scale: tuple[float, ...],
    weights_on_input: bool,
) -> RowShape:
    """The shape of rows of these layers; refuses layers that do not fit one array."""
    if len(set(layer_ids)) != len(layer_ids):
        raise UnsupportedConfig(
            f"Several MoE layers share a decoder layer, which rows cannot express: {tuple(layer_ids)}."
        )
    if len(sizes) > 1:
        raise UnsupportedConfig(
            f"The MoE layers differ in experts or top-k, which one array cannot express: {sorted(sizes)}."
        )
    if not sizes:  # a pipeline stage without MoE layers
        return RowShape((), 0, 0)
    num_experts, top_k = sizes.pop()
    return RowShape(tuple(layer_ids), num_experts, top_k, weights_scale, weights_on_input)
