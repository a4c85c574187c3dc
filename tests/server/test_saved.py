"""The reader of saved answers, on every kind of file: what it finds is what was written."""

import io
import json
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from routed_experts.protocol import saved
from routed_experts.protocol.codec import decode, decode_weights, encode
from routed_experts.protocol.models import RequestFormat
from routed_experts.protocol.routing import RoutingError
from routed_experts.protocol.saved import ModelInfo, page_lines, read
from routed_experts.server import page
from routed_experts.server.cli.console import CommandError
from routed_experts.server.page import read_saved
from routed_experts.server.tools.saved import opened
from tests.protocol.answers import (
    EXPERTS,
    LAYERS,
    TOP_K,
    RoutedPrompt,
    answer,
    histogram,
    peak_of,
    rows_of,
    stream,
    weights_of,
)
from tests.protocol.forms import encode as encode_as

ONE = RoutedPrompt(rows_of(20, 1), [rows_of(9, 2)])
OTHER = RoutedPrompt(rows_of(7, 4), [rows_of(3, 5)], first_token=500)
ROWS = [ONE.whole(), OTHER.whole()]
INFO = {
    "model": "m",
    "num_layers": LAYERS,
    "top_k": TOP_K,
    "num_experts": EXPERTS,
    "layer_ids": [1, 2, 4],
}


def sse(*chunks: Any, end: str = "\n\n") -> str:
    return "".join(f"data: {text}{end}" for text in (*map(json.dumps, chunks), "[DONE]"))


def body(*routed: RoutedPrompt) -> str:
    return json.dumps(answer(*routed))


FILES = {
    "lines": f"{body(ONE)}\n\n{body(OTHER)}\n",
    "no end of line between or after": body(ONE) + body(OTHER),
    "windows": f"\ufeff{body(ONE)}\r\n{body(OTHER)}\r\n",
    "pretty-printed": "\n".join(json.dumps(answer(routed), indent=2) for routed in (ONE, OTHER)),
    "an array": json.dumps([answer(ONE), answer(OTHER)]),
    "an array over lines": json.dumps([answer(ONE), answer(OTHER)], indent=1),
    "streams": sse(*stream(ONE)) + sse(*stream(OTHER, per_chunk=3, piece=4)),
    "streams with carriage returns": sse(*stream(ONE), end="\r\n\r\n")
    + sse(*stream(OTHER), end="\r\n\r\n"),
    "a stream with comments": ": ping\n\nevent: x\n"
    + sse(*stream(ONE))
    + ": ping\n"
    + sse(*stream(OTHER)),
    "a stream, then a body": sse(*stream(ONE)) + "\n" + body(OTHER),
    "a batch's output": "".join(
        json.dumps(
            {
                "custom_id": str(number),
                "response": {"status_code": 200, "body": answer(routed)},
                "error": None,
            }
        )
        + "\n"
        for number, routed in enumerate((ONE, OTHER))
    ),
    "a body over lines, then a stream": json.dumps(answer(ONE), indent=2)
    + "\n"
    + sse(*stream(OTHER)),
}


def answers_in(path: Path, *texts: str, model_info: ModelInfo | None = None) -> list[Any]:
    files = []
    for number, text in enumerate(texts):
        files.append(str(path / f"{number}.jsonl"))
        Path(files[-1]).write_text(text, encoding="utf-8", newline="")
    return list(read(opened(files), model_info or ModelInfo()))


@pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())
def test_every_kind_of_file(tmp_path: Path, text: str) -> None:
    answers = answers_in(tmp_path, text)
    for rows, (routing,) in zip(ROWS, (one.routings() for one in answers), strict=True):
        assert np.array_equal(routing.rows, rows)


def test_lines_are_counted(tmp_path: Path) -> None:
    pretty = json.dumps(answer(ONE), indent=2)
    text = f"\n{pretty}\n[{body(ONE)},\n{body(ONE)}]\n\n{sse(*stream(ONE))}{body(ONE)}"
    line = 2 + pretty.count("\n") + 1
    after = line + 3 + sse(*stream(ONE)).count("\n")
    places = [one.where.rpartition("/")[2] for one in answers_in(tmp_path, text, body(OTHER))]
    lines = [2, line, line, line + 3, after]
    assert places == [*(f"0.jsonl, line {number}" for number in lines), "1.jsonl, line 1"]


