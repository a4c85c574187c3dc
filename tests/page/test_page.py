"""The page in a browser: what people see, click, type and hear."""

import json
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.codec import encode
from routed_experts.protocol.collect import collect
from routed_experts.protocol.saved import ModelInfo, read
from routed_experts.server.cli.tiny_model import make_tokenizer
from routed_experts.server.tools.saved import opened
from routed_experts.server.tools.view import ViewServer
from tests.contract.engine import weights_for
from tests.contract.served import serving
from tests.e2e.harness import ASK, Server, answers_of, wait_until
from tests.page.answers import answer, array, rows_of, two_that_part, weights_of
from tests.page.browser import Tab
from tests.page.conftest import viewing_files

pytestmark = pytest.mark.e2e

Viewed = Callable[..., str]
PROMPT = "Tell me something about experts."
TOKENS, SELECTED, TABLE_ROWS = "#tokens-a .token", "#tokens-a .selected", "#table tbody tr"
TIMES = "\u00d7"
GUTTER = 40  # of the drawings: where the layers' numbers stand


def ask(tab: Tab, prompt: str = PROMPT, tokens: int = 40, kind: str = "chat") -> None:
    tab.wait_for("#ask")
    tab.choose("#kind", kind)
    tab.type("#max-tokens", str(tokens))
    tab.type("#prompt", prompt)
    tab.click("#send")


def ended(tab: Tab) -> None:
    tab.wait_for_text("#summary", "finish reason")


def show(tab: Tab, url: str, **window: Any) -> None:
    tab.open(url, **window)
    ended(tab)


def compare(tab: Tab, url: str, **window: Any) -> None:
    """Opens a file of two responses and compares them."""
    show(tab, url, **window)
    tab.choose("#pick-b", "1")
    tab.wait_for("#side-b")


def error_in(tab: Tab) -> str:
    tab.wait_for("#error")
    return tab.text("#error")


def selected(tab: Tab, token: int) -> None:
    tab.wait(f"$('{SELECTED}')?.dataset.i === '{token}'")


def choose(tab: Tab, token: int) -> None:
    """Clicks a token until it is the selected one: what a response that has just ended adds may move it meanwhile."""

    def is_selected() -> bool:
        tab.click(f"#tokens-a [data-i='{token}']")
        return bool(tab.js(f"$('{SELECTED}')?.dataset.i === '{token}'"))

    wait_until(is_selected, "another token is selected", 60)


def shows(tab: Tab, rows: np.ndarray, column: int = 1) -> None:
    """Waits until the token in full is `rows` [L, K]; all of it is filled in when the keys rest."""
    chips = f"$$('#detail tbody tr').map(row => [...row.children[{column}].querySelectorAll('.chip')])"
    ids = f"{chips}.map(row => row.map(c => Number(c.firstChild.data)))"
    wait_until(lambda: tab.js(ids) == rows.tolist(), "other rows", 60)


def shows_weights(tab: Tab, weights: np.ndarray, column: int = 1) -> None:
    """The same for its weights [L, K], to three decimals, or with fewer digits where they are small or large."""
    cells = f"$$('#detail tbody tr').map(row => [...row.children[{column}].querySelectorAll('.chip small')])"

    @np.errstate(invalid="ignore")  # some tests have any bits as weights
    def is_shown() -> bool:
        shown = tab.js(f"{cells}.map(row => row.map(c => c.textContent.trim()))")
        found = np.array([["nan" if text == "?" else text for text in row] for row in shown], dtype=np.float64)
        size = np.abs(weights)
        room = np.where(size < 0.001, 0.51 * size, np.where(size < 1e6, 0.00051, 0.051) * np.maximum(size, 1))
        isnan = np.isnan(weights)
        return found.shape == weights.shape and bool(
            np.where(isnan, np.isnan(found), abs(found - weights) <= room).all()
        )

    wait_until(is_shown, lambda: f"other weights: {tab.js(cells + '.map(row => row.map(c => c.textContent))')}", 60)


def stopped(tab: Tab, shown: int) -> list[int]:
    """Numbers of tokens that the page shows of an answer that is played, until it has stopped that after so many.

    By the page itself: on a busy machine, all may be there before somebody outside looks or clicks.
    """
    look = f"""new Promise(done => {{
      const seen = new Set();
      (function look() {{
        if ($('#summary').textContent.includes('streaming')) seen.add($$('{TOKENS}').length);
        if (seen.size < {shown}) return requestAnimationFrame(look);
        $('#stop').click();
        done([...seen]);
      }})();
      $('#play').click();
    }})"""
    seen: list[int] = tab.js(look)
    ended(tab)
    return seen


