"""The page's reader of saved responses beside Python's, on files of every form: the same rows,
weights, tokens and facts, or an error."""

import io
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from routed_experts.protocol.routing import Routing, RoutingError
from routed_experts.protocol.saved import ModelInfo, SavedAnswer, read
from tests.page.browser import Tab
from tests.page.conftest import viewing
from tests.protocol.answers import LAYERS, TOP_K, RoutedPrompt, answer, rows_of, stream
from tests.server.test_saved import FILES, INFO, sse

pytestmark = pytest.mark.e2e

READ = """
(async () => {
  const { Reader } = await import('/routed_experts/saved.js');
  const reader = new Reader();
  const choices = [];
  try {
    for (const [name, text] of %s) {
      for await (const { rows, weights, ...rest } of reader.read(name, new Blob([text]).stream())) {
        const bits = weights && [...new Int32Array(weights.buffer)];
        choices.push({ ...rest, rows: [...rows], weights: bits });
      }
    }
  } catch (error) {
    return { choices, error: error.message };
  }
  return { choices, error: null };
})()
"""


@pytest.fixture(scope="module")
def tab(the_tab: Tab) -> Iterator[Tab]:
    """With one page for all tests: each makes a reader of its own."""
    with viewing({}) as url:
        the_tab.open(url)
        yield the_tab
        console = [*the_tab.console]
        the_tab.call("Page.navigate", url="about:blank")
    assert console == []


def read_in(tab: Tab, *texts: str) -> tuple[list[Any], str | None]:
    """The choices that the page reads in files of these texts, and the error that ends them."""
    named = [[f"{number}.jsonl", text] for number, text in enumerate(texts)]
    read_by_page = tab.js(READ % json.dumps(named))
    return read_by_page["choices"], read_by_page["error"]


def check_equal(tab: Tab, *texts: str, n: int | None = None) -> int:
    """The number of choices, which the page and Python read alike. `n` is for Python, which wants to
    know it of a list of prompts."""
    choices, error = read_in(tab, *texts)
    assert error is None
    files = (
        (f"{number}.jsonl", io.StringIO(text.removeprefix("\ufeff")))
        for number, text in enumerate(texts)
    )
    expected = [
        (saved, routing) for saved in read(files, ModelInfo(n=n)) for routing in routings_of(saved)
    ]
    assert len(choices) == len(expected)
    for choice, (saved, routing) in zip(choices, expected, strict=True):
        check_choice(choice, saved, routing)
    return len(expected)


def routings_of(saved: SavedAnswer) -> list[Routing]:
    """Also those of a response that was cut off, which the page shows."""
    so_far = saved.collected(saved.info).so_far()
    is_cut = any(routing.finish_reason is None for routing in so_far)
    return so_far if is_cut else saved.routings()


def check_choice(choice: dict[str, Any], saved: SavedAnswer, routing: Routing) -> None:
    assert choice["name"] in (saved.where, f"{saved.where}, choice {routing.index}")
    facts = json.loads(msgspec.json.encode(saved.info))
    del facts["n"]  # which the page does not need
    assert choice["info"] == {name: value for name, value in facts.items() if value is not None}
    assert (choice["start"], choice["promptLength"]) == (routing.start, routing.prompt_len)
    assert choice["shape"] == list(routing.rows.shape)
    assert choice["rows"] == routing.rows.ravel().tolist()
    if routing.weights is None:
        assert choice["weights"] is None
    else:
        assert choice["weights"] == routing.weights.view(np.int32).ravel().tolist()
    assert choice["finished"] == (routing.finish_reason or "not finished")
    tokens = choice["tokens"]
    if routing.prompt_len is not None:
        before = routing.prompt_token_ids or (None,) * routing.prompt_len
        ids = [*before, *(routing.token_ids or ())]
        assert len(tokens) == max(routing.end + 1, len(ids))
        assert [token["id"] for token in tokens] == ids + [None] * (len(tokens) - len(ids))
    texts = [None] * len(tokens) if routing.texts is None else list(routing.texts)
    assert [token["text"] for token in tokens] == texts


@pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())
def test_every_kind_of_file(tab: Tab, text: str) -> None:
    assert check_equal(tab, text) == 2


