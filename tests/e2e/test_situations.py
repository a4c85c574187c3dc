"""Situations that need engines of other configurations than the shared one: a server each, with as much as fits on it.

Every answer is checked against the oracle, and no server may hold state when its tests are done.
"""

import importlib.util
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from routed_experts.protocol.codec import decode
from routed_experts.protocol.fetch import fetch
from routed_experts.server.http.selftest import SelfTestError
from tests.contract.served import serving_quickly, serving_weights
from tests.e2e.harness import (
    ASK,
    COMPLETIONS,
    ON_GPU,
    OURS,
    SMALL_KV,
    Oracle,
    Server,
    answer_of,
    at_once,
    cached_tokens,
    check,
    check_held_back,
    check_mix,
    commands_in_session,
    free_port,
    headless,
    one,
    prompt_of,
    same,
    serving,
    wait_until,
    wait_until_gone,
    wait_until_idle,
)

pytestmark = pytest.mark.e2e

# 23 blocks for 16 requests, of which one alone may take 16.
TINY_KV = (*SMALL_KV, "--block-size", "32", "--num-gpu-blocks-override", "24", "--max-model-len", "512")
TINY_KV += ("--max-num-seqs", "16", "--enable-prompt-tokens-details")
PREEMPTIONS = "vllm:num_preemptions_total"


def check_preempted(server: Server, oracle: Oracle, seed: int) -> None:
    """Preempted requests have the rows, bit for bit, that they have when nothing disturbs them."""
    before = server.metric(PREEMPTIONS)
    for attempt in range(5):  # how many there are depends on how close together the requests arrive
        body = {**ASK, "max_tokens": 90, "ignore_eos": True}
        prompts = [prompt_of(50 + 5 * i, seed=seed + 1000 * attempt + i) for i in range(14)]
        bodies = [{**body, "prompt": prompt, "stream": i % 2 == 0} for i, prompt in enumerate(prompts)]
        crowded = [answer_of(got) for got in at_once(server, bodies)]
        for prompt, answer in zip(prompts, crowded, strict=True):
            check(answer, oracle)
            same(answer, answer_of(server.complete(**body, prompt=prompt)))
        if server.metric(PREEMPTIONS) - before >= 3:
            return
    raise AssertionError("hardly any request was preempted")


