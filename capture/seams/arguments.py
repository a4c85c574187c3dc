"""How a program asks vLLM for routed experts. Imports nothing, so that it costs nothing where
nobody asks."""

from copy import copy
from dataclasses import replace
from typing import Any

# Until 0.31: engine arguments and the model's configuration have the flag themselves, there is no
# `aux_output_config`.


def asks(args: Any) -> bool:
    """Whether engine arguments ask vLLM for routed experts."""
    return bool(
        getattr(getattr(args, "aux_output_config", args), "enable_return_routed_experts", False)
    )


def clear_flag(args: Any) -> None:
    """Makes engine arguments no longer ask vLLM, because this capture takes its place."""
    if hasattr(args, "aux_output_config"):
        args.aux_output_config = replace(args.aux_output_config, enable_return_routed_experts=False)
    else:
        args.enable_return_routed_experts = False


def set_flag_on_engine(engine: Any) -> None:
    """Sets the flag that a finished engine returns routed experts, where a program looks it up:
    until 0.31 in a copy of its `model_config`, as in the scheduler's and the worker's the flag
    means vLLM's own capture."""
    if hasattr(engine.model_config, "enable_return_routed_experts"):
        engine.model_config = copy(engine.model_config)
        engine.model_config.enable_return_routed_experts = True


def vllm_captures(config: Any) -> bool:
    """Whether the engine's configuration has vLLM's own capture on."""
    return asks(config if hasattr(config, "aux_output_config") else config.model_config)
