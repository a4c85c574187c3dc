"""Responses in files: of every form, opened, saved, picked, or refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.collect import collect
from routed_experts.protocol.saved import ModelInfo, read
from routed_experts.server.tools.saved import opened
from routed_experts.server.tools.view import ViewServer
from tests.page.answers import answer, array, rows_of, weights_of
from tests.page.browser import Tab
from tests.page.conftest import Viewed
from tests.page.seen import (
    TIMES,
    TOKENS,
    choose,
    download,
    ended,
    error_in,
    show,
    shows,
)

pytestmark = pytest.mark.e2e

INFO = {"num_layers": 3, "top_k": 2, "num_experts": 40, "layer_ids": [1, 2, 5]}
SHOWN = "[...$$('#tokens-a .token'), ...$$('#detail th'), $('#summary')].map(e => e.className + e.textContent)"


def without_texts(body: dict[str, Any]) -> dict[str, Any]:
    (choice,) = body["choices"]
    del choice["logprobs"]
    return body


def joined(body: dict[str, Any]) -> dict[str, Any]:
    """In the joined layout, without ids: nothing says where the prompt ends."""
    (choice,) = without_texts(body)["choices"]
    rows = collect(body)[0].rows
    del body["prompt_token_ids"], body["prompt_routed_experts"], choice["token_ids"]
    return {**body, "choices": [{**choice, "routed_experts": array(rows)}]}


@pytest.mark.parametrize(
    ("change", "info", "reason"),
    [
        pytest.param(lambda body: body, {"routed_experts_info": INFO}, "length", id="texts"),
        pytest.param(without_texts, {}, None, id="ids"),
        pytest.param(joined, {"routed_experts_info": INFO}, None, id="neither"),
    ],
)
def test_saving_and_opening_change_nothing(
    tab: Tab, viewed: Viewed, tmp_path: Path, change: Any, info: dict[str, Any], reason: str | None
) -> None:
    body = change(answer(rows_of(29, 3, 2, 32), 12)) | info
    body["choices"][0]["finish_reason"] = reason
    seen, lines = [], [json.dumps(body)]
    for _ in range(2):
        tab.open(viewed(texts={"answers.jsonl": lines[-1]}))
        tab.wait("/finish reason|not finished/.test($('#summary').textContent)")
        tab.wait(f"$$('{TOKENS}').length === 30")
        seen.append(tab.js(SHOWN))
        lines.append(download(tab, "#save", "answer.jsonl", tmp_path).decode())
    assert seen[0] == seen[1]
    assert lines[1] == lines[2]
    saved = json.loads(lines[1])
    assert saved["choices"][0].get("token_ids") == body["choices"][0].get("token_ids")
    assert saved["choices"][0]["finish_reason"] == reason
    assert saved["routed_experts_info"] == (INFO if info else {"num_layers": 3, "top_k": 2})


def test_weights_are_saved(tab: Tab, viewed: Viewed, tmp_path: Path) -> None:
    """Bit for bit, also unknown ones and those that a router has as NaN."""
    rows = rows_of(29, 3, 2, 32)
    rows[20, 2] = -1
    weights = weights_of(rows)
    weights[5, 0, 0] = np.nan
    show(
        tab,
        viewed(
            answer(rows, 12, weights=weights)
            | {"routed_experts_info": {**INFO, "weights_scale": [1.0, 2.5, 1.0]}}
        ),
    )
    download(tab, "#save", "answer.jsonl", tmp_path)
    (saved,) = read(opened([str(tmp_path / "answer.jsonl")]), ModelInfo())
    (routing,) = saved.routings()
    assert np.array_equal(routing.rows, rows)
    assert routing.weights is not None
    assert routing.weights.tobytes() == weights.tobytes()
    assert saved.info.weights_scale == (1.0, 2.5, 1.0)


def test_decoder_layers_are_named(tab: Tab, viewed: Viewed) -> None:
    """As a server records them: the first response of a file has the model of all."""
    rows = np.zeros((29, 7, 2), dtype=np.int16)
    rows[:, INFO["layer_ids"]] = rows_of(29, 3, 2, 32)
    show(tab, viewed(answer(rows, 12) | {"routed_experts_info": INFO}, answer(rows, 12)))
    for number in "01":
        tab.choose("#pick-a", number)
        tab.wait_for_text("#summary", f"29 rows of 3 layers {TIMES} 2 of 40 experts, finish reason")
        choose(tab, 14)
        shows(tab, rows[14, INFO["layer_ids"]])
        assert tab.texts("#detail th") == ["Decoder layer", "Experts", "1", "2", "5"]
        assert "; decoder layer 1: " in tab.text("#map-status")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"layer_ids": [1]}', "These files contain no responses."),
        ("no json", "answers.jsonl, line 1 is not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_said(
    tab: Tab, viewed: Viewed, tmp_path: Path, text: str, sentence: str
) -> None:
    (tmp_path / "answers.jsonl").write_text(text)
    tab.open(viewed(texts={}))
    tab.give_file("#file", tmp_path / "answers.jsonl")
    assert sentence in error_in(tab)
    assert tab.is_hidden("#views")
    assert not tab.js(
        "['#pick-a', '#pick-b', '#save', '#stop'].some(id => $(id).checkVisibility())"
    )


def test_files_that_are_opened_when_they_are_picked(
    tab: Tab, viewed: Viewed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of folders that are larger than a browser should hold, the first file, and others on
    demand."""
    rows = [rows_of(29, 3, 2, 32, seed) for seed in range(3)]
    texts = {
        f"recorded/{number}.jsonl": json.dumps(answer(rows_of_file, 12))
        for number, rows_of_file in enumerate(rows)
    }
    real = ViewServer.__init__

    def of_large_files(self: ViewServer, *args: Any) -> None:
        real(self, *args)
        self.page_config["saved"] = json.dumps(
            [[name, 40 << 20] for name, _ in json.loads(self.page_config["saved"])]
        )

    monkeypatch.setattr(ViewServer, "__init__", of_large_files)
    show(tab, viewed(texts=texts))
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
