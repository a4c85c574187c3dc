"""Prompt rows sent from a prefill to a decode instance with the KV, as `kv_transfer_params.routed_experts`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.rows import ids_of
from routed_experts.protocol.codec import UNKNOWN, Rows

PARAM = "routed_experts"
"""Key in `kv_transfer_params`: the rows; on a prefill request True, which asks for them. Only who asks gets them,
because bytes are not JSON."""

MAX_BYTES = 64 << 20
"""Larger rows are left out, and missing."""

WireRows = NDArray[np.uint8] | NDArray[np.int16]
"""[n, L, K]; in uint8 all are known. With weights [n, 3L, K] int16 (`rows.py`)."""

WORDS = "words"
"""The dtype of rows with weights. Between the processes of an instance only."""
_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "int16": np.dtype("<i2"), WORDS: np.dtype("<i2")}
_WORDS_BYTES = 3  # for each of ids in int16, with its weight

_LATEST = 1 << 40  # `until` is before it, which NaN and Infinity, as Python's JSON reads them, are not

_PIECE_BYTES = 192 << 10  # of ids, encoded at once: they stay in the processor's cache


class PrefillRows(NamedTuple):
    """Rows that came with KV. An engine that captures weights takes ids without them too."""

    rows: WireRows  # from position 0 on
    has_weights: bool
    until: float  # when the KV may be freed, in seconds since 1970

    @property
    def ids(self) -> WireRows:
        return ids_of(self.rows) if self.has_weights else self.rows


def encode(
    read: Callable[[int, Rows], None],  # fills an array ([n, L, K]) with the rows from a position on
    num_rows: int,
    row_shape: tuple[int, int],  # (L, K), with weights (3L, K)
    until: float,
    has_weights: bool = False,
) -> dict[str, Any] | None:
    """Rows as `kv_transfer_params` have them, one byte for each id if that is enough. None if they are too large.

    Between the processes of an instance `data` is bytes, which are not JSON: so no client of another endpoint can make
    the engine take rows for true. Over HTTP it is base64.
    """
    for name in (WORDS,) if has_weights else ("uint8", "int16"):
        dtype = _DTYPES[name]
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
    """The rows in `dtype`; None if one byte is not enough for some of them, or they are not known. In place, because
    fresh memory for a second copy takes longer than all else, and the engine's steps wait."""
    count = max(_PIECE_BYTES // (row_shape[0] * row_shape[1]), 1)
    buffer = np.empty((min(count, num_rows), *row_shape), dtype=np.int16)
    data = bytearray(num_rows * row_shape[0] * row_shape[1] * dtype.itemsize)
    out = np.frombuffer(data, dtype).reshape(num_rows, *row_shape)
    for first in range(0, num_rows, count):
        piece = buffer[: num_rows - first]
        read(first, piece)
        if dtype.itemsize == 1 and piece.view(np.uint16).max() > 255:  # -1 too
            return None
        out[first : first + len(piece)] = piece
    return data


def is_time(until: Any) -> TypeGuard[float]:
    """Whether it can be seconds since 1970."""
    return type(until) in (int, float) and 0 <= until < _LATEST


def decode(value: Any) -> PrefillRows | None:
    """The rows that `encode` was given, without a copy. None for any other object: programs can put any there."""
    if not isinstance(value, dict):
        return None
    data, name, shape, until = (value.get(key) for key in ("data", "dtype", "shape", "until"))
    if not isinstance(data, bytes | bytearray) or type(name) is not str or name not in _DTYPES or not is_time(until):
        return None
    if not isinstance(shape, list) or len(shape) != 3 or any(type(size) is not int or size < 0 for size in shape):
        return None
    dtype, size = _DTYPES[name], math.prod(shape) * _DTYPES[name].itemsize
    if len(data) != size or size > _limit(name) or max(shape) > MAX_BYTES or not shape[1] or not shape[2]:
        return None
    decoded = PrefillRows(np.frombuffer(data, dtype).reshape(shape), name == WORDS, float(until))
    return decoded if decoded.ids.min(initial=0) >= UNKNOWN else None


def without_rows(value: dict[str, Any]) -> dict[str, Any]:
    """The same with rows of no tokens, for the other choices of a prompt: one of them brings the rows."""
    return {**value, "data": b"", "shape": [0, *value["shape"][1:]]}