def texts_of(ids: list[int]) -> list[str]:
    tokenizer = make_tokenizer()
    return [tokenizer.decode([i]) for i in ids]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_an_answer_streams_in(tab: Tab, api: Server, kind: str) -> None:
    body: dict[str, Any] = {**ASK, "max_tokens": 40}
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    (said,) = answers_of(api.chat(**body, **chat) if kind == "chat" else api.complete(**body, prompt=PROMPT))
    tab.open(f"{api.url}/routed_experts")
    ask(tab, kind=kind)
    ended(tab)
    rows = np.concatenate([said.prompt_rows, said.rows])
    tab.wait("!$('#tokens-a .number')")  # the texts are asked for in addition
    assert [text.replace("⏎", "") for text in tab.texts(TOKENS)] == texts_of([*said.prompt, *said.tokens])
    assert f"{len(said.prompt)} prompt and 40 generated tokens, {len(rows)} rows of 8 layers" in tab.text("#summary")
    shows(tab, rows[-1])  # the last row is selected while the answer grows
    choose(tab, 3)
    shows(tab, rows[3])
    assert all(url.startswith(api.url) for url in tab.requested)


def test_what_is_shown_grows(tab: Tab, viewed: Viewed) -> None:
    show(tab, viewed(answer(rows_of(399, 6, 2, 16), 30)))
    assert without_weights(tab)
    seen = stopped(tab, shown=4)
    assert seen == sorted(seen)
    assert max(seen) < 400
    assert tab.count(TOKENS) == 400


def test_stop_ends_the_request(tab: Tab, api: Server) -> None:
    # By the page itself: with a busy machine, all tokens may be there before a click from outside is.
    stop = f"setInterval(() => $$('{TOKENS}').length > 60 && $('#stop').click(), 5)"
    for _ in range(5):
        tab.open(f"{api.url}/routed_experts")
        tab.js(stop)
        ask(tab, tokens=900)
        ended(tab)
        if "finish reason: abort" in tab.text("#summary"):
            break
    assert "finish reason: abort" in tab.text("#summary")
    assert tab.is_hidden("#error")


def test_keys_on_the_map(tab: Tab, viewed: Viewed) -> None:
    rows = rows_of(199, 6, 4, 32)
    show(tab, viewed(answer(rows, 10)))
    tab.js("$('#map').focus()")
    token, layer = 10, 0
    steps = [("ArrowRight", 5, 5, 0), ("ArrowDown", 2, 0, 2), ("ArrowUp", 1, 0, -1), ("PageDown", 1, 50, 0)]
    for key, times, by_token, by_layer in (*steps, ("ArrowLeft", 1, -1, 0)):
        tab.key(key, times)
        token, layer = token + by_token, layer + by_layer
        ends = f"; MoE layer {layer}: {', '.join(map(str, rows[token, layer]))}"
        tab.wait(f"$('#map-status').textContent.endsWith('{ends}')")
        assert tab.text("#map-status").startswith(f"Token {token} ")
        tab.wait(f"$('#live').textContent === {json.dumps(tab.text('#map-status'))}")
    tab.key("End")
    selected(tab, 199)
    assert tab.text("#map-status").endswith("no row")  # the last token never enters a forward pass
    tab.key("ArrowRight", 3)
    tab.key("Home")
    selected(tab, 0)
    shows(tab, rows[0])


def test_clicks(tab: Tab, viewed: Viewed) -> None:
    rows = rows_of(59, 6, 4, 32)
    show(tab, viewed(answer(rows, 10), given=ModelInfo(num_experts=32)))
    wide = min(max(tab.js("($('#map').clientWidth - 42) / 60"), 2), 18)
    tab.click("#map", GUTTER + 33.5 * wide, 20 + 2.5 * 26)
    selected(tab, 33)
    shows(tab, rows[33])
    assert f"; MoE layer 2: {', '.join(map(str, rows[33, 2]))}" in tab.text("#map-status")
    tab.click("#load", GUTTER + 7.5 * tab.js("($('#load').clientWidth - 42) / 32"), 6 + 4.5 * 18)
    tab.wait("$('#load-status').textContent.startsWith('MoE layer 4')")
    count = int((rows[:, 4] == 7).sum())
    assert f"Expert 7: {count * 32 / (59 * 4):.2f} {TIMES} ({count} tokens)." in tab.text("#load-status")
    tab.click("#detail tbody tr:nth-child(2) .chip")
    tab.wait("$('#load-status').textContent.startsWith('MoE layer 1')")
    assert f"Expert {rows[33, 1, 0]}:" in tab.text("#load-status")
    tab.js("$('#load').focus()")
    tab.key("ArrowRight")
    tab.wait_for_text("#load-status", f"Expert {min(rows[33, 1, 0] + 1, 31)}:")
    tab.click("#balance", GUTTER + 1, 50)
    selected(tab, 0)


