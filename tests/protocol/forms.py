"""The wire forms of an array in plain terms: what the server's encoder must send, and what clients must decode."""

import base64
import io
from typing import Any

import numpy as np

from routed_experts.protocol.codec import Format, count_missing


def encode(rows: np.ndarray, *, fmt: Format, dtype: str, start: int) -> Any:
    """`rows` ([n, L, K]) in one of the forms, for JSON."""
    if fmt == "list":
        return rows.tolist()
    array = np.ascontiguousarray(rows, dtype=np.dtype(dtype).newbyteorder("<"))
    if fmt == "npy":
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()
    data = base64.b64encode(array.tobytes()).decode()
    if fmt == "raw":
        return data
    return {"data": data, "shape": list(array.shape), "dtype": dtype, "start": start, "missing": count_missing(rows)}