def test_what_the_server_says_about_its_layers(tmp_path: Path) -> None:
    """Applies to what follows, in later files too; an answer's own comes first, and the command
    line before all."""
    own = {**answer(ONE), "routed_experts_info": {"layer_ids": [7, 8, 9]}}
    texts = [
        body(ONE),
        f"{json.dumps(INFO, indent=1)}\n{sse(*stream(ONE))}{json.dumps(own)}",
        body(OTHER),
    ]
    answers = answers_in(tmp_path, *texts, model_info=ModelInfo(num_experts=99))
    assert [one.info.layer_ids for one in answers] == [None, (1, 2, 4), (7, 8, 9), (1, 2, 4)]
    assert [one.info.num_experts for one in answers] == [99] * 4


@pytest.mark.parametrize("fmt", get_args(RequestFormat))
def test_flags_for_raw_arrays_make_no_other_ids_of_other_formats(tmp_path: Path, fmt: str) -> None:
    """Such text would be read as `raw`: as other ids, without an error."""
    of_raw = ModelInfo(LAYERS, TOP_K, rows_dtype="uint8")
    if fmt == "paired":
        pairs = np.concatenate([ONE.whole(), weights_of(ONE.whole()).view(np.int32)], axis=2)
        array = encode_as(pairs, dtype="int32")
        answer_to_it = {"choices": [{"routed_experts": array, "finish_reason": "stop"}]}
        (saved_answer,) = answers_in(tmp_path, json.dumps(answer_to_it), model_info=of_raw)
        with pytest.raises(RoutingError, match="not an expert id"):
            saved_answer.routings()
        return
    routed = replace(ONE, fmt=fmt, dtype="uint8")
    (saved_answer,) = answers_in(tmp_path, body(routed), model_info=of_raw)
    (routing,) = saved_answer.routings()
    assert np.array_equal(routing.rows, ONE.whole())


def routing_of(path: Path, *values: Any) -> Any:
    (one,) = answers_in(path, "\n".join(map(json.dumps, values)))
    (routing,) = one.routings()
    return routing


def test_dense_layers_that_nothing_names_are_not_counted(tmp_path: Path) -> None:
    rows = rows_of(20, 1)
    rows[:, 1] = 0
    with pytest.raises(RoutingError, match="dense layers"):
        routing_of(tmp_path, answer(RoutedPrompt(rows, [rows[:9]])))
    # with one expert a token, 0 for every token is a choice that a router can make
    rows = rows[:, :, :1]
    assert (routing_of(tmp_path, answer(RoutedPrompt(rows, [rows[:9]]))).rows[:, 1] == 0).all()


def test_dense_layers_are_left_out(tmp_path: Path) -> None:
    rows = np.zeros((20, 6, TOP_K), dtype=np.int16)
    rows[:, INFO["layer_ids"]] = rows_of(20, 1)
    rows[3] = -1
    every = RoutedPrompt(rows, [rows[:5]])
    assert np.array_equal(
        routing_of(tmp_path, INFO, answer(every)).rows, every.whole()[:, [1, 2, 4]]
    )
    rows[4, 0, 0] = 1
    with pytest.raises(ValueError, match="rows of 6 layers, but the model has 3 MoE layers"):
        routing_of(tmp_path, INFO, answer(every))