def test_balance(tab: Tab, viewed: Viewed) -> None:
    """The entropy of the load so far, or of the last tokens, as a share of the most that it can be."""
    rows = rows_of(99, 3, 2, 8)
    show(tab, viewed(answer(rows, 10), given=ModelInfo(num_experts=8)))
    choose(tab, 60)
    for span, part in (("0", rows[:61]), ("32", rows[29:61])):
        tab.choose("#window", span)
        shares = [np.bincount(part[:, layer].ravel(), minlength=8) / part[:, layer].size for layer in range(3)]
        values = [float(-(p[p > 0] * np.log(p[p > 0])).sum() / np.log(8)) for p in shares]
        tab.wait_for_text("#balance-status", f"{100 * np.mean(values):.1f} %")
        assert f"MoE layer 0 {100 * values[0]:.1f} %" in tab.text("#balance-status")
        assert f"between {100 * min(values):.1f} % and {100 * max(values):.1f} %" in tab.text("#balance-status")


def test_two_answers_side_by_side(tab: Tab, viewed: Viewed) -> None:
    bodies = two_that_part(119, 20, at=70)
    one, other = (collect(body)[0].rows for body in bodies)
    compare(tab, viewed(*bodies))
    tab.wait_for_text("#parting", "119")
    differ = (one != other) & ~(one[..., None] == other[..., None, :]).any(-1)
    sentence = tab.text("#parting-text")
    assert "Tokens differ from position 71. Experts differ from position 70, MoE layer 2" in sentence
    assert f"{100 * differ.any(-1).mean():.1f} % of 119 {TIMES} 24 cells differ" in sentence
    tab.click("#go")
    shows(tab, one[70])
    shows(tab, other[70], column=2)
    counts = tab.js("$$('#detail tbody tr').map(row => Number(row.children[3].textContent))")
    assert counts == differ[70].sum(-1).tolist()
    assert tab.count("#detail tbody tr:nth-child(3) td:nth-child(2) .differs") == differ[70, 2].sum()
    assert f"({differ[70, 2].sum()} differ)" in tab.text("#map-status")
    assert tab.js("$('#tokens-b .selected').dataset.i") == "70"
    assert tab.js("$('#tokens-b .parts').dataset.i") == "71"
    show(tab, viewed(answer(rows_of(9, 2, 2, 8), 3), answer(rows_of(9, 3, 2, 8), 3)))
    tab.choose("#pick-b", "1")
    assert "from different models" in error_in(tab)
    assert tab.is_hidden("#side-b")


@pytest.mark.parametrize(
    ("form", "layout"), [("object", "split"), ("npy", "joined"), ("list", "split"), ("raw", "split")]
)
def test_saved_answers_of_every_form(tab: Tab, api: Server, viewed: Viewed, form: str, layout: str) -> None:
    """What raw rows are is said by flags."""
    said = {"prompt": "Hello there", "max_tokens": 6, **ASK, "routed_experts_layout": layout}
    is_raw, info = form == "raw", api.info()
    body = api.complete(**said, routed_experts_format=form, **({"routed_experts_dtype": "int32"} if is_raw else {}))
    given = ModelInfo(info["num_layers"], info["top_k"], rows_dtype="int32") if is_raw else ModelInfo()
    (saved,) = read([("", StringIO(json.dumps(body)))], given)
    (routing,) = saved.routings()
    show(tab, viewed(body, given=given))
    said_of_it = f"11 prompt and 6 generated tokens, {len(routing.rows)} rows of 8 layers {TIMES} 64 of"
    assert said_of_it in tab.text("#summary")
    shows(tab, routing.rows[11])


def test_weights_stream_in(tab: Tab, weighing_api: Server) -> None:
    (said,) = answers_of(weighing_api.complete(**ASK, max_tokens=40, prompt=PROMPT))
    rows = np.concatenate([said.prompt_rows, said.rows])
    tab.open(f"{weighing_api.url}/routed_experts")
    ask(tab, kind="completion")
    ended(tab)
    shows(tab, rows[-1])
    shows_weights(tab, weights_for(rows[-1:])[0])
    choose(tab, 3)
    shows(tab, rows[3])
    shows_weights(tab, weights_for(rows[3:4])[0])


def without_weights(tab: Tab) -> bool:
    """Whether the page offers and shows none."""
    return tab.is_hidden("#by-label") and not tab.count("#detail small") and "weights" not in tab.text("#load-status")


