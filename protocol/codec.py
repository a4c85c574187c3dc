"""Rows of expert ids to and from the forms that they have on the wire.

Imports numpy and the standard library only, so that any client can use it without torch or vLLM.
"""

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import IO, Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol import arguments

Format = Literal["object", "npy", "raw", "list"]
WireDtype = Literal["int16", "uint8", "int32", "auto"]
_INTEGER_DTYPES = ("int16", "uint8", "int32", "uint16")

Rows = NDArray[np.int16]
"""[n, L, K]: the logical ids of the K experts that each of L MoE layers chose for each of n
tokens."""

UNKNOWN = -1
"""Fills unknown rows. Never a valid expert id."""

UNKNOWN_WEIGHT = np.array(UNKNOWN, dtype=np.int32).view(np.float32)
"""Fills unknown weights: NaN with all bits set, as -1 has them."""

_MAX_ID = np.iinfo(np.int16).max  # rows are int16 in the server
MAX_EXPERTS = int(_MAX_ID) + 1

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "int16": np.dtype("<i2"),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("<i4"),
    "uint16": np.dtype("<u2"),  # vLLM's own capture above 256 experts
    "float32": np.dtype("<f4"),  # weights
}
"""Element types on the wire, by their names."""

_NPY_HEADER = re.compile(
    rb"{'descr': '([<>|][iuf][1248])', 'fortran_order': (False|True), "
    rb"'shape': \((\d{1,15}), (\d{1,15}), (\d{1,15})\),? ?} *\n"
)
"""What numpy writes of an array of three dimensions. Its own parser takes any Python literal."""
_NPY_HEADER_BYTES = 1 << 10
"""More than such a header has; a file may say four billion."""


def read_npy_header(
    file: IO[bytes],
) -> tuple[tuple[int, int, int], np.dtype[Any], Literal["C", "F"]]:
    """Shape, dtype and order of the array in a `.npy` file, which is read up to its data.

    Raises:
        CodecError: it is another file, or its array has not three dimensions.
    """
    begin = file.read(8)
    size = file.read(2 if begin[6:7] == b"\x01" else 4)  # of the header
    num_bytes = int.from_bytes(size, "little")
    header = _NPY_HEADER.fullmatch(file.read(num_bytes)) if num_bytes <= _NPY_HEADER_BYTES else None
    if header is None or not begin.startswith(b"\x93NUMPY"):
        raise CodecError("not a .npy file of rows")
    descr, is_fortran, *shape = (each.decode() for each in header.groups())
    rows, layers, top_k = map(int, shape)
    return (rows, layers, top_k), np.dtype(descr), "F" if is_fortran == "True" else "C"


class RowsObject(TypedDict):
    """The `object` form. `data` comes first, because some clients cut it out of the bytes before
    parsing."""

    data: str
    shape: list[int]
    dtype: str
    start: int
    missing: int


class CodecError(ValueError):
    """Rows do not fit the requested dtype, or a value is not an array of expert ids."""


def resolve_dtype(name: WireDtype | Literal["vllm"], num_experts: int) -> str:
    """The wire dtype for a model with `num_experts` logical experts.

    `vllm` is the dtype of vLLM's own capture: `uint8` up to 256 experts, else `uint16`.

    Raises:
        CodecError: the dtype cannot hold the highest expert id.
    """
    num_experts = arguments.integer("num_experts", num_experts, least=1)
    arguments.one_of("name", name, (*_INTEGER_DTYPES, "auto", "vllm"))
    if name in ("auto", "vllm"):
        return "uint8" if num_experts <= 256 else "int16" if name == "auto" else "uint16"
    if np.iinfo(NUMPY_DTYPES[name]).max < num_experts - 1:
        raise CodecError(f"{name} cannot hold the ids of {num_experts} experts: use int16 or auto")
    return name


