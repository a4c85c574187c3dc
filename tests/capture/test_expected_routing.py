"""Whether rows are what a request says, against a loop over tokens, layers and experts."""

import numpy as np
import pytest

from routed_experts.capture.scheduler.expected_routing import ExpectedRouting
from routed_experts.capture.wire.message import PlacedRows
from routed_experts.protocol.routing_input import RoutingInput

L, K, E = 4, 3, 9
NEVER, ALWAYS = -np.inf, np.inf


def chosen(num_tokens: int, bias: np.ndarray, seed: int = 0) -> np.ndarray:
    """[n, L, K], experts that a router with this bias may choose."""
    scores = np.random.default_rng(seed).random((num_tokens, L, E)) + bias
    return (-scores).argsort(axis=2, kind="stable")[:, :, :K].astype(np.int16)


def some_bias() -> np.ndarray:
    """Layer 0 says nothing, layer 1 bans, layer 2 activates, and layer 3 does both."""
    bias = np.zeros((L, E), np.float32)
    bias[1, [0, 8]] = NEVER
    bias[2, 5] = ALWAYS
    bias[3] = 0.5
    bias[3, [1, 4]] = ALWAYS
    bias[3, 7] = NEVER
    return bias


def keeps(bias: np.ndarray, ids: np.ndarray) -> bool:
    """Of one token, layer by layer."""
    for of_layer, ids_of_layer in zip(bias, ids.tolist(), strict=True):
        never = set(np.flatnonzero(of_layer == NEVER).tolist())
        always = set(np.flatnonzero(of_layer == ALWAYS).tolist())
        if never & set(ids_of_layer) or not always <= set(ids_of_layer):
            return False
    return True


def test_a_choice_is_followed_if_a_bias_allows_that_of_each_token() -> None:
    """Each token alone, then all as they must be, and then all but one."""
    bias = some_bias()
    expected = ExpectedRouting(RoutingInput(bias=bias))
    natural = chosen(200, np.zeros((L, E)))
    right = [keeps(bias, ids) for ids in natural]
    assert 0 < sum(right) < len(right)
    assert right == [expected.is_followed(3, ids[None]) for ids in natural]
    rows = chosen(50, bias)
    assert expected.is_followed(0, rows)
    rows[49] = natural[right.index(False)]
    assert not expected.is_followed(0, rows)


@pytest.mark.parametrize(
    ("layer", "ids"),
    [(1, [1, 2, 8]), (2, [4, 6, 7]), (3, [1, 4, 7]), (3, [0, 1, 2])],
    ids=["banned", "activated", "banned beside activated", "one of two activated"],
)
def test_one_layer_of_one_token_is_enough(layer: int, ids: list[int]) -> None:
    bias = some_bias()
    rows = chosen(20, bias)
    rows[13, layer] = ids
    assert not ExpectedRouting(RoutingInput(bias=bias)).is_followed(0, rows)


def test_given_rows_need_no_activated_expert() -> None:
    """But the router's choice does: where no row is, and where a layer of one has a -1."""
    bias = np.zeros((L, E), np.float32)
    bias[:, 5] = ALWAYS
    rows = np.tile(np.array([0, 1, 2], np.int16), (10, L, 1))
    rows[4, 2, 1] = -1
    expected = ExpectedRouting(RoutingInput(rows=rows, start=20, bias=bias))
    captured = chosen(40, bias)
    captured[10:20] = rows
    captured[14, 2] = [5, 6, 7]
    assert expected.num_given(10, 40) == 10
    assert expected.is_followed(10, captured)
    for token, layer in ((14, 2), (9, 0), (20, 3)):
        wrong = captured.copy()
        wrong[token, layer] = [6, 7, 8]
        assert not expected.is_followed(10, wrong)


def test_unknown_ids_break_nothing() -> None:
    """The last expert is banned, which -1 would be as an index."""
    bias = np.zeros((L, E), np.float32)
    bias[:, E - 1] = NEVER
    bias[:, 0] = ALWAYS
    rows = chosen(6, bias)
    rows[:, 2] = -1
    assert ExpectedRouting(RoutingInput(bias=bias)).is_followed(0, rows)


def test_other_rows_than_given_are_not_followed() -> None:
    rows = chosen(10, np.zeros((L, E)))
    expected = ExpectedRouting(RoutingInput(rows=rows, start=5))
    assert expected.is_followed(8, rows[3:])
    assert expected.is_followed(0, chosen(5, np.zeros((L, E)), seed=1))
    assert not expected.is_followed(7, rows[3:])


def test_tokens_that_are_computed_again_must_have_the_experts_that_they_had() -> None:
    """Of a request that says nothing, and of one with a bias, which still holds behind them."""
    bias = some_bias()
    had = chosen(10, bias)
    for said in (None, RoutingInput(bias=bias)):
        expected = ExpectedRouting(said).recomputed(PlacedRows(5, had))
        assert expected.num_given(5, 20) == 10
        assert expected.is_followed(5, np.concatenate([had, chosen(3, bias, seed=1)]))
        assert not expected.is_followed(5, chosen(10, bias, seed=2))
    behind = np.concatenate([had, chosen(200, np.zeros((L, E)))])
    assert not expected.is_followed(5, behind)


def test_rows_that_are_not_known_are_those_that_the_request_gives() -> None:
    rows = chosen(10, np.zeros((L, E)))
    rows[2, 1] = -1
    expected = ExpectedRouting(RoutingInput(rows=rows, start=5))
    had = chosen(20, np.zeros((L, E)), seed=1)
    had[4:9] = -1
    completed = expected.completed(PlacedRows(3, had))
    assert completed.start == 3
    assert np.array_equal(completed.rows[4:9], rows[2:7])
    known = np.r_[0:4, 9:20]
    assert np.array_equal(completed.rows[known], had[known])
    assert (had[4:9] == -1).all()  # which are others', too
