"""The rows of a prompt on their way from the instance that computed it to the one that decodes, beside its KV."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.rows import ids_of
from routed_experts.protocol.codec import UNKNOWN, Rows

PARAM = "routed_experts"
"""Key in `kv_transfer_params`: rows that came with KV, or where a prefill leg wants rows to go with its KV, True or
`ALONE`. Nobody else gets any, as bytes would be the end of a JSON answer."""

ALONE = b"alone"
"""In place of True: if the prompt's rows go with the KV, they are not sent to the API process too. Bytes, so that no
client can say it."""

MAX_BYTES = 64 << 20
"""Most bytes of rows that are handed over; more are left out, and missing."""

WireRows = NDArray[np.uint8] | NDArray[np.int16]
"""[n, L, K]; in uint8 all are known. With weights [n, 3L, K] int16 (`rows.py`)."""


class HandedRows(NamedTuple):
    """Rows that came with KV; an engine that captures weights takes ids alone too."""

    rows: WireRows
    has_weights: bool


_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "int16": np.dtype("<i2")}
WORDS = "words"
"""In place of a dtype: rows have weights. Between the processes of an instance only."""
_WORDS_BYTES = 3  # for each of ids in int16, with its weight

_LATEST = 1 << 40
"""No time is as late as this, in seconds since 1970; what Python's JSON calls NaN and Infinity is not before it."""

_PIECE_BYTES = 192 << 10  # of ids, encoded at once


def encode(
    read: Callable[[int, Rows], None],  # fills an array ([n, L, K]) with the rows from a position on
    num_rows: int,
    row_shape: tuple[int, int],  # (L, K), with weights (3L, K)
    until: float,  # when it is too late to come for their KV, in seconds since 1970
    has_weights: bool = False,
) -> dict[str, Any] | None:
    """Rows as what stands in `kv_transfer_params`, one byte for each id where that is enough.

    Piece by piece, each of which stays in the processor's cache until it is encoded: the engine's steps wait for this.
    Between the processes of an instance `data` is bytes, which JSON cannot say: so no client of another endpoint can
    make the engine take rows for true. Over HTTP it is base64. None if they are too many.
    """
    for name, dtype in [(WORDS, _DTYPES["int16"])] if has_weights else _DTYPES.items():
        if num_rows * row_shape[0] * row_shape[1] * dtype.itemsize > _limit(name):
            break
        if (data := _encoded(read, num_rows, row_shape, dtype)) is not None:
            return {"data": data, "dtype": name, "shape": [num_rows, *row_shape], "until": until}
    return None


def _limit(name: str) -> int:
    return MAX_BYTES * _WORDS_BYTES if name == WORDS else MAX_BYTES


def _encoded(
    read: Callable[[int, Rows], None], num_rows: int, row_shape: tuple[int, int], dtype: np.dtype[Any]
) -> bytearray | None:
    """The rows in `dtype`; None if one byte is not enough for some of them, or they are not known. In place, as fresh
    memory for a second copy takes longer than all else."""
    count = max(_PIECE_BYTES // (row_shape[0] * row_shape[1]), 1)
    room = np.empty((min(count, num_rows), *row_shape), dtype=np.int16)
    data = bytearray(num_rows * row_shape[0] * row_shape[1] * dtype.itemsize)
    out = np.frombuffer(data, dtype).reshape(num_rows, *row_shape)
    for first in range(0, num_rows, count):
        piece = room[: num_rows - first]
        read(first, piece)
        if dtype.itemsize == 1 and piece.view(np.uint16).max() > 255:  # -1 too
            return None
        out[first : first + len(piece)] = piece
    return data


def is_time(until: Any) -> TypeGuard[float]:
    """Whether it can be seconds since 1970."""
    return type(until) in (int, float) and 0 <= until < _LATEST


def has_weights(value: Any) -> bool:
    """Whether what `encode` gave has weights."""
    return isinstance(value, dict) and value.get("dtype") == WORDS


def has_all(params: dict[str, Any] | None, weights: bool) -> bool:
    """Whether `kv_transfer_params` have all of a prompt that a request asks for. Weights may be too large to go too."""
    if params is None or (handed := params.get(PARAM)) is None:
        return False
    return len(handed["data"]) > 0 and (has_weights(handed) or not weights)


def decode(value: Any) -> tuple[WireRows, float] | None:
    """The rows that `encode` was given, in the type that they came in and without a copy, and `until`. None for
    anything else, whatever it is: programs can put any object there."""
    if not isinstance(value, dict):
        return None
    data, name, shape, until = (value.get(key) for key in ("data", "dtype", "shape", "until"))
    if (
        not isinstance(data, bytes | bytearray)
        or type(name) is not str
        or (name not in _DTYPES and name != WORDS)
        or not is_time(until)
    ):
        return None
    dtype = _DTYPES.get(name, _DTYPES["int16"])
    if not isinstance(shape, list) or len(shape) != 3 or any(type(size) is not int or size < 0 for size in shape):
        return None
    size = shape[0] * shape[1] * shape[2] * dtype.itemsize
    if len(data) != size or size > _limit(name) or max(shape) > MAX_BYTES:
        return None
    rows: WireRows = np.frombuffer(data, dtype).reshape(shape)
    ids = ids_of(rows) if name == WORDS else rows
    if ids.min(initial=0) < UNKNOWN:
        return None
    return rows, float(until)


def without_rows(handed: dict[str, Any]) -> dict[str, Any]:
    """The same hand-over with rows of no tokens, for the other choices of a prompt: one of them brings the rows."""
    return {**handed, "data": b"", "shape": [0, *handed["shape"][1:]]}
