"""Fills in vLLM's `serve` arguments and runs it."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from routed_experts.capture.engine.config import UnsupportedConfig, check_engine_config, check_vllm_version
from routed_experts.server.cli import TINY_MODEL_NAME
from routed_experts.server.errors import CommandError

_TINY_KV_CACHE_BYTES = 64 << 20


def parse(argv: list[str]) -> argparse.Namespace:
    """vLLM's parsed `serve` arguments, with the capture on unless it was switched off.

    Raises:
        CommandError: vLLM's parser refuses them, such as a name for a model that is not given.
    """
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="routed-experts")
    serve = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    serve.usage = "routed-experts serve [MODEL] [options]"
    serve.set_defaults(enable_return_routed_experts=True)
    try:
        args: argparse.Namespace = parser.parse_args(["serve", *argv])
    except ValueError as error:
        raise CommandError(str(error)) from None
    if args.model_tag is not None:  # as vLLM's own command does, but before the configuration is checked
        args.model = args.model_tag
    configure_logging_from_args(args)
    return args


def take_capture_flag(args: argparse.Namespace) -> bool:
    """Whether to capture. vLLM's flag of that name means this project's capture here, and is not handed on."""
    capture = bool(args.enable_return_routed_experts)
    args.enable_return_routed_experts = False
    return capture


def use_tiny_model(args: argparse.Namespace, directory: Path) -> None:
    """Serves the tiny model from `directory`, which is made if it is not there."""
    if not (directory / "config.json").exists():
        from routed_experts.server.tiny_model import make_tiny_model  # imports transformers, which takes seconds

        make_tiny_model(directory)
    args.model_tag = args.model = str(directory)
    args.served_model_name = args.served_model_name or [TINY_MODEL_NAME]
    if args.dtype == "auto":
        args.dtype = "float32"
    if args.kv_cache_memory_bytes is None:
        args.kv_cache_memory_bytes = _TINY_KV_CACHE_BYTES
    if current_platform.is_cpu():
        args.enforce_eager = True  # compiling takes longer than the tiny model ever runs


def fill_in(args: argparse.Namespace, scheduler: str, workers: Mapping[str, str]) -> None:
    """Names our scheduler and worker in vLLM's arguments.

    Raises:
        CommandError: the arguments name others, or the device or the version of vLLM is not supported.
    """
    try:
        check_vllm_version()
    except UnsupportedConfig as error:
        raise CommandError(str(error)) from None
    for flag in ("worker_cls", "scheduler_cls"):
        given = getattr(args, flag)
        if given not in (None, "auto", scheduler, *workers.values()):
            raise CommandError(
                f"--{flag.replace('_', '-')} {given} takes the place of this server's capture: remove it, or add "
                "--no-enable-return-routed-experts."
            )
    device = "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else None
    if device is None:
        raise CommandError("Only CUDA and CPU are supported: add --no-enable-return-routed-experts.")
    args.scheduler_cls = scheduler
    args.worker_cls = workers[device]


def check(args: argparse.Namespace) -> None:
    """Refuses here, in a sentence, what the engine's processes would refuse later among their stack traces.

    Raises:
        CommandError: the engine's configuration cannot give exact routing.
    """
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER, headless=args.headless
    )
    try:
        check_engine_config(config)
    except UnsupportedConfig as error:
        raise CommandError(str(error)) from None


def run(args: argparse.Namespace) -> None:
    """Runs vLLM's `serve` until it stops."""
    command = ServeSubcommand()
    command.validate(args)
    command.cmd(args)
