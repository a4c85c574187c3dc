"""What a row is: the `[L, K]` logical expert ids of one token, as int16."""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int16]
"""[n, L, K]"""

UNKNOWN = -1
"""Fills what is not known. Never a valid expert id; the same number as on the wire."""


def with_unknown(rows: Rows, count: int) -> Rows:
    """`rows` ([n, L, K]), followed by rows of -1 up to `count` if they are fewer."""
    missing = count - len(rows)
    if missing <= 0:
        return rows
    return np.concatenate([rows, np.full((missing, *rows.shape[1:]), UNKNOWN, dtype=np.int16)])
