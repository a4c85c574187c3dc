"""Encodes rows in the form that the request asks for.

Long arrays are encoded in blocks, between which others get their turn, and which fit into memory that was freed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from routed_experts.capture.rows import ids_of, row_shape, weights_of
from routed_experts.protocol.batch import spread_layers
from routed_experts.protocol.codec import UNKNOWN, CodecError, Format, Rows, count_missing
from routed_experts.protocol.expert_load import Histogram, count_experts, sum_weights

LINE_BYTES = 64 << 10
"""Maximum routing text in one line of a stream: common clients reject lines of 128 KiB."""

_BLOCK_BYTES = 48 << 10
"""Bytes of rows that are encoded at once. In base64 they take 64 KiB."""
_ENVELOPE_BYTES = 128
"""Upper bound for the JSON text around `data`."""
_NPY_HEADER_BYTES = 128
_MANY = 1024  # rows, of which all but a row's own bytes are a small part
_UNKNOWN_BYTE = b"\xff"
"""A row without this byte has no -1; with it, the row is checked. The search takes a hundredth of numpy's time."""

_UNKNOWN_WEIGHT_BYTES = b"\xff" * 4
_FLOAT_TEXT_BYTES = 26
"""Upper bound for a float32 in a JSON list, with its comma."""

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("int16", "uint8", "uint16", "int32", "float32")}


class LostRowsError(CodecError):
    """Some rows are unknown, and the requested dtype cannot hold -1."""


@dataclass(slots=True)
class Sent:
    """Counters of one response."""

    rows: int = 0
    missing: int = 0  # unknown rows among them
    num_bytes: int = 0  # of the encoded arrays


