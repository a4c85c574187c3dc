"""Counts and load of experts, against counts in plain Python, layer by layer."""

import math

import numpy as np
import pytest

from routed_experts.protocol.codec import CodecError
from routed_experts.protocol.expert_load import count_experts, expert_load
from tests.protocol.answers import EXPERTS, LAYERS, TOP_K, histogram, rows_of


@pytest.mark.parametrize("count", [0, 1, 4095, 4097, 10_000])
def test_histogram(count: int) -> None:
    rows = rows_of(count)
    rows[2:5] = -1
    rows[5:6, 2, 1:] = -1
    missing = len(rows[2:6])
    for dtype in (np.int16, np.int32, np.uint8):
        known = rows if dtype != np.uint8 else np.delete(rows, slice(2, 6), axis=0)
        got = histogram(known.astype(dtype), EXPERTS)
        for layer in range(LAYERS):
            assert got["counts"][layer] == [
                int((known[:, layer] == expert).sum()) for expert in range(EXPERTS)
            ]
        assert (got["rows"], got["missing"]) == (len(known), 0 if dtype == np.uint8 else missing)
    parts = [count_experts(rows[first : first + 30], EXPERTS) for first in range(0, count, 30)]
    assert np.array_equal(
        sum(parts, np.zeros((LAYERS, EXPERTS), int)), count_experts(rows, EXPERTS)
    )


@pytest.mark.parametrize("wrong", [EXPERTS, -2])
def test_ids_that_are_not_experts(wrong: int) -> None:
    rows = rows_of(5)
    rows[2, 1, 0] = wrong
    with pytest.raises(CodecError, match="and 60 experts"):
        count_experts(rows, EXPERTS)


def shares_of(ids: list[int]) -> list[float]:
    """Which share of them each expert is."""
    return [ids.count(expert) / len(ids) for expert in range(EXPERTS)]


def entropy_of(shares: list[float]) -> float:
    """In bits."""
    return -sum(share * math.log2(share) for share in shares if share)


def test_expert_load() -> None:
    rows = rows_of(200, seed=3)
    rows[:, 1] = rows[0, 1]  # a layer in which the same few do everything
    load = expert_load(histogram(rows, EXPERTS)["counts"])
    for layer in range(LAYERS):
        shares = shares_of(rows[:, layer].ravel().tolist())
        entropy = entropy_of(shares)
        assert load.entropy[layer] == pytest.approx(entropy)
        assert load.balance[layer] == pytest.approx(entropy / math.log2(EXPERTS))
        assert load.load[layer].tolist() == pytest.approx([share * EXPERTS for share in shares])
    assert load.entropy[1] == pytest.approx(math.log2(TOP_K))
    one_row = expert_load(count_experts(rows_of(1), EXPERTS))
    assert one_row.balance.tolist() == pytest.approx([1.0] * LAYERS), (
        "K different experts are as even as they can be"
    )


@pytest.mark.parametrize("counts", [np.zeros((2, 8)), np.zeros((2, 1)), [[5], [5]]])
def test_load_of_nothing_or_one_expert(counts: np.ndarray) -> None:
    load = expert_load(counts)
    assert load.entropy.tolist() == [0, 0]
    assert np.isfinite(load.load).all()
    assert load.balance.tolist() in ([1, 1], [0, 0])
