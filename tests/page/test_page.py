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
from routed_experts.server.cli.saved import ModelInfo, opened, read
from routed_experts.server.cli.tiny_model import make_tokenizer
from tests.contract.served import serving
from tests.e2e.harness import ASK, Server, answers_of
from tests.page.answers import answer, rows_of, two_that_part
from tests.page.browser import Tab

pytestmark = pytest.mark.e2e

Viewed = Callable[..., str]
PROMPT = "Tell me something about experts."
ENDED = "document.querySelector('#summary').textContent.includes('finish reason')"
SELECTED = "#tokens-a .selected"
TIMES = "\u00d7"
GUTTER = 40  # of the drawings: where the layers' numbers stand


def ask(tab: Tab, prompt: str = PROMPT, tokens: int = 40, kind: str = "chat") -> None:
    tab.wait("!document.querySelector('#ask').hidden")
    tab.choose("#kind", kind)
    tab.type("#max-tokens", str(tokens))
    tab.type("#prompt", prompt)
    tab.click("#send")


def show(tab: Tab, url: str, **window: Any) -> None:
    tab.open(url, **window)
    tab.wait(ENDED)


def error_in(tab: Tab) -> str:
    tab.wait("!document.querySelector('#error').hidden")
    return tab.text("#error")


def status(tab: Tab) -> str:
    return tab.text("#map-status")


def experts_shown(tab: Tab, column: int = 1) -> list[list[int]]:
    """The ids of the selected token, [L][K]."""
    script = f"""[...document.querySelectorAll('#detail tbody tr')].map(row =>
        [...row.children[{column}].querySelectorAll('.chip')].map(chip => Number(chip.textContent)))"""
    shown: list[list[int]] = tab.js(script)
    return shown


def shows(tab: Tab, rows: np.ndarray, column: int = 1) -> bool:
    """Whether the token in full is `rows` [L, K]; all of it is filled in when the keys rest."""
    deadline = time.monotonic() + 60
    while experts_shown(tab, column) != rows.tolist():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_an_answer_streams_in(tab: Tab, api: Server, kind: str) -> None:
    body: dict[str, Any] = {**ASK, "max_tokens": 40}
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    (said,) = answers_of(api.chat(**body, **chat) if kind == "chat" else api.complete(**body, prompt=PROMPT))
    tab.open(f"{api.url}/routed_experts")
    ask(tab, kind=kind)
    tab.wait(ENDED)
    rows = np.concatenate([said.prompt_rows, said.rows])
    count = len(said.prompt) + len(said.tokens)
    assert tab.js("document.querySelectorAll('#tokens-a .token').length") == count
    tab.wait("!document.querySelector('#tokens-a .number')")  # the texts are asked for in addition
    assert [text.replace("⏎", "") for text in token_texts(tab)] == texts_of([*said.prompt, *said.tokens])
    assert f"{len(said.prompt)} prompt and 40 generated tokens, {len(rows)} rows of 8 layers" in tab.text("#summary")
    assert shows(tab, rows[-1])  # the last row is selected while the answer grows
    tab.click("#tokens-a [data-i='3']")
    assert shows(tab, rows[3])
    assert all(url.startswith(api.url) for url in tab.requested)


def test_what_is_shown_grows(tab: Tab, viewed: Viewed) -> None:
    show(tab, viewed(answer(rows_of(399, 6, 2, 16), 30)))
    tab.click("#play")
    tab.wait("document.querySelector('#summary').textContent.includes('streaming')")
    seen: set[int] = set()
    deadline = time.monotonic() + 60
    while len(seen) < 4:
        assert time.monotonic() < deadline, seen
        seen.add(tab.js("document.querySelectorAll('#tokens-a .token').length"))
    assert max(seen) < 400
    tab.click("#stop")
    tab.wait(ENDED)
    assert tab.js("document.querySelectorAll('#tokens-a .token').length") == 400


