"""The plugin that vLLM loads into each of its processes: `enable_return_routed_experts` means this
capture.

It imports nothing of an engine until a program asks for routed experts, and runs beside any version
of vLLM.
"""

import functools
import logging
import os
import re
import subprocess
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
    create_with = functools.partial(create, args, *positional, **named)
    return engine_hooks.create_config(create_with, args, is_behind_rust(usage_context))


def _engine_hooks(usage_context: Any = None) -> ModuleType | None:
    """The module that puts this capture in the place of vLLM's; None beside a version or front end
    that is not supported. That is an error if VLLM_PLUGINS names the capture."""
    from routed_experts.capture.engine.versions import (
        UnsupportedConfig,
        check_vllm_has,
        check_vllm_version,
    )
    from routed_experts.capture.seams.required import API

    is_named = PLUGIN_NAME in os.environ.get("VLLM_PLUGINS", "").split(",")
    try:
        check_vllm_version()
        check_vllm_has(API)
        if (reason := _unfit_front_end(usage_context, is_named)) is not None:
            raise UnsupportedConfig(reason)
    except UnsupportedConfig as error:
        if is_named:
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


def _unfit_front_end(usage_context: Any, is_named: bool) -> str | None:
    """Why the front end that takes the place of vLLM's Python server, and loads no plugins, cannot
    return what is captured; None if it can, or there is none. `is_named`: whether `VLLM_PLUGINS`
    names this one."""
    # which only vLLM's gRPC server imports, before it builds an engine
    if "smg_grpc_servicer" in sys.modules:
        return "vLLM's gRPC server cannot return what routed-experts-server captures."
    if not is_behind_rust(usage_context):
        return None
    if is_named:  # whose HTTP fields are meant then
        return (
            "vLLM's front end in Rust passes over the fields of routed-experts-server. It returns rows at the end of "
            "/inference/v1/generate alone, to every request, where VLLM_PLUGINS does not name routed_experts."
        )
    from vllm import envs

    version = _version_of_rust_front_end(envs.VLLM_RUST_FRONTEND_PATH)
    if version is None or version < _RUST_RETURNS_ROWS:
        return "vLLM's front end in Rust returns no routed experts before version 0.33."
    return None


_RUST_RETURNS_ROWS = (0, 33)


def is_behind_rust(usage_context: Any) -> bool:
    """Whether vLLM's front end in Rust takes the requests of an engine that is made for
    `usage_context`."""
    from vllm import envs
    from vllm.usage.usage_lib import UsageContext

    return bool(usage_context == UsageContext.OPENAI_API_SERVER and envs.VLLM_USE_RUST_FRONTEND)


def _version_of_rust_front_end(path: str | None) -> tuple[int, int] | None:
    """Major and minor version of the program that vLLM will run; None if it does not say."""
    try:
        command = [str(path), "--version"]  # says "vllm-rs 0.33.0"
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    numbers = re.search(r"vllm-rs (\d+)\.(\d+)", said)
    return (int(numbers[1]), int(numbers[2])) if numbers else None
