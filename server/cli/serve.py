"""`routed-experts serve`: vLLM's `serve` with our plugin, worker and scheduler filled in."""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import zmq_socket_ctx
from vllm.v1.engine import utils as engine_utils

from routed_experts.capture.engine.classes import scheduler_name, worker_name
from routed_experts.capture.engine.config import check_engine_config
from routed_experts.capture.engine.kv_transfer.connectors import MISSING, ON_LOAD_FLAG, ON_LOAD_VARIABLE, RECOMPUTE
from routed_experts.capture.engine.versions import (
    ALLOW_UNTESTED_FLAG,
    ALLOW_UNTESTED_VARIABLE,
    UnsupportedConfig,
    missing_gpu_run,
)
from routed_experts.capture.rows import WEIGHTS_FLAG, WEIGHTS_KEY
from routed_experts.capture.seams.http import cli_env_setup, configure_logging_from_args
from routed_experts.protocol.models import WEIGHTS, FieldError, check_defaults
from routed_experts.protocol.version import VERSION
from routed_experts.server import MAX_RESPONSE_BYTES, PLUGIN_GROUP, PLUGIN_NAME
from routed_experts.server.cli.console import CommandError, say
from routed_experts.server.cli.preflight import check_port, check_socket, sentence_of
from routed_experts.server.http.recording import prepare
from routed_experts.server.http.selftest import SelfTestError
from routed_experts.server.inprocess.api_processes import close_port_after_the_last
from routed_experts.server.outputs.array_store import DEFAULT_LIFETIME_S, LONGEST_LIFETIME_S
from routed_experts.server.outputs.folders import default_folder, private_folder, remove_unused
from routed_experts.server.vllm_api import VLLM_VERSION, get_logger

logger = get_logger(__name__)

TINY_MODEL_NAME = "tiny-moe"
_TINY_KV_CACHE_BYTES = 64 << 20
RECORD_FLAG = "--routed-experts-record"
_RECORD_BYTES = 10 << 30
SHUTDOWN_TIMEOUT_S = 25
"""vLLM's default is 0, which cuts off running requests. Kubernetes gives a pod 30 s to stop."""

DESCRIPTION = """\
Starts an OpenAI-compatible server that also returns the experts that each token was routed to.
MODEL is a folder or a name on the Hugging Face Hub. Without it, a tiny model is created and served.
"""
EPILOG = """\
All flags of vllm serve are accepted:
  routed-experts serve --help=all            list all flags
  routed-experts serve --help=ModelConfig    list the flags of one group
  routed-experts serve --help=max-model-len  show one flag
"""
_ENGINE_FAILED = "Engine core initialization failed"
ENGINE_DID_NOT_START = (
    "The engine did not start; its own error stands above. If memory ran out, lower --max-model-len, --max-num-seqs or "
    "--gpu-memory-utilization, or spread the model over more GPUs with --tensor-parallel-size."
)


