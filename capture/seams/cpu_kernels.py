"""Until 0.30, on CPUs: MoE kernels choose the experts themselves, with a function of their
module."""

import sys
from collections.abc import Callable
from typing import Any

import torch

_MODULES = (
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe",
)
Sink = Callable[[torch.Tensor, torch.Tensor], None]
_sinks: list[Sink] = []  # the last one is that of the layer that runs


def _functions() -> list[Any]:
    return [
        sys.modules[name] for name in _MODULES if hasattr(sys.modules.get(name), "select_experts")
    ]


def routes_itself(runner: Any) -> bool:
    """Whether the kernel of a layer is one of these."""
    on_cpu = next(runner.routed_experts.parameters()).device.type == "cpu"
    return on_cpu and hasattr(runner.routed_experts, "forward_monolithic") and bool(_functions())


def capture(runner: Any, sink: Sink) -> None:
    """Gives the ids that the layer's kernel chooses, and their weights, to `sink`."""
    for module in _functions():
        if not hasattr(module.select_experts, "_routed_experts"):
            module.select_experts = _reporting(module.select_experts)
    forward = runner.routed_experts.forward_monolithic

    def reporting(*args: Any, **kwargs: Any) -> Any:
        _sinks.append(sink)
        try:
            return forward(*args, **kwargs)
        finally:
            _sinks.pop()

    runner.routed_experts.forward_monolithic = reporting


def _reporting(select: Any) -> Any:
    def select_experts(*args: Any, **kwargs: Any) -> Any:
        weights, ids = select(*args, **kwargs)
        if _sinks:
            _sinks[-1](ids, weights)
        return weights, ids

    select_experts._routed_experts = True  # type: ignore[attr-defined]
    return select_experts
