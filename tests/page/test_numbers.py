"""Every number that the page shows of a response is numpy's of the same rows: of three responses."""

import re
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.collect import Routing, collect
from routed_experts.protocol.saved import ModelInfo
from tests.e2e.harness import wait_until
from tests.page.answers import answer, array, rows_of, weights_of
from tests.page.browser import Tab
from tests.page.conftest import Viewed
from tests.page.test_page import TIMES, choose, show
from tests.page.test_study import cells, sort

pytestmark = pytest.mark.e2e

LAYER, EXPERT = 1, 3


def weighed() -> tuple[dict[str, Any], int]:
    """With weights, and rows that are not known."""
    rows = rows_of(69, 3, 4, 16)
    rows[20], rows[41, 1] = -1, -1
    return answer(rows, 10, weights=weights_of(rows)), 16


def later() -> tuple[dict[str, Any], int]:
    """A later turn of a conversation, whose first rows are known from the turn before."""
    body = answer(rows_of(59, 2, 2, 32), 40)
    body["prompt_routed_experts"] = array(collect(body)[0].rows[30:40], 30)
    return body, 32


def short() -> tuple[dict[str, Any], int]:
    """Two rows with one expert each."""
    return answer(rows_of(2, 2, 1, 8), 1), 8


def pages(tab: Tab, place: str) -> list[list[str]]:
    """All rows of a list."""
    found = cells(tab, place)
    while tab.js(f"!$('{place} .pager').hidden && !$('{place} .pager button:nth-child(2)').disabled"):
        before = tab.text(f"{place} .pager span")
        tab.click(f"{place} .pager button:nth-child(2)")
        tab.wait(f"$('{place} .pager span').textContent !== {before!r}")
        found += cells(tab, place)
    return found


def numbers(column: list[str]) -> list[float]:
    return [float(re.sub(r"[^-\d.e]", "", text)) for text in column]


def near(shown: list[str], expected: Any, digits: int) -> bool:
    """As far as it is written out."""
    return bool(np.allclose(numbers(shown), np.asarray(expected, dtype=float), rtol=0, atol=0.5001 * 10.0**-digits))


def balance_of(counts: np.ndarray) -> float:
    """Of a layer: its entropy, as a share of the most that so many choices can have."""
    slots, shares = counts.sum(), counts[counts > 0] / max(counts.sum(), 1)
    most = np.log2(min(len(counts), slots)) if slots else 0
    return float(-(shares * np.log2(shares)).sum() / most) if slots > 1 and most else 1.0


class Expected:
    """What numpy counts of the rows [n, L, K]."""

    def __init__(self, routing: Routing, experts: int) -> None:
        self.routing, self.experts = routing, experts
        self.rows, self.weights = routing.rows, routing.weights
        self.counts = self.counts_of(self.rows)
        self.loads = self.counts * experts / self.counts.sum(1, keepdims=True)
        self.positions = np.arange(routing.start, routing.start + len(self.rows))

    def counts_of(self, rows: np.ndarray) -> np.ndarray:
        return np.stack(
            [
                np.bincount(layer[layer >= 0], minlength=self.experts)
                for layer in rows.transpose(1, 0, 2).reshape(rows.shape[1], -1)
            ]
        )

    @property
    def sums(self) -> np.ndarray:
        """Of the weights that each expert was chosen with."""
        assert self.weights is not None
        found, known = np.zeros(self.counts.shape), self.rows >= 0
        np.add.at(found, (np.nonzero(known)[1], self.rows[known]), self.weights[known].astype(float))
        return found

    @property
    def rarity(self) -> np.ndarray:
        """Of each token, in bits; NaN where nothing is known."""
        slots = self.counts.sum(1, keepdims=True)
        bits = np.log2((slots + self.experts / 2) / self.experts) - np.log2(self.counts + 0.5)
        of_ids = np.take_along_axis(bits[None], np.maximum(self.rows, 0), axis=2)
        with np.errstate(invalid="ignore", divide="ignore"):
            known = self.rows >= 0
            of_cells = (of_ids * known).sum(2) / known.sum(2)
            return (np.nan_to_num(of_cells) * ~np.isnan(of_cells)).sum(1) / (~np.isnan(of_cells)).sum(1)


