"""Rows of expert ids to and from the forms that they have on the wire.

Imports numpy and the standard library only, so that any client can use it without torch or vLLM.
"""

import base64
import binascii
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import IO, Any, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol import arguments

Format = Literal["object", "npy", "raw", "list"]
"""How an array stands in JSON. `FORMATS` below says how each is known and read."""
WireDtype = Literal["int16", "uint8", "int32", "auto"]
_INTEGER_DTYPES = ("int16", "uint8", "int32", "uint16")

Rows = NDArray[np.int16]
"""[n, L, K]: the logical ids of the K experts that each of L MoE layers chose for each of n
tokens."""

UNKNOWN = -1
"""Fills unknown rows. Never a valid expert id."""

Steps = NDArray[np.uint32]
"""[n]: the engine's step that computed each of n rows."""

UNKNOWN_STEP = 0xFFFFFFFF
"""Fills the steps of rows that are unknown, or came from another engine."""

UNKNOWN_WEIGHT = np.array(UNKNOWN, dtype=np.int32).view(np.float32)
"""Fills unknown weights: NaN with all bits set, as -1 has them."""

_MAX_ID = np.iinfo(np.int16).max  # rows are int16 in the server
MAX_EXPERTS = int(_MAX_ID) + 1  # of a model
MAX_LAYERS = 1 << 12  # of a model

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "int16": np.dtype("<i2"),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("<i4"),
    "uint16": np.dtype("<u2"),  # vLLM's own capture above 256 experts
    "float32": np.dtype("<f4"),  # weights
}
"""Element types on the wire, by their names."""

