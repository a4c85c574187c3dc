"""Models of many shapes on a real engine: every row against a Hugging Face forward pass of the same weights."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.contract.served import serving_quickly
from tests.e2e.harness import ASK, FLOAT32, ON_GPU, Oracle, Server, answers_of, check, decode, one, prompt_of, serving
from tests.e2e.shapes import DENSE, SHAPES, SLIDING_ONLY, HookOracle, Shape, attach_adapter, make_model

pytestmark = pytest.mark.e2e

CHUNK = 64
# Blocks are of the size that vLLM chooses: some of these shapes dictate it.
FLAGS = (*FLOAT32, "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "1024")
FLAGS += ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8", "--enable-prefix-caching")


def log_of_refusal(model: Path, log: Path, *flags: str) -> str:
    """The log of a server that must end before it answers."""
    with pytest.raises(AssertionError, match="the server did not start"), serving(model, log, *FLAGS, *flags):
        pass
    return log.read_text()


def as_param(shape: Shape) -> Any:
    reason = shape.needs_cpu if ON_GPU else shape.needs_gpu
    marks = [pytest.mark.skip(reason=reason)] if reason else []
    return pytest.param(shape, id=shape.name, marks=marks)


@pytest.mark.parametrize("shape", [as_param(shape) for shape in SHAPES])
def test_exact(shape: Shape, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(shape, model)
    oracle = HookOracle(model, shape)
    if shape.repeats_logits:
        tokens = prompt_of(50, seed=0)
        assert np.array_equal(oracle.rows(tokens), Oracle(model).rows(tokens)), "the oracles do not agree"
    with serving_quickly(model, tmp_path / "log", *FLAGS, *shape.flags, env=shape.env) as server:
        info = server.info()
        assert info["layer_ids"] == list(shape.layer_ids)
        assert (info["num_layers"], info["top_k"]) == (len(shape.layer_ids), shape.top_k)
        assert info["num_experts"] == shape.num_experts
        hits = server.metric("vllm:prefix_cache_hits_total")
        # One token, less than a chunk, several chunks, and the next turn after that.
        for length in (1, 40, CHUNK + 1, 5 * CHUNK + 7):
            body = {"prompt": prompt_of(length, seed=length), "max_tokens": 9, "ignore_eos": True}
            answer = one(server, **body)
            check(answer, oracle, shape.num_experts)
        turn = [*answer.prompt, *answer.tokens, *prompt_of(90, seed=1)]
        check(one(server, prompt=turn, max_tokens=70, ignore_eos=True), oracle, shape.num_experts)
        assert (server.metric("vllm:prefix_cache_hits_total") > hits) == shape.prefix_cache
        _check_concurrent(server, oracle, shape)
        _check_dtypes(server, shape)


def _check_concurrent(server: Server, oracle: Oracle, shape: Shape) -> None:
    """Prompts of very different lengths in one batch."""
    prompts = [prompt_of(length, seed=1000 + length) for length in (3, 200, 70, 33, 150, 1)]
    response = server.complete(**ASK, prompt=prompts, max_tokens=12, ignore_eos=True)
    answers = answers_of(response)
    assert len(answers) == len(prompts)
    for answer in answers:
        check(answer, oracle, shape.num_experts)


def _check_dtypes(server: Server, shape: Shape) -> None:
    """uint8 holds 256 experts, and is refused for more."""
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 3, "ignore_eos": True, "return_routed_experts": True}
    rows = decode(server.complete(**body)["prompt_routed_experts"])
    auto = server.complete(**body, routed_experts_dtype="auto")["prompt_routed_experts"]
    assert auto["dtype"] == ("uint8" if shape.num_experts <= 256 else "int16")
    assert np.array_equal(decode(auto), rows)
    with server.client() as client:
        for stream in (False, True):
            response = client.post("/v1/completions", json={**body, "routed_experts_dtype": "uint8", "stream": stream})
            if shape.num_experts <= 256:
                assert response.status_code == 200
            else:
                assert_refused(response, "routed_experts_dtype")


def assert_refused(response: httpx.Response, param: str) -> None:
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.slow
def test_sliding_window_only_is_refused(tmp_path: Path) -> None:
    make_model(SLIDING_ONLY, tmp_path / "model")
    log = log_of_refusal(tmp_path / "model", tmp_path / "log")
    assert "The model has no full-attention layers whose KV cache keeps every token" in log


def test_dense_model_is_refused(tmp_path: Path) -> None:
    make_model(DENSE, tmp_path / "model")
    log = log_of_refusal(tmp_path / "model", tmp_path / "log")
    assert "The model has no MoE layers, so there is no routing to return" in log


@pytest.mark.slow
def test_dense_model_is_served_without_capture(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(DENSE, model)
    with serving(model, tmp_path / "log", *FLAGS, "--no-enable-return-routed-experts") as server:
        answer = server.complete(prompt="abc", max_tokens=4, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 4
        with server.client() as client:
            for path, prompt in (
                ("completions", {"prompt": "abc"}),
                ("chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
            ):
                body = {"model": "tiny", "max_tokens": 4, **prompt, "return_routed_experts": True}
                assert_refused(client.post(f"/v1/{path}", json=body), "return_routed_experts")
            assert client.get("/v1/routed_experts").status_code == 404


def lora_flags(adapter: Path) -> tuple[str, ...]:
    return ("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8", "--lora-modules", f"adapter={adapter}")


@pytest.mark.slow
@pytest.mark.skipif(not ON_GPU, reason="with LoRA, vLLM's MoE layers need Triton")
def test_adapter_and_base_are_exact_and_share_no_prefix(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """A LoRA adapter on the attention: it changes the routing, though no expert and no router is in it."""
    merge = attach_adapter(oracle.model.config, tmp_path / "adapter")
    adapted = Oracle(tiny_model)
    merge(adapted.model)
    prompt = prompt_of(300, seed=1)
    assert not np.array_equal(adapted.rows(prompt), oracle.rows(prompt)), "the adapter changes nothing"
    targets = ("--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj")
    flags = (*FLAGS, "--enforce-eager", *lora_flags(tmp_path / "adapter"), *targets)
    # vLLM's kernels for adapters assert 16-bit types, in which near-ties would decide, but work in float32. Without
    # assertions torch.compile does not work.
    with serving(tiny_model, tmp_path / "log", *flags, env={"PYTHONOPTIMIZE": "1"}) as server:
        for model, expected in (("tiny", oracle), ("adapter", adapted), ("tiny", oracle), ("adapter", adapted)):
            check(one(server, model=model, prompt=prompt, max_tokens=9, ignore_eos=True), expected)
