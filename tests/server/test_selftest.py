"""What the self-test refuses, and what it says."""

from typing import Any

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


def test_shapes() -> None:
    check(good_rows())
    for rows in (np.s_[:3], np.s_[:0], np.s_[:, :2], np.s_[:, :, :1]):
        with pytest.raises(SelfTestError, match=r"routing of shape .*, not \(4, 3, 2\)"):
            check(good_rows()[rows])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (np.s_[:], -1, "worker or scheduler is not ours"),
        (np.s_[:, [1]], -1, r"(?s)\[1\].*--moe-backend|--moe-backend.*\[1\]"),  # a kernel that routes by itself
        (np.s_[:, [0, 2]], -1, r"(?s)\[0, 2\].*--moe-backend|--moe-backend.*\[0, 2\]"),
        (np.s_[3, 2, 1], -1, r"layers \[2\]"),
        *((np.s_[1, 1, 1], value, "outside 0 to 7") for value in (EXPERTS, 255, -2)),
        (np.s_[:], 0, "same expert twice"),  # as in vLLM's issues 44116 and 54730
        (np.s_[2, 0], 5, "same expert twice"),
    ],
)
def test_impossible_rows(place: Any, value: int, message: str) -> None:
    rows = good_rows()
    rows[place] = value
    with pytest.raises(SelfTestError, match=message):
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
