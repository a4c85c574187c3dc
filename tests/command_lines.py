"""Reads command lines as a shell and the commands themselves do, and stops before anything is done."""

import argparse
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_BASH = """
PATH=/nowhere
command_not_found_handle() { printf '%s\\0' "$@"; printf '\\n'; }
"""


class Parsed(BaseException):
    """A command has understood its arguments. No error, so that no command takes it for one."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def shell_words(text: str) -> list[list[str]]:
    """The commands of a piece of shell and their arguments, as bash hands them over."""
    script = _BASH + text.replace(".venv/bin/", "")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return [command.split("\0") for command in done.stdout.split("\0\n")[:-1]]


def parser_of(run: Any, *argv: str) -> argparse.ArgumentParser:
    """The parser of a program that `run` starts, which took `argv`.

    Raises:
        SystemExit: it did not.
    """
    depth = 0

    def stopping(parse: Any) -> Any:
        def stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            self.allow_abbrev = False
            depth += 1
            found = parse(self, *args, **kwargs)
            depth -= 1
            if depth:  # in a parser that asks this one
                return found
            raise Parsed(self)

        return stop

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_known_args"):
            patch.setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
        patch.setattr(sys, "argv", ["program", *argv])
        try:
            run()
        except Parsed as parsed:
            return parsed.parser
    raise AssertionError("it has no parser")


def module_parser(name: str, *argv: str) -> argparse.ArgumentParser:
    return parser_of(lambda: runpy.run_module(name, run_name="__main__"), *argv)


def program_parser(path: Path, *argv: str) -> argparse.ArgumentParser:
    return parser_of(lambda: runpy.run_path(str(path), run_name="__main__"), *argv)


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """All that the parser and its commands take."""
    flags: set[str] = set()
    for action in parser._actions:
        flags.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            flags.update(*(flags_of(command) for command in action.choices.values()))
    return flags
