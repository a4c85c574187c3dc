"""How a program asks vLLM for routed experts. Imports nothing, so that it costs nothing where nobody asks."""

from dataclasses import replace
from typing import Any

# Until 0.31: engine arguments and the model's configuration have the flag themselves, there is no `aux_output_config`.


def asks(args: Any) -> bool:
    """Whether engine arguments ask vLLM for routed experts."""
    return bool(getattr(getattr(args, "aux_output_config", args), "enable_return_routed_experts", False))


def withdraw(args: Any) -> None:
    """Makes engine arguments no longer ask vLLM, because this capture takes its place."""
    if hasattr(args, "aux_output_config"):
        args.aux_output_config = replace(args.aux_output_config, enable_return_routed_experts=False)
    else:
        args.enable_return_routed_experts = False


def vllm_captures(config: Any) -> bool:
    """Whether the engine's configuration has vLLM's own capture on."""
    if hasattr(config, "aux_output_config"):
        return bool(config.aux_output_config.enabled)
    return bool(config.model_config.enable_return_routed_experts)
