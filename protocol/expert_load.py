"""Counts how often each expert was chosen, and how balanced the load is. Imports numpy only."""

from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routed_experts.protocol import arguments
from routed_experts.protocol.codec import MAX_EXPERTS, UNKNOWN, CodecError

_SLICE = 4096
"""Rows counted at once. Counting widens each id to eight bytes."""


class Histogram(TypedDict):
    """The wire form of expert counts.

    `counts` is [L][num_experts]. `missing` of the `rows` rows have unknown ids, which are not
    counted.
    """

    counts: list[list[int]]
    rows: int
    missing: int


def count_experts(rows: NDArray[np.integer[Any]], num_experts: int) -> NDArray[np.int64]:
    """How many of `rows` ([n, L, K]) chose each expert: [L, num_experts]. Unknown ids are not
    counted.

    >>> count_experts(np.array([[[0, 2]], [[2, 1]], [[-1, -1]]]), num_experts=4).tolist()
    [[1, 1, 2, 0]]

    Raises:
        CodecError: an id is not an expert's.
    """
    rows, num_experts = _checked(rows, num_experts)
    layers = rows.shape[1]
    width = num_experts + 1  # one more, for -1
    counts = np.zeros(layers * width, dtype=np.int64)
    offsets = (np.arange(layers) * width + 1)[:, None]
    for first in range(0, len(rows), _SLICE):
        counts += np.bincount(
            (rows[first : first + _SLICE] + offsets).ravel(), minlength=counts.size
        )
    return counts.reshape(layers, width)[:, 1:]


def sum_weights(
    rows: NDArray[np.integer[Any]], weights: NDArray[np.float32], num_experts: int
) -> NDArray[np.float64]:
    """The sum of the weights that each expert was chosen with: [L, num_experts]. Unknown ones are
    left out.

    >>> sum_weights(np.array([[[0, 2]], [[2, -1]]]), np.array([[[0.5, 0.25]], [[1, np.nan]]], np.float32), 3).tolist()
    [[0.5, 0.0, 1.25]]

    Raises:
        CodecError: an id is not an expert's.
    """
    rows, num_experts = _checked(rows, num_experts)
    weights = arguments.array("weights", weights, "f", "nLK")
    if weights.shape != rows.shape:
        raise ValueError(f"weights must have the shape of rows {rows.shape}, not {weights.shape}")
    layers = rows.shape[1]
    known = (rows >= 0) & ~np.isnan(weights)
    flat = (rows + (np.arange(layers) * num_experts)[:, None])[known]
    sums = np.bincount(flat, weights=weights[known], minlength=layers * num_experts)
    return sums.astype(np.float64).reshape(layers, num_experts)


def _checked(rows: Any, num_experts: Any) -> tuple[NDArray[np.integer[Any]], int]:
    num_experts = arguments.integer("num_experts", num_experts, 1, MAX_EXPERTS)
    rows = arguments.array("rows", rows, "iu", "nLK")
    if rows.min(initial=0) < UNKNOWN or rows.max(initial=0) >= num_experts:
        raise CodecError(
            f"rows have ids from {rows.min()} to {rows.max()}, and {num_experts} experts"
        )
    return rows, num_experts


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ExpertLoad:
    """The load of L layers with E experts."""

    # [L, E] the counts divided by the mean count of the layer; 0 if nothing was counted
    load: Floats
    entropy: Floats  # [L] of the shares, in bits
    # [L] the entropy divided by its maximum for that number of choices: 1 if all share evenly
    balance: Floats


def expert_load(counts: ArrayLike) -> ExpertLoad:
    """The load of each layer, from `counts` [L, E] of `count_experts` or of a response's histogram.

    >>> of_layers = expert_load([[4, 4, 0, 0], [2, 2, 2, 2]])
    >>> of_layers.load.tolist()
    [[2.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    >>> of_layers.entropy.tolist(), of_layers.balance.tolist()
    ([1.0, 2.0], [0.5, 1.0])

    Raises:
        TypeError: `counts` are not numbers.
        ValueError: they are not whole numbers that are not negative, or have another shape.
    """
    numbers = arguments.array("counts", counts, "iuf", "LE")
    are_counts = (numbers >= 0) & (numbers < 2**53) & (numbers == np.floor(numbers))
    if not numbers.shape[1] or not are_counts.all():
        raise ValueError(
            "counts must be whole numbers that are not negative, of one expert or more"
        )
    whole = numbers.astype(np.int64)
    totals = whole.sum(axis=1, keepdims=True)
    shares = whole / np.maximum(totals, 1)
    entropy = (
        -(shares * np.log2(shares, out=np.zeros_like(shares), where=shares > 0)).sum(axis=1) + 0.0
    )
    most = np.log2(np.clip(totals[:, 0], 1, whole.shape[1]))
    return ExpertLoad(
        load=shares * whole.shape[1],
        entropy=entropy,
        balance=np.divide(entropy, most, out=np.ones_like(entropy), where=most > 0),
    )
