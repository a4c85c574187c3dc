"""Stored arrays as `.npy` files: a header, then the array in C order."""

from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

NPY_HEADER_BYTES = 128


@lru_cache
def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The first bytes of a `.npy` file of an array in C order."""
    buffer = BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def npy_file(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of the `.npy` file of `array`, whose last axis is contiguous; the others may be in
    any order in memory.

    They are in one piece, and numpy makes the only copy. To join a header and an array takes
    another one, which keeps Python's lock for as long as the system takes to give the memory.
    """
    file = np.empty(NPY_HEADER_BYTES + array.nbytes, np.uint8)
    file[:NPY_HEADER_BYTES] = np.frombuffer(npy_header(array.dtype.str, array.shape), np.uint8)
    copy = file[NPY_HEADER_BYTES:].view(array.dtype).reshape(array.shape)
    # numpy moves what is contiguous with one copy
    item = np.dtype((np.void, array.shape[-1] * array.itemsize))
    copy.view(item)[...] = array.view(item)
    return file
