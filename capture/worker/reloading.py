"""On CPUs: experts that are loaded again are packed again, for their kernel."""

from collections.abc import Callable
from functools import partial

from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)


def pack_when_reloaded(model: nn.Module) -> None:
    """Called once a model is loaded. vLLM packs its experts' weights then, and not when it loads
    others: the kernel would take them for packed ones, and nobody would know."""
    for module in model.modules():
        if isinstance(module, RoutedExperts) and isinstance(
            module.quant_method, UnquantizedFusedMoEMethod
        ):
            method = module.quant_method
            process = method.process_weights_after_loading
            method.process_weights_after_loading = partial(_as_at_first, method, process)


def _as_at_first(
    method: UnquantizedFusedMoEMethod, process: Callable[[nn.Module], None], layer: nn.Module
) -> None:
    """Processes weights that were loaded."""
    method.moe_kernel = None  # with a kernel, vLLM does not pack them
    process(layer)
