"""The load against scipy's way of writing it: by hand, layer by layer."""

import doctest
import math

import numpy as np
import pytest

from routed_experts.protocol import expert_load as module
from routed_experts.protocol.expert_load import count_experts, expert_load, histogram
from tests.protocol.answers import EXPERTS, LAYERS, TOP_K, rows_of


def test_the_documentation_runs() -> None:
    assert doctest.testmod(module).attempted
    assert not doctest.testmod(module).failed


def test_each_layer_by_hand() -> None:
    rows = rows_of(200, seed=3)
    rows[:, 1] = rows[0, 1]  # a layer in which the same few do everything
    found = expert_load(count_experts(rows, EXPERTS))
    for layer in range(LAYERS):
        ids = rows[:, layer].ravel().tolist()
        shares = [ids.count(expert) / len(ids) for expert in range(EXPERTS)]
        entropy = -sum(share * math.log2(share) for share in shares if share)
        assert found.entropy[layer] == pytest.approx(entropy)
        assert found.balance[layer] == pytest.approx(entropy / math.log2(EXPERTS))
        assert found.imbalance[layer] == pytest.approx(max(shares) * EXPERTS)
        assert shares[found.busiest[layer]] == max(shares)
        assert found.unused[layer] == shares.count(0)
        assert found.load[layer].tolist() == pytest.approx([share * EXPERTS for share in shares])
    assert found.entropy[1] == pytest.approx(math.log2(TOP_K))


def test_of_a_histogram_from_the_wire() -> None:
    rows = rows_of(50)
    whole = expert_load(count_experts(rows, EXPERTS))
    assert np.array_equal(expert_load(histogram(rows, EXPERTS)["counts"]).load, whole.load)


def test_few_choices_cannot_reach_every_expert() -> None:
    """One row of K different experts is as even as it can be."""
    found = expert_load(count_experts(rows_of(1), EXPERTS))
    assert found.balance.tolist() == pytest.approx([1.0] * LAYERS)


@pytest.mark.parametrize("counts", [np.zeros((2, 8)), np.zeros((2, 1)), [[5], [5]]])
def test_nothing_to_share(counts: np.ndarray) -> None:
    found = expert_load(counts)
    assert found.entropy.tolist() == [0, 0]
    assert np.isfinite(found.load).all()
    assert found.balance.tolist() in ([1, 1], [0, 0])
