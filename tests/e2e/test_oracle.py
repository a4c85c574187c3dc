"""The oracle by which rows are judged: what it calls wrong, and what it leaves to rounding. No
engine runs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.harness import Oracle, check_weights, prompt_of

TOKENS = prompt_of(400, seed=1)
K = 4
TWINS = (2, 10)  # often among the last to be chosen


def ranking(oracle: Oracle) -> np.ndarray:
    """[tokens, L, experts] from the best on."""
    return np.argsort(-oracle.logits(TOKENS, exact=True), axis=2)


def test_every_expert_that_is_not_chosen_is_wrong(oracle: Oracle) -> None:
    """Even the next best: it is off by more than rounding, and said with its place."""
    ranked = ranking(oracle)
    assert oracle.wrong(ranked[:, :, :K], TOKENS) == []
    for position, layer, rank in ((0, 0, K), (31, 2, K), (59, 4, K), (59, 4, 15)):
        rows = ranked[:, :, :K].copy()
        rows[position, layer, K - 1] = ranked[position, layer, rank]
        for start in (0, position):
            (wrong,) = oracle.wrong(rows[start:], TOKENS, start)
            assert (wrong.position, wrong.layer) == (position, layer)
            assert wrong.gap > 100 * wrong.rounding > 0


def test_only_what_float32_cannot_tell_apart_is_left_to_it(tiny_model: Path) -> None:
    """Two experts with the same router weights have the same score, and any other two do not."""
    twins = Oracle(tiny_model)
    gate = next(
        tensor for name, tensor in twins.model.named_parameters() if name.endswith("gate.weight")
    )
    with torch.no_grad():
        gate[TWINS[1]] = gate[TWINS[0]]
    ranked = ranking(twins)
    tied = np.flatnonzero(np.isin(ranked[:, 0, K - 1 : K + 1], TWINS).all(axis=1))
    assert len(tied) > 10
    rows = ranked[:, :, :K].copy()
    rows[tied, 0, K - 1] = ranked[tied, 0, K]
    assert twins.wrong(rows, TOKENS) == []
    assert twins.undecidable == 1

    rows[tied[0], 0, 0] = ranked[tied[0], 0, 15]  # two experts differ, of which one is tied
    assert [one.position for one in twins.wrong(rows, TOKENS)] == [tied[0]]


def test_float64_computes_the_same_model(oracle: Oracle) -> None:
    single, exact = oracle.logits(TOKENS), oracle.logits(TOKENS, exact=True)
    assert (single.dtype, exact.dtype) == (np.float32, np.float64)
    assert 0 < np.abs(single - exact).max() < 1e-4 < np.abs(exact).max()


def test_a_weight_that_is_not_its_experts_is_wrong(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are held against those that add up to 1 of all experts' softmax, for experts in any
    order."""
    every = torch.from_numpy(oracle.logits(TOKENS)).double().softmax(2).numpy()
    rows = ranking(oracle)[:, :, [2, 0, 3, 1]].astype(np.int16)
    chosen = np.take_along_axis(every, rows.astype(np.int64), 2)
    weights = (chosen / chosen.sum(axis=2, keepdims=True)).astype(np.float32)
    swapped, moved = weights.copy(), weights.copy()
    swapped[-1, 4, :2] = weights[-1, 4, 1::-1]
    moved[-1, 4, :2] += (1e-4, -1e-4)
    for start in (0, 99, len(TOKENS)):
        assert check_weights(weights[start:], rows[start:], TOKENS, oracle, start) < 1e-6
    monkeypatch.setattr("tests.e2e.harness.WEIGHTS_OFF", 0)  # so that float64 decides about all
    check_weights(weights, rows, TOKENS, oracle)
    for others in (swapped, moved):
        with pytest.raises(AssertionError, match="weights are off, by"):
            check_weights(others, rows, TOKENS, oracle)
        monkeypatch.undo()


def test_weights_behind_a_near_tie_that_fell_otherwise_are_not_held_against_the_oracle(
    oracle: Oracle,
) -> None:
    """Only those of deeper layers, from the tied token on: what the engine computed there followed
    the other expert."""
    ranked = ranking(oracle)
    rows = ranked[:, :, :K].copy()
    token, layer = 31, 2
    rows[token, layer, K - 1] = ranked[token, layer, K]
    weights = oracle.weights(rows, TOKENS).astype(np.float32)

    behind = weights.copy()
    behind[token:, layer + 1 :, :2] = behind[token:, layer + 1 :, 1::-1]
    check_weights(behind, rows, TOKENS, oracle)
    for not_behind in ((token, layer), (token - 1, layer + 1), (token + 1, layer)):
        wrong = weights.copy()
        wrong[not_behind][:2] = wrong[not_behind][1::-1]
        with pytest.raises(AssertionError, match="2 weights are off"):
            check_weights(wrong, rows, TOKENS, oracle)