def main(argv: list[str]) -> int:
    """Serves until the server is stopped; returns the command's exit status."""
    args = parse(take_version_flag(argv))
    check_front_end(args)
    logger.info("routed-experts-server %s, vLLM %s", VERSION, VLLM_VERSION)
    if args.uds and not args.headless:
        check_socket(args.uds)
    elif not args.headless:
        check_port(args.host, args.port)
    if args.model_tag is None:
        use_tiny_model(args, tiny_model_dir())
    capture = take_capture_flag(args)
    allow_plugin()
    if capture:
        fill_in(args)
    else:
        for flag, is_given in (
            (WEIGHTS_FLAG, args.enable_return_routed_expert_weights),
            (RECORD_FLAG, args.routed_experts_record),
        ):
            if is_given:
                raise CommandError(f"{flag} needs the capture: remove --no-enable-return-routed-experts.")
    check(args, capture)
    with store_of(args) if capture and not args.headless else nullcontext():
        run(args)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """vLLM's parsed `serve` arguments, with the capture on unless it was switched off."""
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="routed-experts")
    serve = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    serve.usage = "routed-experts serve [MODEL] [options]"
    serve.description, serve.epilog = DESCRIPTION, EPILOG
    serve.set_defaults(enable_return_routed_experts=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    add_flags(serve)
    try:
        args: argparse.Namespace = parser.parse_args(["serve", *argv])
    except ValueError as error:
        raise CommandError(str(error)) from None
    except (OSError, TypeError) as error:
        raise CommandError(f"The arguments cannot be read: {error}.") from None
    if args.model_tag is not None:  # as in vLLM's own command, but before checking the configuration
        args.model = args.model_tag
    try:
        configure_logging_from_args(args)
    except (RuntimeError, ValueError, OSError) as error:
        raise CommandError(f"The log's configuration cannot be read: {error}.") from error
    return args


def check_front_end(args: argparse.Namespace) -> None:
    """Raises `CommandError` for front ends that load no plugins: they would take routing fields in silence."""
    for is_chosen, how in ((args.grpc, "--grpc"), (envs.VLLM_USE_RUST_FRONTEND, "VLLM_USE_RUST_FRONTEND")):
        if is_chosen:
            raise CommandError(f"{how} chooses a front end of vLLM that cannot return routed experts: remove it.")


def take_version_flag(argv: list[str]) -> list[str]:
    """Removes the flag that allows an untested vLLM, which vLLM's parser does not know.

    If given, it is passed to all processes of the engine by an environment variable.
    """
    rest = [argument for argument in argv if argument != ALLOW_UNTESTED_FLAG]
    if len(rest) < len(argv):
        _set_everywhere(ALLOW_UNTESTED_VARIABLE, "1")
    return rest


def _set_everywhere(variable: str, value: str) -> None:
    """Sets a variable for all processes of the engine."""
    os.environ[variable] = value
    others = os.environ.get("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY")  # for Ray's workers, which inherit nothing
    os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] = ",".join(filter(None, [others, variable]))


def _positive(kind: type[int] | type[float], most: float, what: str) -> Callable[[str], int | float]:
    """The type of a flag whose values are above 0, at most `most`."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return parse


_BYTES = _positive(int, float("inf"), "a positive number of bytes")
_SECONDS = _positive(float, LONGEST_LIFETIME_S, "a positive number of seconds")
_SHARE = _positive(float, 1, "a share: choose a number above 0, at most 1")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds our own flags."""
    group = parser.add_argument_group("routed experts", "Routing in responses.")
    group.add_argument(
        "--routed-experts-default",
        type=_defaults,
        default={},
        metavar="JSON",
        help="defaults of routing fields, for requests that omit them, for example '{\"return_routed_experts\": true}'",
    )
    group.add_argument(
        "--routed-experts-max-response-bytes",
        type=_BYTES,
        default=MAX_RESPONSE_BYTES,
        metavar="BYTES",
        help="maximum bytes of routing in one response (default: 1 GiB)",
    )
    group.add_argument(
        "--routed-experts-page",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve a page at /routed_experts that shows the experts of a response while it is generated",
    )
    group.add_argument(
        "--routed-experts-store",
        type=Path,
        metavar="FOLDER",
        help="folder for arrays that are returned by reference (routed_experts_delivery); several servers of one host "
        "may share it (default: one for this port in /dev/shm, removed at start and stop if no process uses it)",
    )
    group.add_argument(
        "--routed-experts-store-bytes",
        type=_BYTES,
        metavar="BYTES",
        help="maximum size of the store (default: half of the space that is free in its folder)",
    )
    group.add_argument(
        "--routed-experts-store-seconds",
        type=_SECONDS,
        default=DEFAULT_LIFETIME_S,
        metavar="SECONDS",
        help="time after which stored arrays are deleted (default: 3600)",
    )
    group.add_argument(
        "--routed-experts-store-paths",
        action="store_true",
        help="name the files in references, for clients on the same machine",
    )
    group.add_argument(
        RECORD_FLAG,
        type=Path,
        metavar="FOLDER",
        help="record the routing of what clients ask, whether or not they ask for routing, in FOLDER/*.jsonl, which "
        "export, stats and view read; the files contain the token ids of prompts and answers",
    )
    group.add_argument(
        f"{RECORD_FLAG}-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether recorded files contain token ids; expert ids alone still tell something about a text",
    )
    group.add_argument(
        f"{RECORD_FLAG}-share",
        type=_SHARE,
        default=1.0,
        metavar="SHARE",
        help="share of the prompts to record, above 0 and at most 1 (default: 1), drawn for each",
    )
    group.add_argument(
        f"{RECORD_FLAG}-bytes",
        type=_BYTES,
        default=_RECORD_BYTES,
        metavar="BYTES",
        help="maximum bytes of all files in FOLDER, with those found at start (default: 10 GiB); then recording stops",
    )
    group.add_argument(
        WEIGHTS_FLAG,
        action="store_true",
        help="capture the routers' weights beside the ids, for requests with return_routed_expert_weights; takes three "
        "times the memory for rows",
    )
    group.add_argument(
        ON_LOAD_FLAG,
        choices=(RECOMPUTE, MISSING),
        help="for requests with routing, KV loaded from a KV store without its routing: recompute it "
        "(default), or load it and return -1 for its tokens",
    )