_NPY_MAGIC = b"\x93NUMPY"
_NPY_MAGIC_BASE64 = base64.b64encode(_NPY_MAGIC).decode()
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
    magic_and_version = file.read(8)
    size_bytes = 2 if magic_and_version[6:7] == b"\x01" else 4
    header_bytes = int.from_bytes(file.read(size_bytes), "little")
    header = None
    if header_bytes <= _NPY_HEADER_BYTES:
        header = _NPY_HEADER.fullmatch(file.read(header_bytes))
    if header is None or not magic_and_version.startswith(_NPY_MAGIC):
        raise CodecError("not a .npy file of rows")
    descr, is_fortran, num_rows, num_layers, top_k = (group.decode() for group in header.groups())
    shape = (int(num_rows), int(num_layers), int(top_k))
    return shape, np.dtype(descr), "F" if is_fortran == "True" else "C"


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

    Raises:
        TypeError: `array` has another type.
        ValueError: `array` has another shape, or `start` is negative.
    """
    array = arguments.array("array", array, "iuf", "nLK")
    dtype = arguments.one_of("dtype of array", array.dtype.name, NUMPY_DTYPES)
    little_endian = np.ascontiguousarray(array, dtype=NUMPY_DTYPES[dtype])
    return {
        "data": base64.b64encode(little_endian.tobytes()).decode(),
        "shape": list(array.shape),
        "dtype": dtype,
        "start": arguments.integer("start", start),
        "missing": count_missing(array),
    }


def decode(
    value: RowsObject | Mapping[str, Any] | str | bytes | list[Any],
    *,
    dtype: str = "int16",
    num_layers: int | None = None,
    top_k: int | None = None,
) -> NDArray[np.integer[Any]]:
    """The array of ids in any of the four formats, in base64 (JSON) or as bytes (MessagePack).

    Args:
        value: as in a response; `format_of` says which format it is in.
        dtype: name of the element type, for the format `raw`.
        num_layers: L, for `raw`, and for the shape of an empty `list`.
        top_k: K, likewise.

    Returns:
        [n, L, K], of the type on the wire (int16 for `list`); it may be a read-only view.

    Raises:
        CodecError: `value` has none of the formats, its contents are not expert ids, or the shape
            of `raw` is missing.
    """
    with _reading("expert ids", dtype, num_layers, top_k):
        ids = _ids(_array(value, _Unsaid(dtype, num_layers, top_k), {int}))
        return ids.astype(np.int16, casting="same_kind") if isinstance(value, list) else ids


def decode_weights(
    value: Mapping[str, Any] | str | bytes | list[Any],
    *,
    num_layers: int | None = None,
    top_k: int | None = None,
) -> NDArray[np.float32]:
    """The array of weights in any of the four formats, with the arguments of `decode`.

    Returns:
        [n, L, K]; NaN where they are unknown.

    Raises:
        CodecError: `value` has none of the formats or its contents are not float32, or the shape of
            `raw` is missing.
    """
    with _reading("weights", "float32", num_layers, top_k):
        unsaid = _Unsaid("float32", num_layers, top_k)
        weights = _array(value, unsaid, {int, float, type(None)})
        if isinstance(value, list):
            # what float32 cannot hold is infinite, which `batch.verify` finds
            with np.errstate(over="ignore"):
                weights = weights.astype(np.float32)
            weights[np.isnan(weights)] = UNKNOWN_WEIGHT  # null
    if weights.dtype != np.float32 or weights.ndim != 3:
        raise CodecError(f"not an array of weights: {weights.dtype} in {weights.ndim} dimensions")
    return weights


def decode_steps(value: Mapping[str, Any]) -> Steps:
    """The array of steps [n] beside an array of ids; `UNKNOWN_STEP` where one is unknown.

    Raises:
        CodecError: `value` is no such array.
    """
    with _reading("steps", "int32", None, None):
        if not isinstance(value, Mapping) or value["dtype"] != "uint32":
            raise CodecError("not an array of steps")
        steps = np.frombuffer(_binary(value["data"]), np.dtype("<u4"))
        if list(value["shape"]) != [len(steps)]:
            raise CodecError(f"{len(steps)} steps, said to be {value['shape']}")
        return steps


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


# ---- the formats ----


class _Unsaid(NamedTuple):
    """What a value in the format `raw` does not say of its array; a caller knows it or not."""

    dtype: str
    num_layers: int | None
    top_k: int | None


def _read_object(value: Mapping[str, Any]) -> NDArray[Any]:
    flat = np.frombuffer(_binary(value["data"]), dtype=NUMPY_DTYPES[value["dtype"]])
    return _shaped(flat, value["shape"])


def _is_npy(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith(_NPY_MAGIC_BASE64)
    return isinstance(value, bytes) and value.startswith(_NPY_MAGIC)


def _read_npy(value: str | bytes) -> NDArray[Any]:
    data = _binary(value)
    file = io.BytesIO(data)
    shape, dtype, order = read_npy_header(file)
    flat = np.frombuffer(data, dtype=dtype, offset=file.tell())
    return _shaped(flat, shape, order)


def _is_raw(value: Any) -> bool:
    return isinstance(value, str | bytes) and not _is_npy(value)


def _read_raw(value: str | bytes, unsaid: _Unsaid) -> NDArray[Any]:
    dtype, num_layers, top_k = unsaid
    flat_bytes = _binary(value)
    if num_layers is None or top_k is None:
        raise CodecError(
            "the raw form does not carry its shape: pass num_layers and top_k; in files, routed_experts_info says "
            "both, and rows_dtype"
        )
    return np.frombuffer(flat_bytes, dtype=NUMPY_DTYPES[dtype]).reshape(-1, num_layers, top_k)


def _read_list(value: list[Any], unsaid: _Unsaid, cells: set[type]) -> NDArray[Any]:
    """`cells` are the types of what the innermost lists hold."""
    if not value:
        shape = (0, unsaid.num_layers or 0, unsaid.top_k or 0)
        return np.empty(shape, dtype=unsaid.dtype)
    _check_nested(value, cells)
    return np.array(value, dtype=np.float64 if float in cells else None)


class ArrayFormat(NamedTuple):
    """How readers know a format, and read it. Nothing is allocated but what the value holds.

    Attributes:
        matches: whether a JSON value is in this format. It is in one at most: a response does not
            say its format, so readers have nothing else to go by.
        read: the array of a value, from what a caller says of `raw` arrays, and the types of cells
            in lists.
    """

    matches: Callable[[Any], bool]
    read: Callable[[Any, _Unsaid, set[type]], NDArray[Any]]


FORMATS: dict[Format, ArrayFormat] = {
    "object": ArrayFormat(
        lambda value: isinstance(value, Mapping), lambda value, *_: _read_object(value)
    ),
    "npy": ArrayFormat(_is_npy, lambda value, *_: _read_npy(value)),
    "raw": ArrayFormat(_is_raw, lambda value, unsaid, _: _read_raw(value, unsaid)),
    "list": ArrayFormat(lambda value: isinstance(value, list), _read_list),
}
"""All that a response can have, for every reader: `decode`, `collect`, files, the tools."""


def format_of(value: Any) -> Format:
    """The format that `value`, of JSON or MessagePack, is in.

    Raises:
        TypeError: it is in none.
        CodecError: it may be in several. That is a fault of `FORMATS`.
    """
    names = [name for name, array_format in FORMATS.items() if array_format.matches(value)]
    if not names:
        raise TypeError(type(value).__name__)
    if len(names) > 1:
        raise CodecError(f"an array that may be in the formats {' and '.join(names)}")
    return names[0]


def _array(value: Any, unsaid: _Unsaid, cells: set[type]) -> NDArray[Any]:
    return FORMATS[format_of(value)].read(value, unsaid, cells)


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


def _check_nested(value: list[Any], cells: set[type]) -> None:
    """Checks for lists of three levels, as numpy also takes what needs far more memory: texts,
    objects."""
    for _ in range(2):
        if not set(map(type, value)) <= {list}:
            raise CodecError("not lists of three levels")
        value = list(chain.from_iterable(value))
    if not set(map(type, value)) <= cells:
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