ROWS, OTHERS = rows_of(20, 1), [rows_of(9, 2), rows_of(4, 3)]
UNKNOWN = ROWS.copy()
UNKNOWN[3, 1] = -1
EVERY = np.zeros((20, 6, TOP_K), np.int16)
EVERY[:, INFO["layer_ids"]] = ROWS


def body(prompt: np.ndarray = ROWS, choices: list[np.ndarray] = OTHERS, **forms: Any) -> str:
    return json.dumps(answer(RoutedPrompt(prompt, choices, **forms)))


def with_texts(prompts_too: bool) -> str:
    said = answer(RoutedPrompt(ROWS, OTHERS[:1]))
    texts = [f"{number}\u2028é" for number in range(10 + 20 * prompts_too)]
    said["choices"][0]["logprobs"] = {"tokens": texts}
    return json.dumps(said)


def changed(**fields: Any) -> str:
    """A response with other fields in its choice; None takes one away."""
    said = answer(RoutedPrompt(ROWS, OTHERS[:1]))
    said["choices"][0] |= fields
    return json.dumps(said)


def put_aside() -> str:
    """As LiteLLM does with fields that it does not know."""
    (choice,) = answer(RoutedPrompt(ROWS, OTHERS[:1], layout="joined"))["choices"]
    aside = {"routed_experts": choice["routed_experts"]}
    return json.dumps({"choices": [{"finish_reason": "stop", "provider_specific_fields": aside}]})


PIECES = RoutedPrompt(UNKNOWN, OTHERS, weights=True)
BODIES = {
    "two choices": [body()],
    "lists with weights": [body(fmt="list", weights=True)],
    "uint8": [body(dtype="uint8", weights=True)],
    "unknown rows": [body(UNKNOWN, weights=True)],
    "unknown rows as lists": [body(UNKNOWN, weights=True, fmt="list")],
    "joined": [body(layout="joined", weights=True)],
    "a later start": [body(start=7)],
    "no prompt rows": [body(start=20)],
    "one generated token": [body(choices=[ROWS[:0]])],
    "one generated token as lists": [body(choices=[ROWS[:0]], fmt="list")],
    "texts": [with_texts(False)],
    "texts of the prompt too": [with_texts(True)],
    "a chat's texts": [changed(logprobs={"content": [{"token": str(i)} for i in range(10)]})],
    "cut off": [changed(finish_reason=None, token_ids=None)],
    "without ids": [changed(prompt_token_ids=None, token_ids=None)],
    "aborted": [changed(finish_reason="abort", token_ids=[*range(99)])],
    "a model's facts": [json.dumps(INFO), body()],
    "dense layers": [json.dumps(INFO), body(EVERY, [EVERY[:4]], weights=True)],
    "a response's facts": [
        f"{json.dumps({**json.loads(body()), 'routed_experts_info': INFO})}\n{body()}"
    ],
    "LiteLLM's": [put_aside()],
    "a stream in pieces with weights": [sse(*stream(PIECES, per_chunk=3, piece=4))],
}


@pytest.mark.parametrize("texts", BODIES.values(), ids=BODIES.keys())
def test_every_form_of_a_response(tab: Tab, texts: list[str]) -> None:
    assert check_equal(tab, *texts) > 0


def test_prompts_of_one_request(tab: Tab) -> None:
    prompts = [RoutedPrompt(rows_of(9, seed), OTHERS, first_token=100 * seed) for seed in (1, 5)]
    assert check_equal(tab, json.dumps(answer(*prompts)), n=2) == 4


@pytest.mark.parametrize("fmt", ["npy", "raw", "int32", "reference"])
def test_other_forms_are_named_with_what_to_use(tab: Tab, fmt: str) -> None:
    if fmt == "reference":
        text = changed(routed_experts={"url": "http://x/1", "shape": [9, LAYERS, TOP_K]})
    else:
        text = body(dtype="int32") if fmt == "int32" else body(fmt=fmt)
    choices, error = read_in(tab, text)
    assert choices == []
    assert error is not None
    assert error.startswith("0.jsonl, line 1: The page reads rows as objects of int16 or uint8")
    assert "routed-experts export" in error


