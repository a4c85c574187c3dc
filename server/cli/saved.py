"""Reads saved responses for `compare`, `export`, `stats` and `view`. Needs neither vLLM nor torch.

A file has JSON bodies (one per line, pretty-printed, or in arrays), streams as curl prints them, or both. A folder
stands for its files `*.jsonl`. The response of `GET /v1/routed_experts` applies to all responses after it, including
later files. The field `routed_experts_info` of a response takes precedence, for that response and those after it in the
file.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from routed_experts.protocol.collect import Asked, Routing, RoutingError, collect
from routed_experts.protocol.sse import EventError, EventReader
from routed_experts.server.cli.console import CommandError

STDIN = "-"
INFO = "routed_experts_info"
DENSE_NEED = (
    "its rows include dense layers (routed_experts_layers: all), and their indices are unknown: put the response of "
    "GET /v1/routed_experts into a file before it"
)
RAW_NEEDS = (
    "its rows have the form raw, which does not carry its shape: set --num-layers, --top-k and --rows-dtype, "
    "or request the form object"
)
_SSE_FIELDS = ("data:", "event:", "id:", "retry:", ":")
_NPY = "k05VTVBZ"  # base64 of \x93NUMPY


@dataclass(frozen=True)
class ModelInfo:
    """Known facts about the model of a response; None if unknown.

    Attributes:
        num_layers, top_k, num_experts, layer_ids, weights_scale: as in `GET /v1/routed_experts`.
        rows_dtype: element type of rows in the form `raw`.
    """

    num_layers: int | None = None
    top_k: int | None = None
    num_experts: int | None = None
    layer_ids: tuple[int, ...] | None = None
    rows_dtype: str | None = None
    weights_scale: tuple[float, ...] | None = None

    @classmethod
    def of(cls, document: Any) -> "ModelInfo":
        """Parses the response of `GET /v1/routed_experts`, or a part of it.

        Raises:
            ValueError: an invalid value.
        """
        if not isinstance(document, Mapping):
            raise ValueError(f"{INFO} must be an object, not {document!r}")
        numbers = {name: document.get(name) for name in ("num_layers", "top_k", "num_experts")}
        for name, value in numbers.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        ids = document.get("layer_ids")
        if ids is not None and not (
            isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids) and ids == sorted(set(ids))
        ):
            raise ValueError(f"layer_ids must be ascending layer indices, not {ids!r}")
        if ids is not None and numbers["num_layers"] not in (None, len(ids)):
            raise ValueError(f"num_layers is {numbers['num_layers']}, but layer_ids are {ids!r}")
        scale = document.get("weights_scale")
        if scale is not None and not (
            isinstance(scale, list)
            and all(type(one) in (int, float) for one in scale)
            and len(scale) == len(ids or scale)
        ):
            raise ValueError(f"weights_scale must be a number for each layer, not {scale!r}")
        return cls(
            **numbers,
            layer_ids=None if ids is None else tuple(ids),
            weights_scale=None if scale is None else tuple(map(float, scale)),
        )

    def over(self, other: "ModelInfo") -> "ModelInfo":
        """A copy in which `other` fills the unknown fields."""
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(other, **{name: value for name, value in known.items() if value is not None})


@dataclass(frozen=True)
class SavedAnswer:
    """One response, streamed or not.

    Attributes:
        where: file and line, for messages.
        parts: the body, or the chunks of the stream.
    """

    where: str
    parts: list[dict[str, Any]]
    info: ModelInfo

    def routings(self, model: ModelInfo | None = None) -> list[Routing]:
        """The rows of each choice, in MoE layers only.

        Args:
            model: facts about the model from another source. They take precedence.

        Raises:
            RoutingError: the response is incomplete, or belongs to another model.
        """
        info = self.info if model is None else model.over(self.info)
        return [_checked(_moe_layers(routing, info), info) for routing in collect(self.parts, **self._asked(info))]

    def _asked(self, info: ModelInfo) -> Asked:
        if not any(_is_raw(value) for value in self._arrays()):
            return {}
        if info.num_layers is None or info.top_k is None or info.rows_dtype is None:
            raise RoutingError(RAW_NEEDS)
        return {"num_layers": info.num_layers, "top_k": info.top_k, "dtype": info.rows_dtype}

    def _arrays(self) -> Iterator[Any]:
        for part in self.parts:
            prompts = part.get("prompt_routed_experts")
            yield from prompts if isinstance(prompts, list) else [prompts]
            yield from (choice.get("routed_experts") for choice in choices_of(part))


def once(routings: Iterable[Routing]) -> Iterator[Routing]:
    """The rows of each choice. Those of a prompt come with the first of its choices only."""
    prompts: list[Routing] = []
    for routing in routings:
        prompt_len = 0 if routing.prompt_len is None else len(routing.prompt_rows)
        if prompt_len and any(_have_same_prompt(routing, before) for before in prompts):
            weights = None if routing.weights is None else routing.weights[prompt_len:]
            routing = replace(routing, rows=routing.generated_rows, weights=weights, start=routing.start + prompt_len)
        elif prompt_len:
            prompts.append(routing)
        yield routing


def _have_same_prompt(one: Routing, other: Routing) -> bool:
    return one.prompt_token_ids == other.prompt_token_ids and np.array_equal(one.prompt_rows, other.prompt_rows)


def choices_of(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The choices of a body or of a chunk."""
    choices = part.get("choices")
    return [choice for choice in choices if isinstance(choice, Mapping)] if isinstance(choices, list) else []