def test_weights_of_saved_answers(tab: Tab, viewed: Viewed) -> None:
    """In the selected token, the table and the load; beside them an answer that has none."""
    rows = rows_of(59, 6, 4, 32)
    rows[20, 2] = -1
    weights = weights_of(rows)
    weights[30, 3] = (0.5, 0.25, 0.0001, 0)
    show(tab, viewed(answer(rows, 10, weights=weights), given=ModelInfo(num_experts=32)))
    for token in (14, 20, 30):
        choose(tab, token)
        wait_until(lambda: tab.text("#detail-token").startswith(f"Token {token} "), "another token", 60)  # noqa: B023
        shows_weights(tab, weights[token])
    assert tab.texts("#detail tbody tr:nth-child(4) small") == [" 0.500", " 0.250", " 1e-4", " 0"]
    tab.click("#table summary")
    tab.wait(f"$('{TABLE_ROWS} th')?.textContent === '25'")
    cell = tab.text(f"{TABLE_ROWS}:nth-child(6) td:nth-child(6)")
    words = zip(rows[30, 3], ("0.500", "0.250", "1e-4", "0"), strict=True)
    assert cell == ", ".join(f"{expert} ({weight})" for expert, weight in words)

    sums, layer, expert = np.zeros(32), 3, int(rows[30, 3, 0])
    known = ~np.isnan(weights[:, layer])
    np.add.at(sums, rows[:, layer][known], weights[:, layer][known])
    counts = np.bincount(rows[:, layer].ravel(), minlength=32)
    tab.click("#detail tbody tr:nth-child(4) .chip")
    by_choices = f"{counts[expert] / counts.mean():.2f} {TIMES} ({counts[expert]} tokens)"
    by_weights = f"{sums[expert] / sums.mean():.2f} {TIMES} (sum {sums[expert]:.2f})"
    tab.wait_for_text("#load-status", f"Expert {expert}: {by_choices}; by weights {by_weights}.")
    busiest = "busiest expert {} with {:.1f} " + TIMES + " the even share{};"
    assert busiest.format(counts.argmax(), counts.max() / counts.mean(), "") in tab.text("#load-status")
    picture = tab.js("$('#load canvas').toDataURL()")
    tab.choose("#by", "weights")
    tab.wait_for_text("#load-status", busiest.format(sums.argmax(), sums.max() / sums.mean(), " by weights"))
    assert tab.js("$('#load canvas').toDataURL()") != picture
    assert tab.text("#load-legend + span").endswith("line: by choices")

    stopped(tab, shown=1)
    choose(tab, 14)
    shows_weights(tab, weights[14])
    one, other = rows_of(9, 6, 4, 32), rows_of(9, 6, 4, 32, seed=1)
    compare(tab, viewed(answer(one, 3, weights=weights_of(one)), answer(other, 3)))
    tab.wait_for_text("#parting", "9")
    shows(tab, other[3], column=2)
    shows_weights(tab, weights_of(one)[3])
    assert not tab.count("#detail td:nth-child(3) small")
    tab.choose("#pick-b", "")
    tab.choose("#pick-a", "1")
    shows(tab, other[3])
    assert without_weights(tab)


@pytest.mark.parametrize("form", ["object", "npy", "list", "raw"])
def test_weights_of_every_form(tab: Tab, weighing_api: Server, viewed: Viewed, form: str) -> None:
    """Of all decoder layers, which leave the dense ones out."""
    said = {"prompt": "Hello there", "max_tokens": 6, **ASK, "return_routed_expert_weights": True}
    is_raw, info = form == "raw", weighing_api.info()
    layers = "moe" if is_raw else "all"
    body = weighing_api.complete(**said, routed_experts_format=form, routed_experts_layers=layers)
    given = ModelInfo(info["num_layers"], info["top_k"], rows_dtype=info["dtype"]) if is_raw else ModelInfo()
    text = json.dumps(body) if is_raw else f"{json.dumps(info)}\n{json.dumps(body)}"
    (saved,) = read([("", StringIO(text))], given)
    (routing,) = saved.routings()
    show(tab, viewed(text=text, given=given))
    shows(tab, routing.rows[11])
    shows_weights(tab, weights_for(routing.rows[11:12])[0])


@pytest.mark.parametrize("is_list", [False, True])
def test_weights_are_saved(tab: Tab, viewed: Viewed, tmp_path: Path, is_list: bool) -> None:
    """Bit for bit, also unknown ones and those that a router has as NaN."""
    rows = rows_of(29, 3, 2, 32)
    rows[20, 2] = -1
    weights = weights_of(rows)
    if not is_list:
        weights[5, 0, 0] = np.nan
    body = answer(rows, 12, weights=weights) | {"routed_experts_info": {**INFO, "weights_scale": [1.0, 2.5, 1.0]}}
    if is_list:
        for place, name, part in (
            (body, "prompt_routed_expert", slice(12)),
            (body["choices"][0], "routed_expert", slice(12, 29)),
        ):
            listed = weights[part].astype(object)
            listed[np.isnan(weights[part])] = None
            place |= {f"{name}s": rows[part].tolist(), f"{name}_weights": listed.tolist()}
    show(tab, viewed(body))
    file = save(tab, tmp_path)
    (saved,) = read(opened([str(file)]), ModelInfo())
    (routing,) = saved.routings()
    assert np.array_equal(routing.rows, rows)
    assert routing.weights is not None
    assert routing.weights.tobytes() == weights.tobytes()
    assert saved.info.weights_scale == (1.0, 2.5, 1.0)


