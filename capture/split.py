"""Which rows a request is owed after a step."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.message import OptIn, PlacedRows
from routed_experts.protocol.codec import UNKNOWN, Rows


@dataclass(slots=True)
class RequestRows:
    """What a request with the opt-in has been sent.

    Attributes:
        opt_in: what it asked for.
        next_row: absolute position of the first row that has not been sent. Before the request's first token it is that
            of the first prompt row to send.
        generation: of the weights when it came.
        prefilling: whether rows before its next sampling step are in the host cache only: at the start, and again
            after a preemption.
        is_cached: whether generated rows from `next_row` on are left in the host cache, in the request's current
            blocks. Only for a request that needs its rows at its end.
        group_rows: so many rows, besides those held, complete the next group to send.
        held: the last rows before `next_row` that were not sent yet.
    """

    opt_in: OptIn
    next_row: int
    generation: int = 0
    prefilling: bool = True
    is_cached: bool = False
    group_rows: int = 0
    held: list[Rows] = field(default_factory=list)

    def hold(self, rows: Rows) -> None:
        """Keeps `rows`, the last before `next_row`. Copies views, which may be of a step's rows of all requests."""
        if len(rows):
            self.held.append(rows if rows.base is None else rows.copy())
            self.group_rows -= len(rows)

    def take_held(self) -> PlacedRows | None:
        """The held rows; None if there are none."""
        if not self.held:
            return None
        rows, self.held = self.held[0] if len(self.held) == 1 else np.concatenate(self.held), []
        return PlacedRows(self.next_row - len(rows), rows)


@dataclass(slots=True)
class StepPart:
    """A request's share of one step.

    Attributes:
        start: absolute position of the first of `rows`.
        rows: [n, L, K]; rejected drafts may be at the end.
        block_ids: gives the block table when the step was scheduled, if rows before `start` have to be read from the
            host cache. The blocks may be gone by now, but nothing that was scheduled later has been written yet.
    """

    start: int
    rows: Rows
    block_ids: Callable[[], NDArray[np.int64]] | None = None


def step_start(scheduled_start: int, num_tokens: int) -> int:
    """Absolute position of the first token of a step.

    Under asynchronous scheduling a step is scheduled as if all drafts in flight were accepted. When some were
    rejected the step really begins at the last accepted token, and no step ever begins after that one.

    Args:
        scheduled_start: tokens that the scheduler counted as computed when it scheduled the step.
        num_tokens: tokens of the request before this step's are appended.
    """
    return min(scheduled_start, num_tokens - 1)


def take_rows(state: RequestRows, part: StepPart, end: int, cache: HostCache) -> Rows:
    """The rows [n, L, K] that became known with a step, and advances `state` past them.

    Args:
        end: the position behind the last row that is known: the number of accepted tokens, less one.
    """
    first = state.next_row
    if end <= first:
        return part.rows[:0]
    state.next_row = end
    return rows_between(part, first, end, cache)


def rows_between(part: StepPart, first: int, end: int, cache: HostCache) -> Rows:
    """The rows [end - first, L, K] of a request after a step: the step's own, and before them those of the host cache.

    Rows that neither has are -1. If the step brought all of them, they are a view of it.
    """
    own = part.rows[max(first - part.start, 0) : max(end - part.start, 0)]
    if len(own) == end - first:
        return own
    rows = np.empty((end - first, *part.rows.shape[1:]), dtype=np.int16)
    before = max(min(end, part.start) - first, 0)
    if before and part.block_ids is not None:
        cache.read(part.block_ids(), first, rows[:before])
    else:
        rows[:before] = UNKNOWN
    rows[before : before + len(own)] = own
    rows[before + len(own) :] = UNKNOWN
    return rows
