"""The files of responses that `compare`, `export` and `view` are given, and the flags about
them."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

from routed_experts.protocol.buckets import bucket_at, bucket_errors, is_broken_url, is_bucket
from routed_experts.protocol.codec import MAX_EXPERTS
from routed_experts.protocol.files import open_file
from routed_experts.protocol.saved import ModelInfo
from routed_experts.server.cli.console import CommandError

STDIN = "-"
SUFFIXES = (".json", ".jsonl")
_OF_SHELL = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""What a shell has opened for a command, such as the pipe of `<(zcat FILE)`."""
_OTHER_KINDS = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "an .npz or another zip file",
    b"\x93NUMPY": "a NumPy file",
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
}


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
    `CommandError`, with the `name` if it has another than its path, if it cannot be read or is of
    another kind."""
    name = name or str(path)
    if is_bucket(path):
        with _copy_of(str(path)) as file:
            _check_kind(name, file)
            yield file
        return
    is_of_shell = is_read_once and str(path).startswith(_OF_SHELL)
    try:
        with open(path, encoding="utf-8-sig", opener=None if is_of_shell else open_file) as file:
            if not is_of_shell:
                _check_kind(name, file)
            yield file
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror}.") from error


@contextmanager
def _copy_of(uri: str) -> Iterator[TextIO]:
    """An object of a bucket, as a file of this machine while it is read."""
    place, _, name = uri.rpartition("/")
    with TemporaryFile() as file:
        with _opened_bucket(place, uri) as objects:
            for part in objects.get(name).stream():
                file.write(part)
        file.seek(0)
        with open(file.fileno(), encoding="utf-8-sig", closefd=False) as text:
            yield text


@contextmanager
def _opened_bucket(place: str, url: str) -> Iterator[Any]:
    """obstore's object for a place. Within it, errors say that `url` cannot be read."""
    try:
        objects = bucket_at(place)
        with bucket_errors(url):
            yield objects
    except OSError as error:
        raise CommandError(f"{url} cannot be read: {error.strerror or error}.") from error


def _objects_in(url: str) -> list[str]:
    """The objects with responses below a URL, or that object itself, by name."""
    if url.endswith(SUFFIXES):
        return [url]
    place = url.rstrip("/")
    with _opened_bucket(place, url) as objects:
        listed = [entry for part in objects.list() for entry in part]
    names = sorted(
        entry["path"] for entry in listed if entry["path"].endswith(SUFFIXES) and entry["size"]
    )
    if not names:
        raise CommandError(f"{url} has no objects *.json or *.jsonl with responses.")
    return [f"{place}/{name}" for name in names]


def _check_kind(name: str, file: TextIO) -> None:
    begin = os.pread(file.fileno(), max(map(len, _OTHER_KINDS)), 0)
    for signature, kind in _OTHER_KINDS.items():
        if begin.startswith(signature):
            raise CommandError(
                f"{name} is {kind}: give responses as the server sends them, which are JSON or streams of events."
            )


def files_in(paths: Sequence[str]) -> list[str]:
    """Files, and in place of a folder or a bucket's prefix those in it and below, by name. Empty
    ones there are left out: a server may write such."""
    files: list[str] = []
    for path in paths:
        if is_broken_url(path):
            raise CommandError(f"{path} is neither a path nor a URL: a slash is missing.")
        if is_bucket(path):
            files += _objects_in(path)
        elif path != STDIN and Path(path).is_dir():
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
    if is_broken_url(output):  # what Path makes of a URL
        raise CommandError(f"{flag} {output}: it is written to a file, not to a URL.")
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for facts that files may lack."""
    parser.add_argument("--num-experts", type=_positive, help="number of experts per layer")
    parser.add_argument(
        "--num-layers", type=_positive, help="number of MoE layers, for rows in the raw format"
    )
    parser.add_argument(
        "--top-k", type=_positive, help="experts per token and layer, for rows in the raw format"
    )
    parser.add_argument(
        "--rows-dtype", choices=("int16", "uint8", "int32"), help="dtype of rows in the raw format"
    )
    parser.add_argument(
        "--n", type=_positive, help="choices per prompt, for responses to several prompts at once"
    )


def info_of(args: argparse.Namespace) -> ModelInfo:
    """The values of these flags."""
    return ModelInfo(
        num_layers=args.num_layers,
        top_k=args.top_k,
        num_experts=args.num_experts,
        rows_dtype=args.rows_dtype,
        n=args.n,
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MAX_EXPERTS:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)
