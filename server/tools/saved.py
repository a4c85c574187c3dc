"""The files of responses that `compare`, `export` and `view` are given, and the flags about them."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from routed_experts.protocol.saved import MAX_EXPERTS, ModelInfo
from routed_experts.server.cli.console import CommandError

STDIN = "-"
SUFFIXES = (".json", ".jsonl")


def opened(paths: Sequence[str]) -> Iterator[tuple[str, TextIO]]:
    """The name and text of each file, opened one at a time. `-` is standard input."""
    for path in files_in(paths):
        name = "standard input" if path == STDIN else path
        try:
            with open(0 if path == STDIN else path, encoding="utf-8-sig", closefd=path != STDIN) as file:
                yield name, file
        except OSError as error:
            raise CommandError(f"{name} cannot be read: {error.strerror}.") from error


def files_in(paths: Sequence[str]) -> list[str]:
    """Files, and in place of a folder those in it and below, by name, without empty ones, which a server may write."""
    found: list[str] = []
    for path in paths:
        if path == STDIN or not Path(path).is_dir():
            found.append(path)
            continue
        inside = [file for file in sorted(Path(path).rglob("*.json*")) if file.suffix in SUFFIXES and file.is_file()]
        filled = [str(file) for file in inside if file.stat().st_size]
        if not filled:
            raise CommandError(f"{path} has no files *.json or *.jsonl with responses.")
        found += filled
    return found


@contextmanager
def atomic_file(output: Path, flag: str) -> Iterator[Path]:
    """A file beside `output`, which takes its name if all goes well."""
    path = output.with_name(f".{output.name}.{os.getpid()}.part")
    if output.exists() and not output.is_file():  # a folder, or a device
        raise CommandError(f"{flag} {output} is not a file.")
    try:
        path.touch()
    except OSError as error:
        raise CommandError(f"{flag} {output} cannot be written: {error.strerror}.") from error
    try:
        yield path
        path.replace(output)
    finally:
        path.unlink(missing_ok=True)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for facts that files may lack."""
    parser.add_argument("--num-experts", type=_positive, help="number of experts per layer")
    parser.add_argument("--num-layers", type=_positive, help="number of MoE layers, for rows in the raw format")
    parser.add_argument("--top-k", type=_positive, help="experts per token and layer, for rows in the raw format")
    parser.add_argument("--rows-dtype", choices=("int16", "uint8", "int32"), help="dtype of rows in the raw format")
    parser.add_argument("--n", type=_positive, help="choices per prompt, for responses to several prompts at once")


def info_of(args: argparse.Namespace) -> ModelInfo:
    """The values of these flags."""
    return ModelInfo(args.num_layers, args.top_k, args.num_experts, rows_dtype=args.rows_dtype, n=args.n)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MAX_EXPERTS:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)
