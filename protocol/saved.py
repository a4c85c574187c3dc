"""Reads files of responses. Imports numpy and the standard library only.

A file has JSON bodies (one per line, pretty-printed, or in arrays), streams as curl prints them,
lines of a batch's output, or all of them. The response of `GET /v1/routed_experts` applies to all
responses after it, including later files. The field `routed_experts_info` of a response takes
precedence, for that response and those after it in the file.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from reprlib import repr as shown
from typing import Any, TextIO

import numpy as np

from routed_experts.protocol.answers import is_number, without_envelope
from routed_experts.protocol.codec import MAX_EXPERTS, MAX_LAYERS, Rows
from routed_experts.protocol.collect import Collector, RequestValues
from routed_experts.protocol.routing import Routing, RoutingError
from routed_experts.protocol.sse import EventError, EventReader

INFO = "routed_experts_info"

# What a response says of itself takes nothing before it is held against these. A real file meets
# none of them.
MAX_CHARS = 1 << 31
"""Of a response in a file: twice what a server sends unless its settings say otherwise."""
MAX_REPEATED_BYTES = 1 << 36
"""Of a response with the prompt of each choice. Commands take one choice at a time."""
TOO_LONG = f"a response takes more than {MAX_CHARS} characters: write one per line"
DENSE_NEED = (
    "its rows include dense layers (routed_experts_layers: all), and their indices are unknown: put the response of "
    "GET /v1/routed_experts into a file before it"
)
_SSE_FIELDS = ("data:", "event:", "id:", "retry:", ":")
_SSE_LENGTH = max(map(len, _SSE_FIELDS))


@dataclass(frozen=True)
class ModelInfo:
    """Known facts about a response and its model, as in `GET /v1/routed_experts`; None if
    unknown."""

    num_layers: int | None = None
    top_k: int | None = None
    num_experts: int | None = None
    layer_ids: tuple[int, ...] | None = None
    rows_dtype: str | None = None  # of rows in the form `raw`; None if they have another form
    weights_scale: tuple[float, ...] | None = None
    n: int | None = None  # choices per prompt

    @classmethod
    def of(cls, document: Any) -> "ModelInfo":
        """Parses the response of `GET /v1/routed_experts`, or a part of it."""
        if not isinstance(document, Mapping):
            raise RoutingError(f"{INFO} must be an object, not {shown(document)}")
        num_layers = _size(document, "num_layers")
        top_k = _size(document, "top_k")
        num_experts = _size(document, "num_experts")
        layer_ids = _layer_ids(document)
        if layer_ids is not None and num_layers not in (None, len(layer_ids)):
            raise RoutingError(
                f"num_layers is {num_layers}, but layer_ids are {shown(list(layer_ids))}"
            )
        return cls(
            num_layers=num_layers,
            top_k=top_k,
            num_experts=num_experts,
            layer_ids=layer_ids,
            weights_scale=_weights_scale(document, layer_ids),
        )

    @property
    def known(self) -> dict[str, Any]:
        """The known facts about the model, by the names of `GET /v1/routed_experts`."""
        names = ("num_layers", "top_k", "num_experts", "layer_ids", "weights_scale")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def over(self, other: "ModelInfo") -> "ModelInfo":
        """A copy in which `other` fills the unknown fields."""
        names = [field.name for field in fields(self)]
        known = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(other, **known)


def _size(document: Mapping[str, Any], name: str) -> int | None:
    size = document.get(name)
    if size is None:
        return None
    if type(size) is not int or not 1 <= size <= MAX_EXPERTS:
        raise RoutingError(
            f"{name} must be a positive integer up to {MAX_EXPERTS}, not {shown(size)}"
        )
    return size


def _layer_ids(document: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = document.get("layer_ids")
    if ids is None:
        return None
    are_layers = isinstance(ids, list) and all(
        type(layer) is int and 0 <= layer < MAX_LAYERS for layer in ids
    )
    if not are_layers or ids != sorted(set(ids)):
        raise RoutingError(
            f"layer_ids must be ascending layer indices below {MAX_LAYERS}, not {shown(ids)}"
        )
    return tuple(ids)


def _weights_scale(
    document: Mapping[str, Any], layer_ids: tuple[int, ...] | None
) -> tuple[float, ...] | None:
    """A number for each layer; servers without weights send an empty list."""
    scale = document.get("weights_scale")
    if not scale:
        return None
    are_numbers = isinstance(scale, list) and all(map(is_number, scale))
    if not are_numbers or len(scale) != len(layer_ids or scale):
        raise RoutingError(f"weights_scale must be a number for each layer, not {shown(scale)}")
    return tuple(map(float, scale))


class _PlacedError(RoutingError):
    """One whose message begins with the response's place."""


