"""References: what a response has in place of an array, and the route that returns the array."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

import numpy as np
from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from numpy.typing import NDArray

from routed_experts.protocol.codec import Rows, map_npy
from routed_experts.server.http.encoding import Encoder
from routed_experts.server.http.metrics import count_stored
from routed_experts.server.http.vllm_http import create_error_response
from routed_experts.server.outputs.array_store import ArrayGoneError, ArrayStore, StoreError, UnknownArrayError
from routed_experts.server.vllm_api import VLLMNotFoundError, VLLMValidationError

ROWS_PATH = "/v1/routed_experts/rows"
SHAPE_HEADER, DTYPE_HEADER = "X-Routed-Experts-Shape", "X-Routed-Experts-Dtype"

_CHUNK_BYTES = 1 << 20
"""Sent at once, in well under a millisecond, so that other requests run in between."""
_AT_ONCE_ARRAYS, _AT_ONCE_BYTES = 16, 512 << 10
"""Rows that are stored within the event loop, in less than 2 ms."""
_INSUFFICIENT_STORAGE = 507
_NO_STORE = "This server stores no routed experts."
_MAX_DIGITS = 18
"""Python refuses to read numbers of thousands."""

T = TypeVar("T")


@dataclass(frozen=True)
class ReferenceMaker:
    """Stores the arrays of one response.

    Args:
        url: address of the arrays, without a slash at the end.
        tells_paths: whether references name the files.

    Attributes:
        untold: ids of arrays whose references were not sent yet.
    """

    store: ArrayStore
    url: str
    tells_paths: bool = False
    untold: list[str] = field(default_factory=list, init=False)

    async def run(self, num_arrays: int, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """Runs what stores arrays made of `num_bytes`. Few are stored at once, if nobody has to wait: that takes less
        time than to wake the store's thread. If the client leaves meanwhile, or it fails, they are deleted."""
        try:
            if num_arrays <= _AT_ONCE_ARRAYS and num_bytes <= _AT_ONCE_BYTES:
                with self.store.at_once(num_arrays, 4 * num_bytes) as can:  # for int32, and dense layers
                    if can:
                        return function(*args)
            return await self.store.run(function, *args)
        except BaseException:
            self.delete_untold()
            raise

    def delete_untold(self) -> None:
        """Deletes the arrays that are untold when the store's thread comes to it."""
        self.store.submit(self._delete_untold)

    def _delete_untold(self) -> None:
        for key in self.untold:
            with suppress(LookupError, StoreError):
                self.store.delete(key)

    def refer(self, encoder: Encoder, rows: list[Rows], start: int) -> dict[str, Any]:
        """Stores `rows`, which begin at position `start`; returns the reference.

        Raises:
            StoreError: they do not fit, or cannot be written.
            LostRowsError: a row is unknown, and the dtype cannot hold -1.
        """
        array, missing = encoder.layers_first(rows)
        stored = self.store.put(array)
        self.untold.append(stored.id)
        count_stored(succeeded=True)
        num_layers, num_rows, top_k = array.shape
        encoder.sent.rows += num_rows
        encoder.sent.missing += missing
        reference = {
            "id": stored.id,
            "url": f"{self.url}/{stored.id}",
            "shape": [num_rows, num_layers, top_k],
            "dtype": encoder.dtype,
            "start": start,
            "missing": missing,
            "bytes": array.nbytes,
            "expires": stored.expires,
        }
        return {**reference, "path": str(stored.path)} if self.tells_paths else reference

    def references(
        self, encoder: Encoder, arrays: Iterable[tuple[str, int, list[Rows]]]
    ) -> tuple[list[dict[str, Any]], StoreError | None]:
        """Stores `arrays` (name, first position, rows) and their weights.

        Returns:
            The references of each by name, and the last error. An array that cannot be stored with its weights has no
            references.

        Raises:
            LostRowsError: a row is unknown, and the dtype cannot hold -1.
        """
        made: list[dict[str, Any]] = []
        failure: StoreError | None = None
        for name, start, rows in arrays:
            made.append({})
            try:
                for each, by in encoder.by_name(name).items():
                    made[-1][each] = self.refer(by, rows, start)
            except StoreError as error:
                failure = error
                count_stored(succeeded=False)
                self.take_back(encoder, made[-1])
        return made, failure

    def take_back(self, encoder: Encoder, made: dict[str, Any]) -> None:
        """Deletes the arrays of references that nobody was told of."""
        for reference, by in zip(made.values(), encoder.by_name().values(), strict=False):
            with suppress(LookupError, StoreError):
                self.store.delete(reference["id"])
            by.sent.rows -= reference["shape"][0]
            by.sent.missing -= reference["missing"]
        made.clear()


def address_of(raw_request: Request) -> str:
    """The address of stored arrays as the client reaches this server."""
    return str(raw_request.base_url).rstrip("/") + ROWS_PATH


def cannot_store(error: StoreError) -> HTTPException:
    """The error for a request whose arrays cannot be stored."""
    return HTTPException(
        _INSUFFICIENT_STORAGE,
        f"The routed experts cannot be stored: {error}. Delete arrays that were fetched, raise "
        "--routed-experts-store-bytes, or set routed_experts_delivery to inline.",
    )


