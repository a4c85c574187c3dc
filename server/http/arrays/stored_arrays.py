"""The route that returns arrays by their ids, whole or in part."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from routed_experts.protocol.codec import CodecError
from routed_experts.server.http.vllm_http import create_error_response
from routed_experts.server.outputs.array_store import (
    ArrayGoneError,
    ArrayStore,
    StoreError,
    UnknownArrayError,
)
from routed_experts.server.outputs.folders import MEMORY
from routed_experts.server.outputs.npy import NPY_HEADER_BYTES
from routed_experts.server.vllm_api import VLLMNotFoundError, VLLMValidationError, get_logger

logger = get_logger(__name__)

PATIENCE_S = 30.0
"""How long a client waits for a disk or a bucket, its turn included."""
_CHUNK_BYTES = 512 << 10
"""Read and sent at once; other requests run in between. Twice that is held for a client that reads
slowly."""
_BYTES = "application/octet-stream"
_NUMBER = "[0-9]{0,18}"  # Python refuses to read numbers of thousands of digits
_RANGE = re.compile(rf"bytes *= *({_NUMBER}) *- *({_NUMBER})")
_SPAN = re.compile(rf"({_NUMBER}):({_NUMBER})")

T = TypeVar("T")


class _Part:
    """Some layers and tokens of a stored array: a span of its file for each layer, or one for all
    tokens."""

    def __init__(self, store: ArrayStore, key: str, layers: str | None, tokens: str | None) -> None:
        (num_layers, num_tokens, top_k), dtype = store.header(key)
        begin, end = _span(layers, num_layers, "layers")
        first, last = _span(tokens, num_tokens, "tokens")
        row = top_k * dtype.itemsize
        self._store = store
        self._key = key
        self._layer = num_tokens * row
        self._first = NPY_HEADER_BYTES + begin * self._layer + first * row
        self.nbytes = (end - begin) * (last - first) * row
        self._piece = self.nbytes if last - first == num_tokens else (last - first) * row
        self.headers = {
            "X-Routed-Experts-Shape": f"{end - begin},{last - first},{top_k}",
            "X-Routed-Experts-Dtype": dtype.name,
            "Accept-Ranges": "bytes",
            "Cache-Control": "private, immutable",
        }

    def read(self, at: int, end: int) -> bytes:
        """The bytes from `at` to `end`. Raises `LookupError` if the array is gone by now: nothing of
        it is kept for those who read slowly."""
        return self._store.read(self._key, self._spans(at, end))

    def _spans(self, at: int, end: int) -> Iterator[tuple[int, int]]:
        while at < end:
            layer, begin = divmod(at, self._piece)
            size = min(end - at, self._piece - begin)
            first = self._first + layer * self._layer + begin
            yield first, first + size
            at += size


async def stored_array(
    request: Request, store: ArrayStore | None, key: str, layers: str | None, tokens: str | None
) -> Response:
    """The response for `GET` and `HEAD` of an array, or some `layers` and `tokens` (FIRST:END).
    Raises HTTP errors."""
    store = _of(store)
    if store.bucket is not None:
        return await _elsewhere(request, store, key, layers, tokens)
    with _http_errors(store):
        part = await _run(store, _Part, store, key, layers, tokens)
    status = 200
    first = 0
    end = part.nbytes
    headers = part.headers
    byte_range = _wanted_range(request, part.nbytes)
    if byte_range is not None:
        status = 206
        first, end = byte_range
        if first >= end:
            return _behind_the_end(part.nbytes)
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{part.nbytes}"
    headers["Content-Length"] = str(end - first)
    if request.method != "GET":
        return Response(headers=headers, media_type=_BYTES)

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(first, end, _CHUNK_BYTES):
            try:
                yield await _run(store, part.read, at, min(at + _CHUNK_BYTES, end))
            except (LookupError, StoreError) as error:
                # uvicorn ends the connection of a response that is shorter than it says
                logger.info("An array is gone while a client reads it: %r", error)
                return

    return StreamingResponse(chunks(), status, headers, _BYTES)


async def _elsewhere(
    request: Request, store: ArrayStore, key: str, layers: str | None, tokens: str | None
) -> Response:
    """Sends a client to the bucket, which knows nothing of layers and tokens. No byte of an array
    passes this process."""
    for name, value in (("layers", layers), ("tokens", tokens)):
        if value is not None:
            raise VLLMValidationError(
                f"{name}: this array is an object of a bucket: read a Range of its .npy file, which "
                f"has {NPY_HEADER_BYTES} bytes before the first layer, as routed_experts.protocol.fetch does",
                parameter=name,
            )
    with _http_errors(store):
        url = await _run(store, store.signed_url, key, request.method)
    return Response(status_code=307, headers={"Location": url, "Cache-Control": "no-store"})


async def delete_array(request: Request, store: ArrayStore | None, key: str) -> Response:
    """The response for `DELETE` of an array. Raises as `stored_array` does."""
    store = _of(store)
    with _http_errors(store):
        await _run(store, store.delete, key)
    return Response(status_code=204)


async def _run(store: ArrayStore, function: Callable[..., T], *args: Any) -> T:
    """Calls `function` of `store`: in a thread of the store if it waits for a disk or a bucket. The
    server's own threads are for all requests, and a bucket that is gone would hold them all."""
    if store.folder is not None and store.folder.is_relative_to(MEMORY):
        return function(*args)
    return await run_in_thread(store, function, *args)


