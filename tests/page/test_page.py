"""The page on a server: what people ask, see grow, stop, save, and are refused."""

import csv
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.collect import collect
from routed_experts.protocol.saved import ModelInfo, read
from routed_experts.server.cli.tiny_model import make_tokenizer
from routed_experts.server.page import page_files
from routed_experts.server.tools.saved import opened
from tests.contract.engine import weights_for
from tests.contract.served import serving, serving_quickly
from tests.e2e.harness import ASK, FLOAT32, Answer, Server, answers_of, prompt_of
from tests.page.answers import answer, rows_of, two_that_part
from tests.page.browser import Tab
from tests.page.conftest import Viewed
from tests.page.seen import (
    PROMPT,
    TOKENS,
    ask,
    by_weight,
    choose,
    download,
    ended,
    error_in,
    shows,
    shows_weights,
)

pytestmark = pytest.mark.e2e

TEXTS = "v1/routed_experts/texts"


def texts_of(ids: list[int]) -> list[str]:
    tokenizer = make_tokenizer()
    return [tokenizer.decode([i]) for i in ids]


def shown_tokens(tab: Tab) -> list[str]:
    return [text.replace("⏎", "") for text in tab.texts(TOKENS)]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_an_answer_streams_in(tab: Tab, api: Server, tmp_path: Path, kind: str) -> None:
    """With weights; what Save writes has the same, and opens as the same.

    page: texts come with the stream, those of the prompt in one request, below /v1, which every
    proxy passes.
    """
    said = said_to(api, kind)
    rows = np.concatenate([said.prompt_rows, said.rows])
    tab.open(f"{api.url}/routed_experts")
    start = time.monotonic()  # clock: the page may ask more if it is slow
    ask(tab, kind=kind)
    ended(tab)
    check_form_makes_room(tab)
    tab.wait("!$('#tokens-a .number')")  # the texts are asked for in addition
    assert shown_tokens(tab) == texts_of([*said.prompt, *said.tokens])
    assert not [text for text in tab.texts("#experts .typical") if text.startswith("#")]
    tokens = f"{len(said.prompt)} prompt and 40 generated tokens"
    assert f"{tokens}, {len(rows)} rows of 8 layers" in tab.text("#summary")
    shows_row(tab, rows[-1])  # it is selected while the answer grows
    choose(tab, 3)
    shows_row(tab, rows[3])
    seconds = time.monotonic() - start  # clock: the page may ask more if it is slow
    check_requested(tab, api, seconds)

    download(tab, "#save", "answer.jsonl", tmp_path)
    check_saved(tmp_path / "answer.jsonl", rows, said.tokens, api.info())
    tab.give_file("#file", tmp_path / "answer.jsonl")
    tab.wait("$$('#pick-a option').length === 3")
    tab.choose("#pick-b", "0")
    tab.wait_for_text("#parting", "Experts are equal")


def said_to(api: Server, kind: str) -> Answer:
    """The same request, without the page."""
    body: dict[str, Any] = {**ASK, "max_tokens": 40}
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": PROMPT}]
        response = api.chat(**body)
    else:
        response = api.complete(**body, prompt=PROMPT)
    (said,) = answers_of(response)
    return said


def check_form_makes_room(tab: Tab) -> None:
    """For the answer; it comes again by a click, as it was."""
    assert not tab.js("$('#ask').open")
    assert tab.js("document.activeElement === $('#ask summary')")
    tab.click("#ask summary")
    assert tab.js("$('#ask').open && $('#prompt').value") == PROMPT


def shows_row(tab: Tab, row: np.ndarray) -> None:
    """The selected token has a row's experts [L, K] and their weights, the heaviest first."""
    weights = weights_for(row[None])[0]
    order = by_weight(weights)
    shows(tab, np.take_along_axis(row, order, 1))
    shows_weights(tab, np.take_along_axis(weights, order, 1))


def check_requested(tab: Tab, api: Server, seconds: float) -> None:
    """The page asked its server alone, and for texts once a second, where chunks bring several
    tokens."""
    assert [url for url in tab.requested if not url.startswith(api.url)] == []
    requests = [url for url in tab.requested if url.endswith("texts") or "tokenize" in url]
    assert set(requests) == {f"{api.url}/{TEXTS}"}
    assert len(requests) <= 2 + seconds


