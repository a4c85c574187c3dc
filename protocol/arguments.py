"""Checks of arguments that would give wrong rows, with messages that name the argument. Imports
numpy only.

Arguments of a wrong type that Python refuses by itself are not looked at.
"""

import operator
from collections.abc import Iterable
from reprlib import repr as shown  # a short one
from typing import Any

import numpy as np
from numpy.typing import NDArray


def one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """`value`, if it is one of these strings."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")
    return value


def integer(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """`value` as an int, from `least` to `most`; it may be numpy's or torch's."""
    try:
        result = operator.index(value)
    except TypeError:
        result = None
    if result is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {shown(value)}")
    if result < least or (most is not None and result > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {bounds}, not {result}")
    return result


def integers(name: str, values: Iterable[Any], count: int | None = None) -> list[int]:
    """`values` as integers that are not negative; as many as `count`."""
    result = [integer(f"each of {name}", value) for value in values]
    if count is not None and len(result) != count:
        raise ValueError(f"{name} must be {count} integers, not {len(result)}")
    return result


def array(name: str, value: Any, kinds: str, shape: str = "") -> NDArray[Any]:
    """`value` as an array whose type is one of numpy's `kinds`, with the dimensions of `shape`:
    `nLK`, `...LK`."""
    kind = {"iu": "integers", "f": "floating-point numbers"}.get(kinds, "numbers")
    expected = f"{name} must be {kind}{shape and f' of shape [{shape}]'}"
    try:
        result = np.asarray(value)
    # ragged lists; a tensor on a GPU, or of bfloat16
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{expected}, not {shown(value)}: {error}") from None
    is_empty_list = not result.size and not hasattr(value, "dtype")  # of floats for numpy
    if result.dtype.kind not in kinds and not is_empty_list:
        is_text = result.dtype.kind in "OUS"
        raise TypeError(f"{expected}, not {shown(value) if is_text else result.dtype}")
    if shape and not _has_dimensions(result, shape):
        raise ValueError(f"{expected}, not {list(result.shape)}")
    return result


def _has_dimensions(values: NDArray[Any], shape: str) -> bool:
    if shape.startswith("..."):
        return values.ndim >= len(shape) - len("...")
    return values.ndim == len(shape)


def fitting(name: str, value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """`value`, one or several numbers, as an array of `dtype`, if that can hold it."""
    result = array(name, value, "iu" if dtype.kind in "iu" else "biuf")
    if dtype.kind in "iu" and result.size:
        limits = np.iinfo(dtype)
        if result.min() < limits.min or result.max() > limits.max:
            raise ValueError(
                f"{name} must be from {limits.min} to {limits.max}, as the values are {dtype}"
            )
    return result.astype(dtype)