def _defaults(text: str) -> dict[str, Any]:
    try:
        return check_defaults(json.loads(text))
    except (json.JSONDecodeError, FieldError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def take_capture_flag(args: argparse.Namespace) -> bool:
    """Returns whether to capture, and clears vLLM's flag, which here switches our capture instead of vLLM's."""
    capture = bool(args.enable_return_routed_experts)
    args.enable_return_routed_experts = False
    return capture


def tiny_model_dir() -> Path:
    """The tiny model's folder, in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "routed-experts" / TINY_MODEL_NAME


def use_tiny_model(args: argparse.Namespace, directory: Path) -> None:
    """Sets `args` to serve the tiny model from `directory`, after creating it there if files are missing."""
    if not all((directory / name).exists() for name in ("config.json", "model.safetensors", "tokenizer.json")):
        say(f"Making the tiny model in {directory}; this takes some seconds.")
        from routed_experts.server.cli.tiny_model import make_tiny_model  # imports transformers

        try:
            make_tiny_model(directory)
        except OSError as error:
            raise CommandError(f"The tiny model cannot be written to {directory}: {error.strerror}.") from error
    args.model_tag = args.model = str(directory)
    args.served_model_name = args.served_model_name or [TINY_MODEL_NAME]
    if args.dtype == "auto":
        args.dtype = "float32"
    if args.kv_cache_memory_bytes is None:
        args.kv_cache_memory_bytes = _TINY_KV_CACHE_BYTES
    if current_platform.is_cpu():
        args.enforce_eager = True  # compiling takes longer than it saves for a tiny model


def allow_plugin() -> None:
    """Names our plugin in `VLLM_PLUGINS`, without which vLLM does not load it.

    The variable filters every group of plugins. If it was not set, all installed plugins are named too, to stay loaded.
    """
    plugins = entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    if not plugins:
        raise CommandError(
            "The package is not installed properly (its plugin for vLLM is not registered): reinstall it."
        )
    try:
        next(iter(plugins)).load()
        import_module("routed_experts.server.http.plugin")  # imports names of vLLM that the entry point does not
    except Exception as error:
        # vLLM would log that and serve without it.
        raise CommandError(f"The plugin for vLLM cannot be loaded: {error!r}") from error
    given = os.environ.get("VLLM_PLUGINS")
    names = given.split(",") if given is not None else sorted(_other_plugins())
    os.environ["VLLM_PLUGINS"] = ",".join([*(name for name in names if name and name != PLUGIN_NAME), PLUGIN_NAME])


def _other_plugins() -> set[str]:
    """Installed plugins of vLLM that load without being named, which excludes endpoint plugins."""
    every = entry_points()
    groups = [group for group in every.groups if group.startswith("vllm.") and group != PLUGIN_GROUP]
    return {plugin.name for group in groups for plugin in every.select(group=group)}


def fill_in(args: argparse.Namespace) -> None:
    """Names our scheduler and worker in vLLM's arguments."""
    try:
        args.worker_cls = worker_name(args.worker_cls)
        args.scheduler_cls = scheduler_name(args.scheduler_cls)
    except UnsupportedConfig as error:
        raise CommandError(f"{error} --no-enable-return-routed-experts serves without the capture.") from None
    if args.enable_return_routed_expert_weights:
        args.additional_config = {**(args.additional_config or {}), WEIGHTS_KEY: True}
    elif args.routed_experts_default.get(WEIGHTS):
        raise CommandError(f"--routed-experts-default: {WEIGHTS} needs {WEIGHTS_FLAG}.")
    if args.routed_experts_on_load is not None:
        _set_everywhere(ON_LOAD_VARIABLE, args.routed_experts_on_load)
    if args.routed_experts_record is not None:
        try:
            prepare(args.routed_experts_record)
        except OSError as error:
            raise CommandError(
                f"{RECORD_FLAG}: {args.routed_experts_record} cannot be written: {error.strerror}."
            ) from error
    elif not args.routed_experts_record_tokens or (
        args.routed_experts_record_share,
        args.routed_experts_record_bytes,
    ) != (1.0, _RECORD_BYTES):
        raise CommandError(f"The flags that begin with {RECORD_FLAG} need {RECORD_FLAG} FOLDER.")


def check(args: argparse.Namespace, capture: bool = True) -> None:
    """Refuses invalid arguments with one sentence, before an engine process would fail with a stack trace."""
    try:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
            usage_context=UsageContext.OPENAI_API_SERVER, headless=args.headless
        )
    except (ValueError, OSError) as error:
        raise CommandError(sentence_of(error, args.model)) from error
    if not capture:
        return
    try:
        check_engine_config(config)
    except UnsupportedConfig as error:
        raise CommandError(str(error)) from None
    if current_platform.is_cuda() and (sentence := missing_gpu_run()) is not None:
        logger.warning(sentence)