def check_saved(file: Path, rows: np.ndarray, tokens: list[int], info: dict[str, Any]) -> None:
    """A file that the page wrote has the answer's rows and tokens, and says what `info` does."""
    (saved,) = read(opened([str(file)]), ModelInfo())
    (routing,) = saved.routings()
    assert np.array_equal(routing.rows, rows)
    assert list(routing.token_ids or ()) == tokens
    dimensions = [info[name] for name in ("num_layers", "top_k", "num_experts")]
    assert saved.info == ModelInfo(
        *dimensions, tuple(info["layer_ids"]), weights_scale=tuple(info["weights_scale"])
    )


def load_in(tab: Tab, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Counts and sums of weights [L, E] of the page's table."""
    rows = list(
        csv.DictReader(io.StringIO(download(tab, "#save-load", "load.csv", folder).decode()))
    )
    layers = len({row["layer"] for row in rows})
    names = {"tokens": np.int64, "sum_of_weights": np.float64}
    counts, sums = (
        np.array([row[name] for row in rows], dtype).reshape(layers, -1)
        for name, dtype in names.items()
    )
    return counts, sums


def test_the_load_of_the_server(tab: Tab, tiny_model: Path, tmp_path: Path) -> None:
    """And, the next time, what came since: the rows of the only request."""
    flags = ("--enable-return-routed-expert-weights", "--kv-cache-memory-bytes", str(64 << 20))
    ask_all = {"return_routed_experts": True, "return_routed_expert_weights": True}
    with serving_quickly(tiny_model, tmp_path / "log", *FLOAT32, *flags) as server:
        tab.open(f"{server.url}/routed_experts")
        tab.click("#profile")
        tab.wait_for_text("#summary", "profile 1")
        told = server.profile()
        assert f"profile 1, {told['tokens']} tokens with experts of 5 layers" in tab.text(
            "#summary"
        )
        assert load_in(tab, tmp_path)[0].tolist() == told["counts"].tolist()
        assert tab.js("$('#save').disabled")
        shown = "['#tokens-a', '#map', '#detail', '#load'].map(id => $(id).getClientRects().length)"
        assert tab.js(shown) == [0, 0, 0, 1]

        (routing,) = collect(server.complete(prompt=prompt_of(40, 9), max_tokens=4, **ask_all))
        tab.click("#profile")
        name = "profile 2 \u2212 profile 1"
        tab.wait_for_text("#summary", f"{name}, {len(routing.rows)} tokens with experts")
        since, sums = load_in(tab, tmp_path)
        assert routing.weights is not None
        for layer, (ids, weights) in enumerate(
            zip(routing.rows.swapaxes(0, 1), routing.weights.swapaxes(0, 1), strict=True)
        ):
            assert since[layer].tolist() == np.bincount(ids.ravel(), minlength=16).tolist()
            of_experts = np.bincount(ids.ravel(), weights.ravel(), minlength=16)
            assert np.allclose(sums[layer], of_experts, rtol=1e-5)
        tab.choose("#pick-b", "0")
        tab.wait_for_text("#parting", "Load: ")
        assert tab.text("#name-b") == "B: profile 1"
        ask(tab, tokens=5)
        ended(tab)
        tab.wait("$('#tokens-a').getClientRects().length")


def test_stop_ends_the_request(tab: Tab, api: Server) -> None:
    # By the page itself: with a busy machine, all tokens may be there before a click from outside
    # is.
    stop = f"setInterval(() => $$('{TOKENS}').length > 60 && $('#stop').click(), 5)"
    for _ in range(20):
        tab.open(f"{api.url}/routed_experts")
        tab.js(stop)
        ask(tab, tokens=900)
        ended(tab)
        if "finish reason: abort" in tab.text("#summary"):
            break
    assert "finish reason: abort" in tab.text("#summary")
    assert tab.is_hidden("#error")


def test_several_tokens_in_a_chunk(tab: Tab, tiny_model: Path) -> None:
    """On a server whose own defaults are others than the page's."""
    own = {
        "routed_experts_format": "list",
        "routed_experts_stream": "at_end",
        "routed_experts_prompt_start": 1,
    }
    flags = (
        "--stream-interval",
        "5",
        "--routed-experts-default",
        json.dumps({**own, "return_routed_experts": True}),
    )
    body = {"model": "tiny", "prompt": "Hello there", "max_tokens": 24, "stream": True, **ASK}
    body |= {"routed_experts_format": "object", "routed_experts_prompt_start": 0}
    with serving(tiny_model, *flags) as server:
        with server.client() as client:
            stream = client.post("/v1/completions", json=body).text
        (routing,) = collect(stream)
        assert stream.count('"token_ids"') < 12
        tab.open(f"{server.url}/routed_experts")
        ask(tab, prompt="Hello there", tokens=24)
        ended(tab)
        tab.wait("!$('#tokens-a .number')")
        assert shown_tokens(tab) == texts_of(
            [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())]
        )


