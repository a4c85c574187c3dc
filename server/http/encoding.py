"""Encodes rows in the form that the request asks for.

An array is joined, checked and converted at once; its text is made in parts, so that other tasks
can run between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from routed_experts.capture.wire.rows import row_shape, weights_of
from routed_experts.protocol.batch import spread_layers
from routed_experts.protocol.codec import (
    NUMPY_DTYPES,
    UNKNOWN,
    CodecError,
    Format,
    Rows,
    count_missing,
)
from routed_experts.protocol.expert_load import Histogram, count_experts, sum_weights
from routed_experts.server.outputs.array_store import npy_header

LINE_BYTES = 64 << 10
"""Maximum routing text in one line of a stream: common clients reject lines of 128 KiB."""

_PART_BYTES = 48 << 10
"""Bytes of an array that are encoded at once: whole groups of three, which in base64 are 64 KiB."""
_ENVELOPE_BYTES = 128
"""Upper bound for the JSON text around `data`."""
_NPY_HEADER_BYTES = 128
_UNKNOWN_BYTE = b"\xff"
"""A row without this byte has no -1; with it, the row is checked. The search takes a fifth of
numpy's time."""
_FLOAT_TEXT_BYTES = 26
"""Upper bound for a float32 in a JSON list, with its comma."""


class LostRowsError(CodecError):
    """Some rows are unknown, and the requested dtype cannot hold -1."""


@dataclass(slots=True)
class ResponseCounts:
    rows: int = 0
    missing: int = 0  # unknown rows among them
    num_bytes: int = 0  # of the encoded arrays