def count_missing(rows: NDArray[Any]) -> int:
    """Number of rows in `rows` ([n, L, K]) with an unknown id, or unknown weight (NaN with all bits
    set, as -1 has)."""
    rows = arguments.array("rows", rows, "iuf", "nLK")
    if rows.dtype.kind == "f":
        if rows.dtype != np.float32:
            raise TypeError(f"weights among rows must be float32, not {rows.dtype}")
        rows = rows.view(np.int32)
    if rows.min(initial=0) > UNKNOWN:  # the usual case, and much faster
        return 0
    return int((rows == UNKNOWN).any(axis=(1, 2)).sum())


def encode(array: NDArray[Any], start: int) -> RowsObject:
    """Rows of ids, or their weights ([n, L, K]), in the form `object`. The server has an encoder of
    every form.

    Args:
        array: of int16, uint8, int32, or float32; -1 or NaN where unknown.
        start: absolute position of the first row, in tokens.
    """
    array = arguments.array("array", array, "iuf", "nLK")
    name, missing = (
        arguments.one_of("dtype of array", array.dtype.name, NUMPY_DTYPES),
        count_missing(array),
    )
    data = base64.b64encode(
        np.ascontiguousarray(array, dtype=NUMPY_DTYPES[name]).tobytes()
    ).decode()
    start = arguments.integer("start", start)
    return {
        "data": data,
        "shape": list(array.shape),
        "dtype": name,
        "start": start,
        "missing": missing,
    }


def decode(
    value: RowsObject | Mapping[str, Any] | str | bytes | list[Any],
    *,
    dtype: str = "int16",
    num_layers: int | None = None,
    top_k: int | None = None,
) -> NDArray[np.integer[Any]]:
    """The array ([n, L, K]) in any of the four forms, in base64 (JSON) or as bytes (MessagePack).

    The `raw` form needs `dtype`, `num_layers` and `top_k`; an empty `list` needs the last two for
    its shape. The array may be a read-only view.

    Raises:
        CodecError: `value` has none of the forms, its contents are not expert ids, or the shape of
            `raw` is missing.
    """
    with _reading("expert ids", dtype, num_layers, top_k):
        found = _ids(_decoded(value, dtype, num_layers, top_k, {int}))
        return found.astype(np.int16, casting="same_kind") if isinstance(value, list) else found


def decode_weights(
    value: Mapping[str, Any] | str | bytes | list[Any],
    *,
    num_layers: int | None = None,
    top_k: int | None = None,
) -> NDArray[np.float32]:
    """The weights ([n, L, K]) in any of the four forms, as `decode`; NaN where they are unknown.

    Raises:
        CodecError: `value` has none of the forms or its contents are not float32, or the shape of
            `raw` is missing.
    """
    with _reading("weights", "float32", num_layers, top_k):
        weights = _decoded(value, "float32", num_layers, top_k, {int, float, type(None)})
        if isinstance(value, list):
            # what float32 cannot hold is infinite, which `batch.verify` finds
            with np.errstate(over="ignore"):
                weights = weights.astype(np.float32)
            weights[np.isnan(weights)] = UNKNOWN_WEIGHT  # null
    if weights.dtype != np.float32 or weights.ndim != 3:
        raise CodecError(f"not an array of weights: {weights.dtype} in {weights.ndim} dimensions")
    return weights


