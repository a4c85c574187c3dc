"""The files of responses that `compare`, `export` and `view` are given."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from routed_experts.protocol.files import open_file
from routed_experts.server.cli.console import CommandError

STDIN = "-"
SUFFIXES = (".json", ".jsonl")
_OF_SHELL = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""What a shell has opened for a command, such as the pipe of `<(zcat FILE)`."""


def opened(paths: Sequence[str]) -> Iterator[tuple[str, TextIO]]:
    """The name and text of each file, opened one at a time. `-` is standard input."""
    for path in files_in(paths):
        if path == STDIN:
            yield "standard input", open(0, encoding="utf-8-sig", closefd=False)  # noqa: SIM115
            continue
        with open_text(path, is_read_once=True) as file:
            yield path, file


@contextmanager
def open_text(path: str | Path, name: str = "", *, is_read_once: bool = False) -> Iterator[TextIO]:
    """A file with responses or prompts; what a shell has opened only if it `is_read_once`. Raises
    `CommandError`, with the `name` if it has another than its path, if it cannot be read."""
    is_of_shell = is_read_once and str(path).startswith(_OF_SHELL)
    try:
        with open(path, encoding="utf-8-sig", opener=None if is_of_shell else open_file) as file:
            yield file
    except OSError as error:
        raise CommandError(f"{name or path} cannot be read: {error.strerror}.") from error


def files_in(paths: Sequence[str]) -> list[str]:
    """Files, and in place of a folder those in it and below, by name. Empty ones there are left
    out: a server may write such."""
    files: list[str] = []
    for path in paths:
        if path != STDIN and Path(path).is_dir():
            files += _files_below(path)
        else:
            files.append(path)
    return files


def _files_below(folder: str) -> list[str]:
    """The files with responses in a folder and below, by name."""
    files = [
        str(file)
        for file in sorted(Path(folder).rglob("*.json*"))
        if file.suffix in SUFFIXES and file.is_file() and file.stat().st_size
    ]
    if not files:
        raise CommandError(f"{folder} has no files *.json or *.jsonl with responses.")
    return files


@contextmanager
def atomic_file(output: Path, flag: str) -> Iterator[Path]:
    """A file beside `output`, which takes its name if all goes well."""
    path = output.with_name(f".{output.name}.{os.getpid()}.part")
    if output.exists() and not output.is_file():  # a folder, or a device
        raise CommandError(f"{flag} {output} is not a file.")
    try:
        try:
            path.touch()
        except OSError as error:
            raise CommandError(f"{flag} {output} cannot be written: {error.strerror}.") from error
        yield path
        path.replace(output)
    finally:
        path.unlink(missing_ok=True)
