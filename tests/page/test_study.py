"""What the page counts, ranks and downloads, beside numpy's own numbers of the same rows."""

import csv
import importlib.util
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from routed_experts.protocol.collect import collect
from routed_experts.protocol.saved import ModelInfo
from routed_experts.server.page import page_files
from tests.e2e.harness import Oracle, Server, wait_until
from tests.page.answers import answer, rows_of, two_that_part, weights_of, words_of
from tests.page.browser import Tab
from tests.page.conftest import Viewed, viewing_files

pytestmark = pytest.mark.e2e

E, GUTTER = 32, 40
TIMES = "\u00d7"
GIVEN = ModelInfo(num_experts=E)
ROWS = rows_of(99, 6, 4, E)
WEIGHTS = weights_of(ROWS)
COUNTS = np.stack([np.bincount(ROWS[:, layer].ravel(), minlength=E) for layer in range(6)])
TEXTS = words_of(5)[:100]
CONTROLS = "[...$$('select, #expert, #rank')].map(e => e.id + e.value)"


@pytest.fixture
def study(tab: Tab, viewed: Viewed) -> Tab:
    """An answer with weights, of which 10 tokens are the prompt's."""
    tab.open(viewed(answer(ROWS, 10, TEXTS, WEIGHTS), given=GIVEN))
    tab.wait_for_text("#summary", "finish reason")
    return tab


def cells(tab: Tab, place: str) -> list[list[str]]:
    found: list[list[str]] = tab.js(f"$$('{place} tbody tr').map(r => [...r.cells].map(c => c.textContent))")
    return found


def lists(tab: Tab, place: str, column: int, expected: list[Any]) -> None:
    """Waits until a column of a list has these values, as text."""
    texts = [str(value) for value in expected]
    wait_until(
        lambda: [row[column] for row in cells(tab, place)] == texts,
        lambda: f"not {texts}:\n{[row[column] for row in cells(tab, place)]}",
        60,
    )


def sort(tab: Tab, place: str, title: str) -> None:
    button = f"$$('{place} thead button').find(b => b.textContent.startsWith('{title}'))"
    tab.wait(button)
    tab.js(f"{button}.click()")


def balance_of(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum() / np.log(E))


def test_the_tokens_of_an_expert(study: Tab) -> None:
    layer, expert = 2, int(COUNTS[2].argmax())
    study.click("#load", GUTTER + (expert + 0.5) * study.js("($('#load').clientWidth - 42) / 32"), 6 + 2.5 * 18)
    positions, ranks = np.nonzero(ROWS[:, layer] == expert)
    study.wait_for_text("#expert-status", f"MoE layer 2, expert {expert}: {len(positions)} of 99 tokens.")
    order = np.argsort(-WEIGHTS[positions, layer, ranks], kind="stable")
    lists(study, "#expert-tokens", 0, list(positions[order][:25]))
    lists(study, "#expert-tokens", 2, list(ranks[order][:25] + 1))
    lists(study, "#expert-tokens", 3, [f"{w:.3f}" for w in WEIGHTS[positions, layer, ranks][order][:25]])
    first = int(positions[order][0])
    assert study.text("#expert-tokens mark").replace("␣", " ") == TEXTS[first].replace("\n", "⏎")
    around = "".join(TEXTS[max(first - 4, 0) : first + 5]).replace("\n", "⏎")
    assert study.text("#expert-tokens tbody td:nth-child(2)").replace("␣", " ") == around
    assert study.js("$$('#tokens-a .chosen').map(e => Number(e.dataset.i))") == positions.tolist()
    study.click("#expert-tokens tbody td:nth-child(2)")
    study.wait(f"$('#tokens-a .selected')?.dataset.i === '{first}' && $('#expert-tokens tr.selected')")
    sort(study, "#expert-tokens", "Position")
    lists(study, "#expert-tokens", 0, list(positions[:25]))
    study.type("#expert", "5")
    lists(study, "#expert-tokens", 0, sorted(np.nonzero(ROWS[:, layer] == 5)[0])[:25])
    study.js("$('#map').focus()")
    study.key("ArrowDown")
    study.wait("!$('#tokens-a .chosen')")  # an expert of another layer is another expert


