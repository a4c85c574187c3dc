"""`routed-experts serve`: vLLM's `serve`, whose configuration names our plugin, worker, scheduler
and settings."""

import argparse
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import zmq_socket_ctx
from vllm.v1.engine import utils as engine_utils

from routed_experts.capture.engine.classes import is_capturing, scheduler_name, worker_name
from routed_experts.capture.engine.config import check_engine_config
from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.wire.rows import INPUT_KEY, RECOMPUTE_KEY, WEIGHTS_KEY
from routed_experts.protocol.buckets import is_bucket
from routed_experts.protocol.models import parse_options
from routed_experts.protocol.version import VERSION
from routed_experts.server import PLUGIN_GROUP, PLUGIN_NAME
from routed_experts.server.cli.console import CommandError, say, sentence_of
from routed_experts.server.http.process.selftest import SelfTestError
from routed_experts.server.http.seams import cli_env_setup, configure_logging_from_args
from routed_experts.server.inprocess import plugin as program_plugin
from routed_experts.server.outputs.array_store import ArrayStore, StoreError
from routed_experts.server.outputs.folders import default_folder, private_folder, remove_arrays
from routed_experts.server.outputs.record_files import prepare
from routed_experts.server.settings import HELP, KINDS, Settings, SettingsError
from routed_experts.server.vllm_api import VLLM_VERSION, get_logger

logger = get_logger(__name__)

TINY_MODEL_NAME = "tiny-moe"
_TINY_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_TINY_KV_CACHE_BYTES = 64 << 20
SHUTDOWN_TIMEOUT_S = 25
"""vLLM's default is 0, which cuts off running requests. Kubernetes gives a pod 30 s to stop."""

DESCRIPTION = """\
Starts an OpenAI-compatible server that also returns the experts that each token was routed to.
MODEL is a folder or a name on the Hugging Face Hub. Without it, a tiny model is created and served.
"""
EPILOG = """\
All flags of vllm serve are accepted; --no-enable-return-routed-experts disables the capture:
  routed-experts serve --help=all            list all flags
  routed-experts serve --help=ModelConfig    list the flags of one group
  routed-experts serve --help=max-model-len  show one flag
"""


def main(argv: list[str]) -> int:
    """Serves until the server is stopped; returns the command's exit status."""
    args = parse(argv)
    logger.info("routed-experts-server %s, vLLM %s", VERSION, VLLM_VERSION)
    if not args.headless and args.uds is None:
        check_port(args.host, args.port)
    if args.model_tag is None:
        use_tiny_model(args, tiny_model_dir())
    allow_plugin()
    settings = configure(args)
    if settings is None or args.headless:  # which stores and records nothing here
        run(args)
    else:
        with prepared_folders(settings, args.uds or args.port):
            run(args)
    return 0


# ---- flags ----


def parse(argv: list[str]) -> argparse.Namespace:
    """vLLM's parsed `serve` arguments, with the capture on unless it was switched off."""
    cli_env_setup()
    parser = _parser(argv)
    try:
        args: argparse.Namespace = parser.parse_args(["serve", *argv])
    except ValueError as error:
        raise CommandError(str(error)) from None
    except (OSError, TypeError) as error:
        raise CommandError(f"The arguments cannot be read: {error}.") from None
    # as in vLLM's own command, but before checking the configuration
    if args.model_tag is not None:
        args.model = args.model_tag
    configure_logging_from_args(args)
    _refuse_other_front_ends(args)
    return args


