"""Models of many shapes on a real engine: every row against a Hugging Face forward pass of the same
weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.served import serving_quickly
from tests.e2e.harness import (
    ASK,
    FLOAT32,
    ON_GPU,
    Oracle,
    answers_of,
    check,
    one,
    prompt_of,
)
from tests.e2e.shapes import SHAPES, SLIDING_ONLY, HookOracle, Shape, make_model

pytestmark = pytest.mark.e2e

CHUNK = 64
# Blocks are of the size that vLLM chooses: some of these shapes dictate it.
FLAGS = (*FLOAT32, "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "1024")
FLAGS += ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8", "--enable-prefix-caching")


IN_EVERY_RUN = {"deepseek-v3, latent attention", "gpt-oss, sliding and full attention"}
"""Beside the tiny model's softmax of all experts: a sigmoid with groups and a correction, and a
softmax of the chosen ones."""


def as_param(shape: Shape) -> Any:
    reason = shape.needs_cpu if ON_GPU else shape.needs_gpu
    marks = [pytest.mark.skip(reason=reason)] if reason else []
    if shape.name not in IN_EVERY_RUN:
        marks.append(pytest.mark.release)
    return pytest.param(shape, id=shape.name, marks=marks)


@pytest.mark.parametrize("shape", [as_param(shape) for shape in SHAPES])
def test_exact(shape: Shape, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(shape, model)
    oracle = HookOracle(model, shape)
    if shape.repeats_logits:
        tokens = prompt_of(50, seed=0)
        assert np.array_equal(oracle.rows(tokens), Oracle(model).rows(tokens)), (
            "the oracles do not agree"
        )
    with serving_quickly(model, tmp_path / "log", *FLAGS, *shape.flags, env=shape.env) as server:
        info = server.info()
        assert info["layer_ids"] == list(shape.layer_ids)
        sizes = (len(shape.layer_ids), shape.top_k, shape.num_experts)
        assert (info["num_layers"], info["top_k"], info["num_experts"]) == sizes
        hits = server.metric("vllm:prefix_cache_hits_total")
        # One token, less than a chunk, several chunks, and the next turn after that.
        for length in (1, 40, CHUNK + 1, 5 * CHUNK + 7):
            answer = one(
                server, prompt=prompt_of(length, seed=length), max_tokens=9, ignore_eos=True
            )
            check(answer, oracle, shape.num_experts)
        turn = [*answer.prompt, *answer.tokens, *prompt_of(90, seed=1)]
        check(one(server, prompt=turn, max_tokens=70, ignore_eos=True), oracle, shape.num_experts)
        assert (server.metric("vllm:prefix_cache_hits_total") > hits) == shape.prefix_cache
        # Very different lengths in one batch.
        prompts = [prompt_of(length, seed=1000 + length) for length in (3, 200, 70, 33, 150, 1)]
        answers = answers_of(server.complete(**ASK, prompt=prompts, max_tokens=12, ignore_eos=True))
        assert len(answers) == len(prompts)
        for answer in answers:
            check(answer, oracle, shape.num_experts)


@pytest.mark.release
@pytest.mark.skipif(ON_GPU, reason="on a CPU only")
def test_exact_where_the_cpu_has_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as another CPU can be told so: vLLM asks this function which kernels to choose."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    test_exact(next(shape for shape in SHAPES if "latent" in shape.name), tmp_path)


def test_a_model_whose_kv_cache_forgets_tokens_is_refused(tmp_path: Path) -> None:
    make_model(SLIDING_ONLY, tmp_path / "model")
    flags = (tmp_path / "model", tmp_path / "log", *FLAGS)
    said = "The model has no full-attention layers whose KV cache keeps every token"
    with pytest.raises(Exception, match=said), serving_quickly(*flags):
        pass
