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
from routed_experts.protocol.codec import Rows, count_missing
from routed_experts.protocol.expert_load import Histogram, count_experts
from routed_experts.server.http.encoding.wire_form import PART_BYTES, WireForm
from routed_experts.server.outputs.npy import npy_header

LINE_BYTES = 64 << 10
"""Maximum routing text in one line of a stream: common clients reject lines of 128 KiB."""

OWN = "routed_experts"
"""The name of a choice's array."""

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


class _ArrayText:
    """How an array stands in an answer, in one form: what is around its bytes, and the bytes as
    base64, or as they are in MessagePack."""

    def __init__(self, form: WireForm) -> None:
        self._form = form
        self._is_object = form.format == "object"
        self._before = '{"data":"' if self._is_object else '"'
        more = "".join(f",{size}" for size in form.wire_shape)
        self._rest_of_shape = f'{more}],"dtype":"{form.dtype}","start":'
        # Of a single row: the header's last bytes may share a group of three, as base64 takes them,
        # with the row's first.
        header = self._header(1)
        num_whole = len(header) // 3 * 3
        self._header_end = header[num_whole:]
        self._before_row = self._before + pybase64.b64encode_as_string(header[:num_whole])
        self._padding = "=" * (-(len(header) + form.row_bytes) % 3)

    def _header(self, num_rows: int) -> bytes:
        """In front of the array's bytes."""
        if self._form.format != "npy":
            return b""
        return npy_header(self._form.wire_dtype.str, (num_rows, *self._form.wire_shape))

    def _behind(self, num_rows: int, start: int, missing: int) -> str:
        """In JSON, behind the array's bytes."""
        if not self._is_object:
            return '"'
        return f'","shape":[{num_rows}{self._rest_of_shape}{start},"missing":{missing}}}'

    def whole(self, array: NDArray[Any], start: int, missing: int) -> str:
        """`array` [n, layers, columns] (steps: [n]) of the type on the wire, as JSON."""
        if self._form.format == "list":
            return b"".join(_json_list(array)).decode()
        base64 = pybase64.b64encode_as_string(self._header(len(array)) + array.tobytes())
        return f"{self._before}{base64}{self._behind(len(array), start, missing)}"

    def parts(self, array: NDArray[Any], start: int, missing: int) -> Iterator[bytes]:
        """The same in parts, which are made one by one."""
        match self._form.format:
            case "list":
                yield from _json_list(array)
            case "object" | "npy" | "raw":
                header = self._header(len(array))
                data = array.reshape(-1).view(np.uint8).data
                lead = -len(header) % 3  # bytes that make groups of three of the header's
                yield self._before.encode() + pybase64.b64encode(header + bytes(data[:lead]))
                yield from map(pybase64.b64encode, _slices(data[lead:], PART_BYTES))
                yield self._behind(len(array), start, missing).encode()
            case unknown:
                assert_never(unknown)

    def packed(self, array: NDArray[Any], start: int, missing: int) -> Iterator[bytes]:
        """The same in MessagePack, with bytes in place of base64."""
        if self._form.format == "list":
            yield from _packed_list(array)
            return
        header = self._header(len(array))
        data = array.reshape(-1).view(np.uint8).data
        if self._is_object:
            yield _MAP_OF_FIVE + _KEY_DATA
        yield _BINARY + (len(header) + len(data)).to_bytes(4, "big") + header
        yield from map(bytes, _slices(data, PART_BYTES))
        if self._is_object:
            rest = self._behind(len(array), start, missing).removeprefix('",')
            fields = msgspec.json.decode("{" + rest)
            yield msgspec.msgpack.encode(fields)[1:]  # without the head of a map of its own

    def row(self, run: RunRows, place: int, start: int) -> str | None:
        """`whole` of a single row of a run, in less time. None if it is unknown in part."""
        rows = run.made.get(self)
        if rows is None:
            rows = run.made[self] = self._encode(run.arrays[:, 0])
        text, stride, width, unknown = rows
        if place in unknown:
            return None
        first = place * stride
        base64 = text[first : first + width]
        return f"{self._before_row}{base64}{self._padding}{self._behind(1, start, 0)}"

    def _encode(self, rows: Rows) -> _EncodedRows:
        """The rows [n, ...] of a run of single rows."""
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
_shared_text = lru_cache(_ArrayText)


class Encoder:
    """Encodes the arrays of one response, and counts what is sent of them."""

    def __init__(self, form: WireForm) -> None:
        self.form = form
        # those of the arrays beside the one of ids
        self._beside: tuple[Encoder, ...] = tuple(map(Encoder, form.forms[1:]))
        self.counts = ResponseCounts()
        self._has_single_rows = form.has_single_rows
        self._array_text = _shared_text(form) if self._has_single_rows else _ArrayText(form)

    @property
    def num_bytes(self) -> int:
        """Of all arrays so far."""
        return sum(encoder.counts.num_bytes for encoder in (self, *self._beside))

    def count(self, num_rows: int, missing: int) -> None:
        self.counts.rows += num_rows
        self.counts.missing += missing

    def named_encoders(self, name: str = OWN) -> dict[str, "Encoder"]:
        """The encoders of the arrays of a choice, or of the array of ids called `name` and those
        beside it, by the arrays' names."""
        return {encoder.form.name(name): encoder for encoder in (self, *self._beside)}

    def fields(self, name: str, rows: Rows, start: int) -> str:
        """`rows` as fields of a JSON object, each with a comma behind it: an array called `name`,
        and those beside it."""
        fields = f'"{name}":{self._text(rows, start)},'
        for encoder in self._beside:
            fields += encoder.fields(encoder.form.name(name), rows, start)
        return fields

    def single_row(self, run: RunRows, place: int, start: int, name: str = OWN) -> str | None:
        """`fields` of the row at a place of a run, in less time. None, and nothing is counted, if the
        row is unknown in part, or has to be converted first."""
        text = self._array_text.row(run, place, start) if self._has_single_rows else None
        if text is None:
            return None
        beside = ""
        for encoder in self._beside:
            known = encoder.single_row(run, place, start, encoder.form.name(name))
            if known is None:
                return None
            beside += known
        self.counts.rows += 1
        self.counts.num_bytes += len(text)
        return f'"{name}":{text},{beside}'

    def _text(self, rows: Rows, start: int) -> str:
        """An array as JSON, at once."""
        array, missing = self.form.converted(rows)
        text = self._array_text.whole(array, start, missing)
        self.count(len(array), missing)
        self.counts.num_bytes += len(text)
        return text

    def parts(self, arrays: Sequence[Rows], start: int, packed: bool = False) -> Iterator[bytes]:
        """The rows of `arrays` as one array that begins at position `start`: parts of its JSON
        text, or of MessagePack (`packed`) with bytes instead of base64. Raises `LostRowsError` at
        once; the parts are made one by one."""
        array, missing = self.form.converted(joined(arrays, self.form.captured_shape))
        self.count(len(array), missing)
        make = self._array_text.packed if packed else self._array_text.parts
        return self._counted(make(array, start, missing))

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
        """Counts how often each expert of each layer was chosen. Dense layers count as zero."""
        form = self.form
        counts = np.zeros((form.ids_shape[0], form.num_experts), dtype=np.int64)
        missing = 0
        rows = joined(arrays, form.captured_shape)
        for part in _slices(rows, _rows_in_part(form.row_bytes)):
            ids = form.ids(part)
            counts += count_experts(ids, form.num_experts)
            missing += count_missing(ids)
        return {
            "counts": form.spread(counts).tolist(),
            "rows": len(rows),
            "missing": missing,
        }


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
