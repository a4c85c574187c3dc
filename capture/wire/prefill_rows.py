"""Prompt rows sent from a prefill to a decode instance with the KV, as
`kv_transfer_params.routed_experts`."""

import math
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire.rows import ids_of
from routed_experts.protocol.codec import UNKNOWN, Rows

TRANSFER_PARAMS = "kv_transfer_params"
"""vLLM's name of what a KV connector is told of a request: a field of requests and responses, and a
key in `SamplingParams.extra_args`."""

PARAM = "routed_experts"
"""Key in `kv_transfer_params`: the rows, which are no JSON; on a prefill request True, which asks
for them."""

MAX_BYTES = 64 << 20
"""Larger rows are left out, and missing."""

WireRows = NDArray[np.uint8] | NDArray[np.int16]
"""[n, L, K]; in uint8 all are known. With weights [n, 3L, K] int16 (`rows.py`)."""

WORDS = "words"
"""The dtype of rows with weights. Between the processes of an instance only."""
_DTYPES: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"),
    "int16": np.dtype("<i2"),
    WORDS: np.dtype("<i2"),
}
_WORDS_BYTES = 3  # for each of ids in int16, with its weight

# `until` is before it, which NaN and Infinity, as Python's JSON reads them, are not
_LATEST = 1 << 40


class PrefillRows(NamedTuple):
    """Rows that came with KV. An engine that captures weights takes ids without them too."""

    rows: WireRows  # from position 0 on
    has_weights: bool
    until: float  # when the KV may be freed, in seconds since 1970

    @property
    def ids(self) -> WireRows:
        return ids_of(self.rows) if self.has_weights else self.rows


def encode(rows: Rows, until: float, has_weights: bool = False) -> dict[str, Any] | None:
    """`rows` ([n, L, K], with weights [n, 3L, K]) as `kv_transfer_params` have them, one byte for
    each id if that is enough. None if they are too large.

    Between the processes of an instance `data` is bytes, which are not JSON: so no client of
    another endpoint can make the engine take rows for true. Over HTTP it is base64.
    """
    is_narrow = rows.view(np.uint16).max(initial=0) <= np.iinfo(np.uint8).max  # which -1 is not
    name = WORDS if has_weights else "uint8" if is_narrow else "int16"
    dtype = _DTYPES[name]
    if rows.size * dtype.itemsize > _limit(name):
        return None
    data = bytearray(rows.size * dtype.itemsize)
    np.frombuffer(data, dtype).reshape(rows.shape)[:] = rows  # without another copy
    return {"data": data, "dtype": name, "shape": [*rows.shape], "until": until}


def _limit(name: str) -> int:
    return MAX_BYTES * _WORDS_BYTES if name == WORDS else MAX_BYTES


def is_time(until: Any) -> TypeGuard[float]:
    """Whether it can be seconds since 1970."""
    return type(until) in (int, float) and 0 <= until < _LATEST


def decode(value: Any) -> PrefillRows | None:
    """The rows that `encode` was given, without a copy. None for any other object: programs can put
    any there."""
    if not isinstance(value, dict):
        return None
    data, name, shape, until = (value.get(key) for key in ("data", "dtype", "shape", "until"))
    if (
        not isinstance(data, bytes | bytearray)
        or type(name) is not str
        or name not in _DTYPES
        or not is_time(until)
    ):
        return None
    if (
        not isinstance(shape, list)
        or len(shape) != 3
        or any(type(size) is not int or size < 0 for size in shape)
    ):
        return None
    dtype, size = _DTYPES[name], math.prod(shape) * _DTYPES[name].itemsize
    if (
        len(data) != size
        or size > _limit(name)
        or max(shape) > MAX_BYTES
        or not shape[1]
        or not shape[2]
    ):
        return None
    decoded = PrefillRows(np.frombuffer(data, dtype).reshape(shape), name == WORDS, float(until))
    return decoded if decoded.ids.min(initial=0) >= UNKNOWN else None


def without_rows(value: dict[str, Any]) -> dict[str, Any]:
    """The same with rows of no tokens, for the other choices of a prompt: one of them brings the
    rows."""
    return {**value, "data": b"", "shape": [0, *value["shape"][1:]]}