@pytest.mark.parametrize("made", [weighed, later, short], ids=lambda made: made.__name__)
def test_every_number_is_numpys(tab: Tab, viewed: Viewed, made: Any) -> None:
    body, experts = made()
    expected = Expected(collect(body, prompt_start=body["prompt_routed_experts"]["start"])[0], experts)
    show(tab, viewed(body, given=ModelInfo(num_experts=experts)))
    check_summary(tab, expected)
    check_table(tab, expected)
    check_lists(tab, expected)
    check_selected(tab, expected)
    check_pairs(tab, expected)


def check_summary(tab: Tab, expected: Expected) -> None:
    routing, (n, layers, top_k) = expected.routing, expected.rows.shape
    missing = int((expected.rows < 0).any((1, 2)).sum())
    prompt = routing.prompt_len or 0
    said = f"{prompt} prompt and {routing.start + n + 1 - prompt} generated tokens, {n} rows"
    said += f" ({missing} unknown)" if missing else ""
    assert (
        tab.text("#summary")
        == f"{said} of {layers} layers {TIMES} {top_k} of {expected.experts} experts, finish reason: length."
    )


def check_table(tab: Tab, expected: Expected) -> None:
    """The map, cell by cell."""
    tab.js("$('#table').open = true")
    end = int(expected.positions[-1]) + 2
    rows: dict[int, list[str]] = {}
    for first in range(0, end, 25):
        choose(tab, first)
        tab.wait(f"$('#table-range').textContent.startsWith('tokens {first} to ')")
        found = tab.js("$$('#table tbody tr').map(r => [...r.children].map(c => c.textContent))")
        rows |= {int(row[0]): row[2:] for row in found}
    assert list(rows) == list(range(end))
    for position, shown in rows.items():
        for layer, text in enumerate(shown):
            row = position - expected.routing.start
            if not 0 <= row < len(expected.rows):
                assert text == "no row"
                continue
            ids, weights = expected.rows[row, layer], expected.weights
            parts = text.split(", ")
            assert [part.split(" ")[0] for part in parts] == ["unknown" if i < 0 else str(i) for i in ids]
            if weights is not None and (ids >= 0).all():
                assert near([part.split("(")[1] for part in parts], weights[row, layer], 3)
    tab.js("$('#table').open = false")


def check_lists(tab: Tab, expected: Expected) -> None:
    counts, loads, layers = expected.counts, expected.loads, len(expected.counts)
    tab.choose("#list", "layers")
    tab.wait_for_text("#lists thead", "Busiest expert")
    shown = list(zip(*pages(tab, "#lists"), strict=True))
    assert near(shown[1], [100 * balance_of(of) for of in counts], 1)
    assert numbers(shown[2]) == counts.argmax(1).tolist()
    assert near(shown[3], loads.max(1), 2)
    assert numbers(shown[4]) == (counts == 0).sum(1).tolist()

    tab.choose("#list", "experts")
    tab.choose("#scope", "all")
    tab.wait_for_text("#lists .pager span", f" of {counts.size}")
    shown = list(zip(*pages(tab, "#lists"), strict=True))
    ids, of = [np.array(numbers(shown[column]), dtype=int) for column in (0, 1)]
    assert sorted(zip(of, ids, strict=True)) == [(layer, i) for layer in range(layers) for i in range(expected.experts)]
    assert numbers(shown[2]) == counts[of, ids].tolist()
    assert near(shown[3], loads[of, ids], 2)
    if expected.weights is not None:
        sums = expected.sums
        assert near(shown[4], (sums * expected.experts / sums.sum(1, keepdims=True))[of, ids], 2)

    tab.choose("#list", "tokens")
    tab.wait_for_text("#lists thead", "Rarity")
    shown = list(zip(*pages(tab, "#lists"), strict=True))
    found = dict(zip(numbers(shown[0]), shown[2], strict=True))
    assert sorted(found) == expected.positions.tolist()
    is_known = ~np.isnan(expected.rarity)
    assert [bool(found[position]) for position in expected.positions] == is_known.tolist()
    assert near([found[position] for position in expected.positions[is_known]], expected.rarity[is_known], 2)


