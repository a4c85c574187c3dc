"""Rows into the form that a request asked for."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol import codec
from routed_experts.protocol.models import RoutingOptions

Rows = NDArray[np.int16]

LARGE_BYTES = 1 << 20
"""Rows above this size are encoded in a thread: on the event loop they would hold up every other stream."""


@dataclass(frozen=True)
class Encoder:
    """How one request wants its arrays."""

    options: RoutingOptions
    dtype: str

    def __call__(self, rows: Rows, start: int) -> Any:
        return codec.encode(rows, fmt=self.options.format, dtype=self.dtype, start=start)

    def check(self, rows: Rows) -> None:
        codec.check_encodable(rows, self.dtype)
