"""Encodes rows in the form that the request asks for.

An array is joined, checked and converted at once; its text is made in parts, so that other tasks
can run between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, assert_never

import msgspec
import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from routed_experts.capture.wire.envelope import RunRows
from routed_experts.capture.wire.rows import weights_of
from routed_experts.protocol.codec import Rows, count_missing
from routed_experts.protocol.expert_load import Histogram, count_experts, sum_weights
from routed_experts.server.http.wire_form import PART_BYTES, WeightsForm, WireForm
from routed_experts.server.outputs.npy import npy_header

LINE_BYTES = 64 << 10
"""Maximum routing text in one line of a stream: common clients reject lines of 128 KiB."""

OWN = "routed_experts"
"""The name of a choice's array."""

_BEFORE_DATA = '{"data":"'
_AROUND_VALUE = len('"":,')
"""Around a field's name and value."""

_MAP_OF_FIVE = b"\x85"  # the heads of values in MessagePack
_KEY_DATA = b"\xa4data"
_BINARY = b"\xc6"  # behind it, the length in four bytes
_ARRAY = b"\xdd"  # likewise


@dataclass(slots=True)
class ResponseCounts:
    rows: int = 0
    missing: int = 0  # unknown rows among them
    num_bytes: int = 0  # of the encoded arrays


class _EncodedRows(NamedTuple):
    """The single rows of a run in base64, made at once: one by one takes longer."""

    text: str  # of all rows, each in whole groups of three bytes
    stride: int  # characters from a row to the next
    width: int  # characters of a row, without those that stand for zeros behind it
    unknown: frozenset[int]  # which rows are unknown in part


