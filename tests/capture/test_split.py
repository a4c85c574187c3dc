"""Which rows a request is owed after a step."""

from typing import Any

import numpy as np
import pytest

from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.message import OptIn
from routed_experts.capture.split import RequestRows, StepPart, rows_between, step_start, take_rows
from routed_experts.protocol.codec import UNKNOWN

BLOCK, L, K = 4, 2, 3
BLOCKS = np.array([3, 1, 2], dtype=np.int64)


def rows_of(first: int, end: int) -> np.ndarray:
    """Rows [n, L, K] that say which position they belong to."""
    return np.repeat(np.arange(first, end, dtype=np.int16), L * K).reshape(-1, L, K)


def positions(rows: np.ndarray) -> list[int]:
    assert rows.shape[1:] == (L, K)
    assert rows.dtype == np.int16
    return [int(value) for value in rows[:, 0, 0]]


def request(next_row: int) -> RequestRows:
    return RequestRows(OptIn(0, bytes(16), shared=False), next_row)


@pytest.fixture
def cache() -> HostCache:
    """Positions 0 to 9 of a sequence in the blocks 3, 1 and 2."""
    cache = HostCache(num_blocks=6, block_size=BLOCK, num_layers=L, top_k=K)
    for position in range(10):
        slot = BLOCKS[position // BLOCK] * BLOCK + position % BLOCK
        cache.write(np.array([slot]), rows_of(position, position + 1))
    return cache


@pytest.mark.parametrize(
    ("scheduled", "tokens", "start"),
    [
        pytest.param(0, 7, 0, id="first prefill chunk"),
        pytest.param(4, 7, 4, id="later prefill chunk"),
        pytest.param(7, 8, 7, id="decoding"),
        pytest.param(11, 9, 8, id="drafts that were rejected meanwhile"),
        pytest.param(8, 9, 8, id="no draft rejected"),
    ],
)
def test_step_start(scheduled: int, tokens: int, start: int) -> None:
    assert step_start(scheduled, tokens) == start


def test_whole_prompt_in_one_step(cache: HostCache) -> None:
    state = request(next_row=0)
    assert positions(take_rows(state, StepPart(0, rows_of(0, 5)), end=5, cache=cache)) == [0, 1, 2, 3, 4]
    assert state.next_row == 5


def test_prompt_start_leaves_rows_out(cache: HostCache) -> None:
    state = request(next_row=3)
    assert positions(take_rows(state, StepPart(0, rows_of(0, 5)), end=5, cache=cache)) == [3, 4]


def test_prompt_start_at_the_end_of_the_prompt(cache: HostCache) -> None:
    state = request(next_row=5)
    assert positions(take_rows(state, StepPart(0, rows_of(0, 5)), end=5, cache=cache)) == []
    assert positions(take_rows(state, StepPart(5, rows_of(5, 6)), end=6, cache=cache)) == [5]


def test_decoding_brings_a_row_a_step(cache: HostCache) -> None:
    state = request(next_row=5)
    for position in (5, 6, 7):
        part = StepPart(position, rows_of(position, position + 1))
        assert positions(take_rows(state, part, end=position + 1, cache=cache)) == [position]


def test_a_prefix_comes_from_the_host_cache(cache: HostCache) -> None:
    """A prefix hit, or earlier chunks of the prefill."""
    state = request(next_row=0)
    part = StepPart(6, rows_of(6, 9), block_ids=lambda: BLOCKS)
    assert positions(take_rows(state, part, end=9, cache=cache)) == list(range(9))


def test_prompt_start_within_the_prefix(cache: HostCache) -> None:
    state = request(next_row=5)
    part = StepPart(6, rows_of(6, 9), block_ids=lambda: BLOCKS)
    assert positions(take_rows(state, part, end=9, cache=cache)) == [5, 6, 7, 8]


def test_holes_in_the_prefix_are_unknown(cache: HostCache) -> None:
    cache._written_by_slot[BLOCKS[1] * BLOCK] = False  # position 4
    state = request(next_row=2)
    part = StepPart(6, rows_of(6, 8), block_ids=lambda: BLOCKS)
    assert positions(take_rows(state, part, end=8, cache=cache)) == [2, 3, UNKNOWN, 5, 6, 7]


def test_a_gap_without_a_block_table_is_unknown(cache: HostCache) -> None:
    state = request(next_row=2)
    assert positions(take_rows(state, StepPart(4, rows_of(4, 6)), end=6, cache=cache)) == [UNKNOWN, UNKNOWN, 4, 5]
    assert state.next_row == 6


@pytest.mark.parametrize(("block_ids", "expected"), [(lambda: BLOCKS, [2, 3]), (None, [UNKNOWN, UNKNOWN])])
def test_no_more_than_is_known_is_read(cache: HostCache, block_ids: Any, expected: list[int]) -> None:
    """The end lies before the step's first row."""
    state = request(next_row=2)
    part = StepPart(6, rows_of(6, 8), block_ids)
    assert positions(take_rows(state, part, end=4, cache=cache)) == expected
    assert state.next_row == 4


def test_rows_that_a_step_did_not_bring_are_unknown(cache: HostCache) -> None:
    state = request(next_row=4)
    assert positions(take_rows(state, StepPart(4, rows_of(4, 5)), end=7, cache=cache)) == [4, UNKNOWN, UNKNOWN]


def test_a_step_before_what_is_owed(cache: HostCache) -> None:
    """The whole of a gap is unknown, and none of it is taken from rows of other positions."""
    state = request(next_row=8)
    assert positions(take_rows(state, StepPart(4, rows_of(4, 6)), end=9, cache=cache)) == [UNKNOWN]


@pytest.mark.parametrize("first", range(9))
def test_rows_of_a_step_and_of_the_cache(cache: HostCache, first: int) -> None:
    part = StepPart(6, rows_of(6, 9), block_ids=lambda: BLOCKS)
    for end in range(first, 9):
        assert positions(rows_between(part, first, end, cache)) == list(range(first, end))


def test_rows_of_the_cache_alone(cache: HostCache) -> None:
    part = StepPart(8, rows_of(8, 9), block_ids=lambda: BLOCKS)
    assert positions(rows_between(part, 2, 5, cache)) == [2, 3, 4]


def test_rows_that_a_step_brought_are_not_copied(cache: HostCache) -> None:
    part = StepPart(3, rows_of(3, 9))
    assert np.shares_memory(rows_between(part, 4, 8, cache), part.rows)


def test_rejected_drafts_are_clipped(cache: HostCache) -> None:
    """A step of the last token and three drafts, of which one was accepted: two tokens, two rows."""
    state = request(next_row=5)
    part = StepPart(5, rows_of(5, 9))
    assert positions(take_rows(state, part, end=7, cache=cache)) == [5, 6]
    assert positions(take_rows(state, StepPart(7, rows_of(7, 11)), end=8, cache=cache)) == [7]


def test_a_step_scheduled_before_the_rejection_was_known(cache: HostCache) -> None:
    """It was scheduled at 9, and began at 7: the rows of 7 and 8 are its first two."""
    state = request(next_row=7)
    part = StepPart(step_start(9, num_tokens=8), rows_of(7, 11))
    assert positions(take_rows(state, part, end=9, cache=cache)) == [7, 8]


def test_nothing_is_sent_twice(cache: HostCache) -> None:
    state = request(next_row=6)
    assert positions(take_rows(state, StepPart(3, rows_of(3, 6)), end=6, cache=cache)) == []
    assert positions(take_rows(state, StepPart(3, rows_of(3, 6)), end=4, cache=cache)) == []
    assert state.next_row == 6


def test_after_a_preemption(cache: HostCache) -> None:
    """The prefill is done again; rows that were sent are not, and those in between are read."""
    state = request(next_row=6)  # 0 to 5 were sent before
    part = StepPart(8, rows_of(8, 9), block_ids=lambda: BLOCKS)
    assert positions(take_rows(state, part, end=9, cache=cache)) == [6, 7, 8]
    again = request(next_row=6)
    assert positions(take_rows(again, StepPart(0, rows_of(0, 7)), end=7, cache=cache)) == [6]
