"""`examples/replay.py`: its replay reaches the experts, and the program runs against a real server."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import replay
from tests.clients.test_collect import run_example
from tests.e2e.harness import Server, prompt_of
from tests.protocol.answers import rows_of

L, K, EXPERTS = 5, 4, 16
BATCH, TOKENS = 2, 11


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture
def called_with(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the experts of each layer are called with: [tokens, K] ids and weights."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda module, args: calls.append((args[1], args[2])))
    return calls


def batch() -> torch.Tensor:
    return torch.tensor([prompt_of(TOKENS, seed) for seed in range(BATCH)])


def given_rows() -> torch.Tensor:
    rows = rows_of(BATCH * TOKENS, seed=4, experts=EXPERTS, layers=L, top_k=K)
    return torch.from_numpy(rows.reshape(BATCH, TOKENS, L, K).astype(np.int64))


def test_the_experts_get_the_given_rows(model: Any, called_with: list[Any]) -> None:
    """And where a row is not known, those that the router chooses."""
    model(input_ids=batch(), use_cache=False)
    own = torch.stack([ids.reshape(BATCH, TOKENS, K) for ids, _ in called_with], dim=2)
    some = torch.full((BATCH, TOKENS, L, K), -1)
    some[1, 3:] = given_rows()[1, 3:]
    for rows in (given_rows(), some):
        called_with.clear()
        with replay.replayed(model, rows):
            model(input_ids=batch(), use_cache=False)
        assert len(called_with) == L
        expected = torch.where(rows < 0, own, rows)
        for layer, (ids, weights) in enumerate(called_with):
            assert torch.equal(ids, expected[:, :, layer].reshape(-1, K))
            assert torch.allclose(weights.sum(dim=1), torch.ones(BATCH * TOKENS))


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


@pytest.mark.e2e
def test_the_example(server: Server) -> None:
    out = run_example("replay.py", str(server.model), "--url", server.url, "--max-tokens", "12")
    found = re.findall(r"(with\w*) replay: (\S+) from the server's on average, (\S+) at most", out)
    assert [name for name, _, _ in found] == ["without", "with"]
    assert all(float(most) < 1e-3 for _, _, most in found), "in float32 server and trainer route alike"
    step = re.search(r"step: loss (\S+), gradient norm (\S+), ratio (\S+)", out)
    assert step is not None
    assert float(step[2]) > 0
    assert float(step[3]) == pytest.approx(1, abs=1e-3)
