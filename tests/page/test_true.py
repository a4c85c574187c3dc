"""The page says what is true: texts beside their tokens, whole numbers, comparisons that somebody chose."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.served import serving_weights
from tests.e2e.harness import ASK, Server
from tests.page.answers import answer, rows_of, two_that_part, weights_of, words_of
from tests.page.browser import Tab
from tests.page.conftest import Viewed
from tests.page.screenshots import KV
from tests.page.test_page import TOKENS, ask, choose, compare, ended, error_in, show, shows, texts_of

pytestmark = pytest.mark.e2e

TEXTS = "v1/routed_experts/texts"


@pytest.fixture(scope="module")
def model_api(tiny_model: Path) -> Iterator[Server]:
    """A server whose model computes log-probabilities."""
    with serving_weights(tiny_model, "--dtype", "float32", "--enforce-eager", *KV) as server:
        yield server


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"return_token_ids": False},
        {"return_token_ids": False, "routed_experts_layout": "joined", "routed_experts_format": "npy"},
        {"routed_experts_prompt_start": 3},
        {"stream": True},
    ],
    ids=["ids", "no ids", "joined", "later turn", "stream"],
)
def test_texts_of_an_echoed_prompt(tab: Tab, model_api: Server, viewed: Viewed, said: dict[str, Any]) -> None:
    """page: with `echo`, log-probabilities are of all P + G tokens, and each text stands beside its own rows."""
    asked = {"model": "tiny", "prompt": "Hello there", "max_tokens": 6, "temperature": 0, "logprobs": 0, **ASK}
    plain = model_api.complete(**asked)["choices"][0]
    with model_api.client() as client:
        text = client.post("/v1/completions", json={**asked, "echo": True, **said}).text
    show(tab, viewed(text=text))
    assert tab.texts(TOKENS) == texts_of([*plain["prompt_token_ids"], *plain["token_ids"]])
    if "routed_experts_layout" not in said:  # else nothing says where the prompt ends
        assert "11 prompt and 6 generated tokens" in tab.text("#summary")
        assert tab.count("#tokens-a .prompt") == 11


def test_texts_need_no_request_for_each_token(tab: Tab, api: Server) -> None:
    """page: they come with the stream, and those of the prompt in one request, below /v1, which every proxy passes."""
    prompt = "".join(map(chr, range(33, 120)))
    tab.open(f"{api.url}/routed_experts")
    start = time.monotonic()
    ask(tab, prompt=prompt, tokens=200, kind="completion")
    ended(tab)
    tab.wait("!$('#tokens-a .number')")
    assert "".join(tab.texts(TOKENS)[:87]) == prompt
    asked = [url for url in tab.requested if url.endswith("texts") or "tokenize" in url]
    assert set(asked) == {f"{api.url}/{TEXTS}"}
    assert len(asked) <= 2 + time.monotonic() - start  # one a second, where chunks bring several tokens


def test_opened_files_of_the_served_model_have_texts(tab: Tab, model_api: Server, tmp_path: Path) -> None:
    """page: as its live responses; those of another model have ids."""
    body = model_api.complete(prompt="Hello there", max_tokens=6, temperature=0, **ASK)
    choice = body["choices"][0]
    for model in (body["model"], "another"):
        (tmp_path / f"{model}.json").write_text(json.dumps({**body, "model": model}))
    tab.open(f"{model_api.url}/routed_experts")
    tab.wait_for("#ask")
    tab.give_file("#file", tmp_path / "another.json")
    tab.wait_for_text("#summary", "11 prompt and 6 generated tokens")
    ended(tab)
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert tab.texts(TOKENS) == [f"#{one}" for one in ids]
    assert not [url for url in tab.requested if url.endswith("texts")]
    tab.give_file("#file", tmp_path / f"{body['model']}.json")
    tab.wait(f"$('#pick-a').selectedOptions[0].text.startsWith('{body['model']}.json')")
    tab.wait("$$('#tokens-a .token').length === 17 && !$('#tokens-a .number')")
    assert tab.texts(TOKENS) == texts_of(ids)
    assert [url for url in tab.requested if url.endswith("texts")] == [f"{model_api.url}/{TEXTS}"]


def test_weights_are_written_whole(tab: Tab, viewed: Viewed) -> None:
    """page: large ones as far as they matter, whole numbers as such, and none is cut off."""
    rows = rows_of(49, 3, 8, 256)
    weights = weights_of(rows)
    shown = {1: "1", 16: "16", 2048: "2048", 0.5: "0.500", 1.5: "1.500", 12.34: "12.34", 1234.5678: "1235"}
    shown |= {123456.7: "123457", 2.5e6: "2.5e6", 3e38: "3.0e38", -0.25: "-0.250", -123.4: "-123.4"}
    shown |= {0.0001: "1e-4", 0: "0", 7: "7", 100: "100"}
    weights[20, :2] = np.reshape(list(shown), (2, 8))
    for width in (1440, 1024, 390):
        compare(tab, viewed(*[answer(rows, 10, weights=weights)] * 2), width=width)
        choose(tab, 20)
        shows(tab, rows[20])
        texts = tab.js("$$('#detail tbody tr').map(r => [...r.children[1].querySelectorAll('small')])[0]?.length")
        assert texts == 8
        small = "$$('#detail tbody tr').slice(0, 2).flatMap(r => [...r.children[1].querySelectorAll('small')])"
        assert [text.strip() for text in tab.js(f"{small}.map(e => e.textContent)")] == list(shown.values())
        assert tab.js("$$('.chip').filter(c => c.scrollWidth > c.clientWidth).map(c => c.textContent)") == []
        assert tab.js("$$('.side > .card').every(e => e.scrollWidth <= e.clientWidth)")


def test_the_side_is_not_wider_than_the_content(tab: Tab, viewed: Viewed) -> None:
    """page: nor does it cut what it shows."""
    for width in (1024, 1101, 1440):
        compare(tab, viewed(*two_that_part(49, 10, 20)), width=width)
        assert tab.js("$('.side').clientWidth <= $('.left').clientWidth")
        assert tab.js("$$('.chip').every(c => c.scrollWidth <= c.clientWidth)")
        assert tab.js("document.documentElement.scrollWidth") <= width


def test_nothing_is_compared_that_nobody_chose(tab: Tab, model_api: Server, tmp_path: Path) -> None:
    """page: neither with the example, nor with what was opened before; what was chosen stays."""
    tab.open(f"{model_api.url}/routed_experts")
    tab.wait_for("#ask")
    tab.click("#example")
    ended(tab)
    assert tab.is_hidden("#side-b")
    ask(tab, prompt="Hello", tokens=5, kind="completion")
    tab.wait_for_text("#summary", "5 prompt and 5 generated tokens, 9 rows")
    ended(tab)
    assert (tab.is_hidden("#side-b"), tab.is_hidden("#parting")) == (True, True)
    tab.choose("#pick-b", "1")
    tab.wait_for_text("#summary", "B: ")
    ask(tab, prompt="Hello!", tokens=5, kind="completion")
    tab.wait_for_text("#summary", "A: 6 prompt and 5 generated tokens, 10 rows")
    assert tab.text("#name-b") == "B: example.json, line 2"
    (tmp_path / "two.jsonl").write_text("\n".join(map(json.dumps, two_that_part(49, 10, 20))))
    tab.give_file("#file", tmp_path / "two.jsonl")
    tab.wait_for_text("#summary", "10 prompt and 40 generated tokens, 49 rows of 24 layers")
    assert tab.is_hidden("#side-b")


def test_two_prompts_are_compared_by_load(tab: Tab, viewed: Viewed) -> None:
    """page: rows at one position are of different tokens there, so that nearly all of them differ."""
    one, other = rows_of(49, 6, 4, 32), rows_of(59, 6, 4, 32, seed=1)
    texts = words_of(3)
    others = [*texts[:4], " otherwise", *texts[5:60]]
    compare(tab, viewed(answer(one, 10, texts[:50]), answer(other, 12, others)))
    shares = [
        np.stack([np.bincount(rows[:, layer].ravel(), minlength=32) for layer in range(6)]) / (len(rows) * 4)
        for rows in (one, other)
    ]
    apart = abs(shares[0] - shares[1]).sum(1).mean() / 2
    tab.wait_for_text("#parting-text", f"The prompts differ from position 4. Load: {100 * apart:.1f} % of the choices")
    assert "cells differ" not in tab.text("#parting-text")
    assert tab.is_hidden("#go")
    assert tab.is_hidden("#legend-b")
    shows(tab, one[int(tab.js("$('#tokens-a .selected').dataset.i"))])
    assert "Experts of B" not in tab.texts("#detail th")

    compare(tab, viewed(answer(one, 10, texts[:50]), answer(other, 20, texts[:60])))  # the next turn of a conversation
    tab.wait_for_text("#parting-text", "Tokens are equal up to the end of the shorter response.")
    bare: list[dict[str, Any]] = [answer(one, 10), answer(one, 10)]
    for body in bare:
        del body["prompt_token_ids"], body["routed_experts_page"], body["choices"][0]["token_ids"]
        del body["choices"][0]["logprobs"]
    compare(tab, viewed(*bare))
    tab.wait_for_text("#parting-text", "Not all tokens are known. Experts are equal at all 49 positions")


def test_a_link_says_what_it_cannot_carry(tab: Tab, model_api: Server) -> None:
    """page: a response that was not saved; the example is not shown in its place."""
    tab.open(f"{model_api.url}/routed_experts")
    tab.wait_for("#ask")
    tab.click("#example")
    ended(tab)
    ask(tab, prompt="Hello", tokens=5, kind="completion")
    tab.wait_for_text("#summary", "5 prompt and 5 generated tokens, 9 rows")
    tab.choose("#pick-b", "1")
    tab.wait_for_text("#summary", "B: ")
    assert tab.is_hidden("#notice")
    tab.click("#link")
    assert tab.text("#notice").startswith("The link carries the view, not the response, which is not saved")
    assert not tab.is_hidden("#notice")
    link = tab.js("location.href")
    tab.open("about:blank")
    tab.open(link)
    tab.wait_for("#ask")
    tab.wait_for("#notice")
    assert tab.text("#notice") == "This link shows a response that was not saved: links carry no responses."
    assert tab.is_hidden("#views")
    assert not any("example.json" in url for url in tab.requested)
    ask(tab, prompt="Hello", tokens=5, kind="completion")
    ended(tab)
    assert tab.is_hidden("#notice")


def test_a_refused_request_leaves_the_last_answer(tab: Tab, api: Server) -> None:
    """page: beside the error."""
    tab.open(f"{api.url}/routed_experts")
    ask(tab, prompt="Hello", tokens=5, kind="completion")
    ended(tab)
    tab.wait("!$('#tokens-a .number')")
    summary, tokens = tab.text("#summary"), tab.texts(TOKENS)
    ask(tab, prompt="x" * 3000)
    assert error_in(tab).startswith("The server returned 400: ")
    assert (tab.text("#summary"), tab.texts(TOKENS)) == (summary, tokens)
    assert tab.count("#pick-a > option") == 2
    assert tab.js("$('#stop').disabled")
    tab.console.clear()  # the browser itself notes failed requests


ROWS_OF_LAYERS = """(() => {
  const canvas = $('#map canvas'), picture = canvas.getContext('2d');
  const [width, mixed] = [canvas.width, new Set()];
  const pixels = new Uint32Array(picture.getImageData(0, 20, width, 8 * 26).data.buffer);
  for (let x = 60; x < width - 60; x += 7) for (let y = 0; y < 8 * 26; y++) {
    if (pixels[y * width + x] !== pixels[(26 * Math.floor(y / 26) + 13) * width + x]) mixed.add(x);
  }
  return [...mixed];
})()"""


def test_fit_keeps_layers_apart(tab: Tab, viewed: Viewed) -> None:
    """page: tokens that share a pixel are averaged, layers are not."""
    rows = rows_of(5000, 8, 2, 16)
    rows[:, 1::2] = [0, 1]  # common ones in every other layer
    show(tab, viewed(answer(rows, 1)))
    tab.wait("$$('#tokens-a [data-rare]').length >= 5000", 60)
    for colour in ("usual", "expert"):
        tab.choose("#colour", colour)
        tab.click("#fit")
        tab.wait("$('#map').scrollWidth <= $('#map').clientWidth")
        tab.click("#map", 41, 25)  # the selected token at the left edge
        tab.js("new Promise(done => setTimeout(done, 500))")
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        tab.js("new Promise(done => setTimeout(done, 500))")
        assert tab.js(ROWS_OF_LAYERS) == [], colour
    tab.console.clear()  # where the browser advises against reading pictures


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_ids_have_colours_that_do_not_rise_with_them(tab: Tab, viewed: Viewed, theme: str) -> None:
    """page: ids are names, and neighbours have nothing in common."""
    show(tab, viewed(answer(rows_of(9, 2, 2, 8), 3)), theme=theme)
    found = tab.js("import('./routed_experts/colours.js').then(({ ramps }) => [...ramps().experts(128)])")
    colours = np.array(found, dtype=np.uint32).view(np.uint8).reshape(128, 4)[:, :3].astype(int)
    assert (abs(np.diff(colours[:, :], axis=0)).sum(1) > 90).all()
    assert len(np.unique(colours, axis=0)) == 128
    apart = abs(colours[:24, None] - colours[None, :24]).sum(-1)
    assert apart[~np.eye(24, dtype=bool)].min() > 30