def _parser(argv: list[str]) -> FlexibleArgumentParser:
    """vLLM's parser of `serve` with our flags and help."""
    parser = FlexibleArgumentParser(prog="routed-experts")
    serve = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    serve.usage = "routed-experts serve [MODEL] [options]"
    serve.set_defaults(enable_return_routed_experts=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    add_flags(serve)
    serve._action_groups.insert(0, serve._action_groups.pop())  # in the help, ours come first
    serve.description = DESCRIPTION
    serve.epilog = EPILOG
    if "--help=all" not in argv:  # which lists their group
        ours = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
        add_flags(ours)
        serve.description += f"\n{ours.format_help()}"
    return parser


def _refuse_other_front_ends(args: argparse.Namespace) -> None:
    """Front ends that load no plugins would take routing fields in silence."""
    if args.grpc:
        raise CommandError(
            "--grpc chooses a front end of vLLM that cannot return routed experts: remove it."
        )
    if envs.VLLM_USE_RUST_FRONTEND:
        raise CommandError(
            "VLLM_USE_RUST_FRONTEND chooses a front end of vLLM that passes over the fields of this server: remove "
            "it, or run `vllm serve --enable-return-routed-experts`, whose /inference/v1/generate then returns rows."
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds our own flags. Those that are not given are not in the arguments."""
    group = parser.add_argument_group("routed experts", "Routing in responses.")
    for name, kind in KINDS.items():
        options: dict[str, Any] = {"type": kind.parse, "metavar": kind.metavar, "help": HELP[name]}
        if kind.metavar is None:  # a switch
            default = "on" if Settings.model_fields[name].default else "off"
            options = {
                "action": argparse.BooleanOptionalAction,
                "help": f"{HELP[name]} (default: {default})",
            }
        group.add_argument(flag_of(name), default=argparse.SUPPRESS, **options)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_port(host: str | None, port: int) -> None:
    """Raises `CommandError` if the server cannot listen there, before the model is read.

    Several API processes of vLLM would share a port with another server of this user without an
    error, and this command removes the folder of the port.
    """
    try:
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host or "", port))
    except (OSError, OverflowError) as error:
        address = f"port {port} of --host {host}" if host else f"port {port}"
        raise CommandError(f"The server cannot listen on {address}: {error}.") from None


# ---- the tiny model ----


def tiny_model_dir() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "routed-experts" / TINY_MODEL_NAME


def use_tiny_model(args: argparse.Namespace, directory: Path) -> None:
    """Sets `args` to serve the tiny model from `directory`, after creating it there if files are
    missing."""
    if not all((directory / name).exists() for name in _TINY_MODEL_FILES):
        _write_tiny_model(directory)
    args.model_tag = args.model = str(directory)
    args.served_model_name = args.served_model_name or [TINY_MODEL_NAME]
    if args.dtype == "auto":
        args.dtype = "float32"
    if args.kv_cache_memory_bytes is None:
        args.kv_cache_memory_bytes = _TINY_KV_CACHE_BYTES
    if current_platform.is_cpu():
        args.enforce_eager = True  # compiling takes longer than it saves for a tiny model
    if args.enable_return_routed_experts and not _says_of_weights(args):
        # They cost next to nothing here, and the page has no ranks without them.
        setattr(args, WEIGHTS_KEY, True)


def _write_tiny_model(directory: Path) -> None:
    say(f"Making the tiny model in {directory}; this takes some seconds.")
    from routed_experts.server.cli.tiny_model import make_tiny_model  # imports transformers

    try:
        make_tiny_model(directory)
    except OSError as error:
        raise CommandError(
            f"The tiny model cannot be written to {directory}: {error.strerror}."
        ) from error


def _says_of_weights(args: argparse.Namespace) -> bool:
    """Whether the command line says if weights are captured, by its flag or in
    `--additional-config`."""
    return hasattr(args, WEIGHTS_KEY) or WEIGHTS_KEY in (args.additional_config or {})


# ---- the plugin ----


def allow_plugin() -> None:
    """Names our plugin in `VLLM_PLUGINS`, without which vLLM does not load it.

    The variable filters every group of plugins. If it was not set, all installed plugins are named
    too, to stay loaded.
    """
    try:
        next(iter(entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME))).load()
    except Exception as error:  # vLLM would log that and serve without it
        why = f"its plugin for vLLM cannot be loaded: {error!r}"
        raise CommandError(
            f"The package is not installed properly ({why}): reinstall it."
        ) from error
    named = os.environ.get("VLLM_PLUGINS")
    names = _loaded_unnamed() if named is None else named.split(",")
    others = [name for name in names if name and name != PLUGIN_NAME]
    os.environ["VLLM_PLUGINS"] = ",".join([*others, PLUGIN_NAME])


def _loaded_unnamed() -> list[str]:
    """The plugins that vLLM loads while `VLLM_PLUGINS` is not set: all but those of our group."""
    installed = entry_points()
    names: set[str] = set()
    for group in installed.groups:
        if group.startswith("vllm.") and group != PLUGIN_GROUP:
            names |= installed.select(group=group).names
    return sorted(names)


# ---- the configuration of the engine ----


def configure(args: argparse.Namespace) -> Settings | None:
    """Names our worker and scheduler in vLLM's arguments, if its own flag is on; returns the
    settings then."""
    captures = args.enable_return_routed_experts
    args.enable_return_routed_experts = False  # vLLM's own capture
    try:
        settings = Settings.of(args.additional_config, args)
    except SettingsError as error:
        raise CommandError(str(error)) from None
    for key in (WEIGHTS_KEY, INPUT_KEY, RECOMPUTE_KEY):  # which every process of the engine reads
        if hasattr(args, key):
            args.additional_config = {**args.additional_config, key: getattr(args, key)}
    if not captures:
        _refuse_what_needs_the_capture(settings)
        return None
    _name_classes(args)
    return settings


def _name_classes(args: argparse.Namespace) -> None:
    """Raises `CommandError` for a worker or scheduler of the operator that cannot capture."""
    try:
        worker = worker_name(args.worker_cls)
        scheduler = scheduler_name(args.scheduler_cls)
    except UnsupportedConfig as error:
        raise CommandError(
            f"{error} --no-enable-return-routed-experts serves without the capture."
        ) from None
    args.worker_cls = worker
    args.scheduler_cls = scheduler


def _refuse_what_needs_the_capture(settings: Settings) -> None:
    needs_capture = {
        WEIGHTS_KEY: settings.enable_return_routed_expert_weights,
        INPUT_KEY: settings.enable_routed_experts_input,
        RECOMPUTE_KEY: settings.enable_routed_experts_replay_on_recompute,
        "routed_experts_record": settings.routed_experts_record is not None,
        "routed_experts_default": parse_options({}, settings.routed_experts_default) is not None,
    }
    for name, is_set in needs_capture.items():
        if is_set:
            raise CommandError(
                f"{flag_of(name)} needs the capture: remove --no-enable-return-routed-experts."
            )


# ---- folders ----


@contextmanager
def prepared_folders(settings: Settings, port: int | str) -> Iterator[None]:
    """Raises `CommandError` if a folder of the settings cannot be used. The port's own folder for
    stored arrays is removed before and after."""
    for name, make in (
        ("routed_experts_store", try_store),
        ("routed_experts_record", prepare),
    ):
        place = getattr(settings, name)
        if place is None:
            continue
        try:
            make(place)
        except OSError as error:
            why = f"{place} cannot be used: {error.strerror}" if error.strerror else str(error)
            raise CommandError(f"{flag_of(name)}: {why}.") from error
        except StoreError as error:
            raise CommandError(f"{flag_of(name)}: {error}.") from error
    own_folder = default_folder(port)
    remove_arrays(own_folder)
    try:
        yield
    finally:
        remove_arrays(own_folder)


def try_store(place: str | Path) -> None:
    """Makes a folder, or tries whether a bucket can be written to. Raises OSError or
    `StoreError`."""
    if is_bucket(place):
        ArrayStore(place).open()
    else:
        private_folder(Path(str(place).removeprefix("file://")))


# ---- vLLM's server ----


def run(args: argparse.Namespace) -> None:
    """Runs vLLM's command until the server is stopped. Raises `CommandError` where it fails for a
    reason that can be named."""
    _check_arguments(args)
    engine_utils.zmq_socket_ctx = _socket_until_stopped
    try:
        with checked_configuration():
            ServeSubcommand().cmd(args)
    except KeyboardInterrupt:  # raised on SIGTERM until vLLM's port answers
        return
    except (SelfTestError, SettingsError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:  # for example a missing tokenizer
        raise CommandError(f"The server cannot run: {error}.") from error


def _check_arguments(args: argparse.Namespace) -> None:
    try:
        ServeSubcommand().validate(args)
        AsyncEngineArgs.from_cli_args(args)  # which looks the model up where the hub is offline
    except Exception as error:  # vLLM raises its own classes
        raise CommandError(sentence_of(error)) from error


@contextmanager
def checked_configuration() -> Iterator[None]:
    """Has an invalid configuration end in one sentence where vLLM makes it, not with a trace of an
    engine process."""
    program_plugin.register()  # which replaces the same method, and once only
    create = EngineArgs.create_engine_config

    @wraps(create)
    def create_and_check(*args: Any, **kwargs: Any) -> Any:
        try:
            config = create(*args, **kwargs)
            if is_capturing(config.parallel_config.worker_cls):
                check_engine_config(config)
        except (ValueError, OSError) as error:
            raise CommandError(sentence_of(error)) from error
        return config

    EngineArgs.create_engine_config = create_and_check
    try:
        yield
    finally:
        EngineArgs.create_engine_config = create


@contextmanager
def _socket_until_stopped(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """Replaces vLLM's `zmq_socket_ctx` while the engine starts.

    vLLM's version swallows the KeyboardInterrupt that its SIGTERM handler raises, so the server
    would start anyway. Needed until vLLM lets it pass.
    """
    with zmq_socket_ctx(*args, **kwargs) as of_vllm:
        try:
            yield of_vllm
        except KeyboardInterrupt:
            raise SystemExit(0) from None
