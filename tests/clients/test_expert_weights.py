"""The router's weights in the hands of clients: compared with a checkpoint's, and replayed in a trainer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples import replay
from routed_experts.protocol.codec import encode
from routed_experts.server.cli.main import main
from tests.clients.test_replay import BATCH, TOKENS, K, L, batch, called_with, given_rows, model
from tests.e2e.harness import Oracle, prompt_of

__all__ = ["called_with", "model"]  # fixtures

P, G = 20, 7


def weights_by(logits: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Those that add up to 1, of the chosen experts alone."""
    chosen = np.take_along_axis(logits, rows.astype(np.int64), 2)
    return torch.from_numpy(chosen).softmax(2).numpy()


def answer_of(rows: np.ndarray, weights: np.ndarray, tokens: list[int]) -> dict[str, Any]:
    def arrays(prefix: str, first: int, end: int) -> dict[str, Any]:
        ids = encode(rows[first:end], fmt="object", dtype="int16", start=first)
        data = encode(weights[first:end].view(np.int32).view(np.int16), fmt="raw", dtype="int16", start=first)
        about = {
            "data": data,
            "shape": list(weights[first:end].shape),
            "dtype": "float32",
            "start": first,
            "missing": 0,
        }
        return {f"{prefix}routed_experts": ids, f"{prefix}routed_expert_weights": about}

    choice = {"index": 0, "finish_reason": "length", "prompt_token_ids": tokens[:P], "token_ids": tokens[P:]}
    return {"choices": [choice | arrays("", P, P + G - 1)], **arrays("prompt_", 0, P)}


def compared(model: Path, folder: Path, answer: Any, *flags: str) -> dict[str, Any]:
    file, out = folder / "answers.json", folder / "findings.json"
    file.write_text(json.dumps(answer))
    assert main(["compare", str(model), "--answers", str(file), "--json", str(out), *flags]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_weights_are_compared_with_the_checkpoints(
    tiny_model: Path, oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = prompt_of(P + G, seed=11)
    logits = oracle.logits(tokens)
    rows = np.argsort(-logits, axis=2)[:, :, :K].astype(np.int16)
    rows = rows[:, :, [2, 0, 3, 1]]  # in any order
    weights = weights_by(logits, rows)
    found = compared(tiny_model, tmp_path, answer_of(rows, weights, tokens), "--weights")
    count = (P + G - 1) * K
    assert [layer["weights"] for layer in found["layers"]] == [count] * L
    assert found["total"]["weights"] == L * count
    assert 0 < found["total"]["weight_difference_max"] < 1e-5
    assert "max Δ weight" in capsys.readouterr().out
    weights[3, 2, 1] += 0.25
    changed = compared(tiny_model, tmp_path, answer_of(rows, weights, tokens), "--weights")
    assert [layer["weight_difference_max"] > 0.1 for layer in changed["layers"]] == [layer == 2 for layer in range(L)]
    assert changed["layers"][2]["weight_difference_max"] == pytest.approx(0.25, abs=1e-4)
    assert changed["layers"][2]["weight_difference_mean"] == pytest.approx(0.25 / count, rel=0.01)
    assert "weights" not in compared(tiny_model, tmp_path, answer_of(rows, weights, tokens))["total"]


def test_a_scale_is_applied(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    tokens = prompt_of(P + G, seed=12)
    logits = oracle.logits(tokens)
    rows = np.argsort(-logits, axis=2)[:, :, :K].astype(np.int16)
    info = {"num_layers": L, "layer_ids": [1, 2, 3, 4, 5], "weights_scale": [1.0, 1.0, 2.0, 1.0, 1.0]}
    weights = weights_by(logits, rows)
    weights[:, 2] /= 2
    answer = {**answer_of(rows, weights, tokens), "routed_experts_info": info}
    assert compared(tiny_model, tmp_path, answer, "--weights")["total"]["weight_difference_max"] < 1e-5


def test_answers_without_weights_cannot_be_compared(
    tiny_model: Path, oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = prompt_of(P + G, seed=11)
    rows = np.argsort(-oracle.logits(tokens), axis=2)[:, :, :K].astype(np.int16)
    answer = answer_of(rows, np.zeros(rows.shape, np.float32), tokens)
    del answer["prompt_routed_expert_weights"], answer["choices"][0]["routed_expert_weights"]
    file = tmp_path / "answers.json"
    file.write_text(json.dumps(answer))
    assert main(["compare", str(tiny_model), "--answers", str(file), "--weights"]) == 2
    assert "return_routed_expert_weights" in capsys.readouterr().err


def test_the_experts_get_the_given_weights(model: Any, called_with: list[Any]) -> None:
    rows = given_rows()
    weights = torch.rand(rows.shape)
    rows[0, 2] = -1  # the router chooses there, with weights of its own
    with replay.replayed(model, rows, weights):
        model(input_ids=batch(), use_cache=False)
    for layer, (ids, taken) in enumerate(called_with):
        taken, given = taken.reshape(BATCH, TOKENS, K), weights[:, :, layer].clone()
        assert torch.allclose(taken[0, 2].sum(), torch.tensor(1.0))
        given[0, 2] = taken[0, 2]
        assert torch.allclose(taken, given, atol=1e-6)
        assert (ids.reshape(BATCH, TOKENS, K)[1] == rows[1, :, layer]).all()


def test_gradients_are_those_of_the_routers_own_weights(model: Any, called_with: list[Any]) -> None:
    """Given the weights that it would have computed, a step is the same as without them."""
    mask, rows, gradients = torch.ones(BATCH, TOKENS, dtype=torch.long), given_rows(), []
    for weights in (None, torch.empty(rows.shape)):
        if weights is not None:
            for layer, (_, own) in enumerate(called_with):
                weights[:, :, layer] = own.detach().reshape(BATCH, TOKENS, K)
        model.zero_grad()
        replay.log_probabilities(model, batch(), mask, rows, weights).sum().backward()
        gradients.append(model.model.layers[3].mlp.gate.weight.grad.clone())
    assert gradients[0].abs().sum() > 0
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-6)
