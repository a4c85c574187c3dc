"""The plugin that vLLM loads into each of its processes: `enable_return_routed_experts` means this capture.

It imports nothing of an engine until a program asks for routed experts.
"""

import functools
from typing import Any

_REPLACED = "_routed_experts"


def register() -> None:
    """What vLLM calls, in every process; safe to repeat.

    Replaces `EngineArgs.create_engine_config`: the argument, the flag and `aux_output_config` meet there, and a plugin
    is given no engine's arguments. Until vLLM lets one choose who captures.
    """
    from vllm.engine.arg_utils import EngineArgs

    replace_once(EngineArgs, "create_engine_config", _create_engine_config)


def _create_engine_config(create: Any, args: Any, *positional: Any, **named: Any) -> Any:
    if not args.aux_output_config.enable_return_routed_experts:
        return create(args, *positional, **named)
    from routed_experts.server import own_engines

    own_engines.take_over(args)
    config = create(args, *positional, **named)
    own_engines.check(config)
    return config


def replace_once(owner: type, name: str, replacement: Any) -> None:
    """Makes `owner.name(…)` call `replacement` with the function that it was, in front of its arguments; once only."""
    original = getattr(owner, name)
    if hasattr(original, _REPLACED):
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(replaced, _REPLACED, True)
    setattr(owner, name, replaced)