def _is_raw(value: Any) -> bool:
    return isinstance(value, str) and not value.startswith(_NPY)


def _moe_layers(routing: Routing, info: ModelInfo) -> Routing:
    """`routing` without the dense layers that `routed_experts_layers: "all"` adds."""
    rows, ids = routing.rows, info.layer_ids
    if ids is None or not len(rows) or rows.shape[1] == len(ids):
        return routing
    dense = np.delete(rows, ids, axis=1) if max(ids) < rows.shape[1] else rows
    if (dense > 0).any():
        raise RoutingError(f"rows of {rows.shape[1]} layers, but the model has {len(ids)} MoE layers")
    weights = None if routing.weights is None else routing.weights[:, ids]
    return replace(routing, rows=rows[:, ids], weights=weights)


def _checked(routing: Routing, info: ModelInfo) -> Routing:
    rows = routing.rows
    if not len(rows):
        return routing
    # A router never chooses an expert twice for a token, so such a layer is dense. Top-1 models do not show it.
    if info.layer_ids is None and rows.shape[2] > 1 and (rows == 0).all(axis=2).any():
        raise RoutingError(DENSE_NEED)
    for count, expected, what in ((rows.shape[1], info.num_layers, "layers"), (rows.shape[2], info.top_k, "experts")):
        if expected not in (None, count):
            raise RoutingError(f"rows of {count} {what}, but the model has {expected}")
    if info.num_experts is not None and rows.max() >= info.num_experts:
        raise RoutingError(f"an id is {rows.max()}, but the model has {info.num_experts} experts")
    return routing


# ---- files ----


def opened(paths: Sequence[str]) -> Iterator[tuple[str, TextIO]]:
    """The name and text of each file, opened one at a time. `-` is standard input.

    Raises:
        CommandError: a file cannot be read, or a folder has no responses.
    """
    for path in (file for given in paths for file in _files(given)):
        name = "standard input" if path == STDIN else path
        try:
            with open(0 if path == STDIN else path, encoding="utf-8-sig", closefd=path != STDIN) as file:
                yield name, file
        except OSError as error:
            raise CommandError(f"{name} cannot be read: {error.strerror}.") from error


def _files(path: str) -> list[str]:
    """`path`, or the files in that folder and below, by name, without empty ones, which a server may still write."""
    if path == STDIN or not Path(path).is_dir():
        return [path]
    found = [str(file) for file in sorted(Path(path).rglob("*.jsonl")) if file.stat().st_size]
    if not found:
        raise CommandError(f"{path} has no files *.jsonl with responses.")
    return found


