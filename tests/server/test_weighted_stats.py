"""`routed-experts stats` for answers with the router's weights."""

import json
from pathlib import Path

import numpy as np
import pytest

from routed_experts.protocol.expert_load import histogram, sum_weights
from routed_experts.server.cli.main import main
from tests.protocol.answers import EXPERTS, LAYERS, Told, answer, rows_of


def test_weights_are_added_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of rows, whose prompt counts once, and of histograms; answers without weights count without."""
    told = Told(rows_of(20, 1), [rows_of(9, 2), rows_of(5, 3)], fmt="list")
    every = np.concatenate([told.prompt, *told.choices])
    weights = np.random.default_rng(0).random(every.shape, dtype=np.float32)
    body = answer(told)
    body["prompt_routed_expert_weights"] = weights[:20].tolist()
    for choice, part in zip(body["choices"], np.split(weights[20:], [9]), strict=True):
        choice["routed_expert_weights"] = part.tolist()
    counted = {**histogram(every, EXPERTS), "weights": sum_weights(every, weights, EXPERTS).tolist()}
    alone = {
        "prompt_routed_experts_histogram": histogram(every[:0], EXPERTS),
        "choices": [{"index": 0, "finish_reason": "stop", "routed_experts_histogram": counted}],
    }
    without = answer(Told(rows_of(4, 5), [rows_of(2, 6)]))
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in (body, alone, without)))
    assert main(["stats", str(file), "--json", "--num-experts", str(EXPERTS)]) == 0
    report = json.loads(capsys.readouterr().out)
    sums = np.zeros((LAYERS, EXPERTS))
    for row, layer, slot in np.ndindex(*every.shape):
        sums[layer, every[row, layer, slot]] += 2 * weights[row, layer, slot]
    assert np.allclose([layer["weights"] for layer in report["layers"]], sums)
    assert np.allclose([layer["weighted_imbalance"] for layer in report["layers"]], sums.max(1) / sums.mean(1))
    assert main(["stats", str(file), "--num-experts", str(EXPERTS)]) == 0
    assert "weighted" in capsys.readouterr().out.splitlines()[0]


def test_answers_without_weights_say_nothing_of_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(answer(Told(rows_of(4, 5), [rows_of(2, 6)]))))
    assert main(["stats", str(file), "--json"]) == 0
    assert "weight" not in capsys.readouterr().out