def test_rows_of_another_model_or_of_no_shape(tmp_path: Path) -> None:
    info = {"num_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS // 2}
    for routed in (ONE, RoutedPrompt(rows_of(9, layers=2), [rows_of(3, layers=2)])):
        with pytest.raises(ValueError, match="the model has"):
            routing_of(tmp_path, {**answer(routed), "routed_experts_info": info})
    with pytest.raises(ValueError, match="--num-layers, --top-k and --rows-dtype"):
        routing_of(tmp_path, answer(RoutedPrompt(rows_of(9), [rows_of(3)], fmt="raw")))


def info(**changed: Any) -> str:
    return json.dumps({**INFO, **changed})


NOT_JSON = "is not valid JSON, or was cut off"
CUT_OFF = "the stream that starts here was cut off"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *((text, " has no responses") for text in ("", "\n\n", "[]", json.dumps(INFO))),
        ("{]", f", line 1 {NOT_JSON}: Expecting property name"),
        (f'{body(ONE)}\n{{"a": 1,\n\n "b', f", line 2 {NOT_JSON}: Unterminated string"),
        ("[" * 100_000, f", line 1 {NOT_JSON}"),
        ("3", ", line 1: not a response of the server: it must be a JSON object"),
        (f"{body(ONE)}\n[[]]", ", line 2: not a response of the server"),
        ("data: [1]\n\ndata: [DONE]\n", ", line 1: not a response of the server"),
        ("data: {]\n", ", line 1: an event is not JSON"),
        (f"\n{sse(*stream(ONE))[:-14]}", f", line 2: {CUT_OFF}"),
        (f"{sse(*stream(ONE)[:3])[:-14]}{body(ONE)}", f", line 1: {CUT_OFF}"),
        (
            info(num_experts="many"),
            ", line 1: num_experts must be a positive integer up to 32768, not 'many'",
        ),
        (
            info(layer_ids=[2, 1, 0]),
            ", line 1: layer_ids must be ascending layer indices below 4096, not [2, 1, 0]",
        ),
        (info(num_layers=4), ", line 1: num_layers is 4, but layer_ids are [1, 2, 4]"),
        (
            json.dumps({"choices": [], "routed_experts_info": [1]}),
            ", line 1: routed_experts_info must be an object, not [1]",
        ),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(RoutingError) as error:
        answers_in(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path}/0.jsonl{sentence}")


def test_an_empty_file_among_others(tmp_path: Path) -> None:
    with pytest.raises(RoutingError, match=r"1\.jsonl has no responses"):
        answers_in(tmp_path, body(ONE), "", body(OTHER))


def test_a_folder_as_a_server_records_it(tmp_path: Path) -> None:
    """Files in the order of their names, of which the first response has the model; one may have
    nothing yet."""
    for name, routed in (("b/1.jsonl", OTHER), ("a.jsonl", ONE)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        first = {**answer(routed), "routed_experts_info": INFO}
        path.write_text(f"{json.dumps(first)}\n{body(routed)}\n")
    (tmp_path / "c.jsonl").touch()
    (tmp_path / "notes.txt").write_text("no response")
    answers = list(read(opened([str(tmp_path)]), ModelInfo()))
    for one, rows in zip(answers, [ROWS[0], ROWS[0], ROWS[1], ROWS[1]], strict=True):
        assert np.array_equal(one.routings()[0].rows, rows)
        assert one.info.layer_ids == (1, 2, 4)
    (tmp_path / "none").mkdir()
    with pytest.raises(
        CommandError, match=r"none has no files \*\.json or \*\.jsonl with responses"
    ):
        list(read(opened([str(tmp_path / "none")]), ModelInfo()))


def test_a_broken_line_is_not_searched_for_its_end() -> None:
    """Only a value that may go on beyond the line needs more of the file, which may be larger
    than the memory."""
    rest = f"{body(ONE)}\n" * 50
    for text, most in ((f"{{]\n{rest}", 10), (f'{{"a": 1,\n "b": ]\n{rest}', 2 * len(body(ONE)))):
        file = io.StringIO(text)
        with pytest.raises(RoutingError, match="is not valid JSON"):
            list(read([("file", file)], ModelInfo()))
        assert file.tell() <= most


def test_many_values_on_one_line_take_no_more_than_on_lines() -> None:
    """A server reads files for its page: a line that takes the square of its length would keep it
    busy for an hour."""
    taken = []
    for end in ("\n", " ", ""):
        last = json.dumps({"layer_ids": [], "text": "x" * (4 << 20)})
        file, begin = io.StringIO(f"[]{end}" * (1 << 14) + last), time.process_time()
        assert list(page_lines([("file", file)], ModelInfo())) == []
        taken.append(time.process_time() - begin)
    assert max(taken) < 10 * taken[0], taken


def shown(body: Any) -> list[Any]:
    """What the page gets for a file with this."""
    return [*map(json.loads, page_lines([("f", io.StringIO(json.dumps(body)))], ModelInfo()))]


def test_choices_that_would_take_more_memory_than_there_is() -> None:
    """Each has the rows of the prompt."""
    rows = np.zeros((1 << 17, 1, TOP_K), np.int16)
    choices = [{"index": index, "finish_reason": None} for index in range(1000)]
    body = {"choices": choices, "prompt_routed_experts": encode(rows, 0)}
    (line,), peak = peak_of(lambda: shown(body))
    assert peak < 16 * rows.nbytes
    assert line["error"]["message"] == (
        f"f, line 1: it takes {1000 * (rows.nbytes + 128)} bytes with the prompt of each choice; 536870912 are allowed"
    )


def test_what_the_page_shows() -> None:
    """A line for each choice; an error ends them. What one file says about its model applies to the
    next."""
    prompts = [
        RoutedPrompt(rows_of(9, 1), [rows_of(4, 2), rows_of(3, 3)], first_token=first)
        for first in (100, 500)
    ]
    several = {**answer(*prompts), "model": "m"}
    several["choices"][2]["logprobs"] = {"tokens": [*"vwxyz"]}
    cut = answer(RoutedPrompt(rows_of(9, 1), [rows_of(4, 2)], start=3, fmt="npy", layout="joined"))
    cut["choices"][0] |= {"finish_reason": None, "prompt_token_ids": None, "token_ids": None}
    texts = {
        "info": json.dumps(INFO),
        "a/several": json.dumps(several),
        "cut": f"\n{json.dumps(cut)}\n{{]",
    }
    files = [(name, io.StringIO(text)) for name, text in texts.items()]
    *of_several, of_cut, error = map(json.loads, page_lines(files, ModelInfo(n=2, num_experts=99)))
    choices = [(prompt, choice) for prompt in prompts for choice in range(2)]
    for number, (line, (prompt, choice)) in enumerate(zip(of_several, choices, strict=True)):
        check_line_of_several(line, prompt, choice, number)
    texts_of_lines = [line["texts"] for line in of_several]
    assert texts_of_lines == [None, None, {"start": 9, "values": [*"vwxyz"]}, None]
    assert of_cut["name"] == "cut, line 2"
    for name in ("model", "prompt_len", "finish_reason", "ids", "texts"):
        assert of_cut[name] is None
    assert (of_cut["rows"]["start"], of_cut["rows"]["shape"]) == (0, [10, LAYERS, TOP_K])
    assert error["error"]["message"].startswith("cut, line 3 is not valid JSON")


def check_line_of_several(
    line: dict[str, Any], prompt: RoutedPrompt, choice: int, number: int
) -> None:
    """What the page gets of one choice of the response to several prompts."""
    of_file = {name: INFO[name] for name in ("num_layers", "top_k", "layer_ids")}
    assert line["info"] == {**of_file, "num_experts": 99}
    assert line["name"] == f"a/several, line 1, choice {number}"
    assert line["file"] == "a/several"
    assert line["model"] == "m"
    assert line["prompt_len"] == 9
    assert line["finish_reason"] == "length"
    ids = [*prompt.prompt_token_ids, *prompt.token_ids(choice)]
    assert line["ids"] == {"start": 0, "values": ids}
    assert np.array_equal(decode(line["rows"]), prompt.whole(choice))
    assert line["weights"] is None


CLAIM: dict[str, Any] = {
    "index": 0,
    "finish_reason": "length",
    "routed_experts": {
        "data": "",
        "shape": [0, 5, 4],
        "dtype": "int16",
        "start": 1_048_570,
        "missing": 0,
    },
}
"""A choice of a million tokens of which nothing is known."""


def uploaded(text: str) -> list[Any]:
    """What the page gets for files that a browser sends to a server."""
    return [*map(json.loads, page_lines([("f", io.StringIO(text))], ModelInfo(), is_upload=True))]


@pytest.mark.parametrize("more", [{}, {"logprobs": {"tokens": ["a"]}}, {"token_ids": [5]}], ids=str)
def test_tokens_that_are_only_claimed_take_nothing(more: dict[str, Any]) -> None:
    prompt = {**CLAIM["routed_experts"], "start": 1_048_000}
    far = {**CLAIM["routed_experts"], "start": 1_048_000}
    body = {"choices": [{**CLAIM, **more, "routed_experts": far}], "prompt_routed_experts": prompt}
    (line,), peak = peak_of(lambda: shown(body))
    assert peak < 100_000
    assert line["rows"]["start"] == 1_048_000
    assert line["texts"] == ({"start": 1_048_000, "values": ["a"]} if "logprobs" in more else None)
    assert line["ids"] == ({"start": 1_048_000, "values": [5]} if "token_ids" in more else None)


def test_what_is_uploaded_at_once_has_limits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response, a chunk and a choice each cost work, and the facts of a model stand in each
    line."""
    small = json.dumps({"choices": [CLAIM]})
    monkeypatch.setattr(saved, "MAX_UPLOADED_ITEMS", 1000)
    chunks = "".join(f"data: {json.dumps({'choices': []})}\n\n" for _ in range(1000))
    for text in (
        "[]" * 1001,
        f"{small}\n" * 200,
        f"[{','.join([small] * 200)}]",
        f"{json.dumps({'layer_ids': []})}\n" * 200,
        json.dumps({"choices": [{}] * 1000}),
        json.dumps({"choices": [{**CLAIM, "logprobs": {"content": [{}] * 8000}}]}),
        f"{chunks}data: [DONE]\n",
    ):
        *lines, last = uploaded(text)
        assert len(lines) < 200
        assert "more responses and choices than are read at once" in last["error"]["message"]
    assert len(uploaded(f"{small}\n" * 100)) == 100
    monkeypatch.setattr(saved, "MAX_PAGE_BYTES", 100_000)
    model = {"layer_ids": [*range(4000)]}
    *lines, last = uploaded(f"{json.dumps(model)}\n{small}\n{small}\n{small}\n{small}\n{small}\n")
    assert len(lines) == 5
    assert last["error"]["message"] == "f, line 6: this and what is before it take too many bytes"


ONE_ASIDE = {"provider_specific_fields": {"logprobs": {"content": [{}] * 8000}}}
MANY_CELLS = {"rows": 1, "missing": 0, "counts": [[1] * 800] * 80}
MANY_WEIGHTS = {"rows": 1, "missing": 0, "counts": [[1]], "weights": [[1]] * 32_000}


def in_envelope(body: Any) -> Any:
    return {"custom_id": "1", "response": {"body": body}}


@pytest.mark.parametrize(
    "body",
    [
        {"provider_specific_fields": {"choices": [{}] * 1000}},
        in_envelope(in_envelope({"choices": [{}] * 1000})),
        {"provider_specific_fields": in_envelope({"choices": [{}] * 1000})},
        {"choices": [{**CLAIM, **ONE_ASIDE}]},
        {"choices": [{**CLAIM, "routed_experts_histogram": MANY_CELLS}]},
        {"choices": [{**CLAIM, "routed_experts_histogram": MANY_WEIGHTS}]},
        {"choices": [CLAIM], "prompt_routed_experts_histogram": [MANY_CELLS]},
    ],
    ids=[
        "choices put aside",
        "two envelopes",
        "an envelope put aside",
        "log-probabilities put aside",
        "cells",
        "weights",
        "cells of a prompt",
    ],
)
def test_items_count_wherever_a_response_has_them(
    monkeypatch: pytest.MonkeyPatch, body: Any
) -> None:
    monkeypatch.setattr(saved, "MAX_UPLOADED_ITEMS", 1000)
    (line,) = uploaded(json.dumps(body))
    assert "more responses and choices than are read at once" in line["error"]["message"]


@pytest.mark.parametrize("line", ["data:1\n", "data:{}\n", "id:\n", ":\n", "data:\n"])
def test_a_stream_is_read_no_further_than_its_limit(
    monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(saved, "MAX_UPLOADED_ITEMS", 1000)
    file = io.StringIO(line * 5000)
    (message,) = map(json.loads, page_lines([("f", file)], ModelInfo(), is_upload=True))
    assert "more responses and choices than are read at once" in message["error"]["message"]
    assert file.tell() <= 1001 * len(line)


def escaped(text: str) -> str:
    """The same JSON in a body, but without its signs."""
    return "".join(f"\\u{ord(char):04x}" for char in text)


@pytest.mark.parametrize(
    "body",
    [
        f"[{'[],' * 2000}[]]",
        f"[{'{},' * 2000}{{}}]",
        json.dumps([["f", "[" * 1001 + "]" * 1001]]),
        json.dumps([["f", "\n" * 1001]]),
        json.dumps([["f", "{}" * 500], ["g", "{}" * 501]]),
        f'[["f", "{escaped("[]" * 1001)}"]]',
    ],
    ids=["lists", "objects", "lists in a file", "lines", "two files", "escaped lists"],
)
def test_a_body_of_many_small_values_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(page, "MOST_SIGNS", dict.fromkeys("[{\n", 1000))
    with pytest.raises(ValueError, match=r"more lists, objects or lines .* routed-experts view"):
        read_saved(body.encode())


def test_many_small_values_take_no_memory() -> None:
    """A body of 12 MB took 270 MB."""
    body = f"[{'[],' * (4 << 20)}[]]".encode()

    def refused() -> str:
        with pytest.raises(ValueError, match="lists") as error:
            read_saved(body)
        return str(error.value)

    message, peak = peak_of(refused)
    assert message == page.TOO_MANY_SIGNS
    assert peak < 1 << 20


@pytest.mark.parametrize("last", ["[]", "3", '["f", 3]', "]"])
def test_an_error_keeps_nothing_of_a_body(last: str) -> None:
    body = f"[{'[1, 2],' * 100_000}{last}]".encode()

    def memory_beside_the_error() -> int:
        with pytest.raises(ValueError, match=r"each \[name, text\]") as error:
            read_saved(body)
        assert error.tb is not None
        return tracemalloc.get_traced_memory()[0]

    in_use, peak = peak_of(memory_beside_the_error)
    assert peak > 5 << 20, "it was parsed"
    assert in_use < 1 << 20


@pytest.mark.parametrize("num_experts", [4, 8])
def test_a_real_file_of_lists_is_as_large_as_any(num_experts: int) -> None:
    """Of the most bytes at once, without spaces, and with ids of two digits."""
    token = json.dumps([[*range(10, 10 + num_experts)]] * 60, separators=(",", ":"))
    for sign, most in page.MOST_SIGNS.items():
        assert token.count(sign) * (page.MAX_BYTES // len(token)) < most


def test_pieces_of_an_event_are_parsed_once() -> None:
    """Each piece that comes was parsed with all before it."""
    text = f'data: ["{"a" * (1 << 16)}\n' + "id:\n" * 20_000
    begin = time.process_time()
    (line,) = uploaded(text)
    assert line["error"]["message"].startswith("f, line 1: ")
    assert time.process_time() - begin < 2


def test_a_prompt_in_empty_pieces_is_not_joined_for_each_choice() -> None:
    piece = {
        "choices": [{"index": 0}],
        "prompt_routed_experts": {**CLAIM["routed_experts"], "start": 0},
    }
    choices = {"choices": [{"index": index, "finish_reason": None} for index in range(3000)]}
    text = sse(*[piece] * 3000, choices)
    begin = time.process_time()
    uploaded(text)
    assert time.process_time() - begin < 3


def test_a_line_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "MAX_CHARS", 1000)
    whole = json.dumps({**answer(RoutedPrompt(rows_of(2, 1), [rows_of(1, 2)])), "text": "x" * 300})
    assert 700 < len(whole) < 1000, "is read"
    for begin, text in (
        ("a line", "x" * 100_000),
        ("spaces", " " * 100_000),
        ("a value over lines", '{"a":\n' * 30_000),
        ("a stream", f"data: {json.dumps({'choices': []})}\n" * 5000),
    ):
        file = io.StringIO(f"{whole}\n{text}")
        responses = read([("file", file)], ModelInfo())
        next(responses)
        with pytest.raises(
            RoutingError, match=r"^file, line \d+: a response takes more than \d+ characters"
        ):
            next(responses)
        assert file.tell() < 6000, begin


def test_weights_and_what_the_page_cannot_show() -> None:
    body = answer(RoutedPrompt(rows_of(2, 1), [rows_of(1, 2)], layout="joined"))
    weights = np.random.default_rng(0).random((3, LAYERS, TOP_K), dtype=np.float32)
    body["choices"][0]["routed_expert_weights"] = encode(weights, 0)
    (line,) = shown(body)
    assert np.array_equal(decode_weights(line["weights"]), weights)
    far = answer(RoutedPrompt(rows_of(2, 1), [rows_of(1, 2)], fmt="object", layout="joined"))
    for name in ("prompt_token_ids", "token_ids"):
        del far["choices"][0][name]
    far["choices"][0]["routed_experts"]["start"] = 2**31 - 9  # a token each would take all memory
    (line,) = shown(far)
    assert (
        line["error"]["message"]
        == "f, line 1: rows up to 2147483642, but the page shows 1048576 at most"
    )
    far["choices"][0]["routed_experts"]["start"] = 0
    far["choices"][0]["finish_reason"] = None  # cut off, so that rows may be absent
    far["prompt_routed_experts_histogram"] = histogram(rows_of(2), EXPERTS) | {"rows": 1 << 40}
    (line,) = shown(far)
    assert (
        line["error"]["message"]
        == f"f, line 1: a prompt of {1 << 40} tokens, but the page shows 1048576 at most"
    )
    of_choice = {
        "index": 0,
        "finish_reason": "stop",
        "routed_experts_histogram": histogram(rows_of(3), EXPERTS),
    }
    body = {
        "choices": [of_choice],
        "prompt_routed_experts_histogram": histogram(rows_of(2), EXPERTS),
    }
    (line,) = shown(body)
    assert (
        line["error"]["message"]
        == "f, line 1: it has histograms only: set return_routed_experts in the request"
    )
