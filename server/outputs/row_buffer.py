"""Buffers the rows of one choice between the engine's outputs and the response."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from routed_experts.capture.wire.envelope import SMALL_ARRAY_BYTES, RunRows
from routed_experts.capture.wire.message import Cause
from routed_experts.protocol.codec import UNKNOWN, Rows
from routed_experts.server.vllm_api import get_logger

logger = get_logger(__name__)

Causes = Counter[Cause]
"""Numbers of unknown rows. Those with `Cause.FAULT` are not counted."""
_NO_CAUSES: Causes = Counter()


def causes_of(buffers: Iterable["RowBuffer"], joined: bool) -> Causes:
    """Why rows of the choices of one prompt are unknown. Its own rows count once, with `joined` for
    each choice."""
    prompt: Causes = Counter()
    choices: Causes = Counter()
    for buffer in buffers:
        prompt = prompt + buffer.prompt_causes if joined else prompt | buffer.prompt_causes
        choices += buffer.own_causes
    return prompt + choices


class RowBuffer:
    """The rows of one choice that arrived from the engine and were not taken yet.

    The outputs of the choice carry it as `CompletionOutput.routed_experts`. So it lives as long as
    they do, and merged outputs lose no rows.

    Every array arrives with the position of its first row. A gap before it is filled with -1, and
    repeated rows are dropped.
    """

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_first",
        "_offers",
        "_only_row",
        "_request_id",
        "_shape",
        "end",
        "num_lost",
        "own_causes",
        "prompt_causes",
    )

    def __init__(self, request_id: str = "") -> None:
        self.num_lost = 0  # rows that did not arrive
        # Why the engine does not know some rows of the prompt, and of the choice. Not changed in
        # place.
        self.prompt_causes = _NO_CAUSES
        self.own_causes = _NO_CAUSES
        self._request_id = request_id
        self._shape: tuple[int, ...] = ()
        # prompt rows from other choices, until the first own row
        self._offers: dict[str, RowBuffer] = {}
        self._arrays: list[Rows] = []  # contiguous and not empty
        # in place of `_arrays`, while nothing else waits: a row by its run and its place in that
        self._only_row: tuple[RunRows, int] | None = None
        self._first = -1  # position of the first row; -1 at first
        # after the last row that has arrived, without prompts from other choices; -1 at first
        self.end = -1

    def push(self, start: int, rows: Rows) -> None:
        """Adds `rows` ([n, L, K]) at position `start`. Copies few rows that wait, to free the
        engine's message."""
        if start != self.end:
            if self.end < 0 and self._offers:
                self._accept(start)
            if self.end < 0:
                self._first = start
                self.end = start
                self._shape = rows.shape[1:]
            elif start > self.end:
                self._append(self._lost(self.end, start - self.end))
            else:
                rows = rows[self.end - start :]
        if len(rows):
            self._append(rows)

    def push_from(self, run: RunRows, place: int, start: int) -> None:
        """As `push`, for the rows of an output of a message."""
        if run.has_single_rows and start == self.end == self._first:  # nothing waits
            self._only_row = run, place
            self.end = start + 1
        else:
            self.push(start, run.of(place))

    def push_prompt(self, sender: str, is_own: bool, start: int, rows: Rows) -> None:
        """As `push`, for prompt rows that the engine sent with the choice `sender` of the same
        prompt. Rows of this choice (`is_own`) take precedence.

        With data parallelism, each engine sends the prompt in its own parts. They are kept apart by
        sender, because this choice may start after the whole prompt of its engine and a part of
        another's.
        """
        if is_own:
            self._offers.clear()
            self.push(start, rows)
        elif self.end < 0:
            self._offers.setdefault(sender, RowBuffer(self._request_id)).push(start, rows)

    def _accept(self, end: int) -> None:
        """Starts with the prompt rows from another choice: complete ones up to `end`, else the
        longest."""
        best = max(self._offers.values(), key=lambda offer: (offer.end == end, offer.end))
        self._offers.clear()
        self._first = best._first
        self.end = best._first
        self._shape = best._shape
        self.num_lost += best.num_lost
        for rows in best._arrays:
            self._append(rows)

    def _append(self, rows: Rows) -> None:
        self._unfold()
        self.end += len(rows)
        if self._arrays:  # never in a stream that is read at once
            self._arrays[-1] = owned_copy(self._arrays[-1])
            rows = owned_copy(rows)
        self._arrays.append(rows)

    def _unfold(self) -> None:
        """Makes an array of a row that waits by its place in a run."""
        if self._only_row is not None:
            run, place = self._only_row
            self._only_row = None
            self._arrays = [run.of(place)]

    def _lost(self, start: int, count: int) -> Rows:
        logger.error(
            "Request %r: %d rows from position %d on did not arrive and are sent as -1.",
            self._request_id,
            count,
            start,
        )
        self.num_lost += count
        return np.full((count, *self._shape), UNKNOWN, dtype=np.int16)

    def take(self, first: int, end: int, shape: tuple[int, int] | None = None) -> list[Rows]:
        """Takes the rows from position `first` to `end`, or fewer if they have not arrived. Drops
        rows before `first`.

        `shape` is (L, K) if no more rows can arrive. Rows that are missing up to `end` are then -1.
        """
        if self.end < 0 and self._offers:  # no own row has arrived
            self._accept(end)
        self._unfold()
        if self._first == first and self.end == end and len(self._arrays) == 1:  # the usual case
            taken = self._arrays
            self._arrays = []
            self._first = end
            return taken
        taken = []
        position = first  # of the next row to take
        if position < self._first:
            position = min(self._first, end)
            if position > first:
                taken.append(self._lost(first, position - first))
        _, waiting = split_at(self._arrays, max(position - self._first, 0))
        arrived, waiting = split_at(waiting, max(end - position, 0))
        taken += arrived
        position += num_rows(arrived)
        self._leave(waiting)
        if shape is not None and position < end:
            self._shape = shape
            taken.append(self._lost(position, end - position))
        return taken

    def take_only_row(self, first: int, end: int) -> tuple[RunRows, int] | None:
        """As `take`, in less time, for a row at position `first` that is all that waits, if `end` is
        the position after it: its run and its place in that. Otherwise None, and nothing is taken."""
        row = self._only_row
        if row is None or self._first != first or self.end != end:
            return None
        self._only_row = None
        self._first = end
        return row

    def _leave(self, waiting: list[Rows]) -> None:
        """Leaves the last of the arrays, of which the first may be a part of one."""
        if waiting and waiting[0] is not self._arrays[-len(waiting)]:
            waiting[0] = waiting[0].copy()  # a view would keep the rows before it alive
        self._arrays = waiting
        self._first = self.end - num_rows(waiting)


_CUT_SHORT = (None, "abort", "error")


def is_complete(finish_reason: str | None) -> bool:
    """Whether every token of a choice but the last has a row, so that a row which has not arrived
    is sent as -1. True also for reasons that vLLM may add: a row too many is counted as missing, a
    row too few would be silently lost."""
    return finish_reason not in _CUT_SHORT


def owned_copy(rows: Rows) -> Rows:
    """`rows` for code that keeps them. Copies small arrays, which are views of the rows of all
    requests; see `pack`."""
    return rows if rows.base is None or rows.nbytes > SMALL_ARRAY_BYTES else rows.copy()


def num_rows(arrays: Iterable[Rows]) -> int:
    return sum(map(len, arrays))


def split_at(arrays: list[Rows], count: int) -> tuple[list[Rows], list[Rows]]:
    """The first `count` rows of `arrays`, and the rest."""
    before: list[Rows] = []
    for index, rows in enumerate(arrays):
        if len(rows) > count:
            if count <= 0:
                return before, arrays[index:]
            return [*before, rows[:count]], [rows[count:], *arrays[index + 1 :]]
        before.append(rows)
        count -= len(rows)
    return before, []