def test_weights_that_are_not_of_their_ids(tab: Tab, tmp_path: Path) -> None:
    rows, file = rows_of(9, 2, 2, 8), tmp_path / "answers.jsonl"
    whole = answer(rows, 3, weights=weights_of(rows))
    partial = {name: value for name, value in whole.items() if name != "prompt_routed_expert_weights"}
    (choice,) = whole["choices"]
    short = {**whole, "choices": [{**choice, "routed_expert_weights": array(weights_of(rows[4:]), 3)}]}
    paired = np.concatenate([rows.astype(np.int32), np.ones(rows.shape, np.float32).view(np.int32)], axis=2)
    pairs = encode(paired, fmt="object", dtype="int32", start=0)
    for body, sentence in (
        (partial, "only some of its rows have weights."),
        (short, "An array of weights does not match the ids beside it."),
        ({"choices": [{"routed_experts": pairs}]}, "An array has values that are not expert ids."),
    ):
        file.write_text(json.dumps(body))
        with viewing_files({}) as url:
            tab.open(url)
            tab.give_file("#file", file)
            assert sentence in error_in(tab)


def save(tab: Tab, folder: Path) -> Path:
    """The file that Save writes."""
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    file = folder / "answer.jsonl"
    file.unlink(missing_ok=True)
    tab.click("#save")
    wait_until(lambda: file.exists() and file.stat().st_size, "no file", 60)
    return file


def test_what_is_saved_can_be_read(tab: Tab, api: Server, tmp_path: Path) -> None:
    tab.open(f"{api.url}/routed_experts")
    ask(tab, tokens=12)
    ended(tab)
    file = save(tab, tmp_path)
    said = {"messages": [{"role": "user", "content": PROMPT}]}
    (expected,) = answers_of(api.chat(**said, max_tokens=12, **ASK))
    (saved,) = read(opened([str(file)]), ModelInfo())
    (routing,) = saved.routings()
    assert np.array_equal(routing.rows, np.concatenate([expected.prompt_rows, expected.rows]))
    assert list(routing.token_ids or ()) == expected.tokens
    info = api.info()
    about = [info[name] for name in ("num_layers", "top_k", "num_experts")]
    scale = tuple(info["weights_scale"])
    assert saved.info == ModelInfo(*about, tuple(info["layer_ids"]), weights_scale=scale)
    tab.give_file("#file", file)
    tab.wait("$$('#pick-a option').length === 3")
    tab.choose("#pick-b", "0")
    tab.wait_for_text("#parting-text", "Experts are equal")


SHOWN = "[...$$('#tokens-a .token'), ...$$('#detail th'), $('#summary')].map(e => e.className + e.textContent)"
INFO = {"num_layers": 3, "top_k": 2, "num_experts": 40, "layer_ids": [1, 2, 5]}


def without_texts(body: dict[str, Any]) -> dict[str, Any]:
    (choice,) = body["choices"]
    del body["routed_experts_page"], choice["logprobs"]
    return body


def joined(body: dict[str, Any]) -> dict[str, Any]:
    """In the joined layout, without ids: nothing says where the prompt ends."""
    (choice,) = without_texts(body)["choices"]
    rows = collect(body)[0].rows
    del body["prompt_token_ids"], body["prompt_routed_experts"], choice["token_ids"]
    return {**body, "choices": [{**choice, "routed_experts": array(rows)}]}


@pytest.mark.parametrize("change", [lambda body: body, without_texts, joined], ids=["texts", "ids", "neither"])
@pytest.mark.parametrize(("info", "reason"), [({}, "length"), ({"routed_experts_info": INFO}, None)])
def test_saving_and_opening_change_nothing(
    tab: Tab, viewed: Viewed, tmp_path: Path, change: Any, info: dict[str, Any], reason: str | None
) -> None:
    body = change(answer(rows_of(29, 3, 2, 32), 12)) | info
    body["choices"][0]["finish_reason"] = reason
    seen, lines = [], [json.dumps(body)]
    for _ in range(2):
        tab.open(viewed(text=lines[-1]))
        tab.wait("/finish reason|not finished/.test($('#summary').textContent)")
        tab.wait(f"$$('{TOKENS}').length === 30")
        seen.append(tab.js(SHOWN))
        lines.append(save(tab, tmp_path).read_text())
    assert seen[0] == seen[1]
    assert lines[1] == lines[2]
    saved = json.loads(lines[1])
    assert saved["choices"][0].get("token_ids") == body["choices"][0].get("token_ids")
    assert saved["choices"][0]["finish_reason"] == reason
    assert saved["routed_experts_info"] == (INFO if info else {"num_layers": 3, "top_k": 2})


