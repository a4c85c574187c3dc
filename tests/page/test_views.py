"""Each view of a response: its numbers are numpy's of the same rows, and clicks and keys select
what they say."""

import base64
import csv
import io
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from routed_experts.protocol.collect import Routing, collect
from tests.e2e.harness import wait_until
from tests.page.answers import answer, array, rows_of, two_that_part, weights_of, words_of
from tests.page.browser import Tab
from tests.page.conftest import Viewed
from tests.page.seen import (
    GUTTER,
    SELECTED,
    TIMES,
    TOKENS,
    by_weight,
    cells,
    choose,
    compare,
    download,
    error_in,
    selected,
    show,
    shows,
    shows_weights,
    tips,
)

pytestmark = pytest.mark.e2e

E = 32
ROWS = rows_of(99, 6, 4, E)
WEIGHTS = weights_of(ROWS)
TEXTS = words_of(5)[:100]
LAYER, EXPERT = 1, 3
OKABE_ITO = ["e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7"]


def weighed() -> tuple[dict[str, Any], int]:
    """With weights, and rows that are not known."""
    rows = rows_of(69, 3, 4, 16)
    rows[20], rows[41, 1] = -1, -1
    return answer(rows, 10, weights=weights_of(rows)), 16


def unordered() -> tuple[dict[str, Any], int]:
    """With weights, of a router that returns its experts in another order than theirs."""
    rows = rows_of(69, 3, 4, 16)
    rows[20], rows[41, 1] = -1, -1
    order = np.random.default_rng(3).permuted(np.tile(np.arange(4), (69, 3, 1)), axis=2)
    rows, weights = (np.take_along_axis(values, order, 2) for values in (rows, weights_of(rows)))
    return answer(rows, 10, weights=weights), 16


def order_of(routing: Routing) -> np.ndarray:
    """[n, L, K] The place of each rank's choice; the router's order without weights."""
    if routing.weights is None:
        return np.broadcast_to(np.arange(routing.rows.shape[2]), routing.rows.shape)
    return by_weight(routing.weights)


def later() -> tuple[dict[str, Any], int]:
    """A later turn of a conversation, whose first rows are known from the turn before."""
    body = answer(rows_of(59, 2, 2, 32), 40)
    body["prompt_routed_experts"] = array(collect(body)[0].rows[30:40], 30)
    return body, 32


def short() -> tuple[dict[str, Any], int]:
    """Two rows with one expert each."""
    return answer(rows_of(2, 2, 1, 8), 1), 8


def counts_of(rows: np.ndarray, experts: int) -> np.ndarray:
    """[L, E] How often each expert was chosen."""
    layers = rows.transpose(1, 0, 2).reshape(rows.shape[1], -1)
    return np.stack([np.bincount(layer[layer >= 0], minlength=experts) for layer in layers])


def near(shown: list[str], expected: Any, digits: int) -> bool:
    """As far as it is written out."""
    numbers = [float(re.sub(r"[^-\d.e]", "", text)) for text in shown]
    return bool(
        np.allclose(numbers, np.asarray(expected, dtype=float), rtol=0, atol=0.5001 * 10.0**-digits)
    )


@pytest.mark.parametrize("made", [weighed, unordered, later, short], ids=lambda made: made.__name__)
def test_every_number_is_numpys(tab: Tab, viewed: Viewed, made: Any) -> None:
    body, experts = made()
    (routing,) = collect(body, prompt_start=body["prompt_routed_experts"]["start"])
    show(tab, viewed(body, num_experts=experts))
    n, layers, top_k = routing.rows.shape
    missing, prompt = int((routing.rows < 0).any((1, 2)).sum()), routing.prompt_len or 0
    said = f"{prompt} prompt and {routing.start + n + 1 - prompt} generated tokens, {n} rows"
    said += f" ({missing} unknown)" if missing else ""
    assert (
        tab.text("#summary")
        == f"{said} of {layers} layers {TIMES} {top_k} of {experts} experts, finish reason: length."
    )
    assert ("unknown" in tab.texts("#legend span")) == bool(missing)
    check_every_cell(tab, routing)
    check_selected(tab, routing, experts)


def check_every_cell(tab: Tab, routing: Routing) -> None:
    """What the pointer shows at each token: every expert of every layer."""
    shown = tips(tab, "#tokens-a .token")
    assert len(shown) == routing.start + len(routing.rows) + 1
    for position, (title, layers) in enumerate(shown):
        assert title.startswith(f"Token {position} ")
        row = position - routing.start
        if 0 <= row < len(routing.rows):
            check_tip(layers, routing, row)
        else:
            assert {id for layer in layers for id, _ in layer} == {"\u2013"}


def check_tip(layers: list[list[tuple[str, str | None]]], routing: Routing, row: int) -> None:
    """The ids of a row, and its weights where all of it is known."""
    order = order_of(routing)[row]
    ids = np.take_along_axis(routing.rows[row], order, 1)
    assert [[-1 if id == "?" else int(id) for id, _ in layer] for layer in layers] == ids.tolist()
    if routing.weights is not None and (ids >= 0).all():
        weights = np.take_along_axis(routing.weights[row], order, 1)
        assert near([weight for layer in layers for _, weight in layer], weights.ravel(), 3)


