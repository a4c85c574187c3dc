"""Fetches arrays that a response refers to (`routed_experts_delivery: reference`), whole or in
part."""

import http.client
import math
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol import arguments
from routed_experts.protocol.codec import NUMPY_DTYPES, read_npy_header
from routed_experts.protocol.files import open_file

Range = tuple[int, int]
"""First index, and the index after the last."""

_PIECE_BYTES = 1 << 20

_RELATIVE = re.compile(r"\w[\w/-]*", re.ASCII)


class FetchError(Exception):
    """An array cannot be fetched.

    Attributes:
        status: of the HTTP response; None if there is none. 404: there never was such an array;
        410: it is gone.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, eq=False)
class ArrayReference:
    """Refers to an array, and is one for numpy: the array is read where it is used, not before. Can
    be pickled.

    Engines in programs put it on outputs of requests that ask for references.

    Attributes:
        reference: as in HTTP responses; without `url` where there is no server.
    """

    reference: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n, L, K)"""
        return _described(self.reference)[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""
        return _described(self.reference)[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """A view of the file, [n, L, K], or a copy of it."""
        array = self.fetch().swapaxes(0, 1)
        return array if copy is False else np.array(array, dtype=dtype, copy=copy)

    def fetch(
        self, *, layers: Range | None = None, tokens: Range | None = None, **options: Any
    ) -> NDArray[Any]:
        """See `fetch`: layers first."""
        return fetch(self.reference, layers=layers, tokens=tokens, **options)


def fetch(
    reference: Mapping[str, Any],
    *,
    layers: Range | None = None,
    tokens: Range | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 60.0,
) -> NDArray[Any]:
    """The array of a reference, or a part of it: [layers, n, K], layers first. Read-only.

    If the reference has a `path` that this process can read, the file is mapped into memory, and is
    read where the array is used; this works after the array has expired too. Otherwise it comes
    over HTTP. Safe to call from several threads at once.

    Args:
        reference: with at least `url` (relative to `base_url`) or `path`, `shape` ([n, L, K]) and
        `dtype`. layers: first layer, and the layer after the last, of the L layers; all by default.
        tokens: first row, and the row after the last, of the n rows of this array; all by default.
        base_url: that of OpenAI's client, such as `http://localhost:8000/v1`; not needed where the
        file is read. api_key: is sent to that server only.

    Raises:
        FetchError: the server does not return the array.
        ValueError: a range is outside of the array, or `url` is not relative.
    """
    (num_rows, num_layers, top_k), dtype = _described(reference)
    for name, text in (("base_url", base_url), ("api_key", api_key)):
        if text is not None:
            arguments.instance(name, text, str)
    arguments.number("timeout_s", timeout_s)
    first_layer, end_layer = _checked(layers, num_layers, "layers")
    first_token, end_token = _checked(tokens, num_rows, "tokens")
    if (mapped := _mapped(reference, dtype)) is not None:
        return mapped[first_layer:end_layer, first_token:end_token]
    if not reference.get("url"):
        raise FetchError(f"{reference.get('path')} has expired, or is on another machine")
    if base_url is None:
        raise FetchError("base_url is needed: the url of a reference is relative to it")
    if not _RELATIVE.fullmatch(reference["url"]):
        raise ValueError(f"The url of a reference must be relative, not {reference['url']!r}")
    query = f"layers={first_layer}:{end_layer}&tokens={first_token}:{end_token}"
    request = urllib.request.Request(f"{base_url.rstrip('/')}/{reference['url']}?{query}")
    if api_key is not None:
        # not to where the server redirects
        request.add_unredirected_header("Authorization", f"Bearer {api_key}")
    return _read(
        request, (end_layer - first_layer, end_token - first_token, top_k), dtype, timeout_s
    )


def _described(reference: Mapping[str, Any]) -> tuple[tuple[int, int, int], np.dtype[Any]]:
    """The shape ([n, L, K]) and dtype of the array."""
    arguments.instance("reference", reference, Mapping)
    num_rows, num_layers, top_k = arguments.integers(
        "shape of reference", reference.get("shape"), 3
    )
    dtype = arguments.one_of("dtype of reference", reference.get("dtype"), NUMPY_DTYPES)
    return (num_rows, num_layers, top_k), NUMPY_DTYPES[dtype]


def _checked(chosen: Range | None, size: int, name: str) -> Range:
    first, end = (0, size) if chosen is None else arguments.integers(name, chosen, 2)
    if not first <= end <= size:
        raise ValueError(f"{name} must be within 0 and {size}, not {first} to {end}")
    return first, end


def _mapped(reference: Mapping[str, Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The array in the file that the reference names; None if this machine does not have it."""
    if not reference.get("path"):
        return None
    num_rows, num_layers, top_k = reference["shape"]
    # a number would be an open file
    path = arguments.instance("path of reference", reference["path"], str)
    try:
        with open(path, "rb", opener=open_file) as file:
            if read_npy_header(file) != ((num_layers, num_rows, top_k), dtype, "C"):
                return None
            return np.memmap(file, dtype, "r", file.tell(), (num_layers, num_rows, top_k))
    except (OSError, ValueError):
        return None


def _read(
    request: urllib.request.Request,
    shape: tuple[int, int, int],
    dtype: np.dtype[Any],
    timeout_s: float,
) -> NDArray[Any]:
    """The array in a response. It takes no memory before the server says that it sends as much, or
    has sent it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            told = response.headers.get("Content-Length")
            is_right = told in (None, str(num_bytes))
            content = bytearray() if told is None or not is_right else bytearray(num_bytes)
            if not is_right or _fill(content, response, num_bytes) != num_bytes or response.read(1):
                raise FetchError(
                    f"{request.full_url} returned another number of bytes than {num_bytes}"
                )
    except urllib.error.HTTPError as error:
        raise FetchError(f"{request.full_url}: {error.code} {error.reason}", error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{request.full_url}: {error}") from error
    array: NDArray[Any] = np.ndarray(shape, dtype, content)
    array.flags.writeable = False
    return array


def _fill(content: bytearray, response: http.client.HTTPResponse, num_bytes: int) -> int:
    """Reads up to `num_bytes` into `content`, which has as many or none; returns how many came."""
    count = 0
    if content:
        view = memoryview(content)
        while count < num_bytes and (more := response.readinto(view[count:])):
            count += more
        return count
    while count < num_bytes and (piece := response.read(min(_PIECE_BYTES, num_bytes - count))):
        content += piece
        count += len(piece)
    return count