@contextmanager
def store_of(args: argparse.Namespace) -> Iterator[None]:
    """Raises `CommandError` if the folder of stored arrays cannot be used. One of the port's own is removed at the
    start and at the end if it is unused."""
    if args.routed_experts_store is not None:
        try:
            private_folder(args.routed_experts_store)
        except OSError as error:
            folder = args.routed_experts_store
            raise CommandError(f"--routed-experts-store: {folder} cannot be used: {error.strerror}.") from None
        yield
        return
    folder = default_folder(str(args.port))
    remove_unused(folder)
    try:
        yield
    finally:
        remove_unused(folder)


def run(args: argparse.Namespace) -> None:
    """Runs vLLM's `serve` until it stops."""
    command = ServeSubcommand()
    try:
        command.validate(args)
    except Exception as error:  # vLLM raises its own classes
        raise CommandError(sentence_of(error, args.model)) from error
    engine_utils.zmq_socket_ctx = _socket_until_stopped
    close_port_after_the_last()
    try:
        command.cmd(args)
    except KeyboardInterrupt:  # raised on SIGTERM until vLLM's port answers
        return
    except SelfTestError as error:
        raise CommandError(str(error)) from error
    except OSError as error:  # for example an address that cannot be bound, or a missing tokenizer
        raise CommandError(f"The server cannot run: {error}.") from error
    except RuntimeError as error:
        if not str(error).startswith(_ENGINE_FAILED):
            raise
        raise CommandError(ENGINE_DID_NOT_START) from error


@contextmanager
def _socket_until_stopped(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """Replaces vLLM's `zmq_socket_ctx` while the engine starts.

    vLLM's version swallows the KeyboardInterrupt that its SIGTERM handler raises, so the server would start anyway.
    Needed until vLLM lets it pass.
    """
    with zmq_socket_ctx(*args, **kwargs) as socket:
        try:
            yield socket
        except KeyboardInterrupt:
            raise SystemExit(0) from None
