"""The reader of saved answers, on every kind of file: what it finds is what was written."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from routed_experts.protocol.codec import Format
from routed_experts.protocol.routing import RoutingError
from routed_experts.protocol.saved import ModelInfo, read
from routed_experts.server.cli.console import CommandError
from routed_experts.server.tools.saved import opened
from tests.protocol.answers import (
    EXPERTS,
    LAYERS,
    TOP_K,
    RoutedPrompt,
    answer,
    rows_of,
    stream,
)

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


@pytest.mark.parametrize("fmt", get_args(Format))
def test_flags_for_raw_arrays_make_no_other_ids_of_other_formats(tmp_path: Path, fmt: str) -> None:
    """Such text would be read as `raw`: as other ids, without an error."""
    of_raw = ModelInfo(LAYERS, TOP_K, rows_dtype="uint8")
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
    with pytest.raises(ValueError, match="routed_experts_info says both, and rows_dtype"):
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
            ", line 1: not what the server sends: Expected `int | null`, got `str` - at `$.num_experts`",
        ),
        (info(num_experts=0), ", line 1: not what the server sends: Expected `int` >= 1"),
        (
            info(layer_ids=[1, 2, 4096]),
            ", line 1: not what the server sends: Expected `int` <= 4095",
        ),
        (
            info(layer_ids=[2, 1, 0]),
            ", line 1: not what the server sends: layer_ids must be ascending, not [2, 1, 0]",
        ),
        (
            info(num_layers=4),
            ", line 1: not what the server sends: num_layers is 4, but layer_ids are [1, 2, 4]",
        ),
        (
            info(weights_scale=[1.0]),
            ", line 1: not what the server sends: weights_scale must be a number for each layer",
        ),
        (
            json.dumps({"choices": [], "routed_experts_info": [1]}),
            ", line 1: not what the server sends: Expected `object`, got `array` - at `$.routed_experts_info`",
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
