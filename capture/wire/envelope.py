"""The envelope: a message's first output, with the rows of the others, causes of unknown rows, and
statistics."""

from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire.message import Output, PlacedRows, UnknownRows
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.protocol.codec import Rows

ENVELOPE_ID = "routed_experts"
"""Request id of the envelope, and its `stop_reason`: a client may choose the same request id, but
vLLM's engine puts nothing of clients into `stop_reason`. Its `routed_experts` has what `pack` gave,
and its `kv_transfer_params` what `Notes.encode` gave."""

SMALL_ARRAY_BYTES = 16 << 10
"""Rows up to this size are packed. Larger ones, those of prompts, are cheaper to send without a
copy."""


class Notes(msgspec.Struct, omit_defaults=True):
    """What an envelope says besides rows."""

    unknown: list[UnknownRows] = []  # why rows of this message and of later ones are unknown
    stats: EngineStats | None = None

    def encode(self) -> dict[str, Any]:
        """As vLLM's encoding takes it: dictionaries, lists, numbers, strings and bytes."""
        encoded: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return encoded

    @classmethod
    def decode(cls, encoded: object) -> "Notes":
        """What `encode` was called on; no notes for None. Raises `msgspec.ValidationError` for
        anything else."""
        if encoded is None:
            return cls()
        return msgspec.convert(encoded, cls, builtin_types=(bytes,))


class _Entry(NamedTuple):
    """An entry of the table in an envelope: rows of one output."""

    output: int  # index in the message
    start: int  # position of the first row
    num_rows: int  # or _ON_OUTPUT
    # shape of a row
    height: int
    top_k: int


_ON_OUTPUT = -1
"""Number of rows of an entry whose rows are on the output itself; its rows have the shape (0, 0)
then."""

# columns of a table of entries, int32 [n, 5], in the order of `_Entry`
_OUTPUT = 0
_START = 1
_SHAPE = slice(2, 5)

_INT32 = np.dtype(np.int32)
_INT32_WORDS = _INT32.itemsize // np.dtype(np.int16).itemsize
_ENTRY_WORDS = len(_Entry._fields) * _INT32_WORDS


class SingleRows(NamedTuple):
    """One row for each of many outputs of a message."""

    outputs: Sequence[Output]
    starts: Sequence[int] | NDArray[np.int64]  # position of each row
    step_rows: Rows  # of the step, without weights if those are not asked for
    indexes: Sequence[int] | NDArray[np.int64]  # of each row in `step_rows`

    def table(self, outputs: Sequence[Output]) -> NDArray[np.int32]:
        """The entries [n, 5] of these rows in a message of `outputs`."""
        table = np.empty((len(self.outputs), len(_Entry._fields)), dtype=_INT32)
        if len(self.outputs) == len(outputs) and all(map(is_, self.outputs, outputs)):
            table[:, _OUTPUT] = np.arange(len(outputs))
        else:  # there are others, perhaps before them
            index_of = {id(output): index for index, output in enumerate(outputs)}
            table[:, _OUTPUT] = [index_of[id(output)] for output in self.outputs]
        table[:, _START] = self.starts
        table[:, _SHAPE] = (1, *self.step_rows.shape[1:])
        return table

    def write(self, body: NDArray[np.int16]) -> NDArray[np.int16]:
        """Writes the rows to the beginning of `body`; gives the rest of it."""
        _, height, top_k = self.step_rows.shape
        out = body[: len(self.outputs) * height * top_k].reshape(-1, height, top_k)
        # "clip" writes straight into `out`; with checks of its own, numpy would make a copy first.
        self.step_rows.take(self.indexes, axis=0, out=out, mode="clip")
        return body[out.size :]


