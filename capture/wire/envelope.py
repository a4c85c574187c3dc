"""The envelope: a message's first output, with the rows of the others, causes of unknown rows, and
statistics."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from operator import is_, itemgetter
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


class _Run(NamedTuple):
    """Some outputs beside each other in an envelope, of whose rows each array has one shape."""

    num_outputs: int
    num_rows: int  # of each output; or _ON_OUTPUT
    # shape of a row
    height: int
    top_k: int


_ON_OUTPUT = -1
"""Number of rows in a run whose rows are on the output itself, of which there is one; its rows have
the shape (0, 0) then."""

# columns of the places of outputs, int32 [n, 2]
_INDEX = 0  # of the output in the message
_START = 1  # position of its first row
_PLACE_COLUMNS = 2

_INT32 = np.dtype(np.int32)
_INT32_WORDS = _INT32.itemsize // np.dtype(np.int16).itemsize
_HEADER_WORDS = 2 * _INT32_WORDS
"""The number of runs, and of places."""


class SingleRows(NamedTuple):
    """One row for each of many outputs of a message."""

    outputs: Sequence[Output]
    starts: Sequence[int] | NDArray[np.int64]  # position of each row
    step_rows: Rows  # of the step, without weights if those are not asked for
    indexes: Sequence[int] | NDArray[np.int64]  # of each row in `step_rows`

    def run(self) -> _Run:
        _, height, top_k = self.step_rows.shape
        return _Run(len(self.outputs), 1, height, top_k)

    def places(self, outputs: Sequence[Output]) -> NDArray[np.int32]:
        """The place [n, 2] of each of these rows in a message of `outputs`."""
        places = np.empty((len(self.outputs), _PLACE_COLUMNS), dtype=_INT32)
        if len(self.outputs) == len(outputs) and all(map(is_, self.outputs, outputs)):
            places[:, _INDEX] = np.arange(len(outputs))
        else:  # there are others, perhaps before them
            index_of = {id(output): index for index, output in enumerate(outputs)}
            places[:, _INDEX] = [index_of[id(output)] for output in self.outputs]
        places[:, _START] = self.starts
        return places

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

    Two int32 are the number of runs and of outputs with rows. Then come the runs, four int32 each,
    the places of the outputs, run by run, two int32 each, and in this order the rows.
    """
    runs, places, arrays = _take_off(outputs)
    if not runs and not singles:
        return None
    runs = [*(single.run() for single in singles), *runs]
    all_runs = np.array(runs, dtype=_INT32)
    all_places = np.concatenate(
        [
            *(single.places(outputs) for single in singles),
            np.array(places, dtype=_INT32).reshape(-1, _PLACE_COLUMNS),
        ]
    )
    num_words = sum(map(math.prod, runs))  # of rows on an output: 0
    runs_end = _HEADER_WORDS + _INT32_WORDS * all_runs.size
    places_end = runs_end + _INT32_WORDS * all_places.size
    packed = np.empty(places_end + num_words, dtype=np.int16)
    packed[:_HEADER_WORDS].view(_INT32)[:] = len(all_runs), len(all_places)
    packed[_HEADER_WORDS:runs_end].view(_INT32)[:] = all_runs.reshape(-1)
    packed[runs_end:places_end].view(_INT32)[:] = all_places.reshape(-1)
    body = packed[places_end:]
    for single in singles:
        body = single.write(body)
    if arrays:
        np.concatenate([rows.reshape(-1) for rows in arrays], out=body)
    return packed


def _take_off(
    outputs: Sequence[Output],
) -> tuple[list[_Run], list[tuple[int, int]], list[Rows]]:
    """The runs and places of rows that are on `outputs`, and the small arrays, which are taken off.
    Arrays of one shape are a run."""
    runs = []
    places = []
    small = []
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
            runs.append(_Run(1, _ON_OUTPUT, 0, 0))
            places.append((index, start))
        else:
            output.routed_experts = None
            small.append((rows.shape, (index, start), rows))
    small.sort(key=itemgetter(0))
    for shape, alike in groupby(small, key=itemgetter(0)):
        begin = len(places)
        places += [place for _, place, _ in alike]
        runs.append(_Run(len(places) - begin, *shape))
    return runs, places, [rows for _, _, rows in small]


class RunRows:
    """The rows of the outputs of a run: [outputs, n, L, K], n of each output. Views of the message.

    A buffer keeps the run and the output's place in it, which takes less time than an array for
    each output.
    """

    __slots__ = ("arrays", "has_single_rows", "made")

    def __init__(self, arrays: NDArray[np.int16]) -> None:
        self.arrays = arrays
        self.has_single_rows = arrays.shape[1] == 1
        # What readers have made of all rows at once, by keys of theirs: that takes less time, too.
        self.made: dict[Any, Any] = {}

    def of(self, place: int) -> Rows:
        """The rows of an output, [n, L, K]."""
        rows: Rows = self.arrays[place]
        return rows


_Entry = tuple[int, RunRows | None, int]
"""Of an output: the position of its first row, its run, and its place in that. The run is None if
the rows are on the output itself."""


class Unpacker:
    """Opens envelopes, of messages whose outputs come in one slice or in several."""

    def __init__(self) -> None:
        self._message: object = None
        self._entries: dict[int, _Entry] = {}  # by the output's index in the message
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

    def rows(self, outputs: Sequence[Output]) -> Iterator[tuple[Output, int, RunRows, int]]:
        """Takes the rows off the slice's outputs: each output that has some, the position of its
        first row, and where its rows are, which have weights if they are [n, 3L, K]. Rows without
        an envelope have no position and are dropped."""
        first = self._num_outputs
        self._num_outputs += len(outputs)
        for index, output in enumerate(outputs, first):
            on_output = output.routed_experts
            output.routed_experts = None
            entry = self._entries.pop(index, None)
            if entry is None:
                continue
            start, run, place = entry
            if run is None and isinstance(on_output, np.ndarray):
                run = RunRows(on_output[np.newaxis])
            if run is not None:
                yield output, start, run, place


def _unpack(packed: NDArray[np.int16]) -> dict[int, _Entry]:
    """What `pack` packed, by index of the output."""
    num_runs, num_places = packed[:_HEADER_WORDS].view(_INT32).tolist()
    runs_end = _HEADER_WORDS + _INT32_WORDS * len(_Run._fields) * num_runs
    places_end = runs_end + _INT32_WORDS * _PLACE_COLUMNS * num_places
    runs = packed[_HEADER_WORDS:runs_end].view(_INT32).reshape(-1, len(_Run._fields)).tolist()
    places = packed[runs_end:places_end].view(_INT32).reshape(-1, _PLACE_COLUMNS)
    indexes = places[:, _INDEX].tolist()
    starts = places[:, _START].tolist()
    body = packed[places_end:]
    unpacked: dict[int, _Entry] = {}
    begin = 0  # of the run's outputs among all
    for num_outputs, num_rows, height, top_k in runs:
        run = None
        if num_rows != _ON_OUTPUT:
            shape = num_outputs, num_rows, height, top_k
            size = math.prod(shape)
            run = RunRows(body[:size].reshape(shape))
            body = body[size:]
        end = begin + num_outputs
        entries = zip(starts[begin:end], repeat(run), range(num_outputs), strict=False)
        unpacked.update(zip(indexes[begin:end], entries, strict=True))
        begin = end
    return unpacked