@dataclass(frozen=True)
class SavedAnswer:
    """One response, streamed or not."""

    file: str  # where it begins, for messages
    line: int  # 0 if it was not read from a file
    parts: list[Any]  # the body, or the chunks of the stream
    info: ModelInfo

    @property
    def where(self) -> str:
        return f"{self.file}, line {self.line}" if self.line else self.file

    @contextmanager
    def located(self) -> Iterator[None]:
        """Within it, errors about the response name its place, once."""
        try:
            yield
        except _PlacedError:
            raise
        except ValueError as error:
            raise _PlacedError(f"{self.where}: {error}") from error

    def routings(self, model: ModelInfo | None = None) -> list[Routing]:
        """The rows of each choice, in MoE layers only. `model` has facts from another source, which
        take precedence."""
        return list(self.each_routing(model))

    def each_routing(self, model: ModelInfo | None = None) -> Iterator[Routing]:
        """`routings`, one after another: the rows of a prompt, which each of its choices has, take
        memory once."""
        collector = self.collected(model)
        info = self._info(model)
        with self.located():
            for routing in collector.each_finished():
                yield _checked(_moe_layers(routing, info), info)

    def collected(self, model: ModelInfo | None = None) -> Collector:
        """The response, before arrays of its choices are made."""
        info = self._info(model)
        request: RequestValues = {"prompt_start": None}
        if info.n is not None:
            request["n"] = info.n
        if info.rows_dtype is not None and info.num_layers is not None and info.top_k is not None:
            request["num_layers"] = info.num_layers
            request["top_k"] = info.top_k
            request["dtype"] = info.rows_dtype
        with self.located():
            collector = Collector(**request)
            for part in self.parts:
                collector.take(part)
            if (size := collector.num_bytes) > MAX_REPEATED_BYTES:
                raise RoutingError(
                    f"it takes {size} bytes with the prompt of each choice; {MAX_REPEATED_BYTES} are allowed"
                )
        return collector

    def _info(self, model: ModelInfo | None) -> ModelInfo:
        return self.info if model is None else model.over(self.info)


def _moe_layers(routing: Routing, info: ModelInfo) -> Routing:
    """`routing` without the dense layers that `routed_experts_layers: "all"` adds."""
    rows = routing.rows
    ids = info.layer_ids
    if ids is None or not len(rows) or rows.shape[1] == len(ids):
        return routing
    dense = np.delete(rows, ids, axis=1) if max(ids, default=0) < rows.shape[1] else rows
    if (dense > 0).any() or not ids:
        raise RoutingError(
            f"rows of {rows.shape[1]} layers, but the model has {len(ids)} MoE layers"
        )
    weights = None if routing.weights is None else routing.weights[:, ids]
    return replace(routing, rows=rows[:, ids], weights=weights)


def _checked(routing: Routing, info: ModelInfo) -> Routing:
    rows = routing.rows
    if not len(rows):
        return routing
    if rows.shape[1] > MAX_LAYERS or rows.shape[2] > MAX_EXPERTS:
        raise RoutingError(
            f"rows of {rows.shape[1]} layers and {rows.shape[2]} experts, which no model has"
        )
    # A router never chooses an expert twice for a token, so such a layer is dense. Top-1 models do
    # not show it.
    if info.layer_ids is None and rows.shape[2] > 1 and (rows == 0).all(axis=2).any():
        raise RoutingError(DENSE_NEED)
    _check_fits_model(rows, info)
    return routing


def _check_fits_model(rows: Rows, info: ModelInfo) -> None:
    _, num_layers, top_k = rows.shape
    if info.num_layers not in (None, num_layers):
        raise RoutingError(f"rows of {num_layers} layers, but the model has {info.num_layers}")
    if info.top_k not in (None, top_k):
        raise RoutingError(f"rows of {top_k} experts, but the model has {info.top_k}")
    if info.num_experts is not None and rows.max() >= info.num_experts:
        raise RoutingError(f"an id is {rows.max()}, but the model has {info.num_experts} experts")


# ---- files ----


def read(files: Iterable[tuple[str, TextIO]], model_info: ModelInfo) -> Iterator[SavedAnswer]:
    """The responses in files, given as names and texts. `model_info` has facts about the model, which
    take precedence."""
    reader = Reader(model_info)
    name = ""
    is_empty = True
    for name, file in files:
        for answer in reader.read(name, file):
            is_empty = False
            yield answer
    if is_empty:
        raise RoutingError(f"{name} has no responses")