def test_the_first_response_of_a_file_has_the_model_of_all(tab: Tab, viewed: Viewed) -> None:
    """As a server records them, and as the other commands read them."""
    body = answer(rows_of(29, 3, 2, 32), 12)
    tab.open(viewed(text="\n".join(json.dumps({**body, **info}) for info in ({"routed_experts_info": INFO}, {}))))
    read = "import('./routed_experts/saved.js').then(async ({ read }) => "
    read += (
        "read(await (await fetch('./routed_experts/saved/0')).text(), 'f').answers.map(({ info }) => info.layer_ids))"
    )
    assert tab.js(read) == [INFO["layer_ids"]] * 2


def test_several_tokens_in_a_chunk(tab: Tab, tiny_model: Path, viewed: Viewed) -> None:
    body = {"model": "tiny", "prompt": "Hello there", "max_tokens": 24, "stream": True, **ASK}
    with serving(tiny_model, "--stream-interval", "5") as server:
        with server.client() as client:
            stream = client.post("/v1/completions", json=body).text
        (routing,) = collect(stream)
        ids = [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())]
        texts = texts_of(ids)
        assert stream.count('"token_ids"') < 12
        tab.open(f"{server.url}/routed_experts")
        ask(tab, prompt="Hello there", tokens=24, kind="completion")
        ended(tab)
        tab.wait("!$('#tokens-a .number')")
        assert tab.texts(TOKENS) == texts
    show(tab, viewed(text=stream))
    assert tab.texts(TOKENS) == [f"#{i}" for i in ids]


def test_texts_of_a_saved_stream(tab: Tab, viewed: Viewed) -> None:
    """A chunk's text may be that of other tokens, where some was held back; log-probabilities say them all."""
    rows = rows_of(7, 2, 2, 8)
    parts = [([3], "a"), ([4], "b"), ([5], ""), ([6], "cd"), ([7, 8], "ef")]
    choices: list[dict[str, Any]] = [{"index": 0, "token_ids": ids, "text": text} for ids, text in parts]
    choices[0]["prompt_token_ids"] = [1, 2]
    choices[-1] |= {"finish_reason": "stop", "routed_experts": encode(rows[2:], fmt="npy", dtype="int16", start=2)}
    chunks: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    chunks[0]["prompt_routed_experts"] = encode(rows[:2], fmt="npy", dtype="int16", start=0)
    for expected in ("#1 #2 #3 #4 #5 #6 #7 #8", "#1 #2 a b c d e f"):
        text = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
        show(tab, viewed(text=text))
        assert tab.texts(TOKENS) == expected.split()
        for choice, tokens in zip(choices, ("a", "b", "c", "d", "ef"), strict=True):
            choice["logprobs"] = {"tokens": list(tokens)}


def test_decoder_layers_are_named(tab: Tab, viewed: Viewed) -> None:
    rows = np.zeros((29, 7, 2), dtype=np.int16)
    rows[:, INFO["layer_ids"]] = rows_of(29, 3, 2, 32)
    show(tab, viewed(text=f"{json.dumps(INFO, indent=1)}\n{json.dumps(answer(rows, 12), indent=1)}"))
    assert f"29 rows of 3 layers {TIMES} 2 of 40 experts" in tab.text("#summary")
    choose(tab, 14)
    shows(tab, rows[14, INFO["layer_ids"]])
    assert tab.texts("#detail th") == ["Decoder layer", "Experts", "1", "2", "5"]
    assert "; decoder layer 1: " in tab.text("#map-status")


