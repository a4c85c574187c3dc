"""Rows of expert ids to and from the forms they take on the wire.

Imports numpy and the standard library only, so that any client can use it without torch or vLLM.
"""

import base64
import binascii
import io
import threading
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

Format = Literal["object", "npy", "raw", "list"]
WireDtype = Literal["int16", "uint8", "int32", "auto"]

Rows = NDArray[np.int16]
"""[n, L, K]: for each of n tokens, the logical ids of the K experts that each of L MoE layers chose."""

UNKNOWN = -1
"""Fills a row that the server cannot know. Never a valid expert id."""

_MAX_ID = np.iinfo(np.int16).max  # rows are int16 in the server

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "int16": np.dtype("<i2"),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("<i4"),
    "uint16": np.dtype("<u2"),  # vLLM's own capture above 256 experts
}

_SLICE = 3 << 18
"""Bytes that are encoded at once; a multiple of 3, as base64 puts three bytes into four characters."""

_NPY_HEADERS = threading.Lock()
"""Until Python 3.11 is left: its parser, which numpy reads a header with, fails at times in two threads at once
(https://github.com/python/cpython/issues/106905)."""


class RowsObject(TypedDict):
    """The default form. `data` comes first: some clients cut it out of the bytes before they parse."""

    data: str
    shape: list[int]
    dtype: str
    start: int
    missing: int


class CodecError(ValueError):
    """Rows cannot be put into, or read from, the form asked for."""


def resolve_dtype(name: WireDtype | Literal["vllm"], num_experts: int) -> str:
    """Name of the element type on the wire for a model of `num_experts` logical experts.

    `vllm` is the type of vLLM's own capture: `uint8` up to 256 experts, else `uint16`.

    Raises:
        CodecError: the type is too narrow for the highest expert id.
    """
    if name in ("auto", "vllm"):
        return "uint8" if num_experts <= 256 else "int16" if name == "auto" else "uint16"
    if np.iinfo(_NUMPY_DTYPES[name]).max < num_experts - 1:
        raise CodecError(f"{name} cannot hold the ids of {num_experts} experts")
    return name


def count_missing(rows: NDArray[np.integer[Any]]) -> int:
    """How many of `rows` ([n, L, K]) hold at least one id that is not known."""
    if rows.min(initial=0) > UNKNOWN:  # nearly always, and much faster
        return 0
    return int((rows == UNKNOWN).any(axis=(1, 2)).sum())


def check_encodable(rows: NDArray[np.integer[Any]], dtype: str) -> None:
    """Raises `CodecError` if `dtype` cannot hold `rows`, for example because some of them are not known."""
    if np.can_cast(rows.dtype, _NUMPY_DTYPES[dtype]):
        return
    limits, low, high = np.iinfo(_NUMPY_DTYPES[dtype]), rows.min(initial=0), rows.max(initial=0)
    if low == UNKNOWN < limits.min:
        raise CodecError(
            f"{count_missing(rows)} rows are not known and are filled with -1, which {dtype} cannot hold: ask for int16"
        )
    if low < limits.min or high > limits.max:
        raise CodecError(f"{dtype} cannot hold ids from {low} to {high}")


def encode(rows: NDArray[np.integer[Any]], *, fmt: Format, dtype: str, start: int) -> RowsObject | str | list[Any]:
    """`rows` ([n, L, K], any integer type) in one of the forms of the wire.

    Args:
        rows: expert ids; -1 where not known.
        fmt: `object`, `npy` (base64 of a .npy file), `raw` (base64 of the bare array) or `list`.
        dtype: a result of `resolve_dtype`.
        start: absolute position of the first row, in tokens.

    Raises:
        CodecError: `dtype` cannot hold an id, or cannot hold -1 and a row is not known.
    """
    check_encodable(rows, dtype)
    if fmt == "list":
        return [row.tolist() for row in rows]  # row by row, so that other threads get a turn
    array = np.ascontiguousarray(rows, dtype=_NUMPY_DTYPES[dtype])
    if fmt == "npy":
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return _base64(buffer.getbuffer())
    data = _base64(array.reshape(-1).view(np.uint8).data)
    if fmt == "raw":
        return data
    return {"data": data, "shape": list(array.shape), "dtype": dtype, "start": start, "missing": count_missing(rows)}


def _base64(data: memoryview) -> str:
    # Slice by slice, so that other threads get a turn: the standard library lets none run while it encodes.
    slices = (base64.b64encode(data[first : first + _SLICE]) for first in range(0, len(data), _SLICE))
    return b"".join(slices).decode("ascii")


def decode(
    value: RowsObject | Mapping[str, Any] | str | bytes | list[Any],
    *,
    dtype: str = "int16",
    num_layers: int | None = None,
    top_k: int | None = None,
) -> NDArray[np.integer[Any]]:
    """The array ([n, L, K]) behind any of the four forms; where JSON has base64, MessagePack has the bytes themselves.

    `dtype`, `num_layers` and `top_k` are needed for `raw`, whose bytes do not say them. A `list` without rows does not
    say its shape either. The array is read-only where it is a view of what was decoded.

    Raises:
        CodecError: `value` is none of the forms, `raw` without its shape, or what it holds are no expert ids.
    """
    try:
        return _decode(value, dtype, num_layers, top_k)
    except (LookupError, TypeError, ValueError, EOFError) as error:
        raise error if isinstance(error, CodecError) else CodecError(f"not an array of expert ids: {error}") from error


def _decode(
    value: RowsObject | Mapping[str, Any] | str | bytes | list[Any],
    dtype: str,
    num_layers: int | None,
    top_k: int | None,
) -> NDArray[np.integer[Any]]:
    if isinstance(value, Mapping):
        raw = np.frombuffer(_binary(value["data"]), dtype=_NUMPY_DTYPES[value["dtype"]])
        return _ids(raw.reshape(value["shape"]))
    if isinstance(value, list):
        if not value:
            return np.empty((0, num_layers or 0, top_k or 0), dtype=np.int16)
        return _ids(np.asarray(value)).astype(np.int16, casting="same_kind")
    if not isinstance(value, str | bytes):
        raise CodecError(f"not an array of expert ids: {type(value).__name__}")
    data = _binary(value)
    if data.startswith(b"\x93NUMPY"):
        with _NPY_HEADERS:
            return _ids(np.load(io.BytesIO(data), allow_pickle=False))
    if num_layers is None or top_k is None:
        raise CodecError("the raw form does not carry its shape: give num_layers and top_k")
    return _ids(np.frombuffer(data, dtype=_NUMPY_DTYPES[dtype]).reshape(-1, num_layers, top_k))


def _ids(array: NDArray[Any]) -> NDArray[np.integer[Any]]:
    """`array`, if it can be one of expert ids: numpy would make ids of texts and of fractions."""
    if array.dtype.kind not in "iu" or array.ndim != 3:
        raise CodecError(f"not an array of expert ids: {array.dtype} in {array.ndim} dimensions")
    if array.dtype.kind == "i" and array.min(initial=0) < UNKNOWN:
        raise CodecError(f"not an expert id: {array.min()}")
    if np.iinfo(array.dtype).max > _MAX_ID and array.max(initial=0) > _MAX_ID:
        raise CodecError(f"not an expert id: {array.max()}")
    return array


def _binary(data: str | bytes) -> bytes:
    return binascii.a2b_base64(data, strict_mode=True) if isinstance(data, str) else data
