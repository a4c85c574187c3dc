"""How evenly a layer's experts share the work, from how often each was chosen. Imports numpy only."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ExpertLoad:
    """The load of L layers with E experts.

    Attributes:
        counts: [L, E] how often each expert was chosen.
        load: [L, E] the same as multiples of what each would have if all shared evenly; 0 where nothing was counted.
        entropy: [L] of the shares, in bits.
        balance: [L] the entropy as a share of the most that it can be with so many choices: 1 where all share evenly.
        imbalance: [L] the load of the busiest expert.
        busiest: [L] its id.
        unused: [L] experts that were never chosen.
    """

    counts: NDArray[np.int64]
    load: Floats
    entropy: Floats
    balance: Floats
    imbalance: Floats
    busiest: NDArray[np.intp]
    unused: NDArray[np.intp]


def expert_load(counts: ArrayLike) -> ExpertLoad:
    """What `counts` [L, E], of `count_experts` or of an answer's histogram, say about each layer.

    >>> found = expert_load([[4, 4, 0, 0], [2, 2, 2, 2]])
    >>> found.load.tolist()
    [[2.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    >>> found.entropy.tolist(), found.balance.tolist(), found.imbalance.tolist(), found.unused.tolist()
    ([1.0, 2.0], [0.5, 1.0], [2.0, 1.0], [2, 0])
    """
    whole = np.asarray(counts, dtype=np.int64)
    totals = whole.sum(axis=1, keepdims=True)
    shares = whole / np.maximum(totals, 1)
    entropy = -(shares * np.log2(shares, out=np.zeros_like(shares), where=shares > 0)).sum(axis=1) + 0.0
    most = np.log2(np.clip(totals[:, 0], 1, whole.shape[1]))
    load = shares * whole.shape[1]
    return ExpertLoad(
        counts=whole,
        load=load,
        entropy=entropy,
        balance=np.divide(entropy, most, out=np.ones_like(entropy), where=most > 0),
        imbalance=load.max(axis=1),
        busiest=load.argmax(axis=1),
        unused=(whole == 0).sum(axis=1),
    )