def test_lists_of_layers_experts_and_tokens(study: Tab) -> None:
    balances = [balance_of(counts) for counts in COUNTS]
    lists(study, "#lists", 1, [f"{100 * value:.1f} %" for value in balances])
    lists(study, "#lists", 4, [(counts == 0).sum() for counts in COUNTS])
    sort(study, "#lists", "Balance")
    lists(study, "#lists", 0, list(np.argsort(balances)))
    assert study.js("$('#lists th[aria-sort]').ariaSort") == "ascending"
    study.click("#lists tbody tr:nth-child(1) button")
    study.wait_for_text("#load-status", f"MoE layer {np.argmin(balances)}:")

    study.choose("#list", "experts")
    study.choose("#scope", "all")
    order = np.argsort(-COUNTS.ravel(), kind="stable")[:25]
    lists(study, "#lists", 0, list(order % E))
    lists(study, "#lists", 1, list(order // E))
    lists(study, "#lists", 3, [f"{load:.2f} {TIMES}" for load in COUNTS.ravel()[order] * E / (99 * 4)])

    study.choose("#list", "tokens")
    bits = np.log2((99 * 4 + E / 2) / E) - np.log2(COUNTS + 0.5)
    rarity = np.take_along_axis(bits[None], ROWS.reshape(99, 6, 4), axis=2).mean((1, 2))
    lists(study, "#lists", 0, list(np.argsort(-rarity, kind="stable")[:25]))
    lists(study, "#lists", 2, [f"{value:.2f}" for value in -np.sort(-rarity)[:25]])
    study.click("#lists .pager button:nth-child(2)")
    lists(study, "#lists", 0, list(np.argsort(-rarity, kind="stable")[25:50]))


def folders() -> tuple[dict[str, str], dict[str, np.ndarray]]:
    files, rows = {}, {}
    for seed, name in enumerate(("code/a", "code/b", "prose/a", "prose/b")):
        rows[name] = rows_of(160, 6, 4, E, seed)[(seed // 2) * 120 :][:30]
        files[f"{name}.jsonl"] = json.dumps(answer(rows[name], 8, TEXTS[:31]))
    return files, rows


@pytest.fixture
def compared() -> Iterator[str]:
    with viewing_files(folders()[0], GIVEN) as url:
        yield url


def test_folders_are_compared(tab: Tab, compared: str) -> None:
    rows = folders()[1]
    tab.open(compared)
    tab.wait_for_text("#summary", "B: 2 responses, 60 rows")
    assert tab.texts("#pick-a optgroup option") == [
        *("code/ (2 responses)", "prose/ (2 responses)", "all opened responses (4 responses)")
    ]
    shares = {
        name: np.stack([np.bincount(part[:, layer].ravel(), minlength=E) for layer in range(6)]) / (len(part) * 4)
        for name in ("code", "prose", *rows)
        for part in [np.concatenate([one for key, one in rows.items() if key.startswith(name)])]
    }
    apart = abs(shares["code"] - shares["prose"]).sum(1) / 2
    tab.wait_for_text("#parting-text", f"Load: {100 * apart.mean():.1f} % of the choices")
    assert f"most in MoE layer {apart.argmax()} ({100 * apart.max():.1f} %)" in tab.text("#parting-text")
    lists(tab, "#lists", 6, [f"{100 * value:.1f} %" for value in apart])

    tab.choose("#list", "experts")
    sort(tab, "#lists", "A minus B")
    difference = (shares["code"] - shares["prose"])[0] * E
    lists(tab, "#lists", 0, list(np.argsort(-difference, kind="stable")[:25]))
    expert = int(difference.argmax())
    tab.click("#lists tbody tr:nth-child(1) button")
    counts = [round(shares[name][0, expert] * 240) for name in ("code", "prose")]
    tab.wait_for_text("#expert-status", f"expert {expert}: {counts[0]} of 60 tokens; in B {counts[1]} of 60.")
    sides = [row[4] for row in cells(tab, "#expert-tokens")]
    expected = sum(counts)
    assert len(sides) == min(expected, 25)
    if expected > 25:
        assert f"1 to 25 of {expected}" in tab.text("#expert-tokens .pager")
        tab.click("#expert-tokens .pager button:nth-child(2)")
        sides += [row[4] for row in cells(tab, "#expert-tokens")]
    assert [sides.count(side) for side in "AB"] == counts

    tab.click("#tokens-a [data-i='34']")  # the fifth of the second response
    tab.wait_for_text("#detail-token", "Token 4 ")
    assert tab.text("#detail-token").endswith("prompt of code/b.jsonl, line 1")
    chips = "$$('#detail tbody tr').map(row => [...row.querySelectorAll('.chip')].map(c => Number(c.textContent)))"
    wait_until(lambda: tab.js(chips) == rows["code/b"][4].tolist(), "other rows", 60)

    tab.choose("#list", "responses")
    by_name = [f"{100 * abs(shares['code'] - shares[name]).sum(1).mean() / 2:.1f} %" for name in rows]
    by_response = {row[0]: row[3] for row in cells(tab, "#lists")} if not tab.wait_for_text("#lists", "code/b") else {}
    assert [by_response[f"{name}.jsonl, line 1"] for name in rows] == by_name


def pairs(layer: int, other: int) -> np.ndarray:
    """How many tokens chose expert i of one layer and j of the other."""
    chose = np.zeros((99, 6, E), dtype=np.int64)
    np.put_along_axis(chose, ROWS.astype(np.int64), 1, axis=2)
    return np.einsum("ti,tj->ij", chose[:, layer], chose[:, other])


def test_pairs_of_experts(study: Tab) -> None:
    study.choose("#list", "layers")
    study.click("#lists tbody tr:nth-child(4) button")
    together = pairs(3, 3)
    i, j = np.unravel_index(np.triu(together, 1).argmax(), together.shape)
    side = min(study.js("$('#matrix').clientWidth") - 42, 560) / E
    study.click("#matrix", GUTTER + (j + 0.5) * side, GUTTER + (i + 0.5) * side)
    lift = together[i, j] * 99 / (together[i, i] * together[j, j])
    share = f"{100 * together[i, j] / together[i, i]:.1f} % of those of expert {i}"
    words = f"{together[i, j]} of 99 tokens chose experts {i} and {j} ({share}), {lift:.2f} {TIMES} as many"
    study.wait_for_text("#matrix-status", f"Within MoE layer 3: {words}")
    study.wait_for_text("#expert-status", f"expert {i}: {together[i, i]} of 99")

    study.choose("#pairs", "next")
    following = pairs(3, 4)
    study.wait_for_text("#matrix-status", f"From MoE layer 3 to MoE layer 4: {following[i, j]} of 99 tokens")
    study.js("$('#matrix').focus()")
    study.key("ArrowDown")
    study.key("ArrowLeft")
    i, j = min(i + 1, E - 1), max(j - 1, 0)
    study.wait_for_text("#matrix-status", f"{following[i, j]} of 99 tokens chose expert {i}, then {j}")
    study.click("#pairs-table summary")
    order = np.argsort(-following.ravel(), kind="stable")[:25]
    lists(study, "#pairs-table", 0, list(order // E))
    lists(study, "#pairs-table", 1, list(order % E))
    expected = COUNTS[3][order // E] * COUNTS[4][order % E] / 99
    lists(study, "#pairs-table", 4, [f"{value:.2f}" for value in following.ravel()[order] / expected])
    study.click("#lists tbody tr:nth-child(6) button")
    study.wait_for_text("#matrix-status", "MoE layer 5 is the last one.")


def download(tab: Tab, name: str, folder: Path) -> bytes:
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    tab.click(f"[data-save='{name}']")
    file = folder / name
    wait_until(lambda: file.exists() and file.stat().st_size, f"no {name}", 60)
    return file.read_bytes()


def test_downloads(study: Tab, tmp_path: Path) -> None:
    def table(name: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(download(study, name, tmp_path).decode(), newline="")))

    study.click("#lists tbody tr:nth-child(2) button")
    study.type("#expert", "5")
    study.wait_for_text("#expert-status", "expert 5")
    of_map = table("map.csv")
    assert [json.loads(row["token"]) for row in of_map] == TEXTS
    assert [[int(i) for i in row["experts_4"].split()] for row in of_map[:-1]] == ROWS[:, 4].tolist()
    found = np.array([row["weights_4"].split() for row in of_map[:-1]], dtype=np.float32)
    assert np.array_equal(found, WEIGHTS[:, 4])
    assert of_map[-1]["experts_4"] == ""
    of_load = table("load.csv")
    assert [int(row["tokens"]) for row in of_load] == COUNTS.ravel().tolist()
    of_balance = table("balance.csv")
    assert float(of_balance[-1]["layer_2"]) == pytest.approx(balance_of(COUNTS[2]), abs=1e-6)
    assert [int(row["busiest_expert"]) for row in table("list.csv")] == COUNTS.argmax(1).tolist()
    positions = np.nonzero(ROWS[:, 1] == 5)[0]
    assert {int(row["position"]) for row in table("expert.csv")} == set(positions.tolist())
    upper = np.triu(pairs(1, 1), 1)
    of_pairs = {(int(row["expert"]), int(row["other"])): int(row["tokens"]) for row in table("pairs.csv")}
    assert of_pairs == {(i, j): upper[i, j] for i, j in zip(*upper.nonzero(), strict=True)}
    for name in ("map.png", "load.png", "balance.png", "pairs.png"):
        with Image.open(io.BytesIO(download(study, name, tmp_path))) as picture:
            assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 3, name
            assert picture.convert("RGBA").getextrema()[3] == (255, 255), name


def test_a_link_brings_the_view_back(tab: Tab, compared: str, tmp_path: Path) -> None:
    tab.open(compared)
    tab.wait_for_text("#summary", "B: 2 responses")
    tab.wait("$$('#tokens-a .token').length === 60")
    for control, value in (("#list", "tokens"), ("#colour", "expert"), ("#pairs", "next"), ("#window", "32")):
        tab.choose(control, value)
    tab.click("#detail tbody tr:nth-child(3) .chip")
    sort(tab, "#lists", "Position")
    tab.click("#tokens-a [data-i='10']")  # on the first page of the list, as a link keeps no page
    tab.click("#fit")
    tab.wait("/a=code%2F&b=prose%2F&token=10&layer=2&expert=\\d+.*sort=position.*zoom=fit/.test(location.hash)")
    seen = [tab.js(CONTROLS), cells(tab, "#lists"), cells(tab, "#expert-tokens"), tab.text("#map-status")]
    link = tab.js("location.href")
    tab.open("about:blank")
    tab.open(link)

    def shown() -> list[Any]:
        return [tab.js(CONTROLS), cells(tab, "#lists"), cells(tab, "#expert-tokens"), tab.text("#map-status")]

    wait_until(lambda: shown() == seen, lambda: f"{seen}\n{shown()}", 60)
    assert tab.js("location.href") == link


def test_a_link_says_which_file_to_open(tab: Tab, viewed: Viewed, tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps(answer(ROWS, 10, TEXTS)))
    tab.open(viewed(answer(ROWS[:20], 10, TEXTS[:21])) + "#a=other.jsonl%2C+line+1&token=33&layer=4&expert=7")
    tab.wait_for_text("#notice", "This link shows other.jsonl, line 1: open this file to see it.")
    tab.give_file("#file", file)
    tab.wait_for_text("#expert-status", f"MoE layer 4, expert 7: {COUNTS[4, 7]} of 99")
    tab.wait("$('#tokens-a .selected')?.dataset.i === '33'")
    assert tab.is_hidden("#notice")
    tab.js("location.hash = '#token=3&layer=99&expert=4000&list=nonsense&zoom=x'")
    tab.wait("$('#tokens-a .selected')?.dataset.i === '3'")
    tab.wait_for_text("#map-status", "MoE layer 0: ")
    tab.wait("$('#list').value === 'layers' && $('#expert').value === ''")


def test_4000_tokens_of_58_layers_fit(tab: Tab, viewed: Viewed) -> None:
    """And 8 experts stand in one line, and the selected layer is in sight."""
    rows = np.random.default_rng(0).random((4000, 58, 256), dtype=np.float32).argpartition(8)[:, :, :8]
    tab.open(viewed(answer(rows.astype(np.int16), 500)))
    tab.wait("$$('#tokens-a [data-rare]').length >= 4000")
    assert tab.js("$('#map').scrollWidth > 2 * $('#map').clientWidth")
    tab.click("#fit")
    tab.wait("$('#map').scrollWidth <= $('#map').clientWidth")
    tab.click("#map", GUTTER + (tab.js("$('#map').clientWidth") - 42) * 3000.5 / 4001, 20 + 5 * 40.5)
    tab.wait("Math.abs($('#detail-token').textContent.split(' ')[1] - 3000) < 8")  # as exact as a pixel is
    tab.wait_for_text("#map-status", "MoE layer 40: ")
    tops = "$$('#detail tbody tr').map(row => new Set([...row.querySelectorAll('.chip')].map(c => c.offsetTop)).size)"
    assert tab.js(tops) == [1] * 58
    assert tab.js("$$('.chip').every(c => c.scrollWidth <= c.clientWidth)")
    inside = "(r, f) => r.top >= f.top && r.bottom <= f.bottom + 1"
    boxes = "$('#detail tr.selected').getBoundingClientRect(), $('.detail .scroll').getBoundingClientRect()"
    tab.js("$('#map').focus()")
    for key in ["ArrowDown"] * 17 + ["ArrowUp"] * 57:
        tab.key(key)
        tab.wait(f"$('#detail tr.selected') && ({inside})({boxes})")


CONTRAST = """(() => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const own = e => parts(getComputedStyle(e).backgroundColor);
  const behind = e => own(e)[3] === 0 ? behind(e.parentElement) : own(e);
  const span = $('#tokens-a .token.prompt'), found = [];
  for (const rare of ['', '1', '2', '3', '4']) for (const kind of ['', 'number', 'selected', 'chosen']) {
    span.className = `token prompt ${kind}`; span.dataset.rare = rare;
    const [one, other] = [parts(getComputedStyle(span).color), behind(span)].map(light).sort((a, b) => b - a);
    found.push((one + 0.05) / (other + 0.05));
  }
  return Math.min(...found);
})()"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_prompt_tokens_can_be_read(tab: Tab, viewed: Viewed, theme: str) -> None:
    tab.open(viewed(answer(ROWS, 10, TEXTS)), theme=theme)
    tab.wait_for_text("#summary", "finish reason")
    assert tab.js(CONTRAST) >= 4.5


def test_the_example(tab: Tab, api: Server) -> None:
    """On a server, and in `routed-experts view` without files."""
    with viewing_files({}) as url:
        is_ready = {
            f"{api.url}/routed_experts": "!$('#ask').hidden",
            url: "$('#empty-how').textContent.startsWith('Open')",
        }
        for address, condition in is_ready.items():
            tab.open(address)
            tab.wait(condition)  # the button moves until then
            tab.click("#example")
            tab.wait_for_text("#summary", f"5 layers {TIMES} 4 of 16 experts, finish reason: length.")
            assert tab.is_hidden("#side-b")
            tab.wait("location.hash.includes('a=example.json')")
            tab.choose("#pick-b", "1")
            tab.wait_for_text("#tokens-b", "def route(token):")
            tab.wait_for_text("#parting-text", "The prompts differ from position 0. Load: ")
        tab.open(f"{url}#a=example.json%2C+line+2&token=5&layer=3")
        tab.wait_for_text("#map-status", "Token 5 ")
        assert "decoder layer 3" in tab.text("#map-status")


def test_the_example_is_of_the_tiny_model(oracle: Oracle) -> None:
    for line in page_files()["example.json"][0].splitlines():
        (routing,) = collect(json.loads(line))
        tokens = [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())]
        assert oracle.wrong(routing.rows, tokens[:-1]) == []
        assert routing.weights is not None
        assert np.allclose(routing.weights, oracle.weights(routing.rows, tokens[:-1]), atol=1e-5)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(tab: Tab, viewed: Viewed, compared: str, theme: str) -> None:
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-core-python is not installed")
    axe = Path(spec.origin).with_name("axe.min.js").read_text()
    found = []
    for url, width in ((compared, 1440), (viewed(*two_that_part(49, 10, 20)), 900), (viewed(text=""), 420)):
        tab.open(url, width=width, theme=theme)
        tab.wait("!$('#views').hidden || !$('#error').hidden")
        tab.js("$$('#pick-b > option')[2] && $('#pick-b').value === '' && ($('#pick-b').value = '1')")
        tab.js("$('#pick-b').dispatchEvent(new Event('change'))")
        if not tab.is_hidden("#views"):
            tab.click("#detail tbody tr:nth-child(2) .chip")
            tab.js("$$('details').forEach(e => { e.open = true })")
            tab.wait("$('#pairs-table tbody tr')")
        tab.call("Runtime.evaluate", expression=axe)
        result = tab.js(
            "axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html + n.failureSummary)]))"
        )
        found += [one for one in result if one[0] in ("serious", "critical")]
    tab.console.clear()
    assert found == []