def test_nothing_is_compared_that_nobody_chose(tab: Tab, api: Server, tmp_path: Path) -> None:
    """page: neither with the example, nor with what was opened before; what was chosen stays. Nor
    does a link carry a response that was not saved, or show the example in its place."""
    tab.open(f"{api.url}/routed_experts")
    tab.wait_for("#ask")
    tab.click("#example")
    ended(tab)
    assert tab.is_hidden("#side-b")
    ask(tab, prompt="Hello", tokens=5)
    tab.wait_for_text("#summary", "5 prompt and 5 generated tokens, 9 rows")
    ended(tab)
    assert (tab.is_hidden("#side-b"), tab.is_hidden("#parting"), tab.is_hidden("#notice")) == (
        True,
        True,
        True,
    )
    tab.choose("#pick-b", "2")
    tab.wait_for_text("#summary", "B: ")
    tab.wait("location.hash.includes('&b=a+response+that+was+not+saved')")
    link = tab.js("location.href")
    ask(tab, prompt="Hello!", tokens=5)
    tab.wait_for_text("#summary", "A: 6 prompt and 5 generated tokens, 10 rows")
    assert tab.text("#name-b") == "B: 1: Hello"
    (tmp_path / "two.jsonl").write_text("\n".join(map(json.dumps, two_that_part(49, 10, 20))))
    tab.give_file("#file", tmp_path / "two.jsonl")
    tab.wait_for_text("#summary", "10 prompt and 40 generated tokens, 49 rows of 24 layers")
    assert tab.is_hidden("#side-b")

    tab.open("about:blank")
    tab.open(link)
    tab.wait_for("#ask")
    tab.wait_for("#notice")
    assert (
        tab.text("#notice")
        == "This link shows a response that was not saved: links carry no responses."
    )
    assert tab.is_hidden("#views")
    assert not any("example.json" in url for url in tab.requested)
    ask(tab, prompt="Hello", tokens=5)
    ended(tab)
    assert tab.is_hidden("#notice")


def test_ctrl_and_enter_send_from_every_field(tab: Tab, api: Server) -> None:
    tab.open(f"{api.url}/routed_experts")
    tab.wait_for("#ask")
    tab.type("#prompt", "Hello")
    tab.type("#max-tokens", "3")
    tab.js("$('#kind').focus()")
    tab.js(
        "$('#kind').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', ctrlKey: true, bubbles: true}))"
    )
    tab.wait_for_text("#summary", " and 3 generated tokens")


def test_texts_that_come_late_reach_the_tables(tab: Tab, api: Server, tmp_path: Path) -> None:
    (choice,) = (body := api.complete(**ASK, prompt=PROMPT, max_tokens=3))["choices"]
    choice.pop("logprobs", None)
    (tmp_path / "answer.jsonl").write_text(json.dumps({**body, "model": api.info()["model"]}))
    tab.open(f"{api.url}/routed_experts")
    tab.wait_for("#ask")  # then the page knows the server's model
    tab.give_file("#file", tmp_path / "answer.jsonl")
    tab.wait("$('#experts .typical')")
    tab.wait("!$('#tokens-a .number')")
    tab.wait("!$$('#experts .typical').some(e => e.textContent.startsWith('#'))")