def test_stop_ends_the_request(tab: Tab, api: Server) -> None:
    for _ in range(5):  # all tokens may be there before the click is
        tab.open(f"{api.url}/routed_experts")
        ask(tab, tokens=900)
        tab.wait("document.querySelectorAll('#tokens-a .token').length > 60")
        tab.click("#stop")
        tab.wait(ENDED)
        if "finish reason: abort" in tab.text("#summary"):
            break
    assert "finish reason: abort" in tab.text("#summary")
    assert tab.js("document.querySelector('#error').hidden")


def test_keys_on_the_map(tab: Tab, viewed: Viewed) -> None:
    rows = rows_of(199, 6, 4, 32)
    show(tab, viewed(answer(rows, 10)))
    tab.js("document.querySelector('#map').focus()")
    token, layer = 10, 0
    steps = [("ArrowRight", 5, 0), ("ArrowDown", 0, 2), ("ArrowUp", 0, -1), ("PageDown", 50, 0), ("ArrowLeft", -1, 0)]
    for key, by_token, by_layer in steps:
        tab.key(key, max(abs(by_layer), abs(by_token) if abs(by_token) < 50 else 1))
        token, layer = token + by_token, layer + by_layer
        ends = f"; MoE layer {layer}: {', '.join(map(str, rows[token, layer]))}"
        tab.wait(f"document.querySelector('#map-status').textContent.endsWith('{ends}')")
        assert status(tab).startswith(f"Token {token} ")
        tab.wait(f"document.querySelector('#live').textContent === {json.dumps(status(tab))}")
    tab.key("End")
    tab.wait(f"document.querySelector('{SELECTED}')?.dataset.i === '199'")
    assert status(tab).endswith("no row")  # the last token never enters a forward pass
    tab.key("ArrowRight", 3)
    tab.key("Home")
    tab.wait(f"document.querySelector('{SELECTED}')?.dataset.i === '0'")
    assert shows(tab, rows[0])


def test_clicks(tab: Tab, viewed: Viewed) -> None:
    rows = rows_of(59, 6, 4, 32)
    show(tab, viewed(answer(rows, 10), given=ModelInfo(num_experts=32)))
    wide = tab.js("(document.querySelector('#map').clientWidth - 42) / 60")
    wide = min(max(wide, 2), 18)
    tab.click("#map", GUTTER + 33.5 * wide, 20 + 2.5 * 26)
    tab.wait(f"document.querySelector('{SELECTED}')?.dataset.i === '33'")
    assert shows(tab, rows[33])
    assert f"; MoE layer 2: {', '.join(map(str, rows[33, 2]))}" in status(tab)
    step = tab.js("(document.querySelector('#load').clientWidth - 42) / 32")
    tab.click("#load", GUTTER + 7.5 * step, 6 + 4.5 * 18)
    tab.wait("document.querySelector('#load-status').textContent.startsWith('MoE layer 4')")
    count = int((rows[:, 4] == 7).sum())
    assert f"Expert 7: {count * 32 / (59 * 4):.2f} {TIMES} ({count} tokens)." in tab.text("#load-status")
    tab.click("#detail tbody tr:nth-child(2) .chip")
    tab.wait("document.querySelector('#load-status').textContent.startsWith('MoE layer 1')")
    assert f"Expert {rows[33, 1, 0]}:" in tab.text("#load-status")
    tab.js("document.querySelector('#load').focus()")
    tab.key("ArrowRight")
    tab.wait(f"document.querySelector('#load-status').textContent.includes('Expert {min(rows[33, 1, 0] + 1, 31)}:')")
    tab.click("#balance", GUTTER + 1, 50)
    tab.wait(f"document.querySelector('{SELECTED}')?.dataset.i === '0'")


