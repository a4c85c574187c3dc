"""Prompt rows sent from a prefill to a decode instance with the KV, as
`kv_transfer_params.routed_experts`."""

import math
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

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
"""[n, L, K]; in uint8 all are known."""

_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "int16": np.dtype("<i2")}

# `until` is before it, which NaN and Infinity, as Python's JSON reads them, are not
_LATEST = 1 << 40


class PrefillRows(NamedTuple):
    """Rows that came with KV."""

    rows: WireRows  # from position 0 on
    until: float  # when the KV may be freed, in seconds since 1970


_NumRows = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
_RowSize = Annotated[int, msgspec.Meta(gt=0, le=MAX_BYTES)]


class _Form(msgspec.Struct):
    """What the dictionary that `encode` makes has besides `data`."""

    dtype: Literal["uint8", "int16"]
    shape: tuple[_NumRows, _RowSize, _RowSize]
    until: Annotated[float, msgspec.Meta(ge=0, lt=_LATEST)]


def encode(rows: Rows, until: float) -> dict[str, Any] | None:
    """`rows` ([n, L, K]) as `kv_transfer_params` have them, one byte for each id if that is enough.
    None if they are too large.

    Between the processes of an instance `data` is bytes, which are not JSON: so no client of
    another endpoint can make the engine take rows for true. Over HTTP it is base64.
    """
    is_narrow = rows.view(np.uint16).max(initial=0) <= np.iinfo(np.uint8).max  # which -1 is not
    name = "uint8" if is_narrow else "int16"
    dtype = _DTYPES[name]
    num_bytes = rows.size * dtype.itemsize
    if num_bytes > MAX_BYTES:
        return None
    data = bytearray(num_bytes)
    np.frombuffer(data, dtype).reshape(rows.shape)[:] = rows  # without another copy
    return {"data": data, "dtype": name, "shape": [*rows.shape], "until": until}


def is_time(until: Any) -> TypeGuard[float]:
    """Whether it can be seconds since 1970."""
    return type(until) in (int, float) and 0 <= until < _LATEST


def decode(value: Any) -> PrefillRows | None:
    """The rows that `encode` was given, without a copy. None for any other object: programs can put
    any there."""
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, bytes | bytearray):
        return None
    try:
        form = msgspec.convert(value, _Form)
    except ValueError:  # of another form, or text that is no Unicode
        return None
    dtype = _DTYPES[form.dtype]
    size = math.prod(form.shape) * dtype.itemsize
    if len(data) != size or size > MAX_BYTES:
        return None
    rows = np.frombuffer(data, dtype).reshape(form.shape)
    return PrefillRows(rows, form.until) if rows.min(initial=0) >= UNKNOWN else None


def without_rows(value: dict[str, Any]) -> dict[str, Any]:
    """The same with rows of no tokens, for the other choices of a prompt: one of them brings the
    rows."""
    return {**value, "data": b"", "shape": [0, *value["shape"][1:]]}
