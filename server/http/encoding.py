"""Encodes rows in the form that a request asked for.

Arrays of long responses are encoded block by block, so that other requests do not wait for a whole one. The tests
compare the bytes with `protocol.codec.encode`, which states the forms in plain terms.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray

from routed_experts.protocol.batch import spread_layers
from routed_experts.protocol.codec import UNKNOWN, CodecError, Format, Rows, count_missing
from routed_experts.protocol.expert_load import Histogram, count_experts

LINE_BYTES = 64 << 10
"""Most routing text in one line of a stream: common clients give up on lines of 128 KiB."""

_BLOCK_BYTES = 48 << 10  # of rows, encoded at once: base64 makes 64 KiB of them
_ENVELOPE_BYTES = 128  # at most, of what stands around `data`
_NPY_HEADER_BYTES = 128
_SOME_UNKNOWN = b"\xff"
"""-1 has this byte, and hardly anything else: of the ids 255, 511 and so on. A search for one byte takes a hundredth of
what numpy needs for a row."""

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("int16", "uint8", "uint16", "int32")}


class LostRowsError(CodecError):
    """Rows are not known, and the type that the request asked for cannot say so."""


@dataclass(slots=True)
class Sent:
    """What one response has sent so far.

    Attributes:
        rows: in all of its arrays.
        missing: rows that are not known.
        num_bytes: of the arrays, as encoded.
    """

    rows: int = 0
    missing: int = 0
    num_bytes: int = 0


class Encoder:
    """How one request wants its arrays, and how much of them was encoded.

    Args:
        fmt: `object`, `npy`, `raw` or `list`.
        dtype: of the elements on the wire.
        shape: (L, K) of the served model.
        num_experts: of a layer; how wide the ids of a `list` are.
        layers: to send every decoder layer: the layer ids of the L layers, and how many decoder layers there are.
    """

    def __init__(
        self,
        fmt: Format,
        dtype: str,
        shape: tuple[int, int],
        num_experts: int,
        layers: tuple[Sequence[int], int] | None = None,
    ) -> None:
        self.fmt = fmt
        self.dtype = dtype
        self.shape = shape
        self.sent = Sent()
        self._wire = _DTYPES[dtype]
        self._num_experts = num_experts
        self._layers = layers
        num_layers, top_k = self._wire_shape = (shape[0] if layers is None else layers[1], shape[1])
        self._row_bytes = num_layers * top_k * self._wire.itemsize
        self._middle = f',{num_layers},{top_k}],"dtype":"{dtype}","start":'
        id_bytes = 1 + max(len(str(num_experts - 1)), len(str(UNKNOWN)))
        self._list_row_bytes = num_layers * (top_k * id_bytes + 2) + 2

    def text_bytes(self, num_rows: int) -> int:
        """Most bytes that the JSON text of an array of so many rows takes."""
        if self.fmt == "list":
            return num_rows * self._list_row_bytes + 2
        header = _NPY_HEADER_BYTES if self.fmt == "npy" else 0
        return _base64_bytes(num_rows * self._row_bytes + header) + _ENVELOPE_BYTES

    def rows_in(self, num_bytes: int) -> int:
        """How many rows an array may have for its JSON text to fit into `num_bytes`; at least one."""
        if self.fmt == "list":
            return max((num_bytes - 2) // self._list_row_bytes, 1)
        header = _NPY_HEADER_BYTES if self.fmt == "npy" else 0
        return max(((num_bytes - _ENVELOPE_BYTES) // 4 * 3 - header) // self._row_bytes, 1)

    def text(self, rows: Rows, start: int) -> str:
        """The JSON text of one array of `rows` ([n, L, K]), of which the first is at position `start`.

        Raises:
            LostRowsError: a row is not known, and the type cannot say so.
        """
        rows = self._laid_out(rows)
        if self.fmt == "list":
            self._count(rows, rows.tobytes())
            text = msgspec.json.encode(rows.tolist()).decode()
        else:
            missing, data = self._counted(rows)
            if self.fmt == "object":
                text = f'{{"data":"{pybase64.b64encode_as_string(data)}{self._tail(len(rows), start, missing)}'
            else:
                header = self._npy_header(len(rows)) if self.fmt == "npy" else b""
                text = f'"{pybase64.b64encode_as_string(header + data)}"'
        self.sent.num_bytes += len(text)
        return text

    def check(self, arrays: Iterable[Rows]) -> None:
        """Raises `LostRowsError` if the type cannot say that rows are not known, and some of `arrays` are not."""
        if self._wire.kind == "u":
            for missing in filter(None, map(count_missing, _blocks(arrays))):
                self._check_lost(missing)

    def histogram(self, arrays: Iterable[Rows]) -> Histogram:
        """How often each expert of each layer was chosen in the rows of `arrays`; never one of a dense layer."""
        counts = np.zeros((self.shape[0], self._num_experts), dtype=np.int64)
        rows = missing = 0
        for block in _blocks(arrays):
            counts += count_experts(block, self._num_experts)
            rows += len(block)
            missing += count_missing(block)
        return {"counts": self._laid_out(counts).tolist(), "rows": rows, "missing": missing}

    def json_parts(self, arrays: Sequence[Rows], start: int) -> Iterator[bytes]:
        """The JSON text of one array, whose rows are those of `arrays` in order; see `text`."""
        return self._sent(self._json_parts(arrays, start))

    def msgpack_parts(self, arrays: Sequence[Rows], start: int) -> Iterator[bytes]:
        """As `json_parts`, in MessagePack and with bytes where JSON has base64."""
        return self._sent(self._msgpack_parts(arrays, start))

    def _sent(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        for part in parts:
            self.sent.num_bytes += len(part)
            yield part

    def _json_parts(self, arrays: Sequence[Rows], start: int) -> Iterator[bytes]:
        if self.fmt == "list":
            yield from _list_parts(self._counting(arrays), b"[", _json_rows, b",", b"]")
            return
        missing = 0

        def data() -> Iterator[bytes]:
            nonlocal missing
            for block in self._blocks(arrays):
                unknown, raw = self._counted(block)
                missing += unknown
                yield raw

        num_rows = sum(map(len, arrays))
        if self.fmt == "object":
            yield b'{"data":"'
            yield from _base64_parts(data())
            yield self._tail(num_rows, start, missing).encode()
            return
        yield b'"'
        yield from _base64_parts(data(), self._npy_header(num_rows) if self.fmt == "npy" else b"")
        yield b'"'

    def _msgpack_parts(self, arrays: Sequence[Rows], start: int) -> Iterator[bytes]:
        num_rows = sum(map(len, arrays))
        if self.fmt == "list":
            head = b"\xdd" + num_rows.to_bytes(4, "big")
            yield from _list_parts(self._counting(arrays), head, _msgpack_rows, b"", b"")
            return
        header = self._npy_header(num_rows) if self.fmt == "npy" else b""
        num_bytes = len(header) + num_rows * self._row_bytes
        if self.fmt == "object":
            yield b"\x85" + _pack("data")
        yield b"\xc6" + num_bytes.to_bytes(4, "big") + header
        missing = 0
        for block in self._blocks(arrays):
            unknown, raw = self._counted(block)
            missing += unknown
            yield raw
        if self.fmt == "object":
            rest = {"shape": [num_rows, *self._wire_shape], "dtype": self.dtype, "start": start, "missing": missing}
            yield b"".join(_pack(item) for pair in rest.items() for item in pair)

    def _counted(self, rows: Rows) -> tuple[int, bytes]:
        """How many of `rows`, which are sent, are not known, and their bytes on the wire."""
        data = rows.tobytes()
        missing = self._count(rows, data)
        return missing, data if self.dtype == "int16" else rows.astype(self._wire).tobytes()

    def _count(self, rows: Rows, data: bytes) -> int:
        """How many of `rows`, which are sent and are `data` in int16, are not known."""
        missing = count_missing(rows) if _SOME_UNKNOWN in data else 0
        if missing:
            self._check_lost(missing)
            self.sent.missing += missing
        self.sent.rows += len(rows)
        return missing

    def _counting(self, arrays: Iterable[Rows]) -> Iterator[Rows]:
        """The rows of `arrays` in blocks, for lists."""
        for block in self._blocks(arrays):
            self._count(block, block.tobytes())
            yield block

    def _blocks(self, arrays: Iterable[Rows]) -> Iterator[Rows]:
        return map(self._laid_out, _blocks(arrays))

    def _laid_out(self, rows: NDArray[Any]) -> NDArray[Any]:
        """`rows` [..., L, K] with the layers that are sent."""
        return rows if self._layers is None else spread_layers(rows, *self._layers)

    def _check_lost(self, missing: int) -> None:
        if self._wire.kind == "u":
            raise LostRowsError(
                f"{missing} rows are not known and are filled with -1, which {self.dtype} cannot hold: ask for int16"
            )

    def _tail(self, num_rows: int, start: int, missing: int) -> str:
        return f'","shape":[{num_rows}{self._middle}{start},"missing":{missing}}}'

    def _npy_header(self, num_rows: int) -> bytes:
        buffer = BytesIO()
        described = {"descr": self._wire.str, "fortran_order": False, "shape": (num_rows, *self._wire_shape)}
        np.lib.format.write_array_header_1_0(buffer, described)  # type: ignore[no-untyped-call]
        return buffer.getvalue()


def _pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def _base64_bytes(num_bytes: int) -> int:
    return -(-num_bytes // 3) * 4


def _blocks(arrays: Iterable[Rows]) -> Iterator[Rows]:
    """The rows of `arrays` in order, in arrays of about `_BLOCK_BYTES`: large ones in parts, small ones together."""
    waiting: list[Rows] = []
    waiting_bytes = 0
    for rows in arrays:
        if rows.nbytes > _BLOCK_BYTES:
            if waiting:
                yield np.concatenate(waiting)
                waiting, waiting_bytes = [], 0
            count = max(_BLOCK_BYTES // (rows.nbytes // len(rows)), 1)
            yield from (rows[first : first + count] for first in range(0, len(rows), count))
            continue
        waiting.append(rows)
        waiting_bytes += rows.nbytes
        if waiting_bytes > _BLOCK_BYTES:
            yield np.concatenate(waiting)
            waiting, waiting_bytes = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _base64_parts(parts: Iterable[bytes], rest: bytes = b"") -> Iterator[bytes]:
    """base64 of `rest` and `parts` as of one sequence of bytes: three of them make four characters."""
    for part in parts:
        data = rest + part
        cut = len(data) - len(data) % 3
        yield pybase64.b64encode(memoryview(data)[:cut])
        rest = data[cut:]
    yield pybase64.b64encode(rest)


def _list_parts(
    blocks: Iterable[Rows], head: bytes, encode: Callable[[Rows], bytes], between: bytes, tail: bytes
) -> Iterator[bytes]:
    lead = head
    for block in blocks:
        if len(block):
            yield lead + encode(block)
            lead = between
    yield (head if lead is head else b"") + tail


def _json_rows(rows: Rows) -> bytes:
    return msgspec.json.encode(rows.tolist())[1:-1]


def _msgpack_rows(rows: Rows) -> bytes:
    return b"".join(map(_pack, rows.tolist()))