def test_balance(tab: Tab, viewed: Viewed) -> None:
    """The entropy of the load so far, or of the last tokens, as a share of the most that it can be."""
    rows = rows_of(99, 3, 2, 8)
    show(tab, viewed(answer(rows, 10), given=ModelInfo(num_experts=8)))

    def evenness(part: np.ndarray) -> list[float]:
        shares = [np.bincount(part[:, layer].ravel(), minlength=8) / part[:, layer].size for layer in range(3)]
        return [float(-(p[p > 0] * np.log(p[p > 0])).sum() / np.log(8)) for p in shares]

    tab.click("#tokens-a [data-i='60']")
    for span, part in (("0", rows[:61]), ("32", rows[29:61])):
        tab.choose("#window", span)
        values = evenness(part)
        tab.wait(f"document.querySelector('#balance-status').textContent.includes('{100 * np.mean(values):.1f} %')")
        assert f"MoE layer 0 {100 * values[0]:.1f} %" in tab.text("#balance-status")
        assert f"between {100 * min(values):.1f} % and {100 * max(values):.1f} %" in tab.text("#balance-status")


def test_two_answers_side_by_side(tab: Tab, viewed: Viewed) -> None:
    bodies = two_that_part(119, 20, at=70)
    one, other = (collect(body)[0].rows for body in bodies)
    tab.open(viewed(*bodies))
    tab.wait("document.querySelector('#parting').textContent.includes('119')")
    differ = (one != other) & ~(one[..., None] == other[..., None, :]).any(-1)
    share = 100 * differ.any(-1).mean()
    sentence = tab.text("#parting-text")
    assert "Tokens differ from position 71. Experts differ from position 70, MoE layer 2" in sentence
    assert f"{share:.1f} % of 119 {TIMES} 24 cells differ" in sentence
    tab.click("#go")
    assert shows(tab, one[70])
    assert shows(tab, other[70], column=2)
    counts = tab.js("[...document.querySelectorAll('#detail tbody tr')].map(r => Number(r.children[3].textContent))")
    assert counts == differ[70].sum(-1).tolist()
    marked = tab.js("document.querySelectorAll('#detail tbody tr:nth-child(3) td:nth-child(2) .differs').length")
    assert marked == differ[70, 2].sum()
    assert f"({differ[70, 2].sum()} differ)" in status(tab)
    assert tab.js("document.querySelector('#tokens-b .selected').dataset.i") == "70"
    assert tab.js("document.querySelector('#tokens-b .parts').dataset.i") == "71"


def test_answers_of_two_models_are_not_compared(tab: Tab, viewed: Viewed) -> None:
    tab.open(viewed(answer(rows_of(9, 2, 2, 8), 3), answer(rows_of(9, 3, 2, 8), 3)))
    assert "from different models" in error_in(tab)
    assert tab.js("document.querySelector('#side-b').hidden")


@pytest.mark.parametrize(("form", "layout"), [("object", "split"), ("npy", "joined"), ("list", "split")])
def test_saved_answers_of_every_form(tab: Tab, api: Server, viewed: Viewed, form: str, layout: str) -> None:
    said = {"prompt": "Hello there", "max_tokens": 6, **ASK, "routed_experts_layout": layout}
    body = api.complete(**said, routed_experts_format=form)
    (routing,) = collect(body)
    show(tab, viewed(body))
    assert f"11 prompt and 6 generated tokens, {len(routing.rows)} rows of 8 layers {TIMES} 64 of" in tab.text(
        "#summary"
    )
    assert shows(tab, routing.rows[11])


