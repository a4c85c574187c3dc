"""What the startup probe refuses, and what it says."""

import numpy as np
import pytest

from routed_experts.server.http.selftest import SelfTestError, agreement, check_rows

SHAPE = (3, 2)
EXPERTS = 8


def good_rows() -> np.ndarray:
    """[4, 3, 2] ids, two different ones in each row and layer."""
    first = np.arange(12, dtype=np.int16).reshape(4, 3) % EXPERTS
    return np.stack([first, (first + 1) % EXPERTS], axis=2)


def check(rows: np.ndarray) -> None:
    check_rows(rows, expected_rows=4, shape=SHAPE, num_experts=EXPERTS)


def test_good_rows() -> None:
    check(good_rows())


def test_no_rows() -> None:
    with pytest.raises(SelfTestError, match="worker or scheduler is not ours"):
        check(np.full((4, *SHAPE), -1, dtype=np.int16))


@pytest.mark.parametrize(
    "rows", [good_rows()[:3], good_rows()[:0], good_rows()[:, :2], good_rows()[:, :, :1], good_rows().reshape(4, 6)]
)
def test_wrong_shape(rows: np.ndarray) -> None:
    with pytest.raises(SelfTestError, match=r"routing of shape .*, not \(4, 3, 2\)"):
        check(rows)


@pytest.mark.parametrize("layers", [[1], [0, 2]])
def test_layers_that_wrote_nothing(layers: list[int]) -> None:
    """A monolithic kernel that routes by itself: the ids stay as the device cache was filled."""
    rows = good_rows()
    rows[:, layers] = -1
    with pytest.raises(SelfTestError, match="--moe-backend") as raised:
        check(rows)
    assert str(layers) in str(raised.value)


def test_a_single_row_that_is_not_known() -> None:
    rows = good_rows()
    rows[3, 2, 1] = -1
    with pytest.raises(SelfTestError, match=r"at rows \[2\]"):
        check(rows)


@pytest.mark.parametrize("wrong", [EXPERTS, 255, -2])
def test_ids_out_of_range(wrong: int) -> None:
    rows = good_rows()
    rows[1, 1, 1] = wrong
    with pytest.raises(SelfTestError, match="outside 0 to 7"):
        check(rows)


def test_all_zero() -> None:
    """The right shape and range, but no router's choice (vLLM issues 44116 and 54730)."""
    with pytest.raises(SelfTestError, match="same expert twice"):
        check(np.zeros((4, *SHAPE), dtype=np.int16))


def test_an_expert_twice() -> None:
    rows = good_rows()
    rows[2, 0] = 5
    with pytest.raises(SelfTestError, match="same expert twice"):
        check(rows)


# ---- the same tokens asked for twice ----


def test_agreement_counts_ids_in_any_slot() -> None:
    rows = good_rows()
    assert agreement(rows, rows) == agreement(rows, rows[:, :, ::-1]) == 1
    other = rows.copy()
    other[0, 0, 0] = (rows[0, 0].max() + 1) % EXPERTS  # one of 24 ids
    assert agreement(other, rows) == pytest.approx(23 / 24)


def test_no_agreement() -> None:
    rows = good_rows()
    assert agreement(rows, (rows + 4) % EXPERTS) == 0
    assert agreement(rows, rows[:3]) == 0  # of other tokens
    assert agreement(rows[1:], rows[:-1]) < 0.5  # one token off


def test_rows_that_are_not_known_say_nothing() -> None:
    rows = good_rows()
    lost = rows.copy()
    lost[:2] = -1
    assert agreement(lost, rows) == agreement(rows, lost) == 1
    assert agreement(np.full_like(rows, -1), rows) == agreement(rows[:0], rows[:0]) == 1
