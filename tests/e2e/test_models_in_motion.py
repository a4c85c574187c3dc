"""A second model beside the first that drafts for it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.contract.served import serving_quickly
from tests.e2e.harness import (
    ASK,
    DRAFTS,
    SERVER_FLAGS,
    Oracle,
    Server,
    answer_of,
    check,
    one,
    prompt_of,
)
from tests.e2e.shapes import HookOracle, make_eagle_models, make_mtp_model

pytestmark = [pytest.mark.e2e, pytest.mark.release]


@contextmanager
def drafting(
    model: Path, speculative: dict[str, Any], layer_ids: list[int], **env: str
) -> Iterator[Server]:
    # Eager on a GPU too: a draft model is compiled for a chunk at most, and to warm up, vLLM fills
    # one with short prompts, to each of which the draft adds a token. (In graphs:
    # tests/gpu/test_scores.py, with fewer requests.)
    flags = (*SERVER_FLAGS, "--enforce-eager", "--speculative-config", json.dumps(speculative))
    with serving_quickly(model, model.parent / "log of drafts", *flags, env=env) as server:
        assert server.info()["layer_ids"] == layer_ids
        yield server


def test_a_draft_model_leaves_no_rows(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """A draft model with MoE layers of its own and other weights, whose drafts are seldom right."""
    make_tiny_model(tmp_path / "tiny", seed=7)
    speculative = {
        "method": "draft_model",
        "model": str(tmp_path / "tiny"),
        "num_speculative_tokens": 3,
    }
    with drafting(tiny_model, speculative, [1, 2, 3, 4, 5]) as server:
        before = [server.metric(name) for name in DRAFTS]  # the self-test's, which are sampled
        for seed in range(6):
            check(
                one(
                    server,
                    prompt=prompt_of(10 + 13 * seed, seed=seed),
                    max_tokens=40,
                    ignore_eos=True,
                ),
                oracle,
            )
        drafts, right = (
            server.metric(name) - said for name, said in zip(DRAFTS, before, strict=True)
        )
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
    with drafting(model, speculative, list(shape.layer_ids), **shape.env) as server:
        for seed in range(6):
            body = {
                **ASK,
                "prompt": prompt_of(10 + 31 * seed, seed=seed),
                "max_tokens": 60,
                "ignore_eos": True,
            }
            for got in (server.complete(**body), server.stream(**body, temperature=1)):
                check(answer_of(got), oracle, shape.num_experts)
        drafts, right = (server.metric(name) for name in DRAFTS)
        assert 0 < right < drafts
