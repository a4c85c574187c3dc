"""The curves of `examples/grpo_curve.py` compare what they say that they compare."""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.test_collect import ROOT, run_example

SPEC = importlib.util.spec_from_file_location("grpo_curve", ROOT / "examples/grpo_curve.py")
assert SPEC is not None
assert SPEC.loader is not None
grpo_curve: Any = importlib.util.module_from_spec(SPEC)
sys.modules["grpo_curve"] = grpo_curve
SPEC.loader.exec_module(grpo_curve)


def first_step(folder: Path, noise: float, router: str) -> dict[str, float]:
    """Of a model with random weights, whose engine is in float32, too."""
    torch.manual_seed(3)
    weights, file = folder / "weights.pt", folder / f"{noise}-{router}.jsonl"
    torch.save(grpo_curve.make_model(torch.float32, "cpu").state_dict(), weights)
    args = argparse.Namespace(
        file=file, device="cpu", engine_dtype="float32", steps=1, learning_rate=1e-3
    )
    grpo_curve.learn(grpo_curve.Run(0, noise, router), weights, args, time.time() + 600)
    (line,) = file.read_text().splitlines()
    figures: dict[str, float] = json.loads(line)
    return figures


def test_noise_in_routers_is_all_that_differs_and_replay_takes_all_of_it_back(
    tmp_path: Path,
) -> None:
    quiet = first_step(tmp_path, 0, "live")
    assert quiet["difference"] < 1e-5
    assert quiet["other experts"] == 0
    live, ids, whole = (first_step(tmp_path, 0.5, router) for router in grpo_curve.ROUTERS)
    assert live["difference"] > 1e-3
    assert live["live difference"] == pytest.approx(live["difference"], rel=0.2)
    assert live["other experts"] > 0.5
    assert ids["difference"] < 0.8 * live["difference"]
    assert whole["difference"] < 1e-5
    assert live["reward"] == ids["reward"] == whole["reward"]


@pytest.mark.e2e
@pytest.mark.release
def test_a_line_for_each_step_and_a_table_of_whole_runs(tmp_path: Path) -> None:
    file = tmp_path / "curves.jsonl"
    sizes = ("--steps", "2", "--seeds", "1", "--noise", "0.3", "--warm-up-loss", "9")
    run_example("grpo_curve.py", str(file), *sizes, "--workers", "1")
    header, *lines = map(json.loads, file.read_text().splitlines())
    assert header["options"]["steps"] == 2
    steps = [(line["router"], line["step"]) for line in lines]
    assert steps == [(router, step) for router in grpo_curve.ROUTERS for step in (0, 1)]
    rewards = [line["reward"] for line in lines if line["router"] == "ids"]
    (line,) = [line for line in grpo_curve.table(file).splitlines() if "| ids |" in line]
    assert f" {sum(rewards) / 2:.3f} |" in line
    file.write_text("\n".join(map(json.dumps, [header, *lines[:-1]])))
    assert "| ids |" not in grpo_curve.table(file)
