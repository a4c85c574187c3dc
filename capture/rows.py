"""What a row is: the `[L, K]` logical expert ids of one token, as int16."""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int16]
"""[n, L, K]"""

UNKNOWN = -1
"""Fills what is not known. Never a valid expert id; the same number as on the wire."""