class Reader:
    """Reads one file after another."""

    def __init__(self, model_info: ModelInfo) -> None:
        self.info = ModelInfo()  # what the files so far say about their model
        self._model_info = model_info

    def read(self, name: str, file: TextIO) -> Iterator[SavedAnswer]:
        """The responses in a file."""
        is_empty = True
        of_file = ModelInfo()
        for line, parts in self._responses(name, file):
            is_empty = False
            answer = SavedAnswer(name, line, parts, ModelInfo())
            with answer.located():
                parts[:] = map(without_envelope, parts)
                if not all(isinstance(part, dict) for part in parts):
                    raise RoutingError("not a response of the server: it must be a JSON object")
                if "layer_ids" in parts[0] and "choices" not in parts[0]:
                    self.info = ModelInfo.of(parts[0])
                    of_file = ModelInfo()
                    continue
                if INFO in parts[0]:
                    of_file = ModelInfo.of(parts[0][INFO])
            yield replace(answer, info=self._model_info.over(of_file.over(self.info)))
        if is_empty:
            raise RoutingError(f"{name} has no responses")

    def _responses(self, name: str, file: TextIO) -> Iterator[tuple[int, list[Any]]]:
        """The line of each response (or other JSON value) in a file, and its parts. Arrays yield
        their elements."""
        text = _Text(file)
        number = 0
        try:
            while (begin := text.begin()) is not None:
                number = text.number
                if begin.startswith(_SSE_FIELDS):
                    if chunks := self._stream(text):
                        yield number, chunks
                else:
                    value = text.value()
                    for response in value if isinstance(value, list) else [value]:
                        yield number, [response]
        except UnicodeDecodeError as error:
            raise RoutingError(f"{name} cannot be read: it is not UTF-8 text") from error
        except EventError as error:
            raise RoutingError(f"{name}, line {number}: {error}") from error
        except _TooLargeError as error:
            raise RoutingError(f"{name}, line {text.number}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise RoutingError(
                f"{name}, line {number} is not valid JSON, or was cut off: {error}"
            ) from error

    def _stream(self, text: "_Text") -> list[Any]:
        """The chunks of the stream that begins here, up to `[DONE]`."""
        events = EventReader()
        chunks: list[Any] = []
        num_chars = 0
        while not events.done and (text.begin() or "").startswith(_SSE_FIELDS):
            line = text.line().strip()
            num_chars += len(line)
            if num_chars > MAX_CHARS:
                raise _TooLargeError(TOO_LONG)
            chunks += events.feed(line + "\n")
        if chunks and not events.done:
            raise EventError("the stream that starts here was cut off: it does not end with [DONE]")
        return chunks


class _TooLargeError(RoutingError):
    pass


class _Text:
    """Reads lines and JSON values of a file. Keeps only the current line; for a longer value, what
    it needs."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self.number = 1

    def begin(self) -> str | None:
        """The next characters but spaces; None at the end. Does not copy the line, which may have a
        million values."""
        while True:
            self._go(_SPACES.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at : self._at + _SSE_LENGTH]
            self._text = self._file.readline(MAX_CHARS + 1)
            self._at = 0
            if not self._text:
                return None
            self._check_length()

    def line(self) -> str:
        """The rest of the current line."""
        begin = self._at
        end = self._text.find("\n", begin) + 1 or len(self._text)
        self._go(end)
        return self._text[begin:end]

    def value(self) -> Any:
        """The JSON value that starts here."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Only a value that goes on beyond what was read so far needs more: twice as much
                # each time.
                is_cut = not self._text[error.pos :].strip()
                rest = self._more() if is_cut else ""
                if not rest:
                    line = self.number + self._text.count("\n", self._at, error.pos)
                    raise ValueError(f"{error.msg} at line {line}") from error
                self._text = self._text[self._at :] + rest
                self._at = 0
                self._check_length()
            else:
                self._go(end)
                return value

    def _more(self) -> str:
        """As much of the file again, to the end of a line."""
        room = MAX_CHARS + 1 - (len(self._text) - self._at)
        more = self._file.read(min(len(self._text), room))
        return more + self._file.readline(room - len(more))

    def _check_length(self) -> None:
        if len(self._text) > MAX_CHARS:
            raise _TooLargeError(TOO_LONG)

    def _go(self, end: int) -> None:
        self.number += self._text.count("\n", self._at, end)
        self._at = end


_DECODER = json.JSONDecoder()
_SPACES = re.compile(r"\s*")
