"""A second model beside the first that drafts for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.conftest import SERVER_FLAGS
from tests.contract.served import serving_quickly
from tests.e2e.harness import ASK, Oracle, answers_of, answers_of_stream, check, one, prompt_of
from tests.e2e.shapes import HookOracle, make_eagle_models, make_mtp_model

pytestmark = pytest.mark.e2e


DRAFTS = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")


def test_a_draft_model_leaves_no_rows(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """A draft model with MoE layers of its own and other weights, whose drafts are seldom right."""
    make_tiny_model(tmp_path / "tiny", seed=7)
    speculative = {"method": "draft_model", "model": str(tmp_path / "tiny"), "num_speculative_tokens": 3}
    # Eager on a GPU too: a draft model is compiled for a chunk at most, and to warm up, vLLM fills one with short
    # prompts, to each of which the draft adds a token. (In graphs: tests/e2e/test_scores.py, with fewer requests.)
    flags = (*SERVER_FLAGS, "--enforce-eager", "--speculative-config", json.dumps(speculative))
    with serving_quickly(tiny_model, tmp_path / "log", *flags) as server:
        assert server.info()["layer_ids"] == [1, 2, 3, 4, 5]
        before = [server.metric(name) for name in DRAFTS]  # the self-test's, which are sampled
        for seed in range(6):
            check(one(server, prompt=prompt_of(10 + 13 * seed, seed=seed), max_tokens=40, ignore_eos=True), oracle)
        drafts, right = (server.metric(name) - said for name, said in zip(DRAFTS, before, strict=True))
        assert drafts > right


@pytest.mark.parametrize("method", ["mtp", "eagle"])
def test_heads_that_draft_from_hidden_states(method: str, tmp_path: Path) -> None:
    """Their layers, which have experts too with multi-token prediction, are not the target's."""
    model, head = tmp_path / "model", tmp_path / "head"
    shape = make_mtp_model(model) if method == "mtp" else make_eagle_models(model, head)
    oracle = HookOracle(model, shape)
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method == "eagle":
        speculative["model"] = str(head)
    flags = (*SERVER_FLAGS, "--enforce-eager", "--speculative-config", json.dumps(speculative))
    with serving_quickly(model, tmp_path / "log", *flags, env=shape.env) as server:
        assert server.info()["layer_ids"] == list(shape.layer_ids)
        for seed in range(6):
            body = {**ASK, "prompt": prompt_of(10 + 31 * seed, seed=seed), "max_tokens": 60, "ignore_eos": True}
            check(answers_of(server.complete(**body))[0], oracle, shape.num_experts)
            check(answers_of_stream(server.stream(**body, temperature=1))[0], oracle, shape.num_experts)
        drafts = server.metric("vllm:spec_decode_num_draft_tokens_total")
        assert 0 < server.metric("vllm:spec_decode_num_accepted_tokens_total") < drafts
