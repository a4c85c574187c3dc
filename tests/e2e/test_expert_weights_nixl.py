"""The routers' weights with vLLM's NIXL connector: handed over with the ids of the KV, or computed again."""

import base64
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.collect import Routing, collect
from tests.e2e.harness import ASK, Oracle, prompt_of
from tests.e2e.test_nixl import Legs, running

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"),
]

WEIGHTS = {"return_routed_expert_weights": True}


def second(legs: Legs, prompt: list[int], params: dict[str, Any]) -> Routing:
    """The decode leg's answer, with weights."""
    body = {**ASK, **WEIGHTS, "prompt": prompt, "max_tokens": 9, "ignore_eos": True, "kv_transfer_params": params}
    (routing,) = collect(legs.decode.complete(**body))
    return routing


def expected(oracle: Oracle, routing: Routing) -> np.ndarray:
    tokens = [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())][:-1]
    return oracle.weights(routing.rows, tokens)


def test_weights_come_with_the_kv(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """What arrives is what was handed over, whatever it is; without weights the prompt is computed."""
    with running(tiny_model, tmp_path / "log", "--enable-return-routed-expert-weights") as legs:
        prompt = prompt_of(100, seed=1)
        params = legs.first(prompt, **WEIGHTS)
        handed = params["routed_experts"]
        weights = np.frombuffer(base64.b64decode(handed["weights"]), "<f4").reshape(handed["shape"])
        assert np.allclose(weights.sum(axis=2), 1.0, atol=1e-5)
        others = weights + np.arange(weights.size, dtype=np.float32).reshape(weights.shape)
        text = base64.b64encode(others.tobytes()).decode()
        routing = second(legs, prompt, {**params, "routed_experts": {**handed, "weights": text}})
        assert routing.weights is not None
        assert routing.weights[:99].tobytes() == others[:99].tobytes()
        assert np.abs(routing.weights - expected(oracle, routing))[99:].max() < 1e-5  # computed here

        prompt = prompt_of(100, seed=2)
        params = legs.first(prompt)
        assert "weights" not in params["routed_experts"]
        routing = second(legs, prompt, params)
        assert routing.weights is not None
        assert np.abs(routing.weights - expected(oracle, routing)).max() < 1e-5
        assert oracle.wrong(routing.rows, [*prompt, *(routing.token_ids or ())][:-1]) == []
