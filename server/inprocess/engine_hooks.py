"""Engines that a program builds itself, and asks for routed experts in vLLM's way: this capture
takes vLLM's place."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from routed_experts.capture.engine.classes import scheduler_name, worker_name
from routed_experts.capture.engine.config import check_engine_config
from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.seams.arguments import clear_flag, set_flag_on_engine
from routed_experts.capture.wire.vllm_rows import BARE_ROWS_KEY, sends_bare_rows
from routed_experts.protocol.version import VERSION
from routed_experts.server import GO_BACK
from routed_experts.server.inprocess.arrays import InProcessCapture
from routed_experts.server.inprocess.patching import replace_once
from routed_experts.server.outputs.processor import RowBuffers
from routed_experts.server.settings import (
    VLLM_FLAG_ENABLED,
    Settings,
    SettingsError,
    asks_for_every_request,
)
from routed_experts.server.vllm_api import (
    AsyncLLM,
    BeamSearchOfflineMixin,
    BeamSearchOnlineMixin,
    LLMEngine,
    VLLMValidationError,
    get_logger,
)

logger = get_logger(__name__)
_say_once = cache(logger.info)


def create_config(create: Callable[[], Any], args: Any, has_other_front_end: bool) -> Any:
    """What `create` makes of `args`, with this capture in place of vLLM's own.
    `has_other_front_end`: whether another process than one of ours takes the requests."""
    try:
        take_over(args)
        if has_other_front_end:
            args.additional_config = {**args.additional_config, BARE_ROWS_KEY: True}
        config = create()
        check_engine_config(config)
    except (UnsupportedConfig, SettingsError) as error:
        raise UnsupportedConfig(f"{error} {GO_BACK}") from None
    _say_once("routed-experts-server %s captures the routed experts. %s", VERSION, GO_BACK)
    return config


def take_over(args: Any) -> None:
    """Names our worker and scheduler in vLLM's engine arguments, in place of vLLM's own capture."""
    if not isinstance(args.additional_config, dict):
        raise UnsupportedConfig("additional_config must be a dictionary.")
    Settings.of(args.additional_config)
    args.worker_cls = worker_name(args.worker_cls)
    args.scheduler_cls = scheduler_name(args.scheduler_cls)
    config = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in args.additional_config.items()
    }
    args.additional_config = {**config, VLLM_FLAG_ENABLED: True}  # which vLLM hashes as JSON
    clear_flag(args)
    # Engines that are created from now on return arrays, as vLLM's own capture does. Both classes
    # make their output processor themselves, so it cannot be given to them; beam search drops what
    # its requests return. Needed until vLLM tells plugins of new engines.
    replace_once(LLMEngine, "__init__", _made)
    replace_once(AsyncLLM, "__init__", _made)
    replace_once(BeamSearchOfflineMixin, "beam_search", _beam_search)
    replace_once(BeamSearchOnlineMixin, "beam_search", _beam_search_online)


def _made(init: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
    init(engine, *args, **kwargs)
    if sends_bare_rows(engine.vllm_config):
        return  # vLLM's own server in Python, which reads them as the one in Rust does
    if asks_for_every_request(engine.vllm_config):
        InProcessCapture.install(engine)
        set_flag_on_engine(engine)


def _beam_search(search: Any, llm: Any, *args: Any, **kwargs: Any) -> Any:
    if asks_for_every_request(llm.llm_engine.vllm_config):
        _reject_beam_search()
    return search(llm, *args, **kwargs)


def _beam_search_online(search: Any, serving: Any, *args: Any, **kwargs: Any) -> Any:
    """For vLLM's own routes; behind our routes, `http.serving` has already rejected the request."""
    engine = serving.engine_client
    if isinstance(engine, AsyncLLM) and asks_for_every_request(engine.vllm_config):
        every_request = RowBuffers.install(engine.output_processor).every_request
        if every_request is not None and every_request.is_on:
            _reject_beam_search()
    return search(serving, *args, **kwargs)


def _reject_beam_search() -> None:
    raise VLLMValidationError(
        "Routed experts cannot be returned with beam search: build the engine without enable_return_routed_experts."
    )
