"""Compares rows of experts, and says where they differ."""

from typing import Any

import numpy as np


def check_rows(found: Any, expected: Any, first: int = 0) -> None:
    """That `found` [n, L, K], the rows of positions from `first` on, are `expected`."""
    __tracebackhide__ = True
    found, expected = np.asarray(found), np.asarray(expected)
    shapes = f"rows of shape {found.shape} in place of {expected.shape}"
    assert found.shape == expected.shape, shapes
    is_wrong = (found != expected).any(axis=2)
    if is_wrong.any():
        row, layer = np.argwhere(is_wrong)[0]
        raise AssertionError(
            f"{is_wrong.any(axis=1).sum()} of {len(found)} rows are wrong, in "
            f"{is_wrong.any(axis=0).sum()} of {found.shape[1]} layers. Position {first + row}, "
            f"layer {layer}: {_few(found[row, layer])} in place of {_few(expected[row, layer])}"
        )


def _few(experts: Any) -> str:
    return f"{experts[:8].tolist()}" + " …" * (len(experts) > 8)
