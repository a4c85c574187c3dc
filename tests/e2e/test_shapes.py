"""Models of many shapes on a real engine: every row against a Hugging Face forward pass of the same
weights."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from routed_experts.replay import replayed
from tests.clients.test_replay import ROUTER
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
from tests.e2e.shapes import DENSE, SHAPES, SLIDING_ONLY, HookOracle, Shape, make_model

pytestmark = pytest.mark.e2e

CHUNK = 64
# Blocks are of the size that vLLM chooses: some of these shapes dictate it.
FLAGS = (*FLOAT32, "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "1024")
FLAGS += ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8", "--enable-prefix-caching")


LIKE_OTHERS = {
    "olmoe",
    "deepseek-v2, plain attention",
    "deepseek-v3, plain attention",
    "qwen3-moe, top 1",
}
"""Their routers are those of Mixtral, of the same models with latent attention, and of Llama 4."""


IN_EVERY_RUN = {"deepseek-v3, latent attention", "gpt-oss, sliding and full attention"}
"""Beside the tiny model's softmax of all experts: a sigmoid with groups and a correction, and a
softmax of the chosen ones."""


def as_param(shape: Shape) -> Any:
    reason = shape.needs_cpu if ON_GPU else shape.needs_gpu
    marks = [pytest.mark.skip(reason=reason)] if reason else []
    if shape.name in LIKE_OTHERS:
        marks.append(pytest.mark.slow)
    elif shape.name not in IN_EVERY_RUN:
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
        prompts = [prompt_of(400, seed=5000 + number) for number in range(12)]
        scored = server.complete(**ASK, prompt=prompts, max_tokens=1, prompt_logprobs=0)
    check_replay(model, shape, scored)


def check_replay(model: Path, shape: Shape, scored: dict[str, Any]) -> None:
    """A trainer in another precision, whose routers choose otherwise here and there, takes the
    experts of the rows.

    If only its routers are in bfloat16, then its log-probabilities are closer to the server's where
    experts differed.
    """
    rows = np.sort([answer.prompt_rows for answer in answers_of(scored)], axis=3)
    tokens = torch.tensor([answer.prompt for answer in answers_of(scored)])
    theirs = [
        [
            entry[str(token)]["logprob"]
            for token, entry in zip(of, choice["prompt_logprobs"], strict=True)
            if entry
        ]
        for of, choice in zip(tokens.tolist(), scored["choices"], strict=True)
    ]

    def run(trainer: HookOracle) -> tuple[np.ndarray, np.ndarray]:
        """The experts of all tokens, and how far log-probabilities are off."""
        trainer._seen.clear()
        with torch.no_grad():
            logits = trainer.model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        ours = logits.log_softmax(dim=-1).gather(2, tokens[:, 1:, None])[..., 0]
        experts = torch.stack(trainer._seen, dim=1).reshape(rows.shape)
        return np.sort(experts, axis=3), np.abs(ours.numpy() - theirs)

    for dtype in (torch.bfloat16, torch.float32):
        trainer = HookOracle(AutoModelForCausalLM.from_pretrained(model, dtype=dtype), shape)
        for name, weight in trainer.model.named_parameters():
            if re.search(ROUTER, name):
                weight.data = weight.to(torch.bfloat16).to(dtype)
        own, live = run(trainer)
        with replayed(trainer.model, rows, layer_ids=shape.layer_ids):
            taken, with_ids = run(trainer)
        assert np.array_equal(taken, rows)
        others = (own != rows).any(axis=(2, 3))[:, :-1]
        assert others.any()
    assert with_ids[others].mean() < 0.95 * live[others].mean()


@pytest.mark.release
@pytest.mark.skipif(ON_GPU, reason="on a CPU only")
def test_exact_where_the_cpu_has_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as another CPU can be told so: vLLM asks this function which kernels to choose."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    test_exact(next(shape for shape in SHAPES if "latent" in shape.name), tmp_path)


REFUSED = (
    (SLIDING_ONLY, "no full-attention layers whose KV cache keeps every token"),
    (DENSE, "no MoE layers, so there is no routing to return"),
)


@pytest.mark.parametrize(
    ("shape", "said"), REFUSED, ids=lambda value: value.name if isinstance(value, Shape) else ""
)
def test_models_that_are_refused(shape: Shape, said: str, tmp_path: Path) -> None:
    make_model(shape, tmp_path / "model")
    flags = (tmp_path / "model", tmp_path / "log", *FLAGS)
    with pytest.raises(Exception, match=f"The model has {said}"), serving_quickly(*flags):
        pass