def save(tab: Tab, folder: Path) -> Path:
    """The file that Save writes."""
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    file = folder / "answer.jsonl"
    file.unlink(missing_ok=True)
    tab.click("#save")
    deadline = time.monotonic() + 60
    while not (file.exists() and file.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return file


def test_what_is_saved_can_be_read(tab: Tab, api: Server, viewed: Viewed, tmp_path: Path) -> None:
    tab.open(f"{api.url}/routed_experts")
    ask(tab, tokens=12)
    tab.wait(ENDED)
    file = save(tab, tmp_path)
    said = {"messages": [{"role": "user", "content": PROMPT}]}
    (expected,) = answers_of(api.chat(**said, max_tokens=12, **ASK))
    (saved,) = read(opened([str(file)]), ModelInfo())
    (routing,) = saved.routings()
    assert np.array_equal(routing.rows, np.concatenate([expected.prompt_rows, expected.rows]))
    assert list(routing.token_ids or ()) == expected.tokens
    info = api.info()
    assert saved.info == ModelInfo(info["num_layers"], info["top_k"], info["num_experts"], tuple(info["layer_ids"]))
    tab.give_file("#file", file)
    tab.wait("document.querySelectorAll('#pick-a option').length === 3")
    tab.wait("document.querySelector('#parting-text').textContent.includes('Experts are equal')")


SHOWN = """[...document.querySelectorAll('#tokens-a .token'), ...document.querySelectorAll('#detail th'),
    ...document.querySelectorAll('#summary')].map(e => e.className + e.textContent)"""
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
    return {**body, "choices": [{**choice, "routed_experts": encode(rows, fmt="object", dtype="int16", start=0)}]}


@pytest.mark.parametrize("change", [lambda body: body, without_texts, joined], ids=["texts", "ids", "neither"])
@pytest.mark.parametrize(("info", "reason"), [({}, "length"), ({"routed_experts_info": INFO}, None)])
def test_saving_and_opening_change_nothing(
    tab: Tab, viewed: Viewed, tmp_path: Path, change: Any, info: dict[str, Any], reason: str | None
) -> None:
    body = change(answer(rows_of(29, 3, 2, 32), 12)) | info
    body["choices"][0]["finish_reason"] = reason
    seen, lines = [], []
    for text in (json.dumps(body), None):
        tab.open(viewed(text=text or lines[-1]))
        tab.wait("/finish reason|not finished/.test(document.querySelector('#summary').textContent)")
        tab.wait("document.querySelectorAll('#tokens-a .token').length === 30")
        seen.append(tab.js(SHOWN))
        lines.append(save(tab, tmp_path).read_text())
    assert seen[0] == seen[1]
    assert lines[0] == lines[1]
    saved = json.loads(lines[0])
    assert saved["choices"][0].get("token_ids") == body["choices"][0].get("token_ids")
    assert saved["choices"][0]["finish_reason"] == reason
    assert saved["routed_experts_info"] == (INFO if info else {"num_layers": 3, "top_k": 2})


def texts_of(ids: list[int]) -> list[str]:
    tokenizer = make_tokenizer()
    return [tokenizer.decode([i]) for i in ids]


def test_several_tokens_in_a_chunk(tab: Tab, tiny_model: Path, viewed: Viewed) -> None:
    body = {"model": "tiny", "prompt": "Hello there", "max_tokens": 24, "stream": True, **ASK}
    with serving(tiny_model, "--stream-interval", "5") as server:
        with server.client() as client:
            stream = client.post("/v1/completions", json=body).text
        (routing,) = collect(stream)
        texts = texts_of([*(routing.prompt_token_ids or ()), *(routing.token_ids or ())])
        assert stream.count('"token_ids"') < 12
        tab.open(f"{server.url}/routed_experts")
        ask(tab, prompt="Hello there", tokens=24, kind="completion")
        tab.wait(ENDED)
        tab.wait("!document.querySelector('#tokens-a .number')")
        assert token_texts(tab) == texts
    show(tab, viewed(text=stream))
    shown = token_texts(tab)
    numbers = [f"#{i}" for i in (*(routing.prompt_token_ids or ()), *(routing.token_ids or ()))]
    assert len(shown) == len(texts)
    assert all(one in (text, number) for one, text, number in zip(shown, texts, numbers, strict=True))
    assert shown[11] == texts[11], "the first chunk brings one token"


def token_texts(tab: Tab) -> list[str]:
    shown: list[str] = tab.js("[...document.querySelectorAll('#tokens-a .token')].map(e => e.textContent)")
    return shown


def chunk(ids: list[int], text: str, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "token_ids": ids, "text": text, **fields}]}


