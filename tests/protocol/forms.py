"""The plain statement of the forms that an array has on the wire."""

import base64
import io
import json
from typing import Any

import numpy as np

from routed_experts.protocol.codec import NUMPY_DTYPES, count_missing


def encode(array: Any, *, fmt: str = "object", dtype: str = "int16", start: int = 0) -> Any:
    """Ids [n, L, K] as a wire dtype, or weights, in one of the forms. `start` is the position of
    the first row."""
    dtype = "float32" if array.dtype == np.float32 else dtype
    sent = np.ascontiguousarray(array, dtype=NUMPY_DTYPES[dtype])
    assert dtype == "float32" or np.array_equal(sent, array), f"{dtype} cannot hold the ids"
    if fmt == "list":
        return json.loads(json.dumps(sent.tolist()).replace("NaN", "null"))
    if fmt == "npy":
        file = io.BytesIO()
        np.save(file, sent)
        return base64.b64encode(file.getvalue()).decode()
    data = base64.b64encode(sent.tobytes()).decode()
    if fmt == "raw":
        return data
    if fmt == "object":
        return {
            "data": data,
            "shape": [*sent.shape],
            "dtype": dtype,
            "start": start,
            "missing": count_missing(sent),
        }
    raise NotImplementedError(f"tests/protocol/forms.py does not state the format {fmt} yet")