def test_errors_of_the_server_are_shown(tab: Tab, api: Server) -> None:
    """page: beside the last response, which stays; and that it is gone."""
    tab.open(f"{api.url}/routed_experts")
    ask(tab, prompt="Hello", tokens=5)
    ended(tab)
    tab.wait("!$('#tokens-a .number')")
    summary, tokens = tab.text("#summary"), tab.texts(TOKENS)
    ask(tab, prompt="x" * 3000)
    assert error_in(tab).startswith("The server returned 400: ")
    assert "context length" in tab.text("#error")
    assert (tab.text("#summary"), tab.texts(TOKENS)) == (summary, tokens)
    assert tab.count("#pick-a > option") == 2
    assert tab.js("$('#stop').disabled")
    tab.console.clear()  # the browser itself notes failed requests
    ask(tab, tokens=3)
    tab.wait_for_text("#summary", " and 3 generated tokens")
    assert tab.is_hidden("#error")
    assert tab.console == []
    network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    tab.call("Network.emulateNetworkConditions", offline=True, **network)
    ask(tab)
    assert error_in(tab) == "Cannot reach the server."
    tab.call("Network.emulateNetworkConditions", offline=False, **network)
    tab.console.clear()


@pytest.mark.parametrize("captures", [True, False])
def test_the_key_is_asked_for_and_kept_nowhere(
    tab: Tab, tiny_model: Path, tmp_path: Path, captures: bool
) -> None:
    """Files are opened without one, as the page reads them itself, with capture or without."""
    file = tmp_path / "saved.jsonl"
    file.write_text(json.dumps(answer(rows_of(9, 2, 2, 8), 3)))
    flags = () if captures else ("--no-enable-return-routed-experts",)
    with serving(tiny_model, "--api-key", "a-secret", *flags) as server:
        tab.open(f"{server.url}/routed_experts")
        tab.wait_for("#key-form" if captures else "#notice")
        assert tab.console == []
        tab.give_file("#file", file)
        tab.wait_for_text("#summary", "3 prompt and 7 generated tokens")
        if not captures:
            assert tab.is_hidden("#ask")
            return
        tab.type("#key", "wrong")
        tab.click("#key-form button")
        tab.wait_for_text("#error", "The server rejected this API key.")
        tab.console.clear()
        tab.type("#key", "a-secret")
        tab.click("#key-form button")
        tab.wait("$('#key-form').hidden")
        ask(tab, tokens=5)
        ended(tab)
        storage = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert "a-secret" not in tab.js(storage) + tab.js("document.documentElement.outerHTML")
        assert tab.js("$('#key').value") == ""
        tab.open(f"{server.url}/routed_experts")  # a page that is loaded again knows nothing
        tab.wait_for("#key-form" if captures else "#notice")


def test_the_example(tab: Tab, api: Server, viewed: Viewed) -> None:
    """On a server, and in `routed-experts view` without files: of a trained model, whose rows were
    compared with transformers when they were made. Its experts part code from prose."""
    url = viewed(texts={})
    addresses = {
        f"{api.url}/routed_experts": "!$('#ask').hidden",
        url: "$('#empty-how').textContent.startsWith('Open')",
    }
    for address, condition in addresses.items():
        tab.open(address)
        tab.wait(condition)  # the button moves until then
        tab.click("#example")
        tab.wait_for_text("#summary", "48 layers \u00d7 8 of 128 experts, finish reason: length.")
        assert tab.is_hidden("#side-b")
        tab.wait("location.hash.includes('a=example.json')")
        tab.choose("#pick-b", "1")
        tab.wait_for_text("#tokens-b", "By default `patch` will fail")
        tab.wait_for_text("#parting-text", "The prompts differ from position 0. Load: ")
        apart, _, _, _, by_chance = re.findall(r"([\d.]+) %", tab.text("#parting-text"))
        assert float(apart) > 2 * float(by_chance)
    tab.open(f"{url}#a=example.json%2C+line+2&token=5&layer=3")
    tab.wait_for_text("#map-status", "Token 5 ")
    assert "decoder layer 3" in tab.text("#map-status")
    for line in page_files()["example.json"][0].splitlines():
        saved = json.loads(line)
        (routing,) = collect(saved)
        rows, weights = routing.rows, routing.weights
        assert weights is not None
        assert rows.shape == (111, 48, 8)
        assert (np.diff(np.sort(rows)) > 0).all()
        assert np.allclose(weights.sum(axis=2), 1, atol=1e-5)
        assert (np.diff(weights) <= 0).all()
