"""The envelope: a message's first output, with the rows of the others, causes of unknown rows, and
statistics."""

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import Rows

ENVELOPE_ID = "routed_experts"
"""Request id of the envelope, and its `stop_reason`: a client may choose the same request id, but
vLLM's engine puts nothing of clients into `stop_reason`. `routed_experts` has what `pack` gave, and
`kv_transfer_params` may have CAUSES and STATS."""

CAUSES, STATS = "causes", "stats"
"""A list of `UnknownRows`: why rows of this message and of later ones are unknown. The fields of an
`EngineStats`."""

SMALL_ARRAY_BYTES = 16 << 10
"""Rows up to this size are packed. Larger ones, those of prompts, are cheaper to send without a
copy."""

_TABLE_TYPE = np.dtype(np.int32)
_WORDS = _TABLE_TYPE.itemsize // np.dtype(np.int16).itemsize
_COLUMNS = 5
_ALONE = -1  # in place of a number of rows: they are on their own output


Output = Any
"""A request's part of the engine's message for a step: vLLM's `EngineCoreOutput`."""


class SingleRows(NamedTuple):
    """One row for each of many outputs of a message."""

    outputs: Sequence[Output]
    starts: Sequence[int] | NDArray[np.int64]  # position of each row
    rows: Rows  # of the step, without weights if those are not asked for
    places: Sequence[int] | NDArray[np.int64]  # index of each row in `rows`

    def table(self, outputs: Sequence[Output]) -> NDArray[np.int32]:
        """What `pack` says of these rows in a message of `outputs`."""
        table = np.empty((len(self.outputs), _COLUMNS), dtype=_TABLE_TYPE)
        if len(self.outputs) == len(outputs) and all(map(is_, self.outputs, outputs)):
            table[:, 0] = np.arange(len(outputs))
        else:  # there are others, perhaps before them
            index = {id(output): at for at, output in enumerate(outputs)}
            table[:, 0] = [index[id(output)] for output in self.outputs]
        table[:, 1] = self.starts
        table[:, 2:] = 1, *self.rows.shape[1:]
        return table


def pack(outputs: Sequence[Output], singles: Sequence[SingleRows] = ()) -> NDArray[np.int16] | None:
    """The rows of a message in one array, for its envelope: `singles`, and the `PlacedRows` on
    `outputs`, which are taken off. None if there are none. Large arrays stay on their outputs, and
    are not copied.

    An int32 is the number of entries. In a table of int32 follow for each of them the index of its
    output, the position of its first row, and the shape of its rows; then come all rows.
    """
    tables = [single.table(outputs) for single in singles]
    bodies: list[tuple[Rows, Any]] = [(single.rows, single.places) for single in singles]
    entries = []
    for at, output in enumerate(outputs):
        if output.routed_experts is not None:
            start, rows = output.routed_experts
            if rows.nbytes > SMALL_ARRAY_BYTES:
                output.routed_experts = np.ascontiguousarray(rows)
                entries.append((at, start, _ALONE, 0, 0))
            else:
                output.routed_experts = None
                entries.append((at, start, *rows.shape))
                bodies.append((rows, slice(None)))
    if not entries and not tables:
        return None
    table = np.concatenate([*tables, np.array(entries, dtype=_TABLE_TYPE).reshape(-1, _COLUMNS)])
    at = (1 + table.size) * _WORDS
    packed = np.empty(at + int(table[:, 2:].prod(axis=1).sum()), dtype=np.int16)
    header = packed[:at].view(_TABLE_TYPE)
    header[0], header[1:] = len(table), table.reshape(-1)
    for rows, places in bodies:
        count = len(rows) if isinstance(places, slice) else len(places)
        out = packed[at : at + count * rows.shape[1] * rows.shape[2]].reshape(
            count, *rows.shape[1:]
        )
        if isinstance(places, slice):
            out[:] = rows
        else:
            rows.take(places, axis=0, out=out, mode="clip")
        at += out.size
    return packed


class Unpacker:
    """Opens envelopes, of messages whose outputs come in one slice or in several."""

    def __init__(self) -> None:
        self._message: object = None
        # by the output's index in the message
        self._entries: dict[int, tuple[int, Rows | None]] = {}
        self._num_outputs = 0  # in slices before

    def open(self, outputs: list[Output], message: object) -> Mapping[str, Any]:
        """Takes the envelope off `outputs`, the next slice of a message. Gives what it has besides
        rows. `message` tells messages apart, so that what is left of one is never taken for
        another's."""
        if message != self._message:
            self._message, self._entries, self._num_outputs = message, {}, 0
        if not outputs or outputs[0].stop_reason != ENVELOPE_ID:
            return {}
        envelope = outputs.pop(0)
        self._entries = {} if envelope.routed_experts is None else _entries(envelope.routed_experts)
        self._num_outputs = 0
        return envelope.kv_transfer_params or {}

    def rows(self, outputs: Sequence[Output]) -> Iterator[tuple[Output, int, Rows]]:
        """Takes the rows off the slice's outputs: each output that has some, the position of its
        first row, and its rows. Packed ones are views of the message. Rows without an envelope have
        no position and are dropped."""
        first, self._num_outputs = self._num_outputs, self._num_outputs + len(outputs)
        for index, output in enumerate(outputs, first):
            alone, output.routed_experts = output.routed_experts, None
            if (entry := self._entries.pop(index, None)) is not None:
                start, rows = entry
                if (rows := alone if rows is None else rows) is not None:
                    yield output, start, rows


def _entries(packed: NDArray[np.int16]) -> dict[int, tuple[int, Rows | None]]:
    at = (1 + _COLUMNS * int(packed[:_WORDS].view(_TABLE_TYPE)[0])) * _WORDS
    entries: dict[int, tuple[int, Rows | None]] = {}
    for index, start, count, height, top_k in (
        packed[_WORDS:at].view(_TABLE_TYPE).reshape(-1, _COLUMNS).tolist()
    ):
        rows = None
        if count != _ALONE:
            rows = packed[at : at + count * height * top_k].reshape(count, height, top_k)
            at += rows.size
        entries[index] = start, rows
    return entries
