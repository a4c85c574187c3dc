"""Reads files of responses. Imports numpy and msgspec.

A file has JSON bodies (one per line, pretty-printed, or in arrays), streams as curl prints them,
lines of a batch's output, or all of them. The response of `GET /v1/routed_experts` applies to all
responses after it, including later files. The field `routed_experts_info` of a response takes
precedence, for that response and those after it in the file.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, TextIO

import msgspec
import numpy as np
from msgspec import Meta

from routed_experts.protocol.answers import Number, read_fields, without_envelope
from routed_experts.protocol.codec import MAX_EXPERTS, MAX_LAYERS, Rows
from routed_experts.protocol.collect import Collector, RequestValues
from routed_experts.protocol.routing import Routing, RoutingError
from routed_experts.protocol.sse import FIELDS, EventError, EventReader

INFO = "routed_experts_info"
DENSE_NEED = (
    "its rows include dense layers (routed_experts_layers: all), and their indices are unknown: put the response of "
    "GET /v1/routed_experts into a file before it"
)
_SSE_FIELDS = tuple(f"{name.decode()}:" for name in FIELDS)
_SSE_LENGTH = max(map(len, _SSE_FIELDS))

Size = Annotated[int, Meta(ge=1, le=MAX_EXPERTS)]
LayerId = Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]


class ModelInfo(msgspec.Struct, frozen=True):
    """Known facts about a response and its model, as in `GET /v1/routed_experts`; None if
    unknown."""

    num_layers: Size | None = None
    top_k: Size | None = None
    num_experts: Size | None = None
    layer_ids: tuple[LayerId, ...] | None = None
    # of each layer; servers without weights send an empty list
    weights_scale: tuple[Number, ...] | None = None
    rows_dtype: str | None = None  # of rows in the form `raw`; None if they have another form
    n: int | None = None  # choices per prompt

    def __post_init__(self) -> None:
        ids = self.layer_ids
        if ids is None:
            return
        if list(ids) != sorted(set(ids)):
            raise ValueError(f"layer_ids must be ascending, not {list(ids)}")
        if self.num_layers not in (None, len(ids)):
            raise ValueError(f"num_layers is {self.num_layers}, but layer_ids are {list(ids)}")
        if self.weights_scale and len(self.weights_scale) != len(ids):
            raise ValueError("weights_scale must be a number for each layer")

    def over(self, other: "ModelInfo") -> "ModelInfo":
        """A copy in which `other` fills the unknown fields.

        Raises:
            ValueError: they do not fit together.
        """
        known = {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }
        return msgspec.structs.replace(other, **known)


class _WithInfo(msgspec.Struct):
    routed_experts_info: ModelInfo = ModelInfo()


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
        with self.located():
            info = self.info if model is None else model.over(self.info)
            for routing in self.collected(info).each_finished():
                yield _checked(_moe_layers(routing, info), info)

    def collected(self, info: ModelInfo) -> Collector:
        """The response, whole or not."""
        request: RequestValues = {"prompt_start": None}
        if info.n is not None:
            request["n"] = info.n
        if info.rows_dtype is not None and info.num_layers is not None and info.top_k is not None:
            request["num_layers"] = info.num_layers
            request["top_k"] = info.top_k
            request["dtype"] = info.rows_dtype
        collector = Collector(**request)
        for part in self.parts:
            collector.take(part)
        return collector


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
    info = ModelInfo()  # what the files so far say about their model
    name = ""
    has_answers = False
    for name, file in files:
        of_file = ModelInfo()
        is_empty = True
        for line, parts in _responses(name, file):
            is_empty = False
            answer = SavedAnswer(name, line, list(map(without_envelope, parts)), ModelInfo())
            with answer.located():
                if not all(isinstance(part, dict) for part in answer.parts):
                    raise RoutingError("not a response of the server: it must be a JSON object")
                first = answer.parts[0]
                if "layer_ids" in first and "choices" not in first:
                    info = read_fields(first, ModelInfo)
                    of_file = ModelInfo()
                    continue
                if INFO in first:
                    of_file = read_fields(first, _WithInfo).routed_experts_info
                of_answer = model_info.over(of_file.over(info))
            has_answers = True
            yield replace(answer, info=of_answer)
        if is_empty:
            raise RoutingError(f"{name} has no responses")
    if not has_answers:
        raise RoutingError(f"{name} has no responses")


def _responses(name: str, file: TextIO) -> Iterator[tuple[int, list[Any]]]:
    """The line of each response (or other JSON value) in a file, and its parts. Arrays yield their
    elements."""
    text = _Text(file)
    line = 0
    try:
        while (begin := text.begin()) is not None:
            line = text.line_number
            if begin.startswith(_SSE_FIELDS):
                if chunks := _stream(text):
                    yield line, chunks
            else:
                value = text.value()
                for response in value if isinstance(value, list) else [value]:
                    yield line, [response]
    except UnicodeDecodeError as error:
        raise RoutingError(f"{name} cannot be read: it is not UTF-8 text") from error
    except EventError as error:
        raise RoutingError(f"{name}, line {line}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RoutingError(
            f"{name}, line {line} is not valid JSON, or was cut off: {error}"
        ) from error


def _stream(text: "_Text") -> list[Any]:
    """The chunks of the stream that begins here, up to `[DONE]`."""
    events = EventReader()
    chunks: list[Any] = []
    while not events.done and (text.begin() or "").startswith(_SSE_FIELDS):
        chunks += events.feed(text.line().strip() + "\n")
    if chunks and not events.done:
        raise EventError("the stream that starts here was cut off: it does not end with [DONE]")
    return chunks


class _Text:
    """Reads lines and JSON values of a file. Keeps only the current line; for a longer value, what
    it needs."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self.line_number = 1

    def begin(self) -> str | None:
        """The next characters but spaces; None at the end. Does not copy the line, which may have a
        million values."""
        while True:
            self._go(_SPACES.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at : self._at + _SSE_LENGTH]
            self._text = self._file.readline()
            self._at = 0
            if not self._text:
                return None

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
                rest = self._file.read(len(self._text)) + self._file.readline() if is_cut else ""
                if not rest:
                    line = self.line_number + self._text.count("\n", self._at, error.pos)
                    raise ValueError(f"{error.msg} at line {line}") from error
                self._text = self._text[self._at :] + rest
                self._at = 0
            else:
                self._go(end)
                return value

    def _go(self, end: int) -> None:
        self.line_number += self._text.count("\n", self._at, end)
        self._at = end


_DECODER = json.JSONDecoder()
_SPACES = re.compile(r"\s*")