def check_selected(tab: Tab, routing: Routing, experts: int) -> None:
    """A token in full, the load of its layer, and the tokens of an expert."""
    n = len(routing.rows)
    for row in {n // 2, min(20, n - 1), min(41, n - 1)}:
        choose(tab, row + routing.start)
        check_token(tab, routing, row)
    tab.click(f"#detail tbody tr:nth-child({LAYER + 1}) th")
    tab.type("#expert", str(EXPERT))
    tab.wait_for_text("#expert-title", f"Expert {EXPERT} of MoE layer {LAYER}")
    by_choices = check_load(tab, counts_of(routing.rows, experts)[LAYER], n)
    check_tokens_of_expert(tab, routing)
    if routing.weights is None:
        assert tab.is_hidden("#rank-label")
        assert "weights" not in tab.text("#load-status")
    else:
        check_load_by_weights(tab, weights_by_expert(routing, experts), by_choices)


def check_token(tab: Tab, routing: Routing, row: int) -> None:
    """That it is shown in full."""
    order = order_of(routing)[row]
    shows(tab, np.take_along_axis(routing.rows[row], order, 1))
    if routing.weights is None:
        assert (tab.is_hidden("#by-label"), tab.count("#detail small")) == (True, 0)
    else:
        shows_weights(tab, np.take_along_axis(routing.weights[row], order, 1))


def check_load(tab: Tab, counts: np.ndarray, num_tokens: int) -> str:
    """Of the experts of `LAYER`, chosen so often; gives what is said of `EXPERT`."""
    experts = len(counts)
    loads = counts * experts / counts.sum()
    by_choices = (
        f"Expert {EXPERT}: {loads[EXPERT]:.2f} {TIMES} ({counts[EXPERT]} of {num_tokens} tokens)"
    )
    words = f"busiest expert {loads.argmax()} with {loads.max():.1f} {TIMES}"
    unused = f"; {(counts == 0).sum()} of {experts} experts unused."
    assert tab.text("#load-status").startswith(
        f"MoE layer {LAYER}: {words} the even share{unused} {by_choices}"
    )
    return by_choices


def check_tokens_of_expert(tab: Tab, routing: Routing) -> None:
    """They are marked in the text, paler at a lower rank, and listed, by weight if there is one."""
    rows, places = np.nonzero(routing.rows[:, LAYER] == EXPERT)
    positions = rows + routing.start
    ranks = np.argsort(order_of(routing), axis=2)[rows, LAYER, places]
    if routing.weights is None:
        check_shades(tab, positions, np.ones(len(ranks)))
        shown = {int(cell[0]): cell[2:] for cell in listed(tab)}
        assert len(shown) == len(positions)
        assert not any(shown.values())  # neither rank nor weight
        return
    check_shades(tab, positions, 1 - ranks / routing.rows.shape[2])
    shown = {int(cell[0]): cell[2:] for cell in listed(tab)}
    weights = routing.weights[rows, LAYER, places]
    assert [shown[position][0] for position in positions] == [str(rank + 1) for rank in ranks]
    assert near([shown[position][1] for position in positions], weights, 3)
    assert list(shown) == positions[by_weight(weights)].tolist()


def check_shades(tab: Tab, positions: np.ndarray, shades: np.ndarray) -> None:
    """Of the tokens of the selected expert in the text."""
    shown = tab.js(
        "$$('#tokens-a .chosen').map(e => [Number(e.dataset.i), Number(e.style.getPropertyValue('--shade'))])"
    )
    expected = zip(positions, shades, strict=True)
    assert shown == [[position, pytest.approx(shade)] for position, shade in expected]


def weights_by_expert(routing: Routing, experts: int) -> np.ndarray:
    """The sum of each expert's weights in `LAYER`."""
    assert routing.weights is not None
    ids = routing.rows[:, LAYER]
    known = ids >= 0
    sums = np.zeros(experts)
    np.add.at(sums, ids[known], routing.weights[:, LAYER][known].astype(float))
    return sums


def check_load_by_weights(tab: Tab, sums: np.ndarray, by_choices: str) -> None:
    """It is said beside the load by choices, and drawn if that is chosen."""
    by_weights = f"{sums[EXPERT] / sums.mean():.2f} {TIMES} (sum {sums[EXPERT]:.2f})"
    assert tab.text("#load-status").endswith(f"{by_choices}; by weights {by_weights}.")
    picture = tab.js("$('#load canvas').toDataURL()")
    tab.choose("#by", "weights")
    busiest = f"busiest expert {sums.argmax()} with {sums.max() / sums.mean():.1f} {TIMES} the even share by weights;"
    tab.wait_for_text("#load-status", busiest)
    assert tab.js("$('#load canvas').toDataURL()") != picture


def listed(tab: Tab) -> list[list[str]]:
    """All tokens of the selected expert."""
    shown = cells(tab, "#experts")
    pager = "#experts .pager"
    while tab.js(f"!$('{pager}').hidden && !$('{pager} button:nth-child(2)').disabled"):
        before = tab.text(f"{pager} span")
        tab.click(f"{pager} button:nth-child(2)")
        tab.wait(f"$('{pager} span').textContent !== {before!r}")
        shown += cells(tab, "#experts")
    return shown


def test_the_map_and_its_keys(tab: Tab, viewed: Viewed) -> None:
    """And 8 experts stand in one line, and the selected layer is in sight."""
    rows = rows_of(199, 58, 8, 256)
    show(tab, viewed(answer(rows, 10)))
    wide = min(max(tab.js("($('#map').clientWidth - 42) / 200"), 2), 18)
    tab.click("#map", GUTTER + 33.5 * wide, 20 + 2.5 * 5)
    selected(tab, 33)
    shows(tab, rows[33])
    tops = "$$('#detail tbody tr').map(row => new Set([...row.querySelectorAll('.chip')].map(c => c.offsetTop)).size)"
    assert tab.js(tops) == [1] * 58
    assert tab.js("$$('.chip').every(c => c.scrollWidth <= c.clientWidth)")
    # else the status is that of the cell below it
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    token, layer = 33, 2
    steps = [
        ("ArrowRight", 2, 2, 0),
        ("ArrowDown", 25, 0, 25),
        ("ArrowUp", 26, 0, -26),
        ("PageDown", 1, 50, 0),
    ]
    inside = "(r, f) => r.top >= f.top && r.bottom <= f.bottom + 1"
    boxes = "$('#detail tr.selected').getBoundingClientRect(), $('.detail .scroll').getBoundingClientRect()"
    for key, times, by_token, by_layer in (*steps, ("ArrowLeft", 1, -1, 0)):
        tab.key(key, times)
        token, layer = token + by_token, layer + by_layer
        ends = f"; MoE layer {layer}: {', '.join(map(str, rows[token, layer]))}"
        tab.wait(f"$('#map-status').textContent.endsWith('{ends}')")
        assert tab.text("#map-status").startswith(f"Token {token} ")
        tab.wait(f"$('#live').textContent === {json.dumps(tab.text('#map-status'))}")
        tab.wait(f"({inside})({boxes})")
    tab.key("End")
    selected(tab, 199)
    assert tab.text("#map-status").endswith("no row")  # the last token never enters a forward pass
    tab.key("ArrowRight", 3)
    tab.key("Home")
    selected(tab, 0)
    shows(tab, rows[0])


@pytest.mark.parametrize("has_weights", [True, False])
def test_the_map_colours_the_largest_weight_or_the_rarest_colour(
    tab: Tab, viewed: Viewed, has_weights: bool
) -> None:
    """And never the expert that a router happens to return first."""
    body, experts = unordered()
    (routing,) = collect(body)
    if not has_weights:
        del body["prompt_routed_expert_weights"], body["choices"][0]["routed_expert_weights"]
    show(tab, viewed(body, num_experts=experts))
    colours = legend_colours(tab)
    seven = [int(name) for name in colours if name.isdigit()]
    assert len(seven) == len(OKABE_ITO)
    ids = routing.rows[:, 0]  # of the first layer
    heaviest = np.take_along_axis(ids, order_of(routing)[:, 0, :1], 1)[:, 0]
    pixels = map_colours(tab, len(ids) + 1)
    for position in range(1, len(ids)):  # the token before them is selected, and has a frame
        if ids[position, 0] >= 0:
            top = heaviest[position] if has_weights else rarest_colour(seven, ids[position])
            colour = colours.get(str(top), colours["others"])
            assert pixels[position] == rgb(colour), position
    tab.console.clear()  # where the browser advises against reading pictures


def legend_colours(tab: Tab) -> dict[str, str]:
    """The colour of each expert that has one, the busiest first; then that of the others."""
    colour = "getComputedStyle(e.firstChild).backgroundColor"
    return dict(tab.js(f"$$('#legend span').map(e => [e.textContent, {colour}])"))


def rgb(colour: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", colour)]


def rarest_colour(coloured: list[int], ids: np.ndarray) -> int:
    """Of a token's experts, the last in `coloured`; its first one if none is there."""
    return next((id for id in reversed(coloured) if id in ids), int(ids[0]))


def map_colours(tab: Tab, tokens: int) -> list[list[int]]:
    """Red, green and blue in the middle of each token of the map, in its first layer."""
    line = "$('#map canvas').getContext('2d').getImageData(0, 22, $('#map').clientWidth, 1)"
    pixels = np.array(tab.js(f"[...{line}.data]")).reshape(-1, 4)
    wide = min(tab.js(f"($('#map').clientWidth - 42) / {tokens}"), 18)
    middles = GUTTER + ((np.arange(tokens) + 0.5) * wide).astype(int)
    colours: list[list[int]] = pixels[middles, :3].tolist()
    return colours


def tints(tab: Tab) -> dict[int, str]:
    """The colours of tokens by position."""
    script = "$$('#tokens-a .tinted').map(e => [Number(e.dataset.i), e.style.getPropertyValue('--kind')])"
    return dict(tab.js(script))


def test_text_and_map_have_the_colours_of_the_selected_layer(tab: Tab, viewed: Viewed) -> None:
    """The text comes first, and says what the colours mean."""
    body, experts = unordered()
    (routing,) = collect(body)
    show(tab, viewed(body, num_experts=experts))
    assert tab.js("$('#tokens-a').compareDocumentPosition($('#load')) & 4")  # before the load
    for layer in (0, 2):
        tab.click(f"#detail tbody tr:nth-child({layer + 1}) th")
        tab.wait_for_text("#text-legend", f"Experts of MoE layer {layer}:")
        named = dict(
            tab.js(
                "$$('#text-legend span').map(e => [e.textContent, e.firstChild.style.background])"
            )
        )
        first = np.take_along_axis(routing.rows, order_of(routing), 2)[:, layer, 0]
        expected = {
            position: named.get(str(expert), named["others"])
            for position, expert in enumerate(first)
            if expert >= 0
        }
        assert {at: colour.replace(" ", "") for at, colour in tints(tab).items()} == {
            at: css_of(colour) for at, colour in expected.items()
        }


def css_of(colour: str) -> str:
    """As the page writes it: browsers write `#c3cad3` and `rgb(1 2 3)` as `rgb(1, 2, 3)`."""
    red, green, blue = re.findall(r"\d+", colour)
    return f"rgb({red}{green}{blue})"


def test_the_modes_of_the_colours(tab: Tab, viewed: Viewed) -> None:
    """Each is numpy's of the same rows, on the ramp of where experts differ."""
    rows = rows_of(99, 3, 4, 40)
    weights = weights_of(rows)
    show(tab, viewed(answer(rows, 10, weights=weights), answer(rows, 10)))
    assert tab.js("$('#mode').value") == "unusual"  # 40 experts
    counts = np.bincount(rows[:, 0].ravel(), minlength=40)
    busiest = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[busiest]) - counts[busiest]  # choices of busier ones
    usual = busiest[before < 3 / 4 * counts.sum()]
    parts = weights[:, 0] / weights[:, 0].sum(1, keepdims=True)
    entropy = -(parts * np.log(parts)).sum(1) / np.log(4)
    shares = {
        "unusual": (~np.isin(rows[:, 0], usual)).mean(1),
        "largest": weights[:, 0].max(1) / weights.max(),
        "entropy": entropy,
    }
    for mode, share in shares.items():
        tab.choose("#mode", mode)
        tab.wait(f"document.body.dataset.mode === '{mode}'")
        check_ramp(tab, share)
    tab.choose("#pick-a", "1")
    tab.wait("document.body.dataset.mode === 'unusual'")  # there are no weights
    assert tab.js("$('#mode [value=entropy]').disabled")


def check_ramp(tab: Tab, shares: np.ndarray) -> None:
    """That tokens have the colours of a ramp: the same for equal shares, and darker for larger."""
    colours = tints(tab)
    assert sorted(colours) == [*range(len(shares))]
    reds = [int(re.findall(r"\d+", colours[at])[1]) for at in range(len(shares))]  # green falls
    order = np.argsort(shares, kind="stable")
    assert (np.diff(np.array(reds)[order]) <= 1).all()
    assert len(set(reds)) > 2


def test_columns_of_the_load(tab: Tab, viewed: Viewed) -> None:
    """By load the busiest expert of each layer comes first; by likeness experts stand together
    that tokens choose together. A click and a key take what stands there."""
    # Tokens choose 0 and 3, or 1 and 2; and the first more often.
    pairs = np.array([[0, 3], [0, 3], [1, 2]] * 10, dtype=np.int16)[:, None]
    rows = np.concatenate([pairs, 3 - pairs], axis=1)
    show(tab, viewed(answer(rows[:29], 10), num_experts=4))
    cell = tab.js("($('#load').clientWidth - 42) / 4")
    at = [GUTTER + (column + 0.5) * cell for column in range(4)]
    tab.choose("#columns", "likeness")
    for expert, x in zip([0, 3, 1, 2], at, strict=True):
        tab.click("#load", x, 18 + 11)
        tab.wait_for_text("#load-status", f" Expert {expert}:")
    tab.choose("#columns", "load")
    tab.click("#load", at[0], 18 + 11)
    tab.wait_for_text("#load-status", " Expert 0:")
    tab.key("ArrowRight")
    tab.wait_for_text("#load-status", " Expert 3:")
    tab.key("ArrowRight")
    tab.wait_for_text("#load-status", " Expert 1:")


def test_the_load_and_its_keys(tab: Tab, viewed: Viewed) -> None:
    show(tab, viewed(answer(ROWS, 10), num_experts=E))
    tab.click("#load", GUTTER + 7.5 * tab.js("($('#load').clientWidth - 42) / 32"), 18 + 4.5 * 22)
    steps = [
        ("", 4, 7),
        ("ArrowRight", 4, 8),
        ("ArrowUp", 3, 8),
        ("ArrowLeft", 3, 7),
        ("ArrowDown", 4, 7),
    ]
    for key, layer, expert in steps:
        tab.key(key, bool(key))
        count = int((ROWS[:, layer] == expert).sum())
        load = f"Expert {expert}: {count * E / (99 * 4):.2f} {TIMES} ({count} of 99 tokens)."
        tab.wait_for_text("#load-status", load)
        assert tab.text("#load-status").startswith(f"MoE layer {layer}: ")
        tab.wait(
            f"{json.dumps(not key)} || $('#live').textContent === $('#load-status').textContent"
        )
    tab.key("Escape")
    tab.wait("!$('#load-status').textContent.includes('Expert 7')")
    assert tab.text("#expert-title") == "Experts of MoE layer 4"


def test_a_layers_experts_and_their_tokens(tab: Tab, viewed: Viewed) -> None:
    """By the rows that are known."""
    rows = ROWS.copy()
    rows[33] = -1
    show(tab, viewed(answer(rows, 10, TEXTS), num_experts=E))
    tab.click("#detail tbody tr:nth-child(3) th")
    tab.wait_for_text("#expert-title", "Experts of MoE layer 2")
    listed = cells(tab, "#experts")
    check_loads(listed, counts_of(rows, E)[2])
    check_colours(tab, [expert for expert, *_ in listed])
    shown = tab.js(
        "$$('#experts tbody tr').map(r => [...r.querySelectorAll('.typical')].map(e => e.textContent))"
    )
    for (expert, *_), tokens in zip(listed, shown, strict=True):
        excess = excess_of_tokens(rows[:, 2], int(expert))
        shown_tokens = [token.replace("␣", " ").replace("⏎", "\n") for token in tokens]
        assert [excess[token] for token in shown_tokens] == pytest.approx(
            sorted(excess.values(), reverse=True)[: len(shown_tokens)]
        )
    tab.click("#experts tbody button")
    tab.wait_for_text("#expert-title", f"Expert {listed[0][0]} of MoE layer 2")
    assert set(tab.texts("#experts mark")) <= {text.replace("\n", "⏎") for text in TEXTS}
    tab.click("#all-experts")
    tab.wait_for_text("#expert-title", "Experts of MoE layer 2")


def check_loads(listed: list[list[str]], counts: np.ndarray) -> None:
    """Of the 25 busiest experts, as multiples of the even share."""
    loads = [float(row[1].removesuffix(f" {TIMES}")) for row in listed]
    busiest = sorted(counts * E / counts.sum(), reverse=True)[:25]
    assert loads == [pytest.approx(load, abs=0.005) for load in busiest]


def check_colours(tab: Tab, busiest: list[str]) -> None:
    """The seven busiest experts have the colours, here and in the token in full."""
    colours = legend_colours(tab)
    assert [*colours][:7] == busiest[:7]
    seven = [*colours.values()][:7]
    assert [bytes(rgb(colour)).hex() for colour in seven] == OKABE_ITO
    chips = "$$('#detail tr.selected .chip').map(e => [e.textContent, getComputedStyle(e).borderLeftColor])"
    assert all(colour == colours.get(expert, colours["others"]) for expert, colour in tab.js(chips))


def excess_of_tokens(rows: np.ndarray, expert: int) -> dict[str, float]:
    """How many more tokens of a text chose an expert than if all texts had its share, by what the
    page writes: the text, how many chose it, and how many there are.

    rows: int [n, K], of one layer; -1 where not known, which does not count.
    """
    known = rows[:, 0] >= 0
    chose = (rows == expert).any(1)
    texts = np.array(TEXTS[: len(rows)])
    excess = {}
    for text in set(texts):
        has_text = known & (texts == text)
        count = has_text.sum()
        count_chose = (has_text & chose).sum()
        excess[f"{text} {count_chose}/{count}"] = count_chose - count * chose[known].mean()
    return excess


COLOURS = "[...$('#load canvas').getContext('2d').getImageData(0, %d, %d, 1).data]"


@pytest.mark.parametrize(
    ("theme", "ends"),
    [("light", ["#92c5de", "#f7f7f7", "#67001f"]), ("dark", ["#20526a", "#190c09", "#ffadad"])],
)
def test_the_even_share_is_the_middle_of_the_scale(
    tab: Tab, viewed: Viewed, theme: str, ends: list[str]
) -> None:
    """Two responses, of which one uses all experts alike, and the other one only; below, where the
    second has more. An expert that is not used is paler than the busiest one."""
    even = np.arange(40, dtype=np.int16).reshape(40, 1, 1) % 4
    compare(
        tab,
        viewed(answer(even, 10), answer(0 * even, 10), num_experts=4),
        theme=theme,
    )
    tab.wait_for_text("#parting-text", "Experts differ")
    none, middle, most = ends
    width = tab.js("$('#load').clientWidth")
    for band, expected in enumerate(
        [[middle] * 4, [most, none, none, none], [most, ANY, ANY, ANY]]
    ):
        y = 18 + 11 + band * (18 + 22)
        bytes_ = np.array(tab.js(COLOURS % (y, width))).reshape(width, 4)
        shown = [bytes_[GUTTER + round((width - 42) * (i + 0.5) / 4)][:3] for i in range(4)]
        assert ["#" + "".join(f"{part:02x}" for part in pixel) for pixel in shown] == expected
    tab.console.clear()  # where the browser advises against reading pictures


def test_the_pointer_shows_experts(tab: Tab, viewed: Viewed) -> None:
    """Of a cell of the map, in both responses; of a cell of the load; until a key is pressed."""
    bodies = two_that_part(119, 20, at=70)
    one, other = (collect(body)[0].rows for body in bodies)
    compare(tab, viewed(*bodies))
    left, top, width = tab.scroll_to("#map")
    tab.mouse("Moved", left + GUTTER + 80.5 * (width - 42) / 120, top + 20 + 5.5 * 8)
    tab.wait_for("#tip")
    assert tab.text("#tip strong").startswith("Token 80 ")
    ids = tab.js("$$('#tip td .chips').map(e => [...e.children].map(c => Number(c.textContent)))")
    assert ids == [one[80, 5].tolist(), other[80, 5].tolist()]
    assert (
        int(tab.text("#tip td:last-child")) == (~(one[80, 5, :, None] == other[80, 5]).any(1)).sum()
    )
    left, top, width = tab.scroll_to("#load")
    tab.mouse("Moved", left + GUTTER + 7.5 * (width - 42) / 128, top + 18 + 3.5 * 5)
    counts = [counts_of(rows, 128)[3, 7] for rows in (one, other)]
    loads = [f"{count * 128 / (119 * 8):.2f} {TIMES} ({count} of 119 tokens)" for count in counts]
    tab.wait_for_text("#tip", f"Layer 3. Expert 7: A {loads[0]}; B {loads[1]}.")
    tab.key("Escape")
    assert tab.is_hidden("#tip")


def test_zoom_and_the_strip(tab: Tab, viewed: Viewed) -> None:
    rows = rows_of(1999, 4, 2, 16)
    show(tab, viewed(answer(rows, 10)))
    left, top, width = tab.scroll_to("#map")
    picture, pointer = "$('#map canvas').toDataURL()", (left + 500, top + 60)

    def changes(act: Callable[[], None]) -> None:
        before = tab.js(picture)
        act()
        tab.wait(f"{picture} !== {json.dumps(before)}")

    def under_the_pointer() -> int:
        tab.mouse("Moved", *pointer)
        return int(tab.text("#tip strong").split(" ")[1])

    token = under_the_pointer()
    changes(lambda: tab.mouse("Wheel", *pointer, deltaX=0, deltaY=-600, modifiers=2))  # with Ctrl
    assert abs(under_the_pointer() - token) <= 1
    zoomed = float(tab.js("$('#zoom').value"))
    assert 2**zoomed == pytest.approx(16, rel=0.01)
    tab.mouse("Pressed", *pointer, button="left", clickCount=1)
    changes(lambda: tab.mouse("Moved", pointer[0] - 160, pointer[1], button="left", buttons=1))
    tab.mouse("Released", pointer[0] - 160, pointer[1], button="left", clickCount=1)
    assert under_the_pointer() == pytest.approx(token + 10, abs=2)  # dragged, not selected
    assert tab.js(f"$('{SELECTED}').dataset.i") == "10"
    height = tab.js("$('#map canvas').clientHeight")
    changes(lambda: tab.click("#map", GUTTER + (width - 42) * 0.75, height - 14))
    pointer = (left + GUTTER + (width - 42) / 2, top + 60)
    assert under_the_pointer() == pytest.approx(1500, abs=3)
    tab.js("$('#map').focus()")
    changes(lambda: tab.key("-"))
    assert float(tab.js("$('#zoom').value")) < zoomed
    changes(lambda: tab.key("0"))
    assert tab.js("$('#map canvas').clientHeight") == height - 38  # all is in sight: no strip
    assert under_the_pointer() == pytest.approx(1000, abs=3)


def test_two_answers_side_by_side(tab: Tab, viewed: Viewed) -> None:
    bodies = two_that_part(119, 20, at=70)
    one, other = (collect(body)[0].rows for body in bodies)
    compare(tab, viewed(*bodies))
    tab.wait_for_text("#parting", "119")
    differ = (one != other) & ~(one[..., None] == other[..., None, :]).any(-1)
    sentence = tab.text("#parting-text")
    assert (
        "Tokens differ from position 71. Experts differ from position 70, MoE layer 2" in sentence
    )
    assert f"{100 * differ.any(-1).mean():.1f} % of 119 positions {TIMES} 24 layers" in sentence
    by_layer = 100 * differ.any(-1).mean(0)
    assert f", most in MoE layer {by_layer.argmax()} ({by_layer.max():.1f} %)." in sentence
    assert re.match(
        "MoE layer 0: A: busiest expert .* unused. B: busiest expert .* unused.$",
        tab.text("#load-status"),
    )
    tab.click("#go")
    shows(tab, one[70])
    shows(tab, other[70], column=2)
    counts = tab.js("$$('#detail tbody tr').map(row => Number(row.children[3].textContent))")
    assert counts == differ[70].sum(-1).tolist()
    assert (
        tab.count("#detail tbody tr:nth-child(3) td:nth-child(2) .differs") == differ[70, 2].sum()
    )
    assert f"({differ[70, 2].sum()} differ)" in tab.text("#map-status")
    assert tab.js("$('#tokens-b .selected').dataset.i") == "70"
    assert tab.js("$('#tokens-b .parts').dataset.i") == "71"
    tab.click("#detail tbody tr:nth-child(3) .chip")
    expert = int(one[70, 2, 0])
    expected = [("A", position) for position in np.nonzero(one[:, 2] == expert)[0]]
    expected += [("B", position) for position in np.nonzero(other[:, 2] == expert)[0]]
    tab.wait_for_text("#expert-title", f"Expert {expert} of")
    assert sorted((row[-1], int(row[0])) for row in listed(tab)) == expected
    show(tab, viewed(answer(rows_of(9, 2, 2, 8), 3), answer(rows_of(9, 3, 2, 8), 3)))
    tab.choose("#pick-b", "1")
    assert "from different models" in error_in(tab)
    assert tab.is_hidden("#side-b")


def test_two_equal_responses(tab: Tab, viewed: Viewed) -> None:
    """Both end at one place, so that none is the shorter one."""
    body = answer(ROWS[:20], 10, TEXTS[:21])
    compare(tab, viewed(body, body))
    tab.wait_for_text("#parting-text", "Tokens are equal. Experts are equal in all of 20 positions")


def test_two_prompts_are_compared_by_load(tab: Tab, viewed: Viewed) -> None:
    """page: rows at one position are of different tokens there, so that nearly all of them
    differ."""
    one, other = rows_of(49, 6, 4, 32), rows_of(59, 6, 4, 32, seed=1)
    texts = words_of(3)
    others = [*texts[:4], " otherwise", *texts[5:60]]
    compare(tab, viewed(answer(one, 10, texts[:50]), answer(other, 12, others)))
    shares = [counts_of(rows, 32) / (len(rows) * 4) for rows in (one, other)]
    apart = abs(shares[0] - shares[1]).sum(1) / 2
    load = f"The prompts differ from position 4. Load: {100 * apart.mean():.1f} % of the choices"
    tab.wait_for_text("#parting-text", load)
    assert f"most in MoE layer {apart.argmax()} ({100 * apart.max():.1f} %)" in tab.text(
        "#parting-text"
    )
    assert "positions" not in tab.text("#parting-text")
    assert tab.is_hidden("#go")
    assert tab.is_hidden("#legend + span")
    shows(tab, one[int(tab.js("$('#tokens-a .selected').dataset.i"))])
    assert "Experts of B" not in tab.texts("#detail th")
    loads = [32 * share[0] for share in shares]
    first, *_ = cells(tab, "#experts")
    expert = abs(loads[0] - loads[1]).argmax()
    assert first[:3] == [str(expert), *(f"{load[expert]:.2f} {TIMES}" for load in loads)]
    left, top, width = tab.scroll_to("#map")
    tab.mouse("Moved", left + GUTTER + 20.5 * (width - 42) / 60, top + 20 + 6 * 26 + 10 + 3.5 * 26)
    tab.wait("!$('#tip').hidden && $('#tip strong').textContent.startsWith('Token 20 ')")
    assert tab.texts("#tip .chip") == [str(id) for id in other[20, 3]]
    _, layers = tips(tab, "#tokens-b [data-i='7']")[0]
    assert [[int(id) for id, _ in layer] for layer in layers] == other[7].tolist()
    choose(tab, 3)
    tab.click("#tokens-b [data-i='7']")
    tab.click("#map", GUTTER + 20.5 * (width - 42) / 60, 20 + 6 * 26 + 10 + 3.5 * 26)
    tab.wait_for_text("#detail-token", "A: Token 3 ")
    assert tab.js(f"$('{SELECTED}').dataset.i") == "3"

    # the next turn of a conversation
    compare(tab, viewed(answer(one, 10, texts[:50]), answer(other, 20, texts[:60])))
    tab.wait_for_text("#parting-text", "Tokens are equal up to the end of the shorter response.")
    bare: list[dict[str, Any]] = [answer(one, 10), answer(one, 10)]
    for body in bare:
        del (
            body["prompt_token_ids"],
            body["choices"][0]["token_ids"],
            body["choices"][0]["logprobs"],
        )
    compare(tab, viewed(*bare))
    tab.wait_for_text(
        "#parting-text", "Not all tokens are known. Experts are equal in all of 49 positions"
    )


def distance_of(one: np.ndarray, other: np.ndarray) -> float:
    """The share of choices that go to other experts, over all layers, of rows [n, L, K]."""
    shares = [counts_of(rows, 32) / (len(rows) * rows.shape[2]) for rows in (one, other)]
    return float(abs(shares[0] - shares[1]).sum(1).mean() / 2)


def test_folders_are_compared_as_groups(tab: Tab, viewed: Viewed) -> None:
    """By load, beside what it would be if chance dealt the responses to the two."""
    rows = [rows_of(39 + i, 3, 4, 32, seed=i) for i in range(6)]
    rows[3:] = [(ids + 1) % 32 for ids in rows[3:]]
    names = [f"{'code' if i < 3 else 'prose'}/{i}.json" for i in range(6)]
    texts = {name: json.dumps(answer(ids, 10)) for name, ids in zip(names, rows, strict=True)}
    show(tab, viewed(texts=texts))
    tab.wait("$$('#pick-a optgroup option').length === 2")
    assert tab.texts("#pick-a optgroup option") == ["code/ (3 responses)", "prose/ (3 responses)"]
    tab.choose("#pick-a", "group 0")
    tab.choose("#pick-b", "group 1")
    tab.wait_for_text("#parting-text", "If chance dealt")
    together = [np.concatenate(rows[:3]), np.concatenate(rows[3:])]
    assert f"A: code/ (3 responses), {len(together[0])} tokens with experts of" in tab.text(
        "#summary"
    )
    apart = distance_of(*together)
    deals = [
        distance_of(
            np.concatenate([rows[i] for i in first]),
            np.concatenate([rows[i] for i in range(6) if i not in first]),
        )
        for first in itertools.combinations(range(6), 3)
    ]
    shown = re.findall(r"([\d.]+) %", tab.text("#parting-text"))
    assert float(shown[0]) == pytest.approx(100 * apart, abs=0.051)
    assert float(shown[2]) == pytest.approx(100 * np.mean(deals), rel=0.1)
    assert float(shown[4]) == pytest.approx(100 * max(deals), rel=0.1)  # after "95 %"
    assert tab.is_hidden("#go")


def test_chance_deals_the_tokens_of_two_responses(tab: Tab, viewed: Viewed) -> None:
    """To different prompts, once both have ended."""
    one, other = rows_of(59, 3, 4, 32), rows_of(39, 3, 4, 32, seed=1)
    others = [text.upper() for text in TEXTS[:40]]
    compare(tab, viewed(answer(one, 10, TEXTS[:60]), answer(other, 10, others)))
    tab.wait_for_text("#parting-text", "If chance dealt their tokens to A and B")
    both, random = np.concatenate([one, other]), np.random.default_rng(0)
    dealt = [random.permutation(both) for _ in range(500)]
    deals = [distance_of(rows[:59], rows[59:]) for rows in dealt]
    shown = re.findall(r"([\d.]+) %", tab.text("#parting-text"))
    assert float(shown[0]) == pytest.approx(100 * distance_of(one, other), abs=0.051)
    assert float(shown[2]) == pytest.approx(100 * np.mean(deals), rel=0.03)
    assert float(shown[4]) == pytest.approx(100 * np.quantile(deals, 0.95), rel=0.05)


def test_some_tokens_are_compared_with_all(tab: Tab, viewed: Viewed) -> None:
    """Those that contain a text, and those of a range."""
    show(tab, viewed(answer(ROWS, 10, TEXTS), num_experts=E))
    tab.click("details.find summary")
    tab.type("#find", "expert")
    having = [position for position, text in enumerate(TEXTS) if "expert" in text]
    tab.wait_for_text("#found", f"{len(having)} of 100 tokens")
    assert tab.js("$$('#tokens-a .found').map(e => Number(e.dataset.i))") == having
    tab.click("#next-found")
    selected(tab, next(position for position in having if position > 10))
    tab.click("#compare-found")
    tab.wait_for_text("#name-b", "B: Tokens with \u201cexpert\u201d of answers.jsonl, line 1")
    known = [position for position in having if position < 99]
    tab.wait_for_text("#parting-text", f"Load: {100 * distance_of(ROWS, ROWS[known]):.1f} % of")
    assert "For as many tokens of A, drawn at random, it would be" in tab.text("#parting-text")
    tab.type("#range-first", "20")
    tab.type("#range-last", "39")
    tab.click("#range button")
    tab.wait_for_text("#name-b", "B: Tokens 20 to 39 of")
    tab.wait_for_text("#parting-text", f"Load: {100 * distance_of(ROWS, ROWS[20:40]):.1f} % of")
    assert [text.replace("⏎", "") for text in tab.texts("#tokens-b .token")] == TEXTS[20:40]


def test_weights_are_written_whole(tab: Tab, viewed: Viewed) -> None:
    """page: large ones as far as they matter, whole numbers as such, and none is cut off; B has
    none here."""
    rows = rows_of(49, 3, 8, 256)
    weights = weights_of(rows)
    shown = {
        1: "1",
        16: "16",
        2048: "2048",
        0.5: "0.500",
        1.5: "1.500",
        12.34: "12.34",
        1234.5678: "1235",
    }
    shown |= {123456.7: "123457", 2.5e6: "2.5e6", 3e38: "3.0e38", -0.25: "-0.250", -123.4: "-123.4"}
    shown |= {0.0001: "1e-4", 0: "0", 7: "7", 100: "100"}
    weights[20, :2] = np.reshape(list(shown), (2, 8))
    order = by_weight(weights[20])
    texts = np.take_along_axis(np.reshape([*shown.values(), *[""] * 8], (3, 8)), order, 1)
    url = viewed(answer(rows, 10, weights=weights), answer(rows, 10))
    for width in (1440, 1024, 390):
        compare(tab, url, width=width)
        choose(tab, 20)
        shows(tab, rows[20], column=2)
        shows(tab, np.take_along_axis(rows[20], order, 1))
        small = "$$('#detail tbody tr').slice(0, 2).flatMap(r => [...r.children[1].querySelectorAll('small')])"
        written = [text.strip() for text in tab.js(f"{small}.map(e => e.textContent)")]
        assert written == texts[:2].ravel().tolist()
        assert not tab.count("#detail td:nth-child(3) small")
        assert (
            tab.js("$$('.chip').filter(c => c.scrollWidth > c.clientWidth).map(c => c.textContent)")
            == []
        )
        assert tab.js("$$('.side > .card').every(e => e.scrollWidth <= e.clientWidth)")
        tips(tab, "#tokens-a [data-i='20']")
        assert tab.count("#tip small")
        assert (
            tab.js(
                "$$('#tip .chip').filter(c => c.scrollWidth > c.clientWidth).map(c => c.textContent)"
            )
            == []
        )


def test_no_column_is_out_of_sight(tab: Tab, viewed: Viewed) -> None:
    """The weights of a selected expert's tokens, which may be long, and of many layers."""
    rows = rows_of(29, 48, 8, 128)
    texts = [f" {'long' * 12}{i}" for i in range(30)]
    url = viewed(answer(rows, 10, texts, weights_of(rows)))
    for width in (1440, 1024, 390):
        show(tab, url, width=width)
        tab.click("#detail .chip")
        tab.wait("$('#experts mark')")
        assert tab.texts("#experts thead th")[-1] == "Weight"
        assert tab.js("$$('.scroll').every(e => e.scrollWidth <= e.clientWidth)")


def test_lines_break_where_the_text_does(tab: Tab, viewed: Viewed) -> None:
    rows = rows_of(699, 2, 2, 8)
    texts = ["one "] * 500 + ["two\n"] + ["three "] * 199
    show(tab, viewed(answer(rows, 10, texts)))
    # a browser may give no text of what is out of sight
    shown = "block => { block.style.contentVisibility = 'visible'; return block.innerText; }"
    lines = tab.js(f"$$('#tokens-a .block').map({shown})")
    assert "".join(lines).replace("\n", "") == f"{'one ' * 500}two⏎{'three ' * 199}"
    assert [line.rstrip("\n").count("\n") for line in lines] == [0, 0]


def test_tokens_are_never_markup(tab: Tab, viewed: Viewed) -> None:
    texts = [
        "<script>hacked = 1</script>",
        "<img src=x onerror='hacked = 1'>",
        "</span>",
        "&amp;",
        "<b>",
        "x",
    ]
    rows = rows_of(5, 2, 2, 8)
    show(tab, viewed(answer(rows, 2, texts)))
    tips(tab, TOKENS)
    tab.wait("$$('.typical').length > 1")
    tab.click("#detail .chip")
    tab.wait("$('#experts mark')")
    assert tab.js("typeof hacked") == "undefined"
    assert tab.count("main img, main script, main b") == 0
    assert tab.texts(TOKENS) == texts


def test_downloads(tab: Tab, viewed: Viewed, tmp_path: Path) -> None:
    def table(what: str) -> list[dict[str, str]]:
        content = download(tab, f"#save-{what}", f"{what}.csv", tmp_path)
        return list(csv.DictReader(io.StringIO(content.decode(), newline="")))

    show(tab, viewed(answer(ROWS, 10, TEXTS, WEIGHTS), num_experts=E))
    assert [int(row["tokens"]) for row in table("load")] == counts_of(ROWS, E).ravel().tolist()
    tab.click("#detail tbody tr:nth-child(2) th")
    tab.type("#expert", "5")
    tab.wait_for_text("#expert-title", "Expert 5")
    positions = np.nonzero(ROWS[:, 1] == 5)[0]
    assert {(int(row["position"]), json.loads(row["token"])) for row in table("expert")} == {
        (position, TEXTS[position]) for position in positions.tolist()
    }


@pytest.mark.parametrize("figure", ["load", "map"])
def test_figures_are_saved(tab: Tab, viewed: Viewed, tmp_path: Path, figure: str) -> None:
    """As SVG and PNG, with what their colours mean."""
    show(tab, viewed(answer(ROWS, 10, TEXTS, WEIGHTS), num_experts=E))
    svg = ElementTree.fromstring(download(tab, f"#{figure}-svg", f"{figure}.svg", tmp_path))
    texts = ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    meaning = "Multiple of the even share" if figure == "load" else "Experts of MoE layer 0:"
    assert {meaning, *map(str, range(6))} <= {*texts}
    assert "answers.jsonl, line 1" in (svg[0].text or "")
    (image,) = svg.iter("{http://www.w3.org/2000/svg}image")
    with Image.open(io.BytesIO(base64.b64decode(image.attrib["href"].partition(",")[2]))) as cells:
        assert cells.size == ((32, 6) if figure == "load" else (99, 6))
    png = download(tab, f"#{figure}-png", f"{figure}.png", tmp_path)
    with Image.open(io.BytesIO(png)) as picture:
        assert picture.size == (3 * int(svg.attrib["width"]), 3 * int(svg.attrib["height"]))
        assert picture.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
    assert tab.js(f"$('#{figure} canvas').clientWidth") == tab.js(f"$('#{figure}').clientWidth")


SHOWN = "$$('select, #expert, #rank, #map-status, #experts').map(e => e.id + (e.value ?? e.textContent))"


def test_a_link_brings_the_view_back(tab: Tab, viewed: Viewed) -> None:
    compare(tab, viewed(*two_that_part(119, 20, at=70, has_weights=True)))
    tab.wait_for_text("#parting", "119")
    tab.choose("#columns", "likeness")
    tab.choose("#mode", "expert")
    tab.wait_for("#rank-label")
    tab.type("#rank", "3")
    tab.click("#detail tbody tr:nth-child(3) .chip")
    choose(tab, 90)
    tab.click("#fit")
    tab.wait(
        "/token=90&layer=2&expert=\\d+&mode=expert&columns=likeness&rank=3&zoom=fit$/.test(location.hash)"
    )
    seen, link = tab.js(SHOWN), tab.js("location.href")
    tab.open("about:blank")
    tab.open(link)
    wait_until(lambda: tab.js(SHOWN) == seen, lambda: f"{seen}\n{tab.js(SHOWN)}", 60)
    assert tab.js("location.href") == link


def test_a_selected_token_is_one_of_the_shorter_response(tab: Tab, viewed: Viewed) -> None:
    show(tab, viewed(answer(ROWS, 10, TEXTS), answer(ROWS[:20], 10, TEXTS[:21])))
    choose(tab, 90)
    tab.choose("#pick-a", "1")
    tab.wait_for_text("#summary", " 20 rows")
    selected(tab, 20)
    tab.wait("location.hash.includes('token=20&')")


def test_a_link_says_which_file_to_open(tab: Tab, viewed: Viewed, tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps(answer(ROWS, 10, TEXTS)))
    tab.open(
        viewed(answer(ROWS[:20], 10, TEXTS[:21]))
        + "#a=other.jsonl%2C+line+1&token=33&layer=4&expert=7"
    )
    tab.wait_for_text("#notice", "This link shows other.jsonl, line 1: open this file to see it.")
    tab.give_file("#file", file)
    tab.wait_for_text("#expert-title", "Expert 7 of MoE layer 4")
    tab.wait_for_text("#load-status", f" ({(ROWS[:, 4] == 7).sum()} of 99 tokens)")
    selected(tab, 33)
    assert tab.is_hidden("#notice")
    tab.js("location.hash = '#token=3&layer=99&expert=4000&zoom=x&rank=y'")
    selected(tab, 3)
    tab.wait_for_text("#map-status", "MoE layer 0: ")
    tab.wait("$('#rank').value === '1' && $('#expert').value === ''")
