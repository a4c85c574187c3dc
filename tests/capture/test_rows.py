"""Ids, weights and steps in one array of words: bit for bit, whatever the bits."""

import numpy as np
import pytest

from routed_experts.capture.wire.rows import (
    combined,
    ids_of,
    row_shape,
    steps_of,
    weights_of,
    with_steps,
    without_steps,
)
from routed_experts.protocol.codec import UNKNOWN_STEP
from tests.capture.test_capturer import ODD

L, K = 3, 5


@pytest.mark.parametrize("count", [0, 1, 7])
def test_ids_and_weights_of_rows(count: int) -> None:
    ids = np.arange(count * L * K, dtype=np.int16).reshape(count, L, K)
    bits = np.random.default_rng(0).choice(ODD, size=(count, L, K))
    rows = combined(ids, bits.view(np.float32))
    assert rows.shape == (count, *row_shape(L, K, with_weights=True)) == (count, 3 * L, K)
    assert np.array_equal(ids_of(rows), ids)
    assert np.array_equal(weights_of(rows).view(np.int32), bits)
    assert row_shape(L, K, with_weights=False) == (L, K)


def test_rows_that_are_not_known() -> None:
    rows = np.full((3, 3 * L, K), -1, dtype=np.int16)
    assert (ids_of(rows) == -1).all()
    assert np.isnan(weights_of(rows)).all()


@pytest.mark.parametrize("top_k", [1, 2, K])
@pytest.mark.parametrize("weights", [False, True])
def test_steps_of_rows(top_k: int, weights: bool) -> None:
    steps = np.array([[0, 1, 0xFFFF], [0x10000, 0x89ABCDEF, UNKNOWN_STEP]], np.uint32)
    ids = np.arange(6 * L * top_k, dtype=np.int16).reshape(6, L, top_k)
    rows = combined(ids, ids.astype(np.float32)) if weights else ids
    runs = with_steps(rows.reshape(2, 3, *rows.shape[1:]), steps)  # of several outputs
    joined = runs.reshape(6, *row_shape(L, top_k, weights, with_step=True))
    assert steps_of(joined).tolist() == steps.ravel().tolist()
    assert np.array_equal(without_steps(joined), rows)
    if weights:
        assert np.array_equal(ids_of(joined), ids)
        assert np.array_equal(weights_of(joined), ids)
    unknown = np.full_like(joined, -1)
    assert set(steps_of(unknown).tolist()) == {UNKNOWN_STEP}
    assert len(steps_of(with_steps(rows[:0], steps.ravel()[:0]))) == 0
