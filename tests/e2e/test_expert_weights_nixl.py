"""The routers' weights with vLLM's NIXL connector: handed over with the ids of the KV, or computed again."""

import base64
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.collect import Routing, collect
from tests.e2e.harness import ASK, Oracle, prompt_of
from tests.e2e.test_nixl import Legs, running, tagged
from tests.e2e.test_nixl_and_offloading import SETTINGS, crowd_out, whole_blocks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"),
]

WEIGHTS = {"return_routed_expert_weights": True}


def second(legs: Legs, prompt: list[int], params: dict[str, Any] | None) -> Routing:
    """The decode leg's answer, with weights."""
    body = {**ASK, **WEIGHTS, "prompt": prompt, "max_tokens": 9, "ignore_eos": True}
    (routing,) = collect(legs.decode.complete(**body, **({"kv_transfer_params": params} if params else {})))
    return routing


def expected(oracle: Oracle, routing: Routing) -> np.ndarray:
    tokens = [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())][:-1]
    return oracle.weights(routing.rows, tokens)


def check_computed(routing: Routing, oracle: Oracle) -> None:
    """That ids and weights are those of a forward pass, and not what was handed over."""
    assert routing.weights is not None
    assert np.abs(routing.weights - expected(oracle, routing)).max() < 1e-5
    assert oracle.wrong(routing.rows, [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())][:-1]) == []


def test_weights_come_with_the_kv(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """What arrives is what was handed over, ids and weights, whatever it is, also where it is offloaded and loaded
    again; without weights the prompt is computed."""
    flags = ("--enable-return-routed-expert-weights", *SETTINGS["NIXL first, recompute"].flags)
    with running(tiny_model, tmp_path / "log", *flags) as legs:
        for length in (31, 64, 170):
            prompt = prompt_of(length, seed=length)
            params = tagged(legs.first(prompt, **WEIGHTS), seed=length)
            handed = params["routed_experts"]
            ids = np.frombuffer(base64.b64decode(handed["data"]), handed["dtype"]).reshape(handed["shape"])
            weights = np.frombuffer(base64.b64decode(handed["weights"]), "<f4").reshape(handed["shape"])
            assert np.allclose(weights.sum(axis=2), 1.0, atol=1e-5)
            others = weights + np.arange(weights.size, dtype=np.float32).reshape(weights.shape)
            handed["weights"] = base64.b64encode(others.tobytes()).decode()
            pulled = second(legs, prompt, params)
            assert pulled.weights is not None
            assert np.abs(pulled.weights - expected(oracle, pulled))[length - 1 :].max() < 1e-5  # computed here
            crowd_out(legs.decode)
            loaded = second(legs, prompt, None)
            for routing, end in ((pulled, length - 1), (loaded, min(whole_blocks(prompt), length - 1))):
                assert routing.weights is not None
                assert np.array_equal(routing.rows[:end], ids[:end])
                assert routing.weights[:end].tobytes() == others[:end].tobytes()

        prompt = prompt_of(100, seed=2)
        params = legs.first(prompt)
        assert "weights" not in params["routed_experts"]
        check_computed(second(legs, prompt, params), oracle)

        prompt = prompt_of(100, seed=3)
        legs.second(prompt, 9, legs.first(prompt))  # without weights, and offloaded so
        for _ in range(2):
            crowd_out(legs.decode)
            check_computed(second(legs, prompt, None), oracle)
