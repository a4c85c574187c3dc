"""What the self-test refuses, and what it says."""

from typing import Any

import numpy as np
import pytest

from routed_experts.server.http.process.selftest import (
    SelfTestError,
    agreement,
    check_rows,
    other_rows,
)

SHAPE = (3, 2)
EXPERTS = 8


def good_rows() -> np.ndarray:
    """[4, 3, 2] ids, two different ones in each row and layer."""
    first = np.arange(12, dtype=np.int16).reshape(4, 3) % EXPERTS
    return np.stack([first, (first + 1) % EXPERTS], axis=2)


def test_rows_that_a_router_would_not_choose() -> None:
    rows = good_rows()
    others = other_rows(rows, EXPERTS)
    check_rows(others, expected_rows=4, shape=SHAPE, num_experts=EXPERTS)
    assert agreement(others, rows) == 0
    all_experts = np.tile(np.arange(EXPERTS), (4, 3, 1)).astype(np.int16)
    assert other_rows(all_experts, EXPERTS).shape == all_experts.shape


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (np.s_[:], -1, "worker or scheduler is not ours"),
        # a kernel that routes by itself
        (np.s_[:, [1]], -1, r"(?s)\[1\].*--moe-backend|--moe-backend.*\[1\]"),
        (np.s_[:, [0, 2]], -1, r"(?s)\[0, 2\].*--moe-backend|--moe-backend.*\[0, 2\]"),
        (np.s_[3, 2, 1], -1, r"layers \[2\]"),
        *((np.s_[1, 1, 1], value, "outside 0 to 7") for value in (EXPERTS, 255, -2)),
        (np.s_[:], 0, "same expert twice"),  # as in vLLM's issues 44116 and 54730
        (np.s_[2, 0], 5, "same expert twice"),
        *(
            (part, None, r"routing of shape .*, not \(4, 3, 2\)")
            for part in (np.s_[:3], np.s_[:0], np.s_[:, :2])
        ),
        (np.s_[:, :, :1], None, r"routing of shape .*, not \(4, 3, 2\)"),
    ],
)
def test_impossible_rows(index: Any, value: int | None, message: str) -> None:
    rows = good_rows()
    check_rows(rows, expected_rows=4, shape=SHAPE, num_experts=EXPERTS)
    if value is None:
        rows = rows[index]
    else:
        rows[index] = value
    with pytest.raises(SelfTestError, match=message):
        check_rows(rows, expected_rows=4, shape=SHAPE, num_experts=EXPERTS)


def test_agreement_of_the_same_tokens_asked_for_twice() -> None:
    rows = good_rows()
    other, lost = rows.copy(), rows.copy()
    other[0, 0, 0] = (rows[0, 0].max() + 1) % EXPERTS  # one of 24 ids
    lost[:2] = -1
    for one, two, expected in (
        (rows, rows, 1),
        (rows, rows[:, :, ::-1], 1),  # in any slot
        (other, rows, pytest.approx(23 / 24)),
        (rows, (rows + 4) % EXPERTS, 0),
        (rows, rows[:3], 0),  # of other tokens
        # rows that are not known say nothing
        *((*both, 1) for both in ((lost, rows), (rows, lost))),
        (np.full_like(rows, -1), rows, 1),
        (rows[:0], rows[:0], 1),
    ):
        assert agreement(one, two) == expected
    assert agreement(rows[1:], rows[:-1]) < 0.5  # one token off