class Encoder:
    """Encodes the arrays of one response and counts them."""

    _unknown = _UNKNOWN_BYTE
    _listed: type[np.generic] = np.int16
    _columns = 1  # for each of the K ids

    def __init__(
        self,
        fmt: Format,
        dtype: str,
        shape: tuple[int, int],
        num_experts: int,
        layers: tuple[Sequence[int], int] | None = None,
        has_weights: bool = False,
    ) -> None:
        self.weights: WeightsEncoder | None = WeightsEncoder(fmt, shape, layers) if has_weights else None
        self._has_weights = has_weights
        self.row_shape = row_shape(*shape, has_weights)  # of the rows that it is given: (L, K), or (3L, K) with weights
        self.fmt = fmt
        self.dtype = dtype  # on the wire
        self.shape = shape  # (L, K) of the served model
        self.sent = Sent()
        self._wire = _DTYPES[dtype]
        self._is_native = dtype in ("int16", "float32")
        self._is_plain = fmt == "object" and dtype == "int16" and layers is None
        self._num_experts = num_experts
        self._layers = layers  # decoder layers of the L layers, and how many there are; None to send MoE layers only
        num_layers, top_k = self._wire_shape = (shape[0] if layers is None else layers[1], shape[1] * self._columns)
        self._row_bytes = num_layers * top_k * self._wire.itemsize
        self._middle = f',{num_layers},{top_k}],"dtype":"{dtype}","start":'
        id_bytes = 1 + max(len(str(num_experts - 1)), len(str(UNKNOWN)))
        self._list_row_bytes = num_layers * (top_k * id_bytes + 2) + 2

    @property
    def num_bytes(self) -> int:
        """Size of all encoded arrays."""
        return self.sent.num_bytes if self.weights is None else self.sent.num_bytes + self.weights.sent.num_bytes

    @property
    def total(self) -> Sent:
        """What was sent, with the size of all arrays."""
        return replace(self.sent, num_bytes=self.num_bytes)

    def by_name(self, name: str = "routed_experts") -> dict[str, "Encoder"]:
        """What encodes the arrays of a choice, or those called `name`, by their names."""
        found: dict[str, Encoder] = {name: self}
        if self.weights is not None:
            found[_weights_name(name)] = self.weights
        return found

    def fields(self, name: str, rows: Rows, start: int) -> str:
        """`rows` as fields of a JSON object: an array called `name`, and one of their weights."""
        if self._is_plain and len(rows) == 1:  # which most chunks of a stream bring: less than half the time
            row = rows.tobytes()
            ids, weights = row[: self._row_bytes], row[self._row_bytes :]
            if _UNKNOWN_BYTE not in ids and _UNKNOWN_BYTE not in weights[3::4]:  # of each weight the highest byte
                field = self._row_field(name, ids, start)
                return (
                    field
                    if self.weights is None
                    else field + self.weights._row_field(_weights_name(name), weights, start)
                )
        if self.weights is None:
            return f'"{name}":{self.text(rows, start)},'
        return f'"{name}":{self.text(rows, start)},"{_weights_name(name)}":{self.weights.text(rows, start)},'

    def _row_field(self, name: str, row: bytes, start: int) -> str:
        """One known row in the default form."""
        text = f'{{"data":"{pybase64.b64encode_as_string(row)}","shape":[1{self._middle}{start},"missing":0}}'
        self.sent.rows += 1
        self.sent.num_bytes += len(text)
        return f'"{name}":{text},'

    def text_bytes(self, num_rows: int) -> int:
        """Upper bound for the JSON text of `num_rows` rows, and of their weights."""
        return self._text_bytes(num_rows) + (0 if self.weights is None else self.weights.text_bytes(num_rows))

    def _text_bytes(self, num_rows: int) -> int:
        if self.fmt == "list":
            return num_rows * self._list_row_bytes + 2
        header = _NPY_HEADER_BYTES if self.fmt == "npy" else 0
        return _base64_bytes(num_rows * self._row_bytes + header) + _ENVELOPE_BYTES

    def stored_bytes(self, num_rows: int) -> int:
        """Bytes of the files of `num_rows` rows, and of their weights."""
        own = num_rows * self._row_bytes + _NPY_HEADER_BYTES
        return own + (0 if self.weights is None else self.weights.stored_bytes(num_rows))

    def rows_in(self, num_bytes: int) -> int:
        """Number of rows whose JSON text, and that of their weights, surely fits into `num_bytes`; at least one."""
        if self.weights is not None:
            own, others = self._text_bytes(_MANY), self.weights.text_bytes(_MANY)
            share = num_bytes * own // (own + others)
            return min(self._rows_in(share), self.weights.rows_in(num_bytes - share))
        return self._rows_in(num_bytes)

    def _rows_in(self, num_bytes: int) -> int:
        if self.fmt == "list":
            return max((num_bytes - 2) // self._list_row_bytes, 1)
        header = _NPY_HEADER_BYTES if self.fmt == "npy" else 0
        return max(((num_bytes - _ENVELOPE_BYTES) // 4 * 3 - header) // self._row_bytes, 1)

    def text(self, rows: Rows, start: int) -> str:
        """The JSON text of `rows` ([n, L, K]), which begin at position `start`. Unknown rows are an error if the dtype
        cannot hold -1."""
        rows, missing = self._laid_out(rows), self.sent.missing
        data = self._data(rows)
        if self.fmt == "object":
            text = f'{{"data":"{pybase64.b64encode_as_string(data)}{self._tail(len(rows), start, missing)}'
        elif self.fmt == "list":
            text = f"[{self._list_items(rows).decode()}]"
        else:
            header = self._npy_header(len(rows)) if self.fmt == "npy" else b""
            text = f'"{pybase64.b64encode_as_string(header + data)}"'
        self.sent.num_bytes += len(text)
        return text

    def check(self, arrays: Iterable[Rows]) -> None:
        """Raises `LostRowsError` if some of `arrays` are unknown and the dtype cannot hold -1."""
        if self._wire.kind == "u":
            for missing in filter(None, map(count_missing, map(self._ids, _blocks(arrays)))):
                self._check_lost(missing)

    def histogram(self, arrays: Iterable[Rows]) -> Histogram:
        """Counts how often each expert of each layer was chosen, and adds up weights. Dense layers count as zero."""
        counts = np.zeros((self.shape[0], self._num_experts), dtype=np.int64)
        sums = np.zeros(counts.shape)
        rows = missing = 0
        for block in _blocks(arrays):
            ids = self._ids(block)
            counts += count_experts(ids, self._num_experts)
            if self._has_weights:
                sums += sum_weights(ids, weights_of(block), self._num_experts)
            rows += len(block)
            missing += count_missing(ids)
        counted: Histogram = {"counts": self._spread(counts).tolist(), "rows": rows, "missing": missing}
        if self._has_weights:
            counted["weights"] = self._spread(sums).tolist()
        return counted

    def parts(self, arrays: Sequence[Rows], start: int, packed: bool) -> Iterator[bytes]:
        """The rows of `arrays` as one array, encoded in parts: as in `text`, or in MessagePack (`packed`) with bytes
        instead of base64."""
        make = self._list_parts if self.fmt == "list" else self._data_parts
        for part in make(arrays, start, packed):
            self.sent.num_bytes += len(part)
            yield part

    def _data_parts(self, arrays: Sequence[Rows], start: int, packed: bool) -> Iterator[bytes]:
        num_rows, missing, is_object = sum(map(len, arrays)), self.sent.missing, self.fmt == "object"
        header = self._npy_header(num_rows) if self.fmt == "npy" else b""
        data = chain([header], map(self._data, self._blocks(arrays)))
        if not packed:
            yield b'{"data":"' if is_object else b'"'
            yield from _base64_parts(data)
            yield self._tail(num_rows, start, missing).encode() if is_object else b'"'
            return
        size = len(header) + num_rows * self._row_bytes
        yield (b"\x85\xa4data\xc6" if is_object else b"\xc6") + size.to_bytes(4, "big")
        yield from data
        if is_object:
            rest = {"shape": [num_rows, *self._wire_shape], "dtype": self.dtype, "start": start}
            rest["missing"] = self.sent.missing - missing
            yield msgspec.msgpack.encode(rest)[1:]  # without the header of the map, which has five entries here

    def _list_parts(self, arrays: Sequence[Rows], start: int, packed: bool) -> Iterator[bytes]:
        yield b"\xdd" + sum(map(len, arrays)).to_bytes(4, "big") if packed else b"["
        comma = b""
        for block in self._blocks(arrays):
            self._data(block)  # counts it
            items = self._list_items(block)
            yield b"".join(map(msgspec.msgpack.encode, orjson.loads(b"[%b]" % items))) if packed else comma + items
            comma = b","
        if not packed:
            yield b"]"

    def layers_first(self, arrays: Sequence[Rows]) -> tuple[NDArray[Any], int]:
        """The rows of `arrays` as one array [layers, n, K], and how many of them are unknown, which is an error if the
        dtype cannot hold -1. Counts nothing as sent."""
        num_layers, top_k = self._wire_shape
        array = np.empty((num_layers, sum(map(len, arrays)), top_k), dtype=self._wire)
        item = np.dtype((np.void, top_k * self._wire.itemsize))  # numpy moves K ids with one copy
        out, missing, first = array.view(item)[..., 0], 0, 0
        for block in self._blocks(arrays):
            missing += self._missing_in(block, block.tobytes())
            block = np.ascontiguousarray(block, dtype=self._wire)
            out[:, first : first + len(block)] = block.view(item)[..., 0].T
            first += len(block)
        return array, missing

    def _data(self, rows: Rows) -> bytes:
        """The bytes of `rows` on the wire. Counts the rows as sent."""
        data = rows.tobytes()
        self.sent.rows += len(rows)
        self.sent.missing += self._missing_in(rows, data)
        return data if self._is_native else rows.astype(self._wire).tobytes()

    def _missing_in(self, rows: Rows, data: bytes) -> int:
        """Number of unknown rows in `rows`, whose bytes are `data`."""
        missing = count_missing(rows) if self._unknown in data else 0
        if missing:
            self._check_lost(missing)
        return missing

    def _blocks(self, arrays: Iterable[Rows]) -> Iterator[Rows]:
        return map(self._laid_out, _blocks(arrays))

    def _laid_out(self, rows: Rows) -> NDArray[Any]:
        """The array [n, layers, K] that is encoded of `rows`."""
        return self._spread(self._ids(rows))

    def _ids(self, rows: Rows) -> Rows:
        return rows if not self._has_weights else np.ascontiguousarray(ids_of(rows))  # whole: else `tobytes` is slow

    def _spread(self, array: NDArray[Any]) -> NDArray[Any]:
        """`array` [..., L, K], with all decoder layers if they are sent."""
        return array if self._layers is None else spread_layers(array, *self._layers)

    def _list_items(self, rows: NDArray[Any]) -> bytes:
        """The rows as nested lists in JSON, with commas but no brackets around all of them. NaN is null."""
        rows = np.ascontiguousarray(rows, dtype=self._listed)
        return orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]

    def _check_lost(self, missing: int) -> None:
        if self._wire.kind == "u":
            raise LostRowsError(
                f"{missing} rows are unknown (-1), which {self.dtype} cannot hold: set routed_experts_dtype to int16"
            )

    def _tail(self, num_rows: int, start: int, missing_before: int) -> str:
        return f'","shape":[{num_rows}{self._middle}{start},"missing":{self.sent.missing - missing_before}}}'

    def _npy_header(self, num_rows: int) -> bytes:
        buffer = BytesIO()
        described = {"descr": self._wire.str, "fortran_order": False, "shape": (num_rows, *self._wire_shape)}
        np.lib.format.write_array_header_1_0(buffer, described)  # type: ignore[no-untyped-call]
        return buffer.getvalue()


class WeightsEncoder(Encoder):
    """Encodes the weights of rows, as `Encoder` does their ids: float32, NaN where they are unknown (null in lists)."""

    _unknown = _UNKNOWN_WEIGHT_BYTES
    _listed = np.float64  # its text has all digits of a float32 that is read as a double

    def __init__(self, fmt: Format, shape: tuple[int, int], layers: tuple[Sequence[int], int] | None) -> None:
        super().__init__(fmt, "float32", shape, 1, layers)
        num_layers, top_k = self._wire_shape
        self._list_row_bytes = num_layers * (top_k * _FLOAT_TEXT_BYTES + 2) + 2

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
        super().__init__("object", "int32", shape, num_experts, layers)
        self._has_weights, self.row_shape = True, row_shape(*shape, with_weights=True)
        self._scale = np.asarray(scale, dtype=np.float32)[:, None]

    def _laid_out(self, rows: Rows) -> NDArray[Any]:
        weights = self._spread(weights_of(rows) * self._scale).view(np.int32)
        return np.concatenate([self._spread(self._ids(rows)).astype(np.int32), weights], axis=2)


def _weights_name(name: str) -> str:
    """Of the array beside an array of ids, `routed_experts` or `prompt_routed_experts`."""
    return f"{name[:-1]}_weights"


def _base64_bytes(num_bytes: int) -> int:
    return -(-num_bytes // 3) * 4


def _blocks(arrays: Iterable[Rows]) -> Iterator[Rows]:
    """The rows of `arrays` in order, in arrays of up to `_BLOCK_BYTES`: long arrays are split, short ones joined."""
    block: list[Rows] = []
    num_bytes = 0
    for rows in _pieces(arrays):
        if block and num_bytes + rows.nbytes > _BLOCK_BYTES:
            yield block[0] if len(block) == 1 else np.concatenate(block)
            block, num_bytes = [], 0
        block.append(rows)
        num_bytes += rows.nbytes
    if block:
        yield np.concatenate(block)


def _pieces(arrays: Iterable[Rows]) -> Iterator[Rows]:
    for rows in filter(len, arrays):
        count = max(_BLOCK_BYTES * len(rows) // rows.nbytes, 1)
        yield from (rows[first : first + count] for first in range(0, len(rows), count))


def _base64_parts(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The base64 text of all `parts` together. Remainders of three bytes move to the next part."""
    rest = b""
    for part in parts:
        data = rest + part
        cut = len(data) - len(data) % 3
        yield pybase64.b64encode(memoryview(data)[:cut])
        rest = data[cut:]
    yield pybase64.b64encode(rest)