def of_rows(**fields: Any) -> str:
    """A response whose generated rows say something else of themselves."""
    said = answer(RoutedPrompt(ROWS, OTHERS[:1]))
    return changed(routed_experts=said["choices"][0]["routed_experts"] | fields)


def after_info(text: str, **fields: Any) -> str:
    return f"{json.dumps({**INFO, **fields})}\n{text}"


ERROR = 'data: {"error": {"message": "no more"}}\n\ndata: [DONE]\n'
CUT_OFF = sse(*stream(RoutedPrompt(ROWS, OTHERS)))[:-14]
TWO_LAYERS = body(rows_of(9, layers=2), [rows_of(3, layers=2)])
FIRST = "0.jsonl, line 1"
OTHER_LAYERS = "layers, but the model has 3 MoE layers"
LISTS = f"{FIRST}: Lists of rows must have three levels"
WRONG = [
    ("", "0.jsonl has no responses."),
    ("3", f"{FIRST}: not a response of the server: it must be a JSON object"),
    (f"{body()}\n{{]", "0.jsonl, line 2 is not valid JSON, or was cut off: "),
    (f'{body()}\n{{"a": 1,\n\n "b', "0.jsonl, line 2 is not valid JSON, or was cut off: "),
    (f"\n{CUT_OFF}", "0.jsonl, line 2: the stream that starts here was cut off"),
    (ERROR, f"{FIRST}: the server answered with an error: no more"),
    (of_rows(start=21), f"{FIRST}: choice 0: rows from 21 on after a prompt of 20 tokens"),
    (of_rows(missing=1), f"{FIRST}: 0 rows of an array are not known, said to be 1."),
    (of_rows(shape=[8, LAYERS, TOP_K]), f"{FIRST}: The number of ids in an array"),
    (of_rows(start=None), f"{FIRST}: An array does not say at which token"),
    (changed(routed_experts=[[[1, 2], [3]]]), LISTS),
    (changed(routed_experts=[[[0.5]]]), LISTS),
    (changed(routed_experts=[[[40000]]]), LISTS),
    (changed(routed_experts=[[[1, 2, 3]]] * 9), f"{FIRST}: choice 0: rows of 1,3 experts, not 3,4"),
    (
        changed(token_ids=[1, 2, 3]),
        f"{FIRST}: choice 0: rows up to 29, but its tokens have rows up to 22",
    ),
    (changed(prompt_token_ids=[1]), f"{FIRST}: choice 0: rows of 20 prompt tokens, which are 1"),
    (changed(routed_experts=None), f"{FIRST}: choice 0: rows up to 20, but"),
    ('{"choices": [{"index": 0}]}', f"{FIRST}: choice 0 has no rows: set return_routed_experts"),
    ('{"object": "list"}', f"{FIRST}: it has no choices"),
    (body(EVERY, [EVERY[:4]]), f"{FIRST}: its rows include dense layers"),
    (after_info(TWO_LAYERS), f"0.jsonl, line 2: rows of 2 {OTHER_LAYERS}"),
    (
        after_info(body(EVERY, [EVERY[:4]]), layer_ids=[1, 2, 7]),
        f"0.jsonl, line 2: rows of 6 {OTHER_LAYERS}",
    ),
    (after_info(body(), top_k=2), "0.jsonl, line 2: rows of 4 experts, but the model has 2"),
    (
        after_info("", layer_ids=[2, 1, 0]),
        f"{FIRST}: layer_ids must be ascending layer indices, not 2,1,0",
    ),
    (
        after_info("", num_experts="x"),
        f"{FIRST}: num_experts must be a positive integer up to 32768, not x",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG)
def test_what_does_not_fit_is_an_error(tab: Tab, text: str, sentence: str) -> None:
    _, error = read_in(tab, text)
    assert (error or "").startswith(sentence)


def test_two_prompts_of_a_stream_are_not_mixed(tab: Tab) -> None:
    chunks = []
    for index, seed in enumerate((1, 5)):
        for chunk in stream(RoutedPrompt(rows_of(9, seed), OTHERS[:1], first_token=100 * seed)):
            chunks.append(
                chunk | {"choices": [{**one, "index": index} for one in chunk["choices"]]}
            )
    _, error = read_in(tab, sse(*chunks))
    assert error is not None
    assert "streams of several prompts cannot be told apart" in error


def test_a_long_line_and_many_tokens(tab: Tab) -> None:
    """Of 40 MB; and what claims a million tokens shows none of them."""
    rows = rows_of(1, layers=48, top_k=8)
    said = answer(RoutedPrompt(rows, [rows]))
    said["choices"][0]["prompt_token_ids"] *= 40_000
    said["prompt_routed_experts"] |= {"shape": [40_000, 48, 8], "data": "HERE"}
    said["choices"][0]["routed_experts"]["start"] = 40_000
    before, after = map(json.dumps, json.dumps(said).split("HERE"))
    data = f"'AQAC'.repeat({40_000 * 48 * 8 * 2 // 3})"
    count = "(r => r.next().then(({ value }) => value.shape[0]))"
    text = f"new Blob([{before} + {data} + {after}]).stream()"
    module = "import('/routed_experts/saved.js')"
    assert tab.js(f"{module}.then(m => {count}(new m.Reader().read('f', {text})))") == 40_001
    far = {"data": "", "shape": [0, 3, 4], "dtype": "int16", "start": 1 << 30, "missing": 0}
    choice = {"index": 0, "finish_reason": "stop", "routed_experts": far}
    _, error = read_in(tab, json.dumps({"choices": [choice]}))
    assert (error or "").endswith("1073741825 tokens, but the page shows 1048576 at most")


ODD: list[Any] = [None, True, -1, 3, 2**40, 0.5, "x", "AAAA", [], [1], [[[1]]], {}, {"index": 1}]


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value within a JSON value is; of a list, its first two."""
    keys = (
        [*value]
        if isinstance(value, dict)
        else [*range(len(value))][:2]
        if isinstance(value, list)
        else []
    )
    for key in keys:
        yield (*place, key)
        yield from places_in(value[key], (*place, key))


def with_other(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    """A copy of a JSON value that has another value in a place."""
    copied = json.loads(json.dumps(value))
    inner = copied
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = other
    return copied


def rows_in_python(text: str) -> list[list[int]] | None:
    """The rows of each choice; None if that is an error, also for a choice that was cut off."""
    try:
        (one,) = read([("0.jsonl", io.StringIO(text))], ModelInfo())
        return [routing.rows.ravel().tolist() for routing in routings_of(one)]
    except RoutingError:
        return None


@pytest.mark.parametrize("fmt", ["object", "list"])
def test_other_values_make_no_other_rows(tab: Tab, fmt: Any) -> None:
    """Whatever stands in a place of a response, the page has the rows that Python has, or an
    error."""
    routed = RoutedPrompt(rows_of(2, 1), [rows_of(2, 2), rows_of(1, 3)], fmt=fmt, weights=True)
    info = {name: INFO[name] for name in ("num_layers", "top_k", "layer_ids")}
    said = answer(routed) | {"routed_experts_info": info}
    changes = [(place, other) for place in places_in(said) for other in ODD]
    texts = [json.dumps(with_other(said, place, other)) for place, other in changes]
    read_one = READ % "[['0.jsonl', one]]"
    outcomes = tab.js(f"Promise.all({json.dumps(texts)}.map(one => {read_one}))")
    are_read = [outcome["error"] is None for outcome in outcomes]
    wrong = [
        (place, other)
        for (place, other), text, outcome in zip(changes, texts, outcomes, strict=True)
        if outcome["error"] is None
        and [choice["rows"] for choice in outcome["choices"]] != rows_in_python(text)
    ]
    assert wrong == []
    assert 20 < sum(are_read) < len(texts)


def test_a_file_that_is_no_text_is_said(tab: Tab) -> None:
    module = "import('/routed_experts/saved.js')"
    stream = "new Blob([new Uint8Array([255, 254, 0])]).stream()"
    read_first = f"(m => new m.Reader().read('f.npy', {stream}).next())"
    said = tab.js(f"{module}.then({read_first}).catch(error => error.message)")
    assert said.startswith("f.npy cannot be read as UTF-8 text: ")
