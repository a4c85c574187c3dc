"""The envelope: a message's first output, with the rows of the others, causes of unknown rows, and
statistics."""

import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from operator import is_, itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire.message import Output, PlacedRows, UnknownRows
from routed_experts.capture.wire.rows import with_steps
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.protocol.codec import Rows, Steps

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
    num_rows: int  # of each output
    # shape of a row; (0, 0) if the rows are on the output itself, of which there is one
    height: int
    top_k: int
    has_steps: int  # 1, or 0

    @property
    def num_words(self) -> int:
        return self.num_outputs * self.num_rows * self.height * self.top_k


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
    step: int | None = None  # which computed them, if steps are asked for

    def run(self) -> _Run:
        _, height, top_k = self.step_rows.shape
        return _Run(len(self.outputs), 1, height, top_k, self.step is not None)

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

    Two int32 are the number of runs and of outputs with rows. Then come the runs, five int32 each,
    the places of the outputs, run by run, two int32 each, and in this order the rows, and the steps
    of the runs that have some.
    """
    runs, places, arrays, steps = _take_off(outputs)
    if not runs and not singles:
        return None
    runs = [*(single.run() for single in singles), *runs]
    of_singles = [
        np.full(len(single.outputs), single.step, np.uint32)
        for single in singles
        if single.step is not None
    ]
    packed_steps = _pack_steps([*of_singles, *steps])
    all_runs = np.array(runs, dtype=_INT32)
    all_places = np.concatenate(
        [
            *(single.places(outputs) for single in singles),
            np.array(places, dtype=_INT32).reshape(-1, _PLACE_COLUMNS),
        ]
    )
    num_words = sum(run.num_words for run in runs)
    runs_end = _HEADER_WORDS + _INT32_WORDS * all_runs.size
    places_end = runs_end + _INT32_WORDS * all_places.size
    rows_end = places_end + num_words
    packed = np.empty(rows_end + len(packed_steps), dtype=np.int16)
    packed[:_HEADER_WORDS].view(_INT32)[:] = len(all_runs), len(all_places)
    packed[_HEADER_WORDS:runs_end].view(_INT32)[:] = all_runs.reshape(-1)
    packed[runs_end:places_end].view(_INT32)[:] = all_places.reshape(-1)
    body = packed[places_end:rows_end]
    for single in singles:
        body = single.write(body)
    if arrays:
        np.concatenate([rows.reshape(-1) for rows in arrays], out=body)
    packed[rows_end:] = packed_steps
    return packed


def _pack_steps(steps: Sequence[Steps]) -> NDArray[np.int16]:
    """Rows of one step, and of steps that follow each other, take next to nothing this way."""
    if not steps:
        return np.empty(0, dtype=np.int16)
    differences = np.diff(np.concatenate(steps), prepend=np.uint32(0))
    compressed = zlib.compress(differences.tobytes(), level=1)
    return np.frombuffer(compressed + bytes(len(compressed) % 2), dtype=np.int16)


def _unpack_steps(packed: NDArray[np.int16]) -> Steps:
    if not len(packed):
        return np.empty(0, dtype=np.uint32)
    differences = zlib.decompressobj().decompress(packed.tobytes())
    return np.cumsum(np.frombuffer(differences, np.uint32), dtype=np.uint32)


def _take_off(
    outputs: Sequence[Output],
) -> tuple[list[_Run], list[tuple[int, int]], list[Rows], list[Steps]]:
    """The runs and places of rows that are on `outputs`, the small arrays, which are taken off, and
    the steps of all. Arrays of one shape are a run, apart from those with steps."""
    runs = []
    places = []
    small = []
    steps = []
    for index, output in enumerate(outputs):
        placed = output.routed_experts
        if placed is None:
            continue
        assert isinstance(placed, PlacedRows), (
            f"request {output.request_id!r}: expected rows with their position on its output, "
            f"actually {type(placed).__name__}"
        )
        start, rows, of_rows = placed
        has_steps = of_rows is not None
        if rows.nbytes > SMALL_ARRAY_BYTES:
            output.routed_experts = np.ascontiguousarray(rows)
            runs.append(_Run(1, len(rows), 0, 0, has_steps))
            places.append((index, start))
            if of_rows is not None:
                steps.append(of_rows)
        else:
            output.routed_experts = None
            small.append(((*rows.shape, has_steps), (index, start), placed))
    small.sort(key=itemgetter(0))
    for form, alike in groupby(small, key=itemgetter(0)):
        begin = len(places)
        places += [place for _, place, _ in alike]
        runs.append(_Run(len(places) - begin, *form))
    steps += [placed.steps for _, _, placed in small if placed.steps is not None]
    return runs, places, [placed.rows for _, _, placed in small], steps


class RunRows:
    """The rows of the outputs of a run: [outputs, n, L, K], n of each output. Views of the message;
    copies if they have steps.

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


_Entry = tuple[int, RunRows | None, int, Steps | None]
"""Of an output: the position of its first row, its run, and its place in that. The run is None if
the rows are on the output itself; their steps are the last, if they have some."""


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
        first row, and where its rows are, which have weights and steps as `rows` says. Rows without
        an envelope have no position and are dropped."""
        first = self._num_outputs
        self._num_outputs += len(outputs)
        for index, output in enumerate(outputs, first):
            on_output = output.routed_experts
            output.routed_experts = None
            entry = self._entries.pop(index, None)
            if entry is None:
                continue
            start, run, place, steps = entry
            if run is None and isinstance(on_output, np.ndarray):
                on_output = on_output if steps is None else with_steps(on_output, steps)
                run = RunRows(on_output[np.newaxis])
            if run is not None:
                yield output, start, run, place


def _unpack(packed: NDArray[np.int16]) -> dict[int, _Entry]:
    """What `pack` packed, by index of the output."""
    num_runs, num_places = packed[:_HEADER_WORDS].view(_INT32).tolist()
    runs_end = _HEADER_WORDS + _INT32_WORDS * len(_Run._fields) * num_runs
    places_end = runs_end + _INT32_WORDS * _PLACE_COLUMNS * num_places
    columns = packed[_HEADER_WORDS:runs_end].view(_INT32).reshape(-1, len(_Run._fields))
    runs = [_Run(*run) for run in columns.tolist()]
    places = packed[runs_end:places_end].view(_INT32).reshape(-1, _PLACE_COLUMNS)
    indexes = places[:, _INDEX].tolist()
    starts = places[:, _START].tolist()
    body = packed[places_end:]
    all_steps = _unpack_steps(body[sum(run.num_words for run in runs) :])
    unpacked: dict[int, _Entry] = {}
    begin = 0  # of the run's outputs among all
    for run in runs:
        rows = body[: run.num_words].reshape(run[:4])
        body = body[run.num_words :]
        steps = None
        if run.has_steps:
            steps = all_steps[: run.num_outputs * run.num_rows]
            all_steps = all_steps[len(steps) :]
        run_rows = None
        if run.height:
            if steps is not None:
                rows = with_steps(rows, steps.reshape(run.num_outputs, run.num_rows))
            run_rows = RunRows(rows)
        end = begin + run.num_outputs
        entries = zip(
            starts[begin:end], repeat(run_rows), range(run.num_outputs), repeat(steps), strict=False
        )
        unpacked.update(zip(indexes[begin:end], entries, strict=True))
        begin = end
    return unpacked
