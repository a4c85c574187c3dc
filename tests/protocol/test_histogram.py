"""Counts against numpy's own, layer by layer."""

import doctest

import numpy as np
import pytest

from routed_experts.protocol import expert_load as module
from routed_experts.protocol.codec import CodecError
from routed_experts.protocol.expert_load import count_experts, histogram
from tests.protocol.answers import EXPERTS, LAYERS, TOP_K, rows_of


def test_the_documentation_runs() -> None:
    assert doctest.testmod(module).attempted
    assert not doctest.testmod(module).failed


@pytest.mark.parametrize("count", [0, 1, 4095, 4097, 10_000])
@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.int32])
def test_counts(count: int, dtype: type[np.integer]) -> None:
    rows = rows_of(count).astype(dtype)
    got = histogram(rows, EXPERTS)
    for layer in range(LAYERS):
        assert got["counts"][layer] == [int((rows[:, layer] == expert).sum()) for expert in range(EXPERTS)]
    assert (got["rows"], got["missing"]) == (count, 0)
    assert all(sum(layer) == count * TOP_K for layer in got["counts"])


def test_unknown_ids_are_not_counted_for_any_expert() -> None:
    rows = rows_of(50)
    rows[3:7] = -1
    rows[10, 2, 1:] = -1
    got = histogram(rows, EXPERTS)
    assert (got["rows"], got["missing"]) == (50, 5)
    assert [sum(layer) for layer in got["counts"]] == [46 * TOP_K, 46 * TOP_K, 46 * TOP_K - 3]


def test_counts_of_pieces_add_up() -> None:
    rows = rows_of(100)
    parts = [count_experts(rows[at : at + 30], EXPERTS) for at in range(0, 100, 30)]
    assert np.array_equal(sum(parts), count_experts(rows, EXPERTS))


@pytest.mark.parametrize("wrong", [EXPERTS, -2])
def test_ids_that_are_not_experts(wrong: int) -> None:
    rows = rows_of(5)
    rows[2, 1, 0] = wrong
    with pytest.raises(CodecError, match="and 60 experts"):
        count_experts(rows, EXPERTS)
