"""The plugin that vLLM loads into each of its processes: `enable_return_routed_experts` means this
capture.

It imports nothing of an engine until a program asks for routed experts, and runs beside any version
of vLLM.
"""

import functools
import logging
import os
import sys
from types import ModuleType
from typing import Any

from routed_experts.capture.seams.arguments import asks
from routed_experts.server import GO_BACK, PLUGIN_NAME
from routed_experts.server.inprocess.patching import replace_once

_SILENCE = f"To choose it without this warning, set VLLM_PLUGINS to the plugins to load, without {PLUGIN_NAME}."

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, which is configured
_warn_once = functools.cache(logger.warning)


def register() -> None:
    """What vLLM calls, in every process; safe to repeat, and never raises for its version.

    Replaces `EngineArgs.create_engine_config`: the argument, the flag and `aux_output_config` meet
    there, and a plugin is given no engine's arguments. Needed until vLLM lets a plugin provide the
    capture.
    """
    try:
        from vllm.engine.arg_utils import EngineArgs

        replace_once(EngineArgs, "create_engine_config", _create_engine_config)
    except (ImportError, AttributeError) as error:
        logger.debug("This version of vLLM has no EngineArgs.create_engine_config: %r", error)


def _create_engine_config(create: Any, args: Any, *positional: Any, **named: Any) -> Any:
    usage_context = named.get("usage_context", positional[0] if positional else None)
    engine_hooks = _engine_hooks(usage_context) if asks(args) else None
    if engine_hooks is None:
        return create(args, *positional, **named)
    return engine_hooks.create_config(create, args, *positional, **named)


def _engine_hooks(usage_context: Any = None) -> ModuleType | None:
    """The module that puts this capture in the place of vLLM's; None beside a version or front end
    that is not supported. That is an error if VLLM_PLUGINS names the capture."""
    from routed_experts.capture.engine.versions import (
        UnsupportedConfig,
        check_vllm_has,
        check_vllm_version,
    )
    from routed_experts.capture.seams.required import API

    try:
        check_vllm_version()
        check_vllm_has(API)
        if (front_end := _other_front_end(usage_context)) is not None:
            raise UnsupportedConfig(
                f"{front_end} cannot return what routed-experts-server captures."
            )
    except UnsupportedConfig as error:
        if PLUGIN_NAME in os.environ.get("VLLM_PLUGINS", "").split(","):
            raise UnsupportedConfig(f"{error} {GO_BACK}") from None
        _warn_once(f"{error} vLLM's own capture is used instead. {_SILENCE}")
        return None
    try:
        from routed_experts.server.inprocess import engine_hooks
    except Exception as error:
        raise UnsupportedConfig(
            f"The capture of routed experts cannot be loaded: {error!r}. {GO_BACK}"
        ) from error
    return engine_hooks


def _other_front_end(usage_context: Any) -> str | None:
    """The front end that replaces vLLM's Python server, if any; it loads no plugins."""
    from vllm import envs
    from vllm.usage.usage_lib import UsageContext

    # which only vLLM's gRPC server imports, before it builds an engine
    if "smg_grpc_servicer" in sys.modules:
        return "vLLM's gRPC server"
    is_server = usage_context == UsageContext.OPENAI_API_SERVER
    return "vLLM's front end in Rust" if is_server and envs.VLLM_USE_RUST_FRONTEND else None