class Encoder:
    """Encodes the arrays of one response and counts them."""

    _columns = 1  # for each of the K ids

    def __init__(
        self,
        fmt: Format,
        dtype: str,
        shape: tuple[int, int],
        num_experts: int,
        *,
        layers: tuple[Sequence[int], int] | None = None,
        has_weights: bool = False,
    ) -> None:
        self.weights: WeightsEncoder | None = (
            WeightsEncoder(fmt, shape, layers) if has_weights else None
        )
        # of the rows that it is given: (L, K), or (3L, K) with weights
        self.row_shape = row_shape(*shape, has_weights)
        self.fmt = fmt
        self.dtype = dtype  # on the wire
        self.shape = shape  # (L, K) of the served model
        self.counts = ResponseCounts()
        self._wire = NUMPY_DTYPES[dtype]
        self._is_plain = fmt == "object" and dtype == "int16" and layers is None
        self._num_experts = num_experts
        # decoder layers of the L layers, and how many there are; None to send MoE layers only
        self._layers = layers
        num_layers, top_k = self._wire_shape = (
            shape[0] if layers is None else layers[1],
            shape[1] * self._columns,
        )
        self._row_bytes = num_layers * top_k * self._wire.itemsize
        self._middle = f',{num_layers},{top_k}],"dtype":"{dtype}","start":'
        id_bytes = 1 + max(len(str(num_experts - 1)), len(str(UNKNOWN)))
        self._list_row_bytes = num_layers * (top_k * id_bytes + 2) + 2

    @property
    def num_bytes(self) -> int:
        return self.counts.num_bytes + (
            0 if self.weights is None else self.weights.counts.num_bytes
        )

    def named_encoders(self, name: str = "routed_experts") -> dict[str, "Encoder"]:
        """The encoders of the arrays of a choice, or of those called `name`, by the arrays'
        names."""
        return (
            {name: self}
            if self.weights is None
            else {name: self, _weights_name(name): self.weights}
        )

    def fields(self, name: str, rows: Rows, start: int) -> str:
        """`rows` as fields of a JSON object, each with a comma behind it: an array called `name`,
        and their weights."""
        # which most chunks of a stream bring: less than half the time
        if self._is_plain and len(rows) == 1:
            row = rows.tobytes()
            ids, weights = row[: self._row_bytes], row[self._row_bytes :]
            # of each weight the highest byte
            if _UNKNOWN_BYTE not in ids and _UNKNOWN_BYTE not in weights[3::4]:
                field = self._row_field(name, ids, start)
                return (
                    field
                    if self.weights is None
                    else field + self.weights._row_field(_weights_name(name), weights, start)
                )
        encoders = self.named_encoders(name).items()
        return "".join(
            f'"{key}":{b"".join(encoder.parts([rows], start)).decode()},'
            for key, encoder in encoders
        )

    def _row_field(self, name: str, row: bytes, start: int) -> str:
        """One known row in the default form."""
        text = f'{{"data":"{pybase64.b64encode_as_string(row)}","shape":[1{self._middle}{start},"missing":0}}'
        self.counts.rows += 1
        self.counts.num_bytes += len(text)
        return f'"{name}":{text},'

    def text_bytes(self, num_rows: int) -> int:
        """Upper bound for the JSON text of `num_rows` rows, and of their weights."""
        return sum(encoder._text_bytes(num_rows) for encoder in self.named_encoders().values())

    def _text_bytes(self, num_rows: int) -> int:
        if self.fmt == "list":
            return num_rows * self._list_row_bytes + 2
        num_bytes = num_rows * self._row_bytes + (_NPY_HEADER_BYTES if self.fmt == "npy" else 0)
        return -(-num_bytes // 3) * 4 + _ENVELOPE_BYTES

    def rows_beyond(self, num_bytes: int) -> int:
        """A number of rows whose text by `text_bytes` surely exceeds `num_bytes`, by a few rows at
        most."""
        of_three = self.text_bytes(3) - self.text_bytes(0)  # base64 has whole groups then
        return 3 * num_bytes // of_three + 3

    def stored_bytes(self, num_rows: int) -> int:
        """Bytes of the files of `num_rows` rows, and of their weights."""
        encoders = self.named_encoders().values()
        return sum(num_rows * encoder._row_bytes + _NPY_HEADER_BYTES for encoder in encoders)

    def rows_in(self, num_bytes: int) -> int:
        """Number of rows whose JSON text, and that of their weights, surely fits into `num_bytes`;
        at least one."""
        empty, of_three = self.text_bytes(0), self.text_bytes(3)  # whose base64 has whole groups
        rounding = 3 * len(self.named_encoders())
        return max(3 * (num_bytes - empty - rounding) // (of_three - empty), 1)

    def parts(self, arrays: Sequence[Rows], start: int, packed: bool = False) -> Iterator[bytes]:
        """The rows of `arrays` as one array that begins at position `start`: parts of its JSON
        text, or of MessagePack (`packed`) with bytes instead of base64. Raises `LostRowsError` at
        once; the parts are made one by one."""
        rows, missing = self._converted(arrays)
        self.count(len(rows), missing)
        make = (
            self._list_parts(rows, packed)
            if self.fmt == "list"
            else self._data_parts(rows, start, missing, packed)
        )
        return self._counted(make)

    def _counted(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        for part in parts:
            self.counts.num_bytes += len(part)
            yield part

    def count(self, num_rows: int, missing: int) -> None:
        self.counts.rows += num_rows
        self.counts.missing += missing

    def _data_parts(
        self, rows: NDArray[Any], start: int, missing: int, packed: bool
    ) -> Iterator[bytes]:
        shape = len(rows), *self._wire_shape
        is_object, header = (
            self.fmt == "object",
            npy_header(self._wire.str, shape) if self.fmt == "npy" else b"",
        )
        data = rows.reshape(-1).view(np.uint8).data
        tail = f',"shape":[{len(rows)}{self._middle}{start},"missing":{missing}}}'
        if packed:
            size = (len(header) + len(data)).to_bytes(4, "big")
            yield (b"\x85\xa4data\xc6" if is_object else b"\xc6") + size + header
            yield from map(bytes, _parts(data))
            if is_object:  # without the header of the map, which has five entries here
                yield msgspec.msgpack.encode(msgspec.json.decode("{" + tail[1:]))[1:]
            return
        lead = -len(header) % 3  # bytes that make groups of three of the header's
        yield (b'{"data":"' if is_object else b'"') + pybase64.b64encode(
            header + bytes(data[:lead])
        )
        yield from map(pybase64.b64encode, _parts(data[lead:]))
        yield b'"' + tail.encode() if is_object else b'"'

    def _list_parts(self, rows: NDArray[Any], packed: bool) -> Iterator[bytes]:
        """Nested lists. NaN is null."""
        yield b"\xdd" + len(rows).to_bytes(4, "big") if packed else b"["
        comma = b""
        for part in _parts(rows, max(_PART_BYTES // self._row_bytes, 1)):
            # The text of a double has all digits of a float32 that is read as a double.
            part = part.astype(np.float64) if self._wire.kind == "f" else part
            items = orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)
            yield (
                b"".join(map(msgspec.msgpack.encode, orjson.loads(items)))
                if packed
                else comma + items[1:-1]
            )
            comma = b","
        if not packed:
            yield b"]"

    def layers_first(self, arrays: Sequence[Rows]) -> tuple[NDArray[Any], int]:
        """As `_converted`, with the layers first ([layers, n, K]). Counts nothing as sent."""
        rows, missing = self._converted(arrays)
        # numpy moves K ids with one copy
        item = np.dtype((np.void, rows.shape[2] * self._wire.itemsize))
        array = np.empty((rows.shape[1], rows.shape[0], rows.shape[2]), dtype=self._wire)
        array.view(item)[..., 0] = rows.view(item)[..., 0].T
        return array, missing

    def histogram(self, arrays: Sequence[Rows]) -> Histogram:
        """Counts how often each expert of each layer was chosen, and adds up weights. Dense layers
        count as zero."""
        counts = np.zeros((self.shape[0], self._num_experts), dtype=np.int64)
        sums = np.zeros(counts.shape)
        rows, missing, has_weights = joined(arrays, self.row_shape), 0, self.row_shape != self.shape
        for part in _parts(rows, max(_PART_BYTES // self._row_bytes, 1)):
            ids = self._ids(part)
            counts += count_experts(ids, self._num_experts)
            if has_weights:
                sums += sum_weights(ids, weights_of(part), self._num_experts)
            missing += count_missing(ids)
        counted: Histogram = {
            "counts": self._spread(counts).tolist(),
            "rows": len(rows),
            "missing": missing,
        }
        if has_weights:
            counted["weights"] = self._spread(sums).tolist()
        return counted

    def _converted(self, arrays: Sequence[Rows]) -> tuple[NDArray[Any], int]:
        """The rows of `arrays` as one array [n, layers, K] of the type on the wire, and how many of
        them are unknown, which is an error if that type cannot hold -1."""
        rows = self._laid_out(joined(arrays, self.row_shape))
        missing = count_missing(rows)
        if missing and self._wire.kind == "u":
            raise LostRowsError(
                f"{missing} rows are unknown (-1), which {self.dtype} cannot hold: set routed_experts_dtype to int16"
            )
        return np.ascontiguousarray(rows, dtype=self._wire), missing

    def _laid_out(self, rows: Rows) -> NDArray[Any]:
        """The array [n, layers, K] that is encoded of `rows`."""
        return self._spread(self._ids(rows))

    def _ids(self, rows: Rows) -> Rows:
        return rows[:, : self.shape[0]]

    def _spread(self, array: NDArray[Any]) -> NDArray[Any]:
        """`array` [..., L, K], with all decoder layers if they are sent."""
        return array if self._layers is None else spread_layers(array, *self._layers)


class WeightsEncoder(Encoder):
    """Encodes the weights of rows, as `Encoder` does their ids: float32, NaN where they are unknown
    (null in lists)."""

    def __init__(
        self, fmt: Format, shape: tuple[int, int], layers: tuple[Sequence[int], int] | None
    ) -> None:
        super().__init__(fmt, "float32", shape, 1, layers=layers)
        num_layers, top_k = self._wire_shape
        self._list_row_bytes = num_layers * (top_k * _FLOAT_TEXT_BYTES + 2) + 2
        self.row_shape = row_shape(*shape, with_weights=True)

    def _laid_out(self, rows: Rows) -> NDArray[Any]:
        return self._spread(weights_of(rows))


class PairedEncoder(Encoder):
    """Encodes ids and weights in one array, as prime-rl's trainer reads them.

    It is int32 [n, layers, 2K]: K ids, then the bits of their float32 weights times `scale` [L].
    """

    _columns = 2

    def __init__(
        self,
        shape: tuple[int, int],
        num_experts: int,
        layers: tuple[Sequence[int], int] | None,
        scale: Sequence[float],
    ) -> None:
        super().__init__("object", "int32", shape, num_experts, layers=layers)
        self.row_shape = row_shape(*shape, with_weights=True)
        self._scale = np.asarray(scale, dtype=np.float32)[:, None]

    def _laid_out(self, rows: Rows) -> NDArray[Any]:
        weights = self._spread(weights_of(rows) * self._scale).view(np.int32)
        return np.concatenate([self._spread(self._ids(rows)).astype(np.int32), weights], axis=2)


def joined(arrays: Sequence[Rows], shape: tuple[int, int]) -> Rows:
    """`arrays` as one array of rows of `shape`."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty((0, *shape), dtype=np.int16)


def _parts(array: Any, count: int = _PART_BYTES) -> Iterator[Any]:
    return (array[first : first + count] for first in range(0, len(array), count))


def _weights_name(name: str) -> str:
    """Of the array beside an array of ids, `routed_experts` or `prompt_routed_experts`."""
    return f"{name[:-1]}_weights"
