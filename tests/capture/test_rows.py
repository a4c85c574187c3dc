"""Ids and weights in one array of words: bit for bit, whatever the bits."""

import numpy as np
import pytest

from routed_experts.capture.wire.rows import (
    combined,
    ids_of,
    missing_weights,
    row_shape,
    weights_of,
)
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


def test_rows_that_are_not_known_or_whose_ids_came_alone() -> None:
    rows = np.full((3, 3 * L, K), -1, dtype=np.int16)
    assert (ids_of(rows) == -1).all()
    assert np.isnan(weights_of(rows)).all()
    ids_of(rows)[1:] = 0
    rows[2] = combined(np.zeros((1, L, K), np.int16), np.ones((1, L, K), np.float32))[0]
    assert missing_weights(rows).tolist() == [True, True, False]
    assert (weights_of(rows[1:2]).view(np.int32) == -1).all()