async def stored_array(
    raw_request: Request, store: ArrayStore | None, key: str, layers: str | None, tokens: str | None
) -> Response:
    """The response for `GET` and `HEAD` of an array, or of some `layers` and `tokens` (FIRST:END) of it.

    Raises:
        VLLMNotFoundError: there never was such an array.
        HTTPException: it is gone.
        VLLMValidationError: `layers` or `tokens` is invalid.
    """
    if store is None:
        raise VLLMNotFoundError(_NO_STORE)
    array = await _read(store, _opened, store, key)
    chosen = _slice(layers, array.shape[0], "layers"), _slice(tokens, array.shape[1], "tokens")
    part = array[chosen]
    tag = f'"{key}-{"-".join(f"{each.start}-{each.stop}" for each in chosen)}"'
    headers = {
        SHAPE_HEADER: ",".join(map(str, part.shape)),
        DTYPE_HEADER: part.dtype.name,
        "ETag": tag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, immutable",
    }
    known = raw_request.headers.get("if-none-match", "")
    if tag in known or known.strip() == "*":
        return Response(status_code=304, headers=headers)
    first, end, status = 0, part.nbytes, 200
    asked = raw_request.headers.get("range")
    is_head = raw_request.method == "HEAD"
    if asked is not None and not is_head and raw_request.headers.get("if-range", tag) == tag:
        found = _byte_range(asked, part.nbytes)
        if found is not None:
            first, end = found
            if first >= end:
                return _unsatisfiable(part.nbytes)
            status = 206
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{part.nbytes}"
    headers["Content-Length"] = str(end - first)
    media_type = "application/octet-stream"
    if is_head:
        return Response(status_code=status, headers=headers, media_type=media_type)
    return StreamingResponse(
        _chunks(store, part, first, end), status_code=status, headers=headers, media_type=media_type
    )


def delete_array(store: ArrayStore | None, key: str) -> Response:
    """The response for `DELETE` of an array.

    Raises:
        VLLMNotFoundError: there never was such an array.
        HTTPException: it is gone, or cannot be deleted.
    """
    if store is None:
        raise VLLMNotFoundError(_NO_STORE)
    with _as_responses():
        store.delete(key)
    return Response(status_code=204)


async def _read(store: ArrayStore, function: Callable[..., T], *args: Any) -> T:
    """What `function` gives, which reads files of `store`: in a thread, if they are on a disk."""
    return function(*args) if store.is_in_memory else await run_in_threadpool(function, *args)


@contextmanager
def _as_responses() -> Iterator[None]:
    """Raises the errors of a store as those of a response."""
    try:
        yield
    except UnknownArrayError:
        raise VLLMNotFoundError("There is no such array.") from None
    except (ArrayGoneError, FileNotFoundError):  # the file of an array that was found may expire before it is opened
        raise HTTPException(410, "This array has expired or was deleted.") from None
    except StoreError as error:
        raise HTTPException(500, str(error)) from None


def _opened(store: ArrayStore, key: str) -> NDArray[Any]:
    with _as_responses():
        return map_npy(store.find(key))


def _slice(text: str | None, size: int, name: str) -> slice:
    if text is None:
        return slice(0, size)
    first, colon, end = text.partition(":")
    if colon and all(part == "" or _is_number(part) for part in (first, end)):
        found = slice(int(first or 0), int(end) if end else size)
        if found.start <= found.stop <= size:
            return found
    raise VLLMValidationError(
        f"{name} must be FIRST:END with 0 <= FIRST <= END <= {size}, for example {name}=0:{size}", parameter=name
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _byte_range(text: str, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last of a `Range` header with one range. None for other headers, which are
    ignored (RFC 9110, 14.2)."""
    unit, _, ranges = text.partition("=")
    first, dash, last = (part.strip() for part in ranges.partition("-"))
    numbers = [part for part in (first, last) if part]
    if unit.strip() != "bytes" or not dash or not numbers or not all(map(_is_number, numbers)):
        return None
    if first:
        begin, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < begin:
            return None
    else:
        begin, end = max(size - int(last), 0), size
    return begin, end


def _unsatisfiable(size: int) -> Response:
    status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    error = create_error_response("The range begins behind the end.", status.phrase, status, param="Range")
    return JSONResponse(error.model_dump(), status, headers={"Content-Range": f"bytes */{size}"})


async def _chunks(store: ArrayStore, part: NDArray[Any], first: int, end: int) -> AsyncIterator[memoryview]:
    """The bytes from `first` to `end` of `part`. In memory they are views of the file's pages, so that only the kernel
    copies."""
    for piece in [part] if part.flags.c_contiguous or part.nbytes <= _CHUNK_BYTES else part:
        is_view = piece.flags.c_contiguous
        view = (piece if is_view else await _read(store, _copied, piece)).reshape(-1).view(np.uint8)
        for at in range(max(first, 0), min(end, len(view)), _CHUNK_BYTES):
            chunk = view[at : min(at + _CHUNK_BYTES, end)]
            yield (await _read(store, _copied, chunk) if is_view and not store.is_in_memory else chunk).data
        first, end = first - len(view), end - len(view)


def _copied(array: NDArray[Any]) -> NDArray[Any]:
    """A contiguous copy; other threads run while numpy waits for the disk."""
    return np.array(array, order="C")
