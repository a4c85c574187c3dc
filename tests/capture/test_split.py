"""Which rows a request is owed after a step, position by position."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.message import OptIn
from routed_experts.capture.split import RequestRows, StepPart, rows_between, step_start, take_rows
from routed_experts.protocol.codec import UNKNOWN

BLOCK, L, K = 4, 2, 3
BLOCKS = np.array([3, 1, 2], dtype=np.int64)


def rows_of(first: int, end: int) -> np.ndarray:
    """Rows [n, L, K], each filled with its position."""
    return np.repeat(np.arange(first, end, dtype=np.int16), L * K).reshape(-1, L, K)


def cache_of(known: set[int]) -> HostCache:
    """Rows of a sequence in the blocks 3, 1 and 2. Each is filled with 100 plus its position."""
    cache = HostCache(num_blocks=6, block_size=BLOCK, num_layers=L, top_k=K)
    for position in known:
        slot = BLOCKS[position // BLOCK] * BLOCK + position % BLOCK
        cache.write(np.array([slot]), rows_of(100 + position, 101 + position))
    return cache


def test_step_start() -> None:
    """In a prefill chunk, decoding, and where drafts were rejected after the step was scheduled."""
    assert [step_start(4, 7), step_start(7, 8), step_start(11, 9)] == [4, 7, 8]


@settings(max_examples=250, deadline=None, database=None, derandomize=True)
@given(
    st.integers(0, 12),
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 5), st.integers(0, 12), st.booleans()), min_size=1, max_size=3
    ),
    st.sets(st.integers(0, 11)),
)
def test_rows_of_a_step_and_of_the_cache(
    next_row: int, steps: list[tuple[int, int, int, bool]], known: set[int]
) -> None:
    """Prefix hits, chunks, rejected drafts, preemptions and lost rows alike: the step's own rows; before them the
    cache's, if there is a block table; otherwise unknown."""
    cache, state = cache_of(known), RequestRows(OptIn(0, bytes(16), shared=False), next_row)
    for start, count, end, has_table in steps:
        part = StepPart(start, rows_of(start, start + count), (lambda: BLOCKS) if has_table else None)
        expected = []
        for at in range(state.next_row, end):
            if start <= at < start + count:
                expected.append(at)
            else:
                expected.append(100 + at if at < start and has_table and at in known else UNKNOWN)
        between = rows_between(part, state.next_row, end, cache) if end > state.next_row else rows_of(0, 0)
        end = max(end, state.next_row)
        rows = take_rows(state, part, end, cache)
        assert state.next_row == end
        assert rows.dtype == np.int16
        assert rows.shape == (len(expected), L, K)
        assert np.array_equal(rows, between)
        assert (rows == np.array(expected, dtype=np.int16).reshape(-1, 1, 1)).all()


def test_rows_of_the_step_alone_are_not_copied() -> None:
    part = StepPart(3, rows_of(3, 9))
    assert np.shares_memory(rows_between(part, 4, 8, cache_of(set())), part.rows)