def check_selected(tab: Tab, expected: Expected) -> None:
    """The load, the balance and the tokens of an expert."""
    counts, rows, token = expected.counts, expected.rows, int(expected.positions[len(expected.rows) // 2])
    choose(tab, token)
    tab.choose("#list", "layers")
    sort(tab, "#lists", "MoE layer")
    tab.wait_for_text("#lists thead", "Busiest expert")
    tab.js(f"$$('#lists tbody tr').find(r => r.cells[0].textContent === '{LAYER}').cells[1].click()")
    tab.type("#expert", str(EXPERT))
    tab.wait_for_text(
        "#expert-status", f"MoE layer {LAYER}, expert {EXPERT}: {counts[LAYER, EXPERT]} of {len(rows)} tokens."
    )
    words = tab.text("#load-status")
    assert f"busiest expert {counts[LAYER].argmax()} with {expected.loads[LAYER].max():.1f} {TIMES}" in words
    assert f"; {(counts[LAYER] == 0).sum()} of {expected.experts} experts unused." in words
    assert f"Expert {EXPERT}: {expected.loads[LAYER, EXPERT]:.2f} {TIMES} ({counts[LAYER, EXPERT]} tokens)" in words
    if expected.weights is not None:
        assert f"(sum {expected.sums[LAYER, EXPERT]:.2f})" in words
    positions, ranks = np.nonzero(rows[:, LAYER] == EXPERT)
    shown = pages(tab, "#expert-tokens") if len(positions) else []
    found = {int(row[0]): row[2:] for row in shown}
    assert sorted(found) == (positions + expected.routing.start).tolist()
    assert [int(found[position + expected.routing.start][0]) for position in positions] == (ranks + 1).tolist()
    if expected.weights is not None:
        weights = expected.weights[positions, LAYER, ranks]
        assert near([found[position + expected.routing.start][1] for position in positions], weights, 3)

    row = token - expected.routing.start
    for span in ("0", "32"):
        tab.choose("#window", span)
        part = rows[max(row + 1 - int(span or 0), 0) if int(span) else 0 : row + 1]
        shares = [balance_of(of) for of in expected.counts_of(part)]
        percents = [100 * np.mean(shares), 100 * shares[LAYER], 100 * min(shares), 100 * max(shares)]

        def is_shown(percents: list[float] = percents) -> bool:
            text = tab.text("#balance-status")
            found = re.findall(r"([\d.]+) %", text)
            return text.startswith(f"Token {token}: ") and len(found) == 4 and near(found, percents, 1)

        wait_until(is_shown, lambda: f"not {percents}: {tab.text('#balance-status')}", 60)  # noqa: B023


def check_pairs(tab: Tab, expected: Expected) -> None:
    rows, experts = expected.rows, expected.experts
    for what, other in (("together", LAYER), ("next", LAYER + 1)):
        if other == rows.shape[1]:
            continue
        tab.choose("#pairs", what)
        known = (rows[:, LAYER, 0] >= 0) & (rows[:, other, 0] >= 0)
        chose = np.zeros((2, known.sum(), experts), dtype=int)
        for side, layer in enumerate((LAYER, other)):
            np.put_along_axis(chose[side], rows[known, layer].astype(int), 1, axis=1)
        together = np.einsum("ti,tj->ij", chose[0], chose[1])
        left, right = chose[0].sum(0), chose[1].sum(0)
        expected_pairs = {
            (i, j): together[i, j]
            for i, j in zip(*np.nonzero(np.triu(together, 1) if what == "together" else together), strict=True)
        }
        tab.js("$('#pairs-table').open = true")
        title = "From expert" if what == "next" else "With expert"
        tab.wait(f"$('#pairs-table thead')?.textContent.includes('{title}')")
        shown = pages(tab, "#pairs-table")
        found = {(int(row[0]), int(row[1])): row[2:] for row in shown}
        assert {pair: int(row[0]) for pair, row in found.items()} == expected_pairs
        for (i, j), (count, share, lift) in found.items():
            assert near([share], [100 * int(count) / left[i]], 1)
            assert near([lift], [int(count) * known.sum() / (left[i] * right[j])], 2)
