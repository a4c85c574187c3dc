"""`routed-experts stats` for answers of known rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.expert_load import count_experts, expert_load, histogram
from routed_experts.server.cli.main import main
from tests.protocol.answers import EXPERTS, LAYERS, TOP_K, Told, answer, rows_of


def written(path: Path, *answers: Any) -> Path:
    file = path / "answers.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in answers) + "\n\n")
    return file


def counts_said(capsys: pytest.CaptureFixture[str], file: Path, *flags: str) -> tuple[np.ndarray, dict[str, Any]]:
    assert main(["stats", str(file), "--json", "--num-experts", str(EXPERTS), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    return np.array([layer["counts"] for layer in report["layers"]]), report


@pytest.mark.parametrize(("fmt", "layout"), [("object", "split"), ("list", "joined")])
def test_every_row_is_counted_once(capsys: pytest.CaptureFixture[str], tmp_path: Path, fmt: Any, layout: str) -> None:
    one = Told(rows_of(20, 1), [rows_of(9, 2), rows_of(5, 3)], fmt=fmt, layout=layout)
    other = Told(rows_of(7, 4), [rows_of(3, 5)], fmt=fmt, layout=layout)
    counts, report = counts_said(capsys, written(tmp_path, answer(one), answer(other)))
    every = np.concatenate([one.prompt, *one.choices, other.prompt, *other.choices])
    assert np.array_equal(counts, count_experts(every, EXPERTS))
    assert (report["answers"], report["rows"], report["missing"]) == (2, len(every), 0)
    load = expert_load(count_experts(every, EXPERTS))
    for layer, said in enumerate(report["layers"]):
        assert said["entropy"] == pytest.approx(load.entropy[layer])
        assert said["imbalance"] == pytest.approx(load.imbalance[layer])


def test_histograms_in_place_of_rows_and_rows_that_are_not_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompt, rows = rows_of(20, 1), rows_of(9, 2)
    body = {
        "prompt_routed_experts_histogram": histogram(prompt, EXPERTS),
        "choices": [{"index": 0, "finish_reason": "stop", "routed_experts_histogram": histogram(rows, EXPERTS)}],
    }
    counts, report = counts_said(capsys, written(tmp_path, body))
    assert np.array_equal(counts, count_experts(np.concatenate([prompt, rows]), EXPERTS))
    assert report["rows"] == 29
    prompt[3] = -1
    counts, report = counts_said(capsys, written(tmp_path, answer(Told(prompt, [rows]))))
    assert report["missing"] == 1
    assert np.array_equal(counts, count_experts(np.concatenate([prompt, rows]), EXPERTS))


def test_the_documented_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documented: list[str]
) -> None:
    (command,) = documented
    written(tmp_path, answer(Told(rows_of(20, 1), [rows_of(9, 2)])))
    monkeypatch.chdir(tmp_path)
    assert main(command.split()[1:]) == 0
    assert "1 responses, 29 rows" in capsys.readouterr().out


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = written(tmp_path, answer(Told(rows_of(300, 1), [rows_of(9, 2)])))
    assert main(["stats", str(file)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "MoE layer entropy balance imbalance busiest unused load of each expert"
    counts, report = counts_said(capsys, file)
    for line, said, row in zip(lines[:LAYERS], report["layers"], expert_load(counts).load, strict=True):
        cells = line.split()
        assert cells[:4] == [str(said["layer"]), f"{said['entropy']:.2f}", f"{100 * said['balance']:.1f}", "%"]
        assert cells[4:7] == [f"{said['imbalance']:.2f}", str(said["busiest"]), str(said["unused"])]
        bars = line[head.index("load of") :]
        assert len(line) <= 100
        assert bars[int(row.argmax()) // 2] == max(bars)  # a column is two of the 60 experts
    assert lines[LAYERS] == "1 responses, 309 rows, 0 of them unknown."
    assert lines[-1].startswith("MoE layers are counted from 0")


INFO = {"num_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS, "layer_ids": [1, 3, 4]}


@pytest.mark.parametrize("is_own", [True, False])
def test_decoder_layers_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, is_own: bool) -> None:
    body = answer(Told(rows_of(30, 1), [rows_of(9, 2)]))
    file = written(tmp_path, *([{**body, "routed_experts_info": INFO}] if is_own else [INFO, body]))
    assert main(["stats", str(file)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("decoder layer  entropy")
    assert [line.split()[0] for line in lines[:LAYERS]] == ["1", "3", "4"]
    assert "counted from 0" not in lines[-1]
    assert main(["stats", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(layer["layer"], layer["layer_id"]) for layer in report["layers"]] == [(0, 1), (1, 3), (2, 4)]
    assert report["num_experts"] == EXPERTS


def test_what_cannot_be_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    body = answer(Told(rows_of(9), [rows_of(3)]))
    narrow = answer(Told(rows_of(9, layers=2), [rows_of(3, layers=2)]))
    one_model = "count one model at a time."
    for answers, sentence in (
        (
            [INFO, body, {**INFO, "layer_ids": [0, 1, 2]}, body],
            f"line 4: decoder layers (0, 1, 2) after (1, 3, 4): {one_model}",
        ),
        ([narrow, body], f"line 2: 3 layers after 2 layers: {one_model}"),
        ([{"error": {"message": "too long"}}], "line 1: the server answered with an error: too long."),
    ):
        assert main(["stats", str(written(tmp_path, *answers))]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.endswith(sentence)