class TestWithoutPrefixCache:
    """No prefix cache, chunks of 16 tokens, blocks of 64, several tokens a chunk, and parsers that hold text back."""

    INTERVAL = 4
    END_OF_THINKING = 260

    @pytest.fixture(scope="class")
    def thinker(self, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The tiny model with two more tokens, which a reasoning parser looks for."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
        assert tokenizer.add_tokens(["<think>", "</think>"]) == 2
        assert tokenizer.convert_tokens_to_ids("</think>") == self.END_OF_THINKING
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        directory = tmp_path_factory.mktemp("thinker") / "tiny"
        for part in (model, model.generation_config, tokenizer):
            part.save_pretrained(directory)
        return directory

    @pytest.fixture(scope="class")
    def thinker_oracle(self, thinker: Path) -> Oracle:
        return Oracle(thinker)

    @pytest.fixture(scope="class")
    def engine(self, thinker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        log = tmp_path_factory.mktemp("no-prefix-cache") / "log"
        flags = (*SMALL_KV, "--block-size", "64", "--num-gpu-blocks-override", "13", "--max-model-len", "512")
        flags += ("--max-num-seqs", "16", "--max-num-batched-tokens", "16", "--no-enable-prefix-caching")
        flags += ("--no-async-scheduling", "--stream-interval", str(self.INTERVAL), "--enable-prompt-tokens-details")
        flags += ("--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        with serving_quickly(thinker, log, *flags) as server:
            yield server
            wait_until_idle(server)

    def test_nothing_is_hit(self, engine: Server, thinker_oracle: Oracle) -> None:
        body = {"prompt": prompt_of(200, seed=600), "max_tokens": 9, "ignore_eos": True}
        check(one(engine, **body), thinker_oracle)
        assert cached_tokens(engine.complete(**ASK, **body)) == 0

    def test_prompt_lengths(self, engine: Server, thinker_oracle: Oracle) -> None:
        for length in (1, 15, 16, 17, 63, 64, 65, 130):
            check(one(engine, prompt=prompt_of(length, seed=length), max_tokens=9, ignore_eos=True), thinker_oracle)

    def test_preemption(self, engine: Server, thinker_oracle: Oracle) -> None:
        check_preempted(engine, thinker_oracle, seed=610)

    def test_stream_interval_of_the_server(self, engine: Server, thinker_oracle: Oracle) -> None:
        """The first token comes at once, then so many at a time; more where the reader is slower than the engine."""
        chunks = engine.stream(**ASK, prompt=prompt_of(20, seed=620), max_tokens=14, ignore_eos=True)
        assert {1, 5, 9, 13, 14} >= set(np.cumsum([len(chunk["choices"][0]["token_ids"]) for chunk in chunks]).tolist())
        check(answer_of(chunks), thinker_oracle)

    def test_reasoning_that_the_parser_sets_apart(self, engine: Server, thinker_oracle: Oracle) -> None:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Think!"}], "max_tokens": 40}
        body |= {"logit_bias": {str(self.END_OF_THINKING): 1}, "ignore_eos": True}
        chunks = check_held_back(engine, thinker_oracle, body)
        assert any(choice["delta"].get("reasoning") for chunk in chunks for choice in chunk["choices"])


# ---- several processes ----


@contextmanager
def left_without_state(model: Path, log: Path, *flags: str, **process: Any) -> Iterator[Server]:
    """A server that must hold no request state, and must have logged no error, when its tests are done."""
    with serving(model, log, *TINY_KV, *flags, **process) as server:
        yield server
        for _ in range(8):  # whichever API process answers
            wait_until_idle(server)
        assert server.errors() == []  # before it ends: vLLM may stop the engine before an API process


@pytest.fixture(scope="module")
def in_processes(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two API processes, and where no GPU is needed for each, two tensor-parallel ranks."""
    flags = ("--api-server-count", "2", *(() if ON_GPU else ("-tp", "2")))
    with left_without_state(tiny_model, tmp_path_factory.mktemp("processes") / "log", *flags) as server:
        yield server


@pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank")
def test_tensor_parallel(in_processes: Server, oracle: Oracle) -> None:
    assert sum("Worker_TP" in line for line in set(in_processes.log.read_text().split())) >= 2
    check_mix(in_processes, oracle, 800)


def _at_rest(server: Server, metric: str, least: float = 0) -> float:
    """Once it does not change, and is so much: one of the API processes has the engine's numbers, and may be behind."""
    wait_until(lambda: server.metric(metric) >= least, lambda: f"{metric}: {server.metric(metric)}, not {least}")
    seen = [server.metric(metric)]
    while len(seen) < 9 or len(set(seen[-9:])) > 1:
        time.sleep(0.5)
        seen.append(server.metric(metric))
    return seen[-1]


def test_two_api_servers(in_processes: Server, oracle: Oracle) -> None:
    """Each API process takes its own requests' rows off the one engine's outputs."""
    server = in_processes
    for seed in (700, 720, 740):
        check_mix(server, oracle, seed)
    captured = _at_rest(server, "routed_experts_rows_captured_total")
    returned = server.metric("routed_experts_rows_returned_total")  # which a stream counts when it has ended
    for seed in range(750, 762):  # whichever of the two answers
        one(server, prompt=prompt_of(20, seed=seed), max_tokens=4, ignore_eos=True)  # twice
    wait_until_idle(server)
    now = _at_rest(server, "routed_experts_rows_captured_total", captured + 24 * 23)
    assert 24 * 23 <= now - captured <= 24 * 24
    assert server.metric("routed_experts_rows_returned_total") - returned == 24 * (20 + 3)
    body = {"model": "tiny", **ASK, "prompt": prompt_of(30, seed=760), "max_tokens": 300, "stream": True}
    for _ in range(6):  # clients that leave
        with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
            assert next(response.iter_lines())
    log = server.log.read_text()
    assert "ApiServer_0" in log
    assert "ApiServer_1" in log


def test_each_of_two_api_servers_returns_what_the_other_stored(in_processes: Server) -> None:
    ask = {"prompt": prompt_of(40, seed=770), "max_tokens": 4, **ASK}
    rows = decode(in_processes.complete(**ask)["prompt_routed_experts"])
    for _ in range(6):
        reference = in_processes.complete(**ask, routed_experts_delivery="reference")["prompt_routed_experts"]
        found = [fetch(reference, base_url=f"{in_processes.url}/v1") for _ in range(6)]
        assert all(np.array_equal(each.swapaxes(0, 1), rows) for each in found)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank")
def test_sequence_parallel(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    flags = ("-tp", "2", "-dp", "2", "--enable-expert-parallel", "--data-parallel-rpc-port", str(free_port()))
    flags += ("--api-server-count", "1")
    with left_without_state(tiny_model, tmp_path / "log", *flags, module="tests.e2e.ranks_on_cpu") as server:
        for length in (1, 2, 31, 64, 65, 150):
            check(answer_of(server.complete(**ASK, prompt=prompt_of(length, 830 + length), max_tokens=6)), oracle)
        check_mix(server, oracle, 850)


@contextmanager
def two_nodes(model: Path, folder: Path, commands: str, *more: str, module: str = OURS) -> Iterator[Server]:
    """A server of which another node is a part, as the documentation's two commands start them; both on this host."""
    values = {"FIRST": "127.0.0.1", "13345": str(free_port()), "13346": str(free_port())}
    first, second = (
        [values.get(word, word) for word in words[3:]] for words in map(shlex.split, commands.splitlines())
    )
    env = {"VLLM_HOST_IP": "127.0.0.1"}
    with (
        headless(model, folder / "second", *TINY_KV, *second, env=env, module=module) as node,
        serving(model, folder / "log", *TINY_KV, *first, *more, env=env, module=module, beside=[node]) as server,
    ):
        yield server
        assert server.errors() + node.errors() == []


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_nodes.py does this there, with a GPU each")
def test_tensor_parallel_on_two_nodes(tiny_model: Path, oracle: Oracle, tmp_path: Path, documented: list[str]) -> None:
    with two_nodes(tiny_model, tmp_path, documented[0]) as server:
        check_mix(server, oracle, 840)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_nodes.py does this there, with vLLM's own collectives")
def test_data_parallel_with_a_headless_node(
    tiny_model: Path, oracle: Oracle, tmp_path: Path, documented: list[str]
) -> None:
    module = "tests.e2e.ranks_on_cpu"
    with two_nodes(tiny_model, tmp_path, documented[0], "--api-server-count", "1", module=module) as server:
        check_mix(server, oracle, 860)
        wait_until_idle(server)
        for engine in ("0", "1"):
            assert server.metric("routed_experts_rows_captured_total", engine=engine) > 0


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_nodes.py does this there, with a GPU for each rank")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray_executor(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Told to end, the one process that its user knows of leaves none of Ray's behind."""
    flags = (*TINY_KV, "-tp", "2", "--distributed-executor-backend", "ray")
    with serving(tiny_model, tmp_path / "log", *flags, module="tests.e2e.ray_on_cpu") as server:
        check_mix(server, oracle, 900)
        check_preempted(server, oracle, seed=920)
        wait_until_idle(server)
        assert any("raylet" in command for command in commands_in_session(server))
        server.process.terminate()
        assert server.process.wait(60) == 0
        wait_until_gone(server)
    assert server.errors() == []


@pytest.mark.skipif(ON_GPU, reason="the layers that skip steps there are bound in another way")
def test_a_layer_that_skips_some_steps_is_found_at_start(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that go around their routers in all but small batches, as some kernels do."""
    set_capture_fn = BaseRouter.set_capture_fn

    def set_for_small_batches(router: BaseRouter, capture: Callable[[torch.Tensor], None]) -> None:
        set_capture_fn(router, lambda ids: capture(ids) if len(ids) <= 7 else None)

    monkeypatch.setattr(BaseRouter, "set_capture_fn", set_for_small_batches)
    said = r"MoE layers \[0, 1, 2, 3, 4\] wrote no ids for some tokens"
    with pytest.raises(SelfTestError, match=said), serving_weights(tiny_model, *SMALL_KV, "--max-model-len", "512"):
        pass
