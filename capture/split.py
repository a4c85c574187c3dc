"""Which rows a request is owed after a step, and where the prompt ends among them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.rows import with_unknown


@dataclass(slots=True)
class RequestRows:
    """What a request with the opt-in has been sent.

    Attributes:
        next_row: absolute position of the first row that has not been sent.
        prefilling: whether rows before its next sampling step are in the host cache only: at the start, and again
            after a preemption.
    """

    next_row: int
    prefilling: bool = True


@dataclass(slots=True)
class StepPart:
    """A request's share of one step.

    Attributes:
        start: absolute position of the first of `rows`.
        rows: [n, L, K]; rejected drafts may be at the end.
        block_ids: the block table when the step was scheduled, if rows before `start` have to be read from the
            host cache. The blocks may be gone by now, but nothing that was scheduled later has been written yet.
    """

    start: int
    rows: NDArray[np.int16]
    block_ids: NDArray[np.int64] | None = None


def step_start(scheduled_start: int, num_tokens: int) -> int:
    """Absolute position of the first token of a step.

    Under asynchronous scheduling a step is scheduled as if all drafts in flight were accepted. When some were
    rejected the step really begins at the last accepted token, and no step ever begins after that one.

    Args:
        scheduled_start: tokens that the scheduler counted as computed when it scheduled the step.
        num_tokens: tokens of the request before this step's are appended.
    """
    return min(scheduled_start, num_tokens - 1)


def take_rows(state: RequestRows, part: StepPart, end: int, cache: HostCache) -> NDArray[np.int16]:
    """The rows [n, L, K] that became known with a step, and advances `state` past them.

    Args:
        end: the position behind the last row that is known: the number of accepted tokens, less one.
    """
    first = state.next_row
    if end <= first:
        return part.rows[:0]
    state.next_row = end
    own = part.rows[max(first - part.start, 0) : max(end - part.start, 0)]
    if len(own) == end - first:
        return own
    pieces = []
    if first < part.start:
        until = min(end, part.start)
        if part.block_ids is None:
            pieces.append(with_unknown(part.rows[:0], until - first))
        else:
            pieces.append(cache.read(part.block_ids, first, until))
    pieces.append(own)
    return with_unknown(np.concatenate(pieces), end - first)


def split_at_prompt(
    rows: NDArray[np.int16], prompt_start: int, num_prompt_tokens: int
) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Prompt rows and generated rows of `rows`, whose first row is at position `prompt_start`."""
    cut = num_prompt_tokens - prompt_start
    return rows[:cut], rows[cut:]
