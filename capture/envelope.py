"""The envelope: an output that comes before all others of a message, with their rows and what else is to be said."""

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.rows import row_shape
from routed_experts.protocol.codec import Rows

ENVELOPE_ID = "routed_experts"
"""Request id of the envelope; vLLM ignores outputs with unknown request ids. `routed_experts` has what `pack` gave, and
`kv_transfer_params` may have CAUSES and STATS."""

CAUSES, STATS = "causes", "stats"
"""A list of `UnknownRows`: why rows of this message and of later ones are unknown. What `EngineStats.encode` gave."""

SMALL_ARRAY_BYTES = 16 << 10
"""Rows up to this size are packed. Larger ones, those of prompts, are cheaper to send without a copy."""

_HEADER_TYPE = np.dtype(np.int32)
_WORDS = _HEADER_TYPE.itemsize // np.dtype(np.int16).itemsize
_ALONE = -1  # in place of a number of rows: they are on their own output


class Output(Protocol):
    """A request's part of the engine's message for a step; vLLM's `EngineCoreOutput`."""

    request_id: str
    routed_experts: Any
    kv_transfer_params: Any


AnyOutput = TypeVar("AnyOutput", bound=Output)


class SingleRows(NamedTuple):
    """One row for each of many outputs of a message."""

    outputs: Sequence[Any]
    starts: Sequence[int]  # position of each row
    rows: Rows  # of the step, without weights if those are not asked for
    places: NDArray[np.int64]  # index of each row in `rows`


def pack(outputs: Sequence[Output], singles: Sequence[SingleRows] = ()) -> NDArray[np.int16] | None:
    """The rows of a message in one array, for its envelope: `singles`, and the `PlacedRows` on `outputs`, which are
    taken off. None if there are none.

    At hundreds of requests with a row each, an array costs much more to encode and decode than its contents. Large
    arrays stay on their outputs, and are not copied.

    A header of int32: the number of entries, how many of them at the end have weights although others have none, and
    the shape of a row of the others; then the index of each entry's output, then the numbers of their rows, then the
    positions of the first ones. The rows follow.
    """
    parts = [_part(single, outputs) for single in singles if len(single.outputs)]
    for at, output in enumerate(outputs):
        if output.routed_experts is not None:
            start, rows = output.routed_experts
            is_small = rows.nbytes <= SMALL_ARRAY_BYTES
            output.routed_experts = None if is_small else np.ascontiguousarray(rows)
            parts.append(_Part([at], len(rows) if is_small else _ALONE, [start], rows if is_small else rows[:0]))
    if not parts:
        return None
    parts.sort(key=lambda part: part.rows.shape[1])
    height, top_k = parts[0].rows.shape[1:]
    count = sum(len(part.indexes) for part in parts)
    num_wide = sum(len(part.indexes) for part in parts if part.rows.shape[1] != height)
    head = (4 + 3 * count) * _WORDS
    packed: NDArray[np.int16] = np.empty(head + sum(part.num_words for part in parts), dtype=np.int16)
    header = packed[:head].view(_HEADER_TYPE)
    header[:4] = count, num_wide, height, top_k
    table, first, at = header[4:].reshape(3, count), 0, head
    for part in parts:
        column = table[:, first : first + len(part.indexes)]
        column[0], column[1], column[2] = part.indexes, part.num_rows, part.starts
        out = packed[at : at + part.num_words].reshape(-1, *part.rows.shape[1:])
        if part.places is None:
            out[:] = part.rows
        else:
            part.rows.take(part.places, axis=0, out=out, mode="clip")
        first, at = first + len(part.indexes), at + part.num_words
    return packed


class _Part(NamedTuple):
    """Entries with one number of rows each."""

    indexes: Sequence[int]
    num_rows: int
    starts: Sequence[int]
    rows: Rows
    places: NDArray[np.int64] | None = None  # of the entries' rows in `rows`; None if they are all of them

    @property
    def num_words(self) -> int:
        num_rows = len(self.rows) if self.places is None else len(self.places)
        return num_rows * int(self.rows.shape[1]) * int(self.rows.shape[2])


def _part(single: SingleRows, outputs: Sequence[Output]) -> _Part:
    if len(single.outputs) == len(outputs) and all(map(is_, single.outputs, outputs)):
        indexes: Sequence[int] = range(len(outputs))
    else:  # there are others, perhaps before them
        index = {id(output): at for at, output in enumerate(outputs)}
        indexes = [index[id(output)] for output in single.outputs]
    return _Part(indexes, 1, single.starts, single.rows, single.places)


class Unpacker:
    """Opens envelopes, of messages whose outputs come in one slice or in several."""

    def __init__(self) -> None:
        self._message: object = None
        self._entries: dict[int, tuple[int, Rows | None]] = {}  # by the output's index in the message
        self._num_outputs = 0  # in slices before

    def open(self, outputs: list[AnyOutput], message: object) -> Mapping[str, Any]:
        """Takes the envelope off `outputs`, the next slice of a message. Gives what it has besides rows. `message`
        tells messages apart, so that what is left of one is never taken for another's."""
        if message != self._message:
            self._message, self._entries, self._num_outputs = message, {}, 0
        if not outputs or outputs[0].request_id != ENVELOPE_ID:
            return {}
        envelope = outputs.pop(0)
        self._entries = {} if envelope.routed_experts is None else _entries(envelope.routed_experts)
        self._num_outputs = 0
        return envelope.kv_transfer_params or {}

    def rows(self, outputs: Sequence[AnyOutput]) -> Iterator[tuple[AnyOutput, int, Rows]]:
        """Takes the rows off the slice's outputs. Gives each output that has some, the position of its first row, and
        its rows. Packed rows are views of the message, so that whoever keeps one keeps the message. Rows without an
        envelope have no position and are dropped."""
        first, self._num_outputs = self._num_outputs, self._num_outputs + len(outputs)
        for index, output in enumerate(outputs, first):
            alone, output.routed_experts = output.routed_experts, None
            if (entry := self._entries.pop(index, None)) is not None:
                start, rows = entry
                if (rows := alone if rows is None else rows) is not None:
                    yield output, start, rows


def _entries(packed: NDArray[np.int16]) -> dict[int, tuple[int, Rows | None]]:
    count, num_wide, height, top_k = packed[: 4 * _WORDS].view(_HEADER_TYPE).tolist()
    table, body = np.split(packed[4 * _WORDS :], [3 * count * _WORDS])
    found: dict[int, tuple[int, Rows | None]] = {}
    first = 0
    for at, (index, num_rows, start) in enumerate(zip(*table.view(_HEADER_TYPE).reshape(3, -1).tolist(), strict=True)):
        if num_rows == _ALONE:
            found[index] = start, None
            continue
        shape = row_shape(height, top_k, with_weights=True) if at >= count - num_wide else (height, top_k)
        end = first + num_rows * shape[0] * shape[1]
        found[index], first = (start, body[first:end].reshape(num_rows, *shape)), end
    return found