def test_files_in_every_shape(tab: Tab, viewed: Viewed) -> None:
    body = answer(rows_of(9, 2, 2, 8), 3)
    body["choices"][0]["text"] = 'a "quoted\\" } text\n'
    stream = f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n"
    pretty = json.dumps(body, indent=2)
    text = f"{stream}: ping\n\n{stream}{pretty}\n{json.dumps([body, body])}{json.dumps(body)}\n\n{pretty}"
    show(tab, viewed(text=text))
    found = [answer.where for answer in read([("answers.jsonl", StringIO(text))], ModelInfo())]
    assert len(found) == 7
    assert tab.texts("#pick-a > option")[1:] == found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "answers.jsonl contains no responses."),
        ("no json", "answers.jsonl, line 1: invalid or truncated JSON."),
        ('{"a": 1}', "answers.jsonl, line 1: not a response: it has no choices."),
        ('{"error": {"message": "too long"}}', "too long"),
        ('{"choices": [{}]}', "no routed_experts: the request needs return_routed_experts."),
        ('{"choices": [{"routed_experts": "AAAA"}]}', "The raw format has no shape"),
        (
            '{"choices": [{"routed_experts": {"data": "AAAA", "shape": [1, 1, 1], "dtype": "uint8"}}]}',
            "does not match its shape",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_said(tab: Tab, tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "answers.jsonl").write_text(text)
    with viewing_files({}) as url:
        tab.open(url)
        tab.give_file("#file", tmp_path / "answers.jsonl")
        assert sentence in error_in(tab)
    assert tab.js("$('#error').getAttribute('role')") == "alert"


def test_errors_of_the_server_are_shown(tab: Tab, tiny_model: Path) -> None:
    """And that it is gone."""
    with serving(tiny_model) as server:
        tab.open(f"{server.url}/routed_experts")
        ask(tab, prompt="x" * 3000)
        assert error_in(tab).startswith("The server returned 400: ")
        assert "context length" in tab.text("#error")
        tab.console.clear()  # the browser itself notes failed requests
        ask(tab, tokens=3)
        ended(tab)
        assert tab.is_hidden("#error")
        assert tab.console == []
        network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        tab.call("Network.emulateNetworkConditions", offline=True, **network)
        ask(tab)
        assert error_in(tab) == "Cannot reach the server."
        tab.call("Network.emulateNetworkConditions", offline=False, **network)
    tab.console.clear()


def test_the_key_is_asked_for_and_kept_nowhere(tab: Tab, tiny_model: Path) -> None:
    with serving(tiny_model, "--api-key", "a-secret") as server:
        tab.open(f"{server.url}/routed_experts")
        tab.wait_for("#key-form")
        assert tab.console == []
        tab.type("#key", "wrong")
        tab.click("#key-form button")
        assert error_in(tab) == "The server rejected this API key."
        tab.console.clear()
        tab.type("#key", "a-secret")
        tab.click("#key-form button")
        ask(tab, tokens=5)
        ended(tab)
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert "a-secret" not in tab.js(kept) + tab.js("document.documentElement.outerHTML")
        assert tab.js("$('#key').value") == ""
        tab.open(f"{server.url}/routed_experts")  # a page that is loaded again knows nothing
        tab.wait_for("#key-form")


def test_a_server_without_capture(tab: Tab, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved.jsonl"
    file.write_text(json.dumps(answer(rows_of(9, 2, 2, 8), 3)))
    with serving(tiny_model, "--no-enable-return-routed-experts") as server:
        tab.open(f"{server.url}/routed_experts")
        tab.wait_for("#notice")
        assert tab.is_hidden("#ask")
        tab.give_file("#file", file)
        ended(tab)


def test_tokens_are_never_markup(tab: Tab, viewed: Viewed) -> None:
    texts = ["<script>hacked = 1</script>", "<img src=x onerror='hacked = 1'>", "</span>", "&amp;", "<b>", "x"]
    show(tab, viewed(answer(rows_of(5, 2, 2, 8), 2, texts)))
    tab.click("#table summary")
    tab.wait(f"$$('{TABLE_ROWS}').length === 6")
    assert tab.js("typeof hacked") == "undefined"
    assert tab.count("main img, main script, main b") == 0
    assert tab.texts(TOKENS) == texts


def test_the_table_says_what_the_map_shows(tab: Tab, viewed: Viewed) -> None:
    rows = rows_of(69, 3, 2, 8)
    rows[30, 1] = -1
    show(tab, viewed(answer(rows, 10)))
    assert "69 rows (1 unknown)" in tab.text("#summary")
    tab.click("#table summary")
    tab.wait(f"$$('{TABLE_ROWS}').length === 25")
    tab.click("#table-on")
    tab.wait("$('#table-range').textContent === 'tokens 25 to 49 of 70'")
    cells = f"$$('{TABLE_ROWS}').map(r => [...r.children].slice(2).map(c => c.textContent))"
    expected = [[", ".join("unknown" if i < 0 else str(i) for i in layer) for layer in row] for row in rows[25:50]]
    assert tab.js(cells) == expected
    tab.click("#table-on")
    tab.wait(f"$$('{TABLE_ROWS}').length === 20")
    assert tab.js(cells)[-1] == ["no row"] * 3


def test_screen_readers_find_names_and_roles(tab: Tab, viewed: Viewed) -> None:
    compare(tab, viewed(*two_that_part(39, 10, 20)))
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    found = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]}
    assert {
        ("application", "Experts by token and layer"),
        ("application", "Load by layer and expert"),
        ("listbox", "Tokens of the response"),
        ("listbox", "Tokens of the compared response"),
        ("heading", "Balance over time"),
        ("columnheader", "Experts of A"),
        ("combobox", "Theme"),
    } <= found
    named = {"button", "combobox", "textbox", "spinbutton", "slider", "application", "listbox", "image"}
    assert [role for role, name in found if role in named and not name] == []
    assert tab.js("$('#live').getAttribute('aria-live')") == "polite"


@pytest.mark.parametrize("width", [1440, 420])
def test_light_dark_and_both_sizes(tab: Tab, viewed: Viewed, width: int) -> None:
    """As the system has it, unless the switch says otherwise; nothing is wider than the window."""
    compare(tab, viewed(*two_that_part(149, 20, 70)), width=width, theme="dark")
    background, pixel = "getComputedStyle(document.body).backgroundColor", "$('#legend').toDataURL()"
    dark, dark_pixel = tab.js(background), tab.js(pixel)
    tab.prefer("light")
    tab.wait(f"{background} !== '{dark}'")
    light = tab.js(background)
    tab.wait(f"{pixel} !== '{dark_pixel}'")  # what is drawn follows
    tab.choose("#theme", "dark")
    assert tab.js(background) == dark
    tab.prefer("dark")
    tab.choose("#theme", "light")
    assert tab.js(background) == light
    tab.choose("#theme", "auto")
    assert tab.js("document.documentElement.scrollWidth") <= width
    assert tab.js("$('#map canvas').getBoundingClientRect().right") <= width


