"""References, which stand in a response in place of arrays."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import HTTPException

from routed_experts.protocol.codec import Rows
from routed_experts.server.http.encoding.encoding import Encoder
from routed_experts.server.http.metrics import count_stored, waiting_for_store
from routed_experts.server.outputs.array_store import ArrayStore, StoreError
from routed_experts.server.outputs.threads import Threads

_ROWS = "routed_experts/rows"
ROWS_PATH = f"/v1/{_ROWS}"

AT_ONCE_BYTES = 512 << 10
"""Rows of a response that is made at once, in about 2 ms. More are made in a thread, and others run
between parts."""

THREADS = Threads(4, "routed-experts-arrays")
"""For arrays and histograms that take long. Answers that end together would take all threads that
other routes share."""

T = TypeVar("T")
NamedArray = tuple[str, int | None, int, list[Rows]]
"""The name of an array in the response, the index of its choice (None for a prompt), its first
position, and its rows."""
Arrays = Sequence[NamedArray]


class Delivery:
    """How the arrays of one response reach the client: inline."""

    async def run(self, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """Runs what prepares arrays of `num_bytes`: at once, or in a thread if it takes long."""
        return await THREADS.run(function, *args) if num_bytes > AT_ONCE_BYTES else function(*args)

    def references(
        self, encoder: Encoder, arrays: Arrays
    ) -> tuple[list[dict[str, Any]], StoreError | None]:
        """Stores `arrays` and their weights. Returns the references of each by name, none for an
        array that is sent inline, and why arrays could not be stored. Raises `LostRowsError`.

        Several threads may do this for one response. `count_references` counts what was stored.
        """
        return [{} for _ in arrays], None

    def hand_over(self) -> None:
        """Called before the part of a stream is sent that has references, or before the last part
        of a response that is one object."""

    def end(self) -> None:
        """Called when nothing more is sent. Deletes what was stored and not handed over."""


@dataclass(frozen=True)
class ReferenceMaker(Delivery):
    """Stores arrays, so that the response has references to them."""

    store: ArrayStore
    names_files: bool = False  # whether references name the files
    part: str = "generated"  # what a choice's arrays have: "joined" with the prompt's rows
    metadata: dict[str, str] = field(default_factory=dict)  # of objects: what the response is
    # what prepares arrays, and may still run
    _prepared: list["Future[Any]"] = field(default_factory=list, init=False)
    # ids whose references are not handed over
    _stored: list[str] = field(default_factory=list, init=False)

    async def run(self, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """In a thread of the store. If all are busy, the answer waits until one is free."""
        prepared = self.store.writer.submit(function, *args)
        self._prepared.append(prepared)
        with waiting_for_store():
            return await asyncio.wrap_future(prepared)

    def hand_over(self) -> None:
        self._stored.clear()

    def end(self) -> None:
        """In a thread of the store, after everything that was submitted for this response: whoever
        was waiting for an array may have been cancelled while it was written."""
        if not self._stored and all(prepared.done() for prepared in self._prepared):
            return
        with suppress(RuntimeError):  # the process ends, and the thread takes no more
            self.store.writer.submit(self._delete_stored)

    def _delete_stored(self) -> None:
        wait(self._prepared)  # they were submitted before this, so each has ended or has a thread
        for key in [*self._stored]:
            self.store.discard(key)

    def references(
        self, encoder: Encoder, arrays: Arrays
    ) -> tuple[list[dict[str, Any]], StoreError | None]:
        failures: list[StoreError] = []

        def try_to_store(array: NamedArray) -> dict[str, Any]:
            """The references of an array and its weights, none if they cannot be stored."""
            try:
                return self._store_with_weights(encoder, array)
            except StoreError as error:
                failures.append(error)
                count_stored(succeeded=False)
                return {}

        made = [try_to_store(array) for array in arrays]
        if not failures:
            return made, None
        self.store.warnings.log("Routed experts come inline: %s", failures[0])
        return made, failures[0]

    def _store_with_weights(self, encoder: Encoder, array: NamedArray) -> dict[str, Any]:
        """Stores an array and its weights, or neither. Raises `StoreError`."""
        name, choice, start, rows = array
        references: dict[str, Any] = {}
        try:
            for array_name, of_array in encoder.named_encoders(name).items():
                references[array_name] = self._refer(of_array, rows, start, choice)
        except StoreError:
            for reference in references.values():
                self.store.discard(reference["id"])
            raise
        return references

    def _refer(
        self, encoder: Encoder, rows: list[Rows], start: int, choice: int | None
    ) -> dict[str, Any]:
        array, missing = encoder.layers_first(rows)
        facts: dict[str, Any] = {"part": "prompt"}
        if choice is not None:
            facts = {"part": self.part, "choice": choice}
        of_object = {**facts, "start": start, "missing": missing}
        metadata = {name: str(fact) for name, fact in of_object.items()}
        stored = self.store.put(array, **metadata, **self.metadata)
        self._stored.append(stored.id)
        count_stored(succeeded=True)
        if stored.url is not None:
            facts |= {"uri": stored.place}
        elif self.names_files:
            facts |= {"path": stored.place}
        # The URL of what is in a folder is relative to the API's base.
        url = stored.url or f"{_ROWS}/{stored.id}"
        return stored.reference(array, start, missing, url=url, **facts)


def count_references(encoder: Encoder, arrays: Arrays, made: list[dict[str, Any]]) -> None:
    """Counts the rows of `arrays` that the response refers to."""
    for (name, *_), references in zip(arrays, made, strict=True):
        encoders = encoder.named_encoders(name)
        for array_name, reference in references.items():
            encoders[array_name].count(reference["shape"][0], reference["missing"])


def cannot_store(error: StoreError) -> HTTPException:
    return HTTPException(
        HTTPStatus.INSUFFICIENT_STORAGE,
        f"The routed experts cannot be stored: {error}. Delete arrays that were fetched, give the "
        "store more room, or set routed_experts_delivery to inline.",
    )