async def run_in_thread(store: ArrayStore, function: Callable[..., T], *args: Any) -> T:
    """Calls `function` of `store` in a thread of it."""
    try:
        return await asyncio.wait_for(store.reader.run(function, *args), PATIENCE_S)
    except TimeoutError:
        raise StoreError(f"{store.place} has not answered for {PATIENCE_S:g} s") from None


def _of(store: ArrayStore | None) -> ArrayStore:
    if store is None:
        raise VLLMNotFoundError("This server stores no routed experts.")
    return store


@contextmanager
def _http_errors(store: ArrayStore) -> Iterator[None]:
    """Raises the store's errors as HTTP errors. A bucket is another server's: it may come back."""
    try:
        yield
    except UnknownArrayError:
        raise VLLMNotFoundError("There is no such array.") from None
    except ArrayGoneError:
        raise HTTPException(410, "This array has expired or was deleted.") from None
    except CodecError:
        raise HTTPException(500, "The file of this array is damaged.") from None
    except StoreError as error:
        raise HTTPException(500 if store.bucket is None else 503, str(error)) from None


def _span(text: str | None, size: int, name: str) -> tuple[int, int]:
    match = _SPAN.fullmatch(":" if text is None else text)
    if match is not None:
        begin = int(match[1] or 0)
        end = int(match[2] or size)
        if begin <= end <= size:
            return begin, end
    raise VLLMValidationError(
        f"{name} must be FIRST:END with 0 <= FIRST <= END <= {size}, for example {name}=0:{size}",
        parameter=name,
    )


def _wanted_range(request: Request, size: int) -> tuple[int, int] | None:
    """The bytes of the array that a request is for; None for all of them. No array has a tag or a
    date that `If-Range` could name."""
    if request.method != "GET" or "if-range" in request.headers:
        return None
    return _byte_range(request.headers.get("range", ""), size)


def _byte_range(text: str, size: int) -> tuple[int, int] | None:
    """First byte, and the one after the last, of a `Range` with one range; None for others (RFC
    9110, 14.2)."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    first, last = match.groups()
    if not first and not last:
        return None
    if not first:  # so many bytes at the end
        return max(size - int(last), 0), size
    if not last:
        return int(first), size
    if int(first) > int(last):
        return None
    return int(first), min(int(last) + 1, size)


def _behind_the_end(size: int) -> Response:
    """An error as FastAPI's, whose headers vLLM leaves out."""
    status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    message = "The range begins behind the end."
    error = create_error_response(message, status.phrase, status, "Range")
    return JSONResponse(error.model_dump(), status, {"Content-Range": f"bytes */{size}"})
