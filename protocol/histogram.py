"""How often each expert was chosen. Imports numpy only."""

from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import UNKNOWN, CodecError, count_missing

_SLICE = 4096
"""Rows that are counted at once: their ids are widened to eight bytes each."""


class Histogram(TypedDict):
    """Counts in place of rows, as they go over the wire.

    `counts` is [L][num_experts]; `missing` of the `rows` hold ids that are not known and not counted.
    """

    counts: list[list[int]]
    rows: int
    missing: int


def count_experts(rows: NDArray[np.integer[Any]], num_experts: int) -> NDArray[np.int64]:
    """How many of `rows` ([n, L, K]) chose each expert: [L, num_experts]. Ids that are not known are left out.

    >>> count_experts(np.array([[[0, 2]], [[2, 1]], [[-1, -1]]]), num_experts=4).tolist()
    [[1, 1, 2, 0]]

    Raises:
        CodecError: an id is not an expert's.
    """
    layers = rows.shape[1]
    width = num_experts + 1  # one more, for -1
    counts = np.zeros(layers * width, dtype=np.int64)
    if rows.min(initial=0) < UNKNOWN or rows.max(initial=0) >= num_experts:
        raise CodecError(f"ids from {rows.min()} to {rows.max()}, and {num_experts} experts")
    offsets = (np.arange(layers) * width + 1)[:, None]
    for first in range(0, len(rows), _SLICE):
        counts += np.bincount((rows[first : first + _SLICE] + offsets).ravel(), minlength=counts.size)
    return counts.reshape(layers, width)[:, 1:]


def histogram(rows: NDArray[np.integer[Any]], num_experts: int) -> Histogram:
    """The histogram of `rows` ([n, L, K]) in the form of the wire.

    Raises:
        CodecError: an id is not an expert's.
    """
    return {
        "counts": count_experts(rows, num_experts).tolist(),
        "rows": len(rows),
        "missing": count_missing(rows),
    }
