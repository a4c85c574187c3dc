"""The rows of a prompt on their way from the instance that computed it to the one that decodes, beside its KV."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.rows import Rows

PARAM = "routed_experts"
"""Key in `kv_transfer_params`: rows that came with KV, or True where a prefill leg wants rows to go with its KV. Nobody
else gets any, as bytes would be the end of a JSON answer."""

MAX_BYTES = 64 << 20
"""Most bytes of rows that are handed over; more are left out, and missing."""

_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "int16": np.dtype("<i2")}


def encode(rows: Rows, until: float | None = None) -> dict[str, Any] | None:
    """`rows` [n, L, K] as what stands in `kv_transfer_params`, one byte for each id where that is enough.

    Args:
        until: when it is too late to come for their KV, in seconds since 1970.

    None if they are too many. Between the processes of an instance `data` is bytes, which JSON cannot say: so no client
    of another endpoint can make the engine take rows for true. Over HTTP it is base64.
    """
    name = "uint8" if len(rows) and rows.min() >= 0 and rows.max() < 256 else "int16"
    if rows.size * _DTYPES[name].itemsize > MAX_BYTES:
        return None
    handed = {"data": rows.astype(_DTYPES[name]).tobytes(), "dtype": name, "shape": list(rows.shape)}
    return handed if until is None else {**handed, "until": until}


def decode(value: Any) -> Rows | None:
    """The rows that `encode` was given; None for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("data"), bytes):
        return None
    dtype, shape = _DTYPES.get(str(value.get("dtype"))), value.get("shape")
    if dtype is None or not isinstance(shape, list) or len(shape) != 3:
        return None
    if type(value.get("until", 0)) not in (int, float):
        return None
    if any(type(size) is not int or size < 0 for size in shape):
        return None
    if len(value["data"]) != shape[0] * shape[1] * shape[2] * dtype.itemsize or len(value["data"]) > MAX_BYTES:
        return None
    rows: NDArray[np.int16] = np.frombuffer(value["data"], dtype).reshape(shape).astype(np.int16)
    return rows