def test_4000_tokens_of_60_layers_and_512_experts(tab: Tab, viewed: Viewed) -> None:
    """The page's own work leaves most of each second, and most of a frame, to the browser."""
    rows = np.random.default_rng(0).random((4000, 60, 512), dtype=np.float32).argpartition(10)[:, :, :10]
    show(tab, viewed(answer(rows.astype(np.int16), 500)))
    tab.wait("$$('#tokens-a [data-rare]').length >= 4000", 60)
    tab.call("Performance.enable", timeDomain="threadTicks")
    tab.js("(globalThis.shown = 0, (function tick() { shown++; requestAnimationFrame(tick) })())")

    before, start = script_seconds(tab), time.monotonic()
    tab.click("#play")
    tab.wait_for_text("#summary", "streaming")
    tab.wait("$('#summary').textContent.includes('finish reason')", 60)
    share = (script_seconds(tab) - before) / (time.monotonic() - start)

    before = script_seconds(tab)
    tab.js("$('#map').focus()")
    tab.key("ArrowRight", 80)
    by_key = (script_seconds(tab) - before) / 80 * 1000

    before, frames = script_seconds(tab), tab.js("shown")
    tab.js(
        "new Promise(done => { let i = 0; const step = () => { $('#map').scrollLeft = 30 * i;"
        " ++i < 200 ? requestAnimationFrame(step) : done() }; step() })"
    )
    by_frame = (script_seconds(tab) - before) / (tab.js("shown") - frames) * 1000

    print(f"growing: {share:.0%} of the time; {by_key:.1f} ms for a key, {by_frame:.1f} ms for a scrolled frame")
    assert share < 0.5
    assert by_key < 16
    assert by_frame < 8


def script_seconds(tab: Tab) -> float:
    """Processor time that the page's scripts have taken."""
    metrics = {metric["name"]: metric["value"] for metric in tab.call("Performance.getMetrics")["metrics"]}
    return float(metrics["ScriptDuration"])


def test_f3_files_that_are_opened_when_they_are_picked(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: of a folder that is larger than a browser should hold, the first file, and others on demand."""
    rows = [rows_of(29, 3, 2, 32, seed) for seed in range(3)]
    texts = {f"recorded/{place}.jsonl": json.dumps(answer(each, 12)) for place, each in enumerate(rows)}
    real = ViewServer.__init__

    def of_large_files(self: ViewServer, *args: Any) -> None:
        real(self, *args)
        self.page_config["saved"] = json.dumps([[name, 40 << 20] for name, _ in json.loads(self.page_config["saved"])])

    monkeypatch.setattr(ViewServer, "__init__", of_large_files)
    with viewing_files(texts) as url:
        show(tab, url)
        assert tab.texts("#pick-a > option")[1:] == ["recorded/0.jsonl, line 1"]
        unopened = "[label='Not opened yet'] option"
        assert tab.texts(f"#pick-a {unopened}") == ["recorded/1.jsonl", "recorded/2.jsonl"]
        tab.choose("#pick-a", tab.js(f'$("#pick-a {unopened}:last-child").value'))
        tab.wait("$$('#pick-a > option').length === 3")
        assert tab.texts(f"#pick-a {unopened}") == ["recorded/1.jsonl"]
        ended(tab)
        choose(tab, 20)
        shows(tab, rows[2][20])
        tab.choose("#pick-b", tab.js(f'$("#pick-b {unopened}").value'))
        tab.wait_for("#side-b")
        names = [tab.text(f"#name-{side}") for side in "ab"]
        assert names == ["A: recorded/2.jsonl, line 1", "B: recorded/1.jsonl, line 1"]
        tab.wait(f'!$$("{unopened}").length')
        shows(tab, rows[1][20], column=2)


def test_f3_a_file_in_each_folder_is_a_group(tab: Tab) -> None:
    """F3: as folders with several files are."""
    rows = {name: rows_of(29, 3, 2, 32, seed) for seed, name in enumerate(("code", "prose"))}
    with viewing_files({f"{name}/a.jsonl": json.dumps(answer(each, 12)) for name, each in rows.items()}) as url:
        tab.open(url)
        tab.wait_for_text("#summary", "B: 1 responses, 29 rows")
        groups = ["code/ (1 responses)", "prose/ (1 responses)", "all opened responses (2 responses)"]
        assert tab.texts("#pick-a optgroup option") == groups