class _SingleRowForm:
    """A known row as a field of a JSON object, with a comma behind it: what is around the base64 of
    the row, and the base64 of all rows of a run."""

    def __init__(self, form: WireForm) -> None:
        name = _weights_name(OWN) if isinstance(form, WeightsForm) else OWN
        header = b""
        before = '"'
        behind = '"'
        end = ""
        if form.format == "object":
            before = _BEFORE_DATA
            behind = f'","shape":[1{_rest_of_shape(form)}'
            end = ',"missing":0}'
        elif form.format == "npy":
            header = npy_header(form.wire_dtype.str, (1, *form.wire_shape))
        # The header's last bytes may share a group of three, as base64 takes them, with the row's
        # first.
        num_whole = len(header) // 3 * 3
        padding = "=" * (-(len(header) + form.row_bytes) % 3)
        self.before = f'"{name}":{before}{pybase64.b64encode_as_string(header[:num_whole])}'
        self.behind = f"{padding}{behind}"
        self.says_start = form.format == "object"  # whether the row's position comes next
        self.end = f"{end},"
        self.num_bytes_of_name = len(name) + _AROUND_VALUE
        self._form = form
        self._header_end = header[num_whole:]

    def encoded(self, run: RunRows) -> _EncodedRows:
        """The rows of a run of single rows."""
        rows = run.made.get(self)
        if rows is None:
            rows = run.made[self] = self._encode(run.arrays[:, 0])
        return rows

    def _encode(self, rows: Rows) -> _EncodedRows:
        values, is_unknown = self._form.single_rows(rows)
        data = values.view(np.uint8)
        size = len(self._header_end) + data.shape[1]
        if self._header_end or size % 3:  # copies them into whole groups
            groups = np.zeros((len(data), size + -size % 3), np.uint8)
            groups[:, : len(self._header_end)] = np.frombuffer(self._header_end, np.uint8)
            groups[:, len(self._header_end) : size] = data
            data = groups
        text = pybase64.b64encode_as_string(data.data)
        unknown = frozenset(np.flatnonzero(is_unknown).tolist())
        return _EncodedRows(text, data.shape[1] // 3 * 4, -(-size * 4 // 3), unknown)


# one for all streams of a form, which share what it makes of a message
_single_row_of = lru_cache(_SingleRowForm)


class Encoder:
    """Encodes the arrays of one response, and counts what is sent of them."""

    def __init__(self, form: WireForm) -> None:
        self.form = form
        self.weights = None if form.weights is None else Encoder(form.weights)
        self.counts = ResponseCounts()
        self._rest_of_shape = _rest_of_shape(form)
        self._single_row = _single_row_of(form) if form.has_single_rows else None

    @property
    def num_bytes(self) -> int:
        """Of the arrays so far, and of their weights."""
        of_weights = 0 if self.weights is None else self.weights.counts.num_bytes
        return self.counts.num_bytes + of_weights

    def count(self, num_rows: int, missing: int) -> None:
        self.counts.rows += num_rows
        self.counts.missing += missing

    def named_encoders(self, name: str = OWN) -> dict[str, "Encoder"]:
        """The encoders of the arrays of a choice, or of those called `name`, by the arrays'
        names."""
        if self.weights is None:
            return {name: self}
        return {name: self, _weights_name(name): self.weights}

    def fields(self, name: str, rows: Rows, start: int) -> str:
        """`rows` as fields of a JSON object, each with a comma behind it: an array called `name`,
        and their weights."""
        fields = f'"{name}":{self._text(rows, start)},'
        if self.weights is not None:
            fields += f'"{_weights_name(name)}":{self.weights._text(rows, start)},'
        return fields

    def single_row(self, run: RunRows, place: int, start: int) -> str | None:
        """`fields` of the row at a place of a run, called `routed_experts`, in less time. None, and
        nothing is counted, if the row is unknown in part, or has to be converted first."""
        row = self._single_row
        if row is None:
            return None
        text, stride, width, unknown = row.encoded(run)
        if place in unknown:
            return None
        of_weights = ""
        if self.weights is not None:
            known = self.weights.single_row(run, place, start)
            if known is None:
                return None
            of_weights = known
        first = place * stride
        data = text[first : first + width]
        position = start if row.says_start else ""
        field = f"{row.before}{data}{row.behind}{position}{row.end}"
        self.counts.rows += 1
        self.counts.num_bytes += len(field) - row.num_bytes_of_name
        return field + of_weights

    def _text(self, rows: Rows, start: int) -> str:
        """An array as JSON, at once."""
        if self.form.format != "object":
            return b"".join(self.parts([rows], start)).decode()
        array, missing = self.form.converted(rows)
        base64 = pybase64.b64encode_as_string(array.tobytes())
        text = f'{_BEFORE_DATA}{base64}"{self._behind_data(len(array), start, missing)}'
        self.count(len(array), missing)
        self.counts.num_bytes += len(text)
        return text

    def _behind_data(self, num_rows: int, start: int, missing: int) -> str:
        """The end of the form `object`."""
        return f',"shape":[{num_rows}{self._rest_of_shape}{start},"missing":{missing}}}'

    def parts(self, arrays: Sequence[Rows], start: int, packed: bool = False) -> Iterator[bytes]:
        """The rows of `arrays` as one array that begins at position `start`: parts of its JSON
        text, or of MessagePack (`packed`) with bytes instead of base64. Raises `LostRowsError` at
        once; the parts are made one by one."""
        array, missing = self._converted(arrays)
        self.count(len(array), missing)
        header = b""
        rest = ""  # of the object
        match self.form.format:
            case "list":
                return self._counted(_packed_list(array) if packed else _json_list(array))
            case "object":
                rest = self._behind_data(len(array), start, missing)
            case "npy":
                header = npy_header(self.form.wire_dtype.str, array.shape)
            case "raw":
                pass
            case unknown:
                assert_never(unknown)
        data = array.reshape(-1).view(np.uint8).data
        make = _packed_data if packed else _json_data
        return self._counted(make(header, data, rest))

    def _counted(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        for part in parts:
            self.counts.num_bytes += len(part)
            yield part

    def layers_first(self, arrays: Sequence[Rows]) -> tuple[NDArray[Any], int]:
        """The rows of `arrays` with the layers first ([layers, n, columns]), without a copy where
        they are one array of this type, and how many of them are unknown. Counts nothing as sent."""
        rows, missing = self.form.in_wire_dtype(joined(arrays, self.form.captured_shape))
        return rows.swapaxes(0, 1), missing

    def histogram(self, arrays: Sequence[Rows]) -> Histogram:
        """Counts how often each expert of each layer was chosen, and adds up weights. Dense layers
        count as zero."""
        form = self.form
        has_weights = form.captured_shape != form.ids_shape
        counts = np.zeros((form.ids_shape[0], form.num_experts), dtype=np.int64)
        sums = np.zeros(counts.shape)
        missing = 0
        rows = joined(arrays, form.captured_shape)
        for part in _slices(rows, _rows_in_part(form.row_bytes)):
            ids = form.ids(part)
            counts += count_experts(ids, form.num_experts)
            if has_weights:
                sums += sum_weights(ids, weights_of(part), form.num_experts)
            missing += count_missing(ids)
        histogram: Histogram = {
            "counts": form.spread(counts).tolist(),
            "rows": len(rows),
            "missing": missing,
        }
        if has_weights:
            histogram["weights"] = form.spread(sums).tolist()
        return histogram

    def _converted(self, arrays: Sequence[Rows]) -> tuple[NDArray[Any], int]:
        return self.form.converted(joined(arrays, self.form.captured_shape))


def _json_data(header: bytes, data: memoryview, rest: str) -> Iterator[bytes]:
    """Base64: alone, or as `data` of an object, before the rest of it."""
    lead = -len(header) % 3  # bytes that make groups of three of the header's
    before = b'{"data":"' if rest else b'"'
    yield before + pybase64.b64encode(header + bytes(data[:lead]))
    yield from map(pybase64.b64encode, _slices(data[lead:], PART_BYTES))
    yield b'"' + rest.encode()


def _packed_data(header: bytes, data: memoryview, rest: str) -> Iterator[bytes]:
    """The same in MessagePack: bytes."""
    before = _MAP_OF_FIVE + _KEY_DATA if rest else b""
    size = (len(header) + len(data)).to_bytes(4, "big")
    yield before + _BINARY + size + header
    yield from map(bytes, _slices(data, PART_BYTES))
    if rest:
        fields = msgspec.json.decode("{" + rest.removeprefix(","))
        yield msgspec.msgpack.encode(fields)[1:]  # without the head of a map of its own


def _json_list(array: NDArray[Any]) -> Iterator[bytes]:
    """Nested lists. NaN is null."""
    yield b"["
    comma = b""
    for items in _list_items(array):
        yield comma + items[1:-1]
        comma = b","
    yield b"]"


def _packed_list(array: NDArray[Any]) -> Iterator[bytes]:
    yield _ARRAY + len(array).to_bytes(4, "big")
    for items in _list_items(array):
        yield b"".join(map(msgspec.msgpack.encode, orjson.loads(items)))


def _list_items(array: NDArray[Any]) -> Iterator[bytes]:
    """Some rows after the other, as a list in JSON."""
    row_bytes = array.shape[1] * array.shape[2] * array.itemsize
    for rows in _slices(array, _rows_in_part(row_bytes)):
        if array.dtype.kind == "f":
            # The text of a double has all digits of a float32 that is read as a double.
            rows = rows.astype(np.float64)
        yield orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)


def _rows_in_part(row_bytes: int) -> int:
    return max(PART_BYTES // row_bytes, 1)


def _slices(array: Any, size: int) -> Iterator[Any]:
    return (array[first : first + size] for first in range(0, len(array), size))


def joined(arrays: Sequence[Rows], shape: tuple[int, int]) -> Rows:
    """`arrays` as one array of rows of `shape`."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty((0, *shape), dtype=np.int16)


def _rest_of_shape(form: WireForm) -> str:
    """In the form `object`: behind the number of rows, up to the position of the first."""
    num_layers, num_columns = form.wire_shape
    return f',{num_layers},{num_columns}],"dtype":"{form.dtype}","start":'


def _weights_name(name: str) -> str:
    """Of the array beside an array of ids, `routed_experts` or `prompt_routed_experts`."""
    return f"{name[:-1]}_weights"