def unpaired(value: Mapping[str, Any]) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Ids and weights ([n, L, K]) of an array in the form `paired`; dense layers are 0.

    Raises:
        CodecError: `value` is another form.
    """
    with _reading("pairs", "int32", None, None):
        pairs = _array(value, "int32", None, None)
        if pairs.dtype != np.int32 or pairs.ndim != 3 or pairs.shape[2] % 2:
            raise CodecError(f"not an array of pairs: {pairs.dtype} of shape {pairs.shape}")
        top_k = pairs.shape[2] // 2
        ids = _ids(pairs[:, :, :top_k]).astype(np.int16)
        return ids, np.ascontiguousarray(pairs[:, :, top_k:]).view(np.float32)


@contextmanager
def _reading(what: str, dtype: str, num_layers: int | None, top_k: int | None) -> Iterator[None]:
    """Checks the form that a caller gives, and turns what reading a value raises into a
    `CodecError`."""
    arguments.one_of("dtype", dtype, NUMPY_DTYPES)
    for name, size in (("num_layers", num_layers), ("top_k", top_k)):
        if size is not None:
            arguments.integer(name, size, least=1)
    try:
        yield
    except CodecError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"not an array of {what}: {error}") from error


def _decoded(
    value: Any, dtype: str, num_layers: int | None, top_k: int | None, kinds: set[type]
) -> NDArray[Any]:
    """The array in any of the forms; `kinds` are the types of what nested lists hold."""
    if not isinstance(value, list):
        return _array(value, dtype, num_layers, top_k)
    if not value:
        return np.empty((0, num_layers or 0, top_k or 0), dtype=dtype)
    _check_nested(value, kinds)
    return np.array(value, dtype=np.float64 if float in kinds else None)


def _array(
    value: Mapping[str, Any] | str | bytes, dtype: str, num_layers: int | None, top_k: int | None
) -> NDArray[Any]:
    """The array in one of the binary forms. Nothing is allocated but what the value itself
    holds."""
    if isinstance(value, Mapping):
        return _shaped(
            np.frombuffer(_binary(value["data"]), dtype=NUMPY_DTYPES[value["dtype"]]),
            value["shape"],
        )
    if not isinstance(value, str | bytes):
        raise TypeError(type(value).__name__)
    data = _binary(value)
    if data.startswith(b"\x93NUMPY"):
        file = io.BytesIO(data)
        shape, of_file, order = read_npy_header(file)
        return _shaped(np.frombuffer(data, dtype=of_file, offset=file.tell()), shape, order)
    if num_layers is None or top_k is None:
        raise CodecError(
            "the raw form does not carry its shape: pass num_layers and top_k; for files, set --num-layers, --top-k "
            "and --rows-dtype"
        )
    return np.frombuffer(data, dtype=NUMPY_DTYPES[dtype]).reshape(-1, num_layers, top_k)


def _shaped(
    flat: NDArray[Any], shape: Sequence[int], order: Literal["F", "C"] = "C"
) -> NDArray[Any]:
    if not isinstance(shape, Sequence) or not all(
        type(size) is int and size >= 0 for size in shape
    ):
        raise CodecError("a shape must be a list of integers")
    array = flat.reshape(shape, order=order)
    if len(shape) and len(array) and not array.size:  # numpy makes any number of rows of nothing
        raise CodecError(f"{len(array)} rows without experts")
    return array


def _check_nested(value: list[Any], kinds: set[type]) -> None:
    """Checks for lists of three levels, as numpy also takes what needs far more memory: texts,
    objects."""
    for _ in range(2):
        if not set(map(type, value)) <= {list}:
            raise CodecError("not lists of three levels")
        value = list(chain.from_iterable(value))
    if not set(map(type, value)) <= kinds:
        raise CodecError("other values than numbers in a list")


def _ids(array: NDArray[Any]) -> NDArray[np.integer[Any]]:
    """Checks that `array` holds expert ids: numpy also parses strings and fractions."""
    if array.dtype.kind not in "iu" or array.ndim != 3:
        raise CodecError(f"not an array of expert ids: {array.dtype} in {array.ndim} dimensions")
    if array.dtype.kind == "i" and array.min(initial=0) < UNKNOWN:
        raise CodecError(f"not an expert id: {array.min()}")
    if np.iinfo(array.dtype).max > _MAX_ID and array.max(initial=0) > _MAX_ID:
        raise CodecError(f"not an expert id: {array.max()}")
    return array


def _binary(data: str | bytes) -> bytes:
    return binascii.a2b_base64(data, strict_mode=True) if isinstance(data, str) else data