def pack(outputs: Sequence[Output], singles: Sequence[SingleRows] = ()) -> NDArray[np.int16] | None:
    """The rows of a message in one array, for its envelope: `singles`, and the `PlacedRows` on
    `outputs`, which are taken off. None if there are none. Large arrays stay on their outputs, and
    are not copied.

    An int32 is the number of entries. Then come the entries, five int32 each, and then the rows of
    each of them, in this order.
    """
    entries, arrays = _take_off(outputs)
    if not entries and not singles:
        return None
    tables = [single.table(outputs) for single in singles]
    tables.append(np.array(entries, dtype=_INT32).reshape(-1, len(_Entry._fields)))
    table = np.concatenate(tables)
    num_words = int(table[:, _SHAPE].prod(axis=1).sum())  # of the rows that are packed
    header_words = _INT32_WORDS + _ENTRY_WORDS * len(table)
    packed = np.empty(header_words + num_words, dtype=np.int16)
    header = packed[:header_words].view(_INT32)
    header[0] = len(table)
    header[1:] = table.reshape(-1)
    body = packed[header_words:]
    for single in singles:
        body = single.write(body)
    for rows in arrays:
        body[: rows.size] = rows.reshape(-1)
        body = body[rows.size :]
    return packed


def _take_off(outputs: Sequence[Output]) -> tuple[list[_Entry], list[Rows]]:
    """The entries of rows that are on `outputs`, and the small arrays, which are taken off."""
    entries = []
    arrays = []
    for index, output in enumerate(outputs):
        placed = output.routed_experts
        if placed is None:
            continue
        assert isinstance(placed, PlacedRows), (
            f"request {output.request_id!r}: expected rows with their position on its output, "
            f"actually {type(placed).__name__}"
        )
        start, rows = placed
        if rows.nbytes > SMALL_ARRAY_BYTES:
            output.routed_experts = np.ascontiguousarray(rows)
            entries.append(_Entry(index, start, _ON_OUTPUT, 0, 0))
        else:
            output.routed_experts = None
            entries.append(_Entry(index, start, *rows.shape))
            arrays.append(rows)
    return entries, arrays


class Unpacker:
    """Opens envelopes, of messages whose outputs come in one slice or in several."""

    def __init__(self) -> None:
        self._message: object = None
        # By the output's index in the message: the position of its first row, and its rows; None if
        # they are on the output.
        self._entries: dict[int, tuple[int, Rows | None]] = {}
        self._num_outputs = 0  # in slices before

    def open(self, outputs: list[Output], message: object) -> object:
        """Takes the envelope off `outputs`, the next slice of a message. Returns its notes, for
        `Notes.decode`; None if there are none. `message` tells messages apart, so that what is left
        of one is never taken for another's."""
        if message != self._message:
            self._message = message
            self._entries = {}
            self._num_outputs = 0
        if not outputs or outputs[0].stop_reason != ENVELOPE_ID:
            return None
        envelope = outputs.pop(0)
        packed = envelope.routed_experts
        self._entries = _unpack(packed) if isinstance(packed, np.ndarray) else {}
        self._num_outputs = 0
        return envelope.kv_transfer_params

    def rows(self, outputs: Sequence[Output]) -> Iterator[tuple[Output, int, Rows]]:
        """Takes the rows off the slice's outputs: each output that has some, the position of its
        first row, and its rows ([n, L, K], with weights [n, 3L, K]). Those that were packed are
        views of the message. Rows without an envelope have no position and are dropped."""
        first = self._num_outputs
        self._num_outputs += len(outputs)
        for index, output in enumerate(outputs, first):
            on_output = output.routed_experts
            output.routed_experts = None
            entry = self._entries.pop(index, None)
            if entry is None:
                continue
            start, rows = entry
            if rows is None and isinstance(on_output, np.ndarray):
                rows = on_output
            if rows is not None:
                yield output, start, rows


def _unpack(packed: NDArray[np.int16]) -> dict[int, tuple[int, Rows | None]]:
    """What `pack` packed, by index of the output."""
    count = int(packed[:_INT32_WORDS].view(_INT32)[0])
    header_words = _INT32_WORDS + _ENTRY_WORDS * count
    table = packed[_INT32_WORDS:header_words].view(_INT32).reshape(count, len(_Entry._fields))
    body = packed[header_words:]
    unpacked: dict[int, tuple[int, Rows | None]] = {}
    begin = 0  # of the entry's rows in `body`
    # a tuple for each entry: as an `_Entry` it would take twice as long
    for output, start, num_rows, height, top_k in table.tolist():
        if num_rows == _ON_OUTPUT:
            unpacked[output] = start, None
            continue
        end = begin + num_rows * height * top_k
        unpacked[output] = start, body[begin:end].reshape(num_rows, height, top_k)
        begin = end
    return unpacked
