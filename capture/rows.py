"""What a row is: the `[L, K]` logical expert ids of one token, as int16."""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int16]
"""[n, L, K]"""

UNKNOWN = -1
"""Fills what is not known. Never a valid expert id; the same number as on the wire."""


def count_unknown(rows: Rows) -> int:
    """How many of `rows` have an id that is not known."""
    if rows.min(initial=0) > UNKNOWN:  # nearly always
        return 0
    return int((rows == UNKNOWN).any(axis=(1, 2)).sum())
