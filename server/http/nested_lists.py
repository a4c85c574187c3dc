"""Expert ids as nested lists, in JSON and in MessagePack.

Made of cells from tables: from Python's lists it takes several times as long, and thousands of new lists make the
garbage collector hold the event loop for 20 ms.
"""

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int16]

_THREE_DIGITS = 1000
_BYTE_IDS, _TWO_BYTE_IDS = 128, 256
"""Numbers of experts whose ids, and -1, take one byte and two bytes in MessagePack; others take three."""


def json_rows(ids: Ids, num_experts: int) -> bytes:
    """`ids` ([n, L, K], from -1 to `num_experts` - 1) as JSON lists with commas between the n rows, but no brackets
    around them.

    Raises:
        IndexError: an id is out of range.
    """
    if not len(ids):
        return b""
    _check(ids, num_experts)
    numbers = _json_cells(num_experts)
    cells = np.empty((*ids.shape[:2], ids.shape[2] + 1), dtype=numbers.dtype)
    cells[..., :-1] = numbers[ids]
    cells.view(np.uint8)[..., 0] = ord("[")  # in place of a comma
    cells[..., -1] = _cells([b"],"], cells.itemsize)
    cells[:, -1, -1] = _cells([b"]],["], cells.itemsize)
    return b"[" + cells.tobytes().translate(None, b"\0")[: -len(",[")]


@lru_cache
def _json_cells(num_experts: int) -> NDArray[Any]:
    """A comma and the text of each id, with zeros behind them. That of -1 comes last."""
    return _cells([b",%d" % number for number in (*range(num_experts), -1)], 4 if num_experts <= _THREE_DIGITS else 8)


def _cells(texts: list[bytes], size: int) -> NDArray[Any]:
    """`texts` of up to `size` bytes as one integer each, which numpy copies faster than bytes."""
    return np.array(texts, dtype=f"S{size}").view(f"u{size}")


def msgpack_rows(ids: Ids, num_experts: int) -> bytes:
    """The same as MessagePack arrays. All ids of a model take the same number of bytes.

    Raises:
        IndexError: an id is out of range.
    """
    _check(ids, num_experts)
    num_rows, num_layers, top_k = ids.shape
    numbers, row, layer = _packed(num_experts), _array_header(num_layers), _array_header(top_k)
    packed = np.empty((num_rows, num_layers, len(layer) + top_k * numbers.itemsize), dtype=np.uint8)
    packed[..., : len(layer)] = np.frombuffer(layer, dtype=np.uint8)
    own = packed[..., len(layer) :]
    own[:] = numbers[ids].view(np.uint8).reshape(own.shape)
    return b"".join(row + each.tobytes() for each in packed)


@lru_cache
def _packed(num_experts: int) -> NDArray[np.void]:
    """The MessagePack of each id, and at last of -1."""
    ids = range(num_experts)
    if num_experts <= _BYTE_IDS:
        packed = [bytes([number]) for number in ids] + [b"\xff"]
    elif num_experts <= _TWO_BYTE_IDS:
        packed = [b"\xcc" + bytes([number]) for number in ids] + [b"\xd0\xff"]
    else:
        packed = [b"\xcd" + number.to_bytes(2, "big") for number in ids] + [b"\xd1\xff\xff"]
    return np.frombuffer(b"".join(packed), dtype=f"V{len(packed[-1])}")


def _check(ids: Ids, num_experts: int) -> None:
    """Tables would give other ids."""
    if ids.min(initial=0) < -1 or ids.max(initial=0) >= num_experts:
        raise IndexError(f"ids outside -1 to {num_experts - 1}")


def _array_header(size: int) -> bytes:
    return msgspec.msgpack.encode([None] * size)[:-size]
