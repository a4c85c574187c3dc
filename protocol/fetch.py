"""Fetches arrays that a response refers to (`routed_experts_delivery: reference`), whole or in part,
from wherever they are: a file on this machine, the server, or a bucket."""

import http.client
import math
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from routed_experts.protocol import arguments
from routed_experts.protocol.answers import Count, Index, read_fields
from routed_experts.protocol.buckets import bucket_at, bucket_errors
from routed_experts.protocol.codec import (
    MAX_EXPERTS,
    MAX_LAYERS,
    NUMPY_DTYPES,
    read_npy_header,
)
from routed_experts.protocol.files import open_file

Range = tuple[int, int]
"""First index, and the index after the last."""

_HEADER_BYTES = 128  # of the `.npy` object in a bucket
_RELATIVE = re.compile(r"\w[\w/-]*", re.ASCII)
_ABSOLUTE = re.compile(r"https?://[\x21-\x7e]+")


AT_ONCE = 8
"""How many parts are fetched at once."""


class FetchError(Exception):
    """An array cannot be fetched.

    Attributes:
        status: of the HTTP response; None if there is none. From a server, 404: there never was
            such an array; 410: the array is gone. From a bucket, 404: the array is gone; 403: the signed URL
            has expired.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Span(NamedTuple):
    """Some rows of a stored array: those of a turn that no turn before had."""

    reference: Mapping[str, Any]
    first: int  # counted from 0 in the array
    end: int  # the row after the last


class Reference(Struct):
    """What a reference says of its array."""

    # [n, L, K]
    shape: tuple[
        Count, Annotated[int, Meta(ge=0, le=MAX_LAYERS)], Annotated[int, Meta(ge=0, le=MAX_EXPERTS)]
    ]
    dtype: Literal["int16", "uint8", "int32", "uint16", "float32"]
    start: Index = 0
    part: str | None = None
    id: str | None = None
    url: str | None = None
    uri: str | None = None
    path: str | None = None
    data: Any = None

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return NUMPY_DTYPES[self.dtype]


def read_reference(json: Mapping[str, Any]) -> Reference:
    """Raises `ValueError` if it is no reference: where a store is full, arrays come inline."""
    reference = read_fields(json, Reference)
    if reference.data is not None:
        raise ValueError(
            "reference has data, so the array came inline: decode it with routed_experts.protocol.codec.decode"
        )
    return reference


def fetch(
    reference: Mapping[str, Any],
    *,
    layers: Range | None = None,
    tokens: Range | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 60.0,
    by_uri: bool = False,
) -> NDArray[Any]:
    """The array of a reference, or a part of it: [layers, n, K], layers first. Read-only.

    If the reference has a `path` that this process can read, the file is mapped into memory, and is
    read where the array is used; this works after the array has expired too. Otherwise it comes
    over HTTP, from the server or, in ranges of several layers at once, from the bucket that its
    `url` leads to. Safe to call from several threads at once.

    Args:
        reference: with at least `url` (relative to `base_url`, or of a bucket), `path` or `uri`,
            `shape` ([n, L, K]) and `dtype`.
        layers: first layer, and the layer after the last, of the L layers; all by default.
        tokens: first row, and the row after the last, of the n rows of this array; all by default.
        base_url: that of OpenAI's client, such as `http://localhost:8000/v1`; not needed where the
            file or a bucket is read.
        api_key: is sent to that server only.
        by_uri: read the object of `uri`, with obstore and the keys of this process's environment.

    Raises:
        FetchError: the array does not come.
        ValueError: a range is outside of the array, `url` is neither relative nor of a bucket, or
            the array came inline and has no reference.
    """
    described = read_reference(reference)
    num_rows, num_layers, top_k = described.shape
    dtype = described.numpy_dtype
    first_layer, end_layer = _checked(layers, num_layers, "layers")
    first_token, end_token = _checked(tokens, num_rows, "tokens")
    shape = (end_layer - first_layer, end_token - first_token, top_k)
    ranges = _byte_ranges(described, (first_layer, end_layer), (first_token, end_token))
    if by_uri:
        return _as_array(_read_object(described, ranges), shape, dtype)
    if (mapped := _mapped(described)) is not None:
        return mapped[first_layer:end_layer, first_token:end_token]
    url = described.url
    if not url:
        raise FetchError(f"{described.path} has expired, or is on another machine")
    if _ABSOLUTE.fullmatch(url):
        return _as_array(_read_ranges(described, url, ranges, timeout_s), shape, dtype)
    query = f"layers={first_layer}:{end_layer}&tokens={first_token}:{end_token}"
    request = _request_to_server(url, query, base_url, api_key)
    with _explained():
        content = _read(request, math.prod(shape) * dtype.itemsize, timeout_s, request.full_url)
        return _as_array(content, shape, dtype)


def _request_to_server(
    url: str, query: str, base_url: str | None, api_key: str | None
) -> urllib.request.Request:
    """For the array of a reference whose `url` is relative."""
    if base_url is None:
        raise FetchError("base_url is needed: the url of a reference is relative to it")
    if not _RELATIVE.fullmatch(url):
        raise ValueError(f"The url of a reference must be relative, not {url!r}")
    request = urllib.request.Request(f"{base_url.rstrip('/')}/{url}?{query}")
    if api_key is not None:
        # not to where the server redirects
        request.add_unredirected_header("Authorization", f"Bearer {api_key}")
    return request


_MEANING = {
    404: "is base_url right? It ends in /v1",
    410: "it has expired, was deleted or is in another machine's folder",
}
"""What a status of a server says of an array."""


@contextmanager
def _explained() -> Iterator[None]:
    """Has errors of a server say what their status means."""
    try:
        yield
    except FetchError as error:
        if (meaning := _MEANING.get(error.status or 0)) is None:
            raise
        raise FetchError(f"{error}: {meaning}", error.status) from None


def fetch_all(
    references: Iterable[Mapping[str, Any]], *, at_once: int = AT_ONCE, **options: Any
) -> list[NDArray[Any]]:
    """As `fetch`, of several references at once, with the same options."""
    at_once = arguments.integer("at_once", at_once, least=1)
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda reference: fetch(reference, **options), references))


def fetch_spans(
    spans: Sequence[Span],
    *,
    layers: Range | None = None,
    tokens: Range | None = None,
    at_once: int = AT_ONCE,
    **options: Any,
) -> NDArray[Any]:
    """The rows of a sequence, which `batch.join_turns` made of its references: [layers, n, K], or
    what a rank needs of them. Only that is read, of several arrays at once. If the arrays have
    several dtypes, the result has one that holds the values of all.

    Args:
        tokens: counted from the first row of the sequence.
        options: those of `fetch`.

    Raises:
        FetchError, ValueError: as `fetch`.
    """
    if not spans:
        raise ValueError("spans must not be empty")
    num_layers, top_k, dtype = _common_rows(spans)
    for span in spans:
        num_rows, *_ = read_reference(span.reference).shape
        _checked((span.first, span.end), num_rows, "rows of each of spans")
    first_layer, end_layer = _checked(layers, num_layers, "layers")
    first, end = _checked(tokens, sum(span.end - span.first for span in spans), "tokens")
    rows = np.empty((end_layer - first_layer, end - first, top_k), dtype)

    def read(span: Span, begin: int) -> None:
        """The rows of a span that begins at row `begin` of the sequence."""
        lower = max(first - begin, 0)
        upper = min(end - begin, span.end - span.first)
        if lower < upper:
            rows[:, begin + lower - first : begin + upper - first] = fetch(
                span.reference,
                layers=(first_layer, end_layer),
                tokens=(span.first + lower, span.first + upper),
                **options,
            )

    begins = np.cumsum([0, *(span.end - span.first for span in spans)]).tolist()
    with ThreadPoolExecutor(arguments.integer("at_once", at_once, least=1)) as threads:
        list(threads.map(read, spans, begins[:-1]))
    return rows


def _common_rows(spans: Sequence[Span]) -> tuple[int, int, np.dtype[Any]]:
    """The layers and experts per token of all arrays, and a dtype that holds the values of all:
    -1 of one array would be 255 in the dtype of another."""
    first = read_reference(spans[0].reference)
    _, *of_row = first.shape
    first_dtype = first.numpy_dtype
    dtype = first_dtype
    for span in spans[1:]:
        other = read_reference(span.reference)
        _, *of_other = other.shape
        other_dtype = other.numpy_dtype
        if of_other != of_row:
            raise ValueError(f"spans have rows of shapes {of_row} and {of_other}")
        if (other_dtype.kind == "f") != (first_dtype.kind == "f"):
            raise ValueError("spans have ids and weights: fetch them apart")
        dtype = np.result_type(dtype, other_dtype)
    num_layers, top_k = of_row
    return num_layers, top_k, dtype


def _byte_ranges(reference: Reference, layers: Range, tokens: Range) -> list[Range]:
    """Where some layers and tokens are in the object of an array: one range for each layer, or one
    for all if they are without a gap."""
    num_rows, _, top_k = reference.shape
    row = top_k * reference.numpy_dtype.itemsize
    layer = num_rows * row
    if tokens == (0, num_rows):
        return [(_HEADER_BYTES + layers[0] * layer, _HEADER_BYTES + layers[1] * layer)]
    begins = [_HEADER_BYTES + index * layer for index in range(*layers)]
    return [(begin + tokens[0] * row, begin + tokens[1] * row) for begin in begins]


def _read_ranges(
    reference: Reference, url: str, ranges: Sequence[Range], timeout_s: float
) -> bytes:
    """Parts of an object at a signed URL, several at once. No key goes there, and no message has
    the URL: whoever knows it may read the array."""
    name = str(reference.uri or reference.id)

    def read(part: Range) -> bytes:
        first, end = part
        if first == end:
            return b""
        headers = {"Range": f"bytes={first}-{end - 1}"}
        request = urllib.request.Request(url, headers=headers)
        return _read(request, end - first, timeout_s, name)

    if len(ranges) == 1:
        return read(ranges[0])
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return b"".join(threads.map(read, ranges))


def _read_object(reference: Reference, ranges: Sequence[Range]) -> bytes:
    """Parts of the object that a reference names."""
    uri = reference.uri
    if uri is None:
        raise ValueError("the reference has no uri: its array is not in a bucket")
    place, _, name = uri.rpartition("/")
    filled = [part for part in ranges if part[0] < part[1]]
    if not filled:
        return b""
    try:
        objects = bucket_at(place)
        with bucket_errors(uri):
            starts, ends = zip(*filled, strict=True)
            return b"".join(objects.get_ranges(name, starts=starts, ends=ends))
    except OSError as error:
        is_gone = isinstance(error, FileNotFoundError)
        raise FetchError(f"{uri}: {error.strerror or error}", 404 if is_gone else None) from None


def _checked(chosen: Range | None, size: int, name: str) -> Range:
    first, end = (0, size) if chosen is None else arguments.integers(name, chosen, 2)
    if not first <= end <= size:
        raise ValueError(f"{name} must be within 0 and {size}, not {first} to {end}")
    return first, end


def _mapped(reference: Reference) -> NDArray[Any] | None:
    """The array in the file that the reference names; None if this machine does not have it."""
    if not reference.path:
        return None
    num_rows, num_layers, top_k = reference.shape
    shape = (num_layers, num_rows, top_k)
    dtype = reference.numpy_dtype
    try:
        with open(reference.path, "rb", opener=open_file) as file:
            if read_npy_header(file) != (shape, dtype, "C"):
                return None
            return np.memmap(file, dtype, "r", file.tell(), shape)
    except (OSError, ValueError, OverflowError):
        return None


def _as_array(content: bytes, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    num_bytes = math.prod(shape) * dtype.itemsize
    if len(content) != num_bytes:
        raise FetchError(f"{len(content)} bytes came, not {num_bytes}")
    return np.frombuffer(content, dtype).reshape(shape)


def _read(request: urllib.request.Request, num_bytes: int, timeout_s: float, name: str) -> bytes:
    """The bytes in a response."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            content: bytes = response.read(num_bytes + 1)
    except urllib.error.HTTPError as error:
        raise FetchError(f"{name}: {error.code} {error.reason}", error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{name}: {error}") from error
    if len(content) != num_bytes:
        raise FetchError(f"{name} returned another number of bytes than {num_bytes}")
    return content