def test_texts_of_a_saved_stream(tab: Tab, viewed: Viewed) -> None:
    """A chunk's text is its token's, until some was held back; log-probabilities say them all."""
    rows = rows_of(7, 2, 2, 8)
    first = {"prompt_token_ids": [1, 2], "prompt_routed_experts": encode(rows[:2], fmt="npy", dtype="int16", start=0)}
    last = {"finish_reason": "stop", "routed_experts": encode(rows[2:], fmt="npy", dtype="int16", start=2)}
    parts = [([3], "a"), ([4], "b"), ([5], ""), ([6], "cd"), ([7, 8], "ef")]
    chunks = [chunk(ids, text) for ids, text in parts]
    chunks[0]["choices"][0]["prompt_token_ids"] = first.pop("prompt_token_ids")
    chunks[0] |= first
    chunks[-1]["choices"][0] |= last
    for expected in ("#1 #2 a b #5 #6 #7 #8", "#1 #2 a b c d e f"):
        text = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
        show(tab, viewed(text=text))
        assert token_texts(tab) == expected.split()
        for one, tokens in zip(chunks, ("a", "b", "c", "d", "ef"), strict=True):
            one["choices"][0]["logprobs"] = {"tokens": list(tokens)}


def test_decoder_layers_are_named(tab: Tab, viewed: Viewed) -> None:
    rows = np.zeros((29, 7, 2), dtype=np.int16)
    rows[:, INFO["layer_ids"]] = rows_of(29, 3, 2, 32)
    show(tab, viewed(text=f"{json.dumps(INFO, indent=1)}\n{json.dumps(answer(rows, 12), indent=1)}"))
    assert f"29 rows of 3 layers {TIMES} 2 of 40 experts" in tab.text("#summary")
    tab.click("#tokens-a [data-i='14']")
    assert shows(tab, rows[14, INFO["layer_ids"]])
    assert tab.js("[...document.querySelectorAll('#detail th')].map(e => e.textContent)") == [
        *("Decoder layer", "Experts"),
        *("1", "2", "5"),
    ]
    assert "; decoder layer 1: " in status(tab)


def test_raw_rows_by_flags(tab: Tab, api: Server, viewed: Viewed) -> None:
    form = {"routed_experts_layout": "split", "routed_experts_format": "raw", "routed_experts_dtype": "int32"}
    body = api.complete(prompt="Hello there", max_tokens=6, **ASK, **form)
    info = api.info()
    given = ModelInfo(info["num_layers"], info["top_k"], rows_dtype="int32")
    (saved,) = read([("", StringIO(json.dumps(body)))], given)
    show(tab, viewed(body, given=given))
    assert shows(tab, saved.routings()[0].rows[11])


