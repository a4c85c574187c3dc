"""References, which stand in a response in place of arrays."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool

from routed_experts.protocol.codec import Rows
from routed_experts.server.http.encoding import Encoder
from routed_experts.server.http.metrics import count_stored
from routed_experts.server.outputs.array_store import ArrayStore, StoreError

_ROWS = "routed_experts/rows"
ROWS_PATH = f"/v1/{_ROWS}"

AT_ONCE_BYTES = 512 << 10
"""Rows of a response that is made at once, in about 2 ms. More are made in a thread, and others run between parts."""

T = TypeVar("T")
Arrays = Iterable[tuple[str, int, list[Rows]]]
"""The name of an array in the response, its first position, and its rows."""


class Delivery:
    """How the arrays of one response reach the client: inline."""

    async def run(self, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """Runs what prepares arrays of `num_bytes`: at once, or in a thread if it takes long."""
        return await run_in_threadpool(function, *args) if num_bytes > AT_ONCE_BYTES else function(*args)

    def references(self, encoder: Encoder, arrays: Arrays) -> tuple[list[dict[str, Any]], StoreError | None]:
        """Stores `arrays` and their weights. Returns the references of each by name, none for an array that is sent
        inline, and why arrays could not be stored. Raises `LostRowsError`."""
        return [{} for _ in arrays], None

    def mark_sent(self) -> None:
        """Called when the response, or a part with references, has been sent."""

    def delete_unsent(self) -> None:
        """Deletes the arrays whose references were not sent."""


@dataclass(frozen=True)
class ReferenceMaker(Delivery):
    """Stores arrays, so that the response has references to them."""

    store: ArrayStore
    has_left: Callable[[], bool]  # whether the client has closed its connection
    names_files: bool = False  # whether references name the files
    unsent_ids: list[str] = field(default_factory=list, init=False)  # ids whose references were not sent yet

    async def run(self, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """In the store's thread. If the client leaves meanwhile, or storing fails, the arrays are deleted."""
        try:
            return await asyncio.wrap_future(self.store.writer.submit(function, *args))
        except BaseException:
            self.delete_unsent()
            raise

    def mark_sent(self) -> None:
        """Deletes the arrays if the client had left before."""
        if self.unsent_ids and self.has_left():
            self.delete_unsent()
        else:
            self.unsent_ids.clear()

    def delete_unsent(self) -> None:
        """In the store's thread."""
        if self.unsent_ids:
            self.store.writer.submit(lambda: self._delete(self.unsent_ids))

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(LookupError, StoreError):
                self.store.delete(key)

    def references(self, encoder: Encoder, arrays: Arrays) -> tuple[list[dict[str, Any]], StoreError | None]:
        made: list[dict[str, Any]] = []
        failure: StoreError | None = None
        for name, start, rows in arrays:
            encoders, references = encoder.named_encoders(name), {}
            try:
                for each, by in encoders.items():
                    references[each] = self._refer(by, rows, start)
            except StoreError as error:
                failure = error
                count_stored(succeeded=False)
                self._delete(reference["id"] for reference in references.values())
                references = {}
            for each, reference in references.items():
                encoders[each].count(reference["shape"][0], reference["missing"])
            made.append(references)
        if failure is not None:
            self.store.warn("Routed experts come inline: %s", failure)
        return made, failure

    def _refer(self, encoder: Encoder, rows: list[Rows], start: int) -> dict[str, Any]:
        array, missing = encoder.layers_first(rows)
        stored = self.store.put(array)
        self.unsent_ids.append(stored.id)
        count_stored(succeeded=True)
        # The URL is relative to the API's base.
        reference = stored.reference(array, start, missing, url=f"{_ROWS}/{stored.id}")
        return {**reference, "path": str(stored.path)} if self.names_files else reference


def has_left(request: Request) -> bool:
    """Whether the client has closed its connection. Unlike `is_disconnected`, it does not yield to other tasks."""
    message = request.receive().__await__()
    try:
        next(message)
    except StopIteration as stop:
        return bool(stop.value["type"] == "http.disconnect")
    message.close()
    return False


def cannot_store(error: StoreError) -> HTTPException:
    return HTTPException(
        HTTPStatus.INSUFFICIENT_STORAGE,
        f"The routed experts cannot be stored: {error}. Delete arrays that were fetched, raise "
        "--routed-experts-store-bytes, or set routed_experts_delivery to inline.",
    )