def read(files: Iterable[tuple[str, TextIO]], given: ModelInfo) -> Iterator[SavedAnswer]:
    """The responses in files, in order.

    Args:
        given: facts about the model from the command line. They take precedence.

    Raises:
        CommandError: a file cannot be read, is empty, or has other contents.
    """
    about, name, found = ModelInfo(), "", False
    for name, file in files:
        is_empty, of_file = True, ModelInfo()
        for where, parts in _responses(name, file):
            is_empty = False
            if not all(isinstance(part, dict) for part in parts):
                raise CommandError(f"{where} is not a response of the server: it must be a JSON object.")
            try:
                if "layer_ids" in parts[0] and "choices" not in parts[0]:
                    about, of_file = ModelInfo.of(parts[0]), ModelInfo()
                    continue
                of_file = ModelInfo.of(parts[0][INFO]) if INFO in parts[0] else of_file
            except ValueError as error:
                raise CommandError(f"{where}: {error}.") from error
            found = True
            yield SavedAnswer(where, parts, given.over(of_file.over(about)))
        if is_empty:
            raise CommandError(f"{name} has no responses.")
    if not found:
        raise CommandError(f"{name} has no responses.")


def _responses(name: str, file: TextIO) -> Iterator[tuple[str, list[Any]]]:
    """File and line of each response (or other JSON value) in a file, and its parts. Arrays yield their elements."""
    text = _Text(file)
    try:
        while (line := text.peek()) is not None:
            where = f"{name}, line {text.number}"
            if line.lstrip().startswith(_SSE_FIELDS):
                chunks = _stream(text)
                if chunks:
                    yield where, chunks
            elif line.strip():
                value = text.value()
                yield from ((where, [one]) for one in (value if isinstance(value, list) else [value]))
            else:
                text.skip_line()
    except UnicodeDecodeError as error:
        raise CommandError(f"{name} cannot be read: it is not UTF-8 text.") from error
    except EventError as error:
        raise CommandError(f"{where}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{where} is not valid JSON, or was cut off: {error}.") from error


def _stream(text: "_Text") -> list[Any]:
    """The chunks of the stream that begins here.

    Raises:
        EventError: an event is not JSON, or the stream does not end with `[DONE]`.
    """
    events = EventReader()
    chunks: list[Any] = []
    while not events.done and (line := text.peek()) is not None:
        if line.strip() and not line.lstrip().startswith(_SSE_FIELDS):
            break
        chunks += events.feed(line.strip() + "\n")
        text.skip_line()
    if chunks and not events.done:
        raise EventError("the stream that starts here was cut off: it does not end with [DONE]")
    return chunks


class _Text:
    """Reads lines and JSON values of a file. Keeps only the current line; for a longer value, the rest of the file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text, self._at = "", 0
        self.number = 1

    def peek(self) -> str | None:
        """The rest of the current line; None at the end of the file."""
        if self._at == len(self._text):
            self._text, self._at = self._file.readline(), 0
        return self._text[self._at : self._line_end()] or None

    def skip_line(self) -> None:
        self._go(self._line_end())

    def value(self) -> Any:
        """The JSON value that starts in the current line.

        Raises:
            ValueError: it is not JSON.
        """
        while self._text[self._at].isspace():
            self._at += 1
        try:
            value, end = _DECODER.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            rest = self._file.read()
            if not rest:
                line = self.number + self._text.count("\n", self._at, error.pos)
                raise ValueError(f"{error.msg} at line {line}") from error
            self._text, self._at = self._text[self._at :] + rest, 0
            return self.value()
        self._go(end)
        return value

    def _line_end(self) -> int:
        return self._text.find("\n", self._at) + 1 or len(self._text)

    def _go(self, end: int) -> None:
        self.number += self._text.count("\n", self._at, end)
        self._at = end


_DECODER = json.JSONDecoder()


# ---- flags ----


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for facts about the model that files may lack."""
    parser.add_argument("--num-experts", type=_positive, help="number of experts per layer")
    parser.add_argument("--num-layers", type=_positive, help="number of MoE layers, for rows in the raw format")
    parser.add_argument("--top-k", type=_positive, help="experts per token and layer, for rows in the raw format")
    parser.add_argument("--rows-dtype", choices=("int16", "uint8", "int32"), help="dtype of rows in the raw format")


def info_of(args: argparse.Namespace) -> ModelInfo:
    """The values of these flags."""
    return ModelInfo(args.num_layers, args.top_k, args.num_experts, rows_dtype=args.rows_dtype)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)