def test_files_in_every_shape(tab: Tab, viewed: Viewed) -> None:
    body = answer(rows_of(9, 2, 2, 8), 3)
    body["choices"][0]["text"] = 'a "quoted\\" } text\n'
    stream = f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n"
    pretty = json.dumps(body, indent=2)
    text = f"{stream}: ping\n\n{stream}{pretty}\n{json.dumps([body, body])}{json.dumps(body)}\n\n{pretty}"
    show(tab, viewed(text=text))
    names = tab.js("[...document.querySelectorAll('#pick-a option')].slice(1).map(e => e.textContent)")
    found = [answer.where for answer in read([("answers.jsonl", StringIO(text))], ModelInfo())]
    assert len(found) == 7
    assert names == found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "answers.jsonl contains no responses."),
        ("no json", "answers.jsonl, line 1: invalid or truncated JSON."),
        ('{"a": 1}', "answers.jsonl, line 1: not a response: it has no choices."),
        ('{"error": {"message": "too long"}}', "answers.jsonl, line 1: too long"),
        ('{"choices": [{}]}', "no routed_experts: the request needs return_routed_experts."),
        ('{"choices": [{"routed_experts": "AAAA"}]}', "The raw format has no shape"),
        (
            '{"choices": [{"routed_experts": {"data": "AAAA", "shape": [1, 1, 1], "dtype": "uint8"}}]}',
            "does not match its shape",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_said(tab: Tab, viewed: Viewed, text: str, sentence: str) -> None:
    tab.open(viewed(text=text))
    assert sentence in error_in(tab)
    assert tab.js("document.querySelector('#error').getAttribute('role')") == "alert"


def test_errors_of_the_server_are_shown(tab: Tab, api: Server) -> None:
    tab.open(f"{api.url}/routed_experts")
    ask(tab, prompt="x" * 3000)
    assert error_in(tab).startswith("The server returned 400: ")
    assert "context length" in tab.text("#error")
    tab.console.clear()  # the browser itself notes failed requests
    ask(tab, tokens=3)
    tab.wait(ENDED)
    assert tab.js("document.querySelector('#error').hidden")


def test_a_server_that_is_gone(tab: Tab, tiny_model: Path) -> None:
    with serving(tiny_model) as server:
        tab.open(f"{server.url}/routed_experts")
        tab.wait("!document.querySelector('#ask').hidden")
        network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        tab.call("Network.emulateNetworkConditions", offline=True, **network)
        ask(tab)
        tab.wait("!document.querySelector('#error').hidden")
        tab.call("Network.emulateNetworkConditions", offline=False, **network)
    assert tab.text("#error") == "Cannot reach the server."
    tab.console.clear()


def test_the_key_is_asked_for_and_kept_nowhere(tab: Tab, tiny_model: Path) -> None:
    with serving(tiny_model, "--api-key", "a-secret") as server:
        tab.open(f"{server.url}/routed_experts")
        tab.wait("!document.querySelector('#key-form').hidden")
        assert tab.console == []
        tab.type("#key", "wrong")
        tab.click("#key-form button")
        assert error_in(tab) == "The server rejected this API key."
        tab.console.clear()
        tab.type("#key", "a-secret")
        tab.click("#key-form button")
        ask(tab, tokens=5)
        tab.wait(ENDED)
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert "a-secret" not in tab.js(kept) + tab.js("document.documentElement.outerHTML")
        assert tab.js("document.querySelector('#key').value") == ""
        tab.open(f"{server.url}/routed_experts")  # a page that is loaded again knows nothing
        tab.wait("!document.querySelector('#key-form').hidden")


def test_a_server_without_capture(tab: Tab, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved.jsonl"
    file.write_text(json.dumps(answer(rows_of(9, 2, 2, 8), 3)))
    with serving(tiny_model, "--no-enable-return-routed-experts") as server:
        tab.open(f"{server.url}/routed_experts")
        tab.wait("!document.querySelector('#notice').hidden")
        assert tab.js("document.querySelector('#ask').hidden")
        tab.give_file("#file", file)
        tab.wait(ENDED)


def test_tokens_are_never_markup(tab: Tab, viewed: Viewed) -> None:
    texts = ["<script>hacked = 1</script>", "<img src=x onerror='hacked = 1'>", "</span>", "&amp;", "<b>", "x"]
    show(tab, viewed(answer(rows_of(5, 2, 2, 8), 2, texts)))
    tab.click("#table summary")
    tab.wait("document.querySelectorAll('#table tbody tr').length === 6")
    assert tab.js("typeof hacked") == "undefined"
    assert tab.js("document.querySelectorAll('main img, main script, main b').length") == 0
    assert token_texts(tab) == texts


def test_the_table_says_what_the_map_shows(tab: Tab, viewed: Viewed) -> None:
    rows = rows_of(69, 3, 2, 8)
    rows[30, 1] = -1
    show(tab, viewed(answer(rows, 10)))
    assert "69 rows (1 unknown)" in tab.text("#summary")
    tab.click("#table summary")
    tab.wait("document.querySelectorAll('#table tbody tr').length === 25")
    tab.click("#table-on")
    tab.wait("document.querySelector('#table-range').textContent === 'tokens 25 to 49 of 70'")
    cells = (
        "[...document.querySelectorAll('#table tbody tr')].map(r => [...r.children].slice(2).map(c => c.textContent))"
    )
    expected = [[", ".join("unknown" if i < 0 else str(i) for i in layer) for layer in row] for row in rows[25:50]]
    assert tab.js(cells) == expected
    tab.click("#table-on")
    tab.wait("document.querySelectorAll('#table tbody tr').length === 20")
    assert tab.js(cells)[-1] == ["no row"] * 3


def test_screen_readers_find_names_and_roles(tab: Tab, viewed: Viewed) -> None:
    show(tab, viewed(*two_that_part(39, 10, 20)))
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
    assert tab.js("document.querySelector('#live').getAttribute('aria-live')") == "polite"


@pytest.mark.parametrize("width", [1440, 420])
def test_light_dark_and_both_sizes(tab: Tab, viewed: Viewed, width: int) -> None:
    """As the system has it, unless the switch says otherwise; nothing is wider than the window."""
    show(tab, viewed(*two_that_part(149, 20, 70)), width=width, theme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.js(background)
    pixel = "document.querySelector('#legend').toDataURL()"
    dark_pixel = tab.js(pixel)
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
    assert tab.js("document.querySelector('#map canvas').getBoundingClientRect().right") <= width


def test_4000_tokens_of_60_layers_and_512_experts(tab: Tab, viewed: Viewed) -> None:
    """The page's own work leaves most of each second, and most of a frame, to the browser."""
    rows = np.random.default_rng(0).random((4000, 60, 512), dtype=np.float32).argpartition(10)[:, :, :10]
    tab.open(viewed(answer(rows.astype(np.int16), 500)))
    tab.wait(ENDED, 120)
    tab.wait("document.querySelectorAll('#tokens-a [data-rare]').length >= 4000", 60)
    tab.call("Performance.enable", timeDomain="threadTicks")
    tab.js("var frames = 0; (function tick() { frames++; requestAnimationFrame(tick) })()")

    before, start = script_seconds(tab), time.monotonic()
    tab.click("#play")
    tab.wait("document.querySelector('#summary').textContent.includes('streaming')")
    tab.wait(ENDED, 60)
    share = (script_seconds(tab) - before) / (time.monotonic() - start)

    before = script_seconds(tab)
    tab.js("document.querySelector('#map').focus()")
    tab.key("ArrowRight", 80)
    by_key = (script_seconds(tab) - before) / 80 * 1000

    before, frames, start = script_seconds(tab), tab.js("frames"), time.monotonic()
    tab.js(
        "new Promise(done => { let i = 0; const step = () => { document.querySelector('#map').scrollLeft = 30 * i;"
        " ++i < 200 ? requestAnimationFrame(step) : done() }; step() })"
    )
    rate = (tab.js("frames") - frames) / (time.monotonic() - start)
    by_frame = (script_seconds(tab) - before) / (tab.js("frames") - frames) * 1000

    print(f"growing: {share:.0%} of the time; {by_key:.1f} ms for a key, {by_frame:.1f} ms for a scrolled frame")
    print(f"{rate:.0f} frames a second while scrolling")
    assert share < 0.5
    assert by_key < 16
    assert by_frame < 8


def script_seconds(tab: Tab) -> float:
    """Processor time that the page's scripts have taken."""
    metrics = {metric["name"]: metric["value"] for metric in tab.call("Performance.getMetrics")["metrics"]}
    return float(metrics["ScriptDuration"])
