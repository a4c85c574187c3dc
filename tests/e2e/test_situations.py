"""Situations that need engines of other configurations than the shared one: a server each, with as much as fits on it.

Every answer is checked against the oracle, and no server may hold state when its tests are done.
"""

import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command_lines import shell_words
from tests.contract.served import serving_quickly
from tests.e2e.harness import (
    ASK,
    ON_GPU,
    SMALL_KV,
    Oracle,
    Server,
    answer_of,
    answers_of,
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
    wait_until_gone,
    wait_until_idle,
)

pytestmark = pytest.mark.e2e

# 23 blocks for 16 requests, of which one alone may take 16.
TINY_KV = (*SMALL_KV, "--block-size", "32", "--num-gpu-blocks-override", "24", "--max-model-len", "512")
TINY_KV += ("--max-num-seqs", "16", "--enable-prompt-tokens-details")
PREEMPTIONS = "vllm:num_preemptions_total"


@contextmanager
def left_without_state(
    model: Path, log: Path, *flags: str, module: str = "routed_experts.server.cli"
) -> Iterator[Server]:
    """A server that must hold no request state, and must have logged no error, when its tests are done."""
    with serving(model, log, *flags, module=module) as server:
        yield server
        wait_until_idle(server)
        errors = [line for line in log.read_text().splitlines() if " ERROR " in line]
        assert not errors, errors


def crowd(seed: int, count: int = 14) -> list[dict[str, Any]]:
    """Requests that do not fit into the tiny KV cache together, every other one streamed."""
    body = {**ASK, "max_tokens": 90, "ignore_eos": True}
    return [{**body, "prompt": prompt_of(50 + 5 * i, seed=seed + i), "stream": i % 2 == 0} for i in range(count)]


def check_preempted(server: Server, oracle: Oracle, seed: int) -> None:
    """Preempted requests have the rows, bit for bit, that they have when nothing disturbs them."""
    before = server.metric(PREEMPTIONS)
    for attempt in range(5):  # how many there are depends on how close together the requests arrive
        bodies = crowd(seed + 1000 * attempt)
        crowded = [answer_of(got) for got in at_once(server, bodies)]
        for body, answer in zip(bodies, crowded, strict=True):
            check(answer, oracle)
            same(answer, answers_of(server.complete(**{**body, "stream": False}))[0])
        if server.metric(PREEMPTIONS) - before >= 3:
            return
    raise AssertionError("hardly any request was preempted")


def test_stop_string_inside_an_accepted_group(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Of n-gram drafts: the rows end with the token that completes the stop string, not with the group."""
    speculative = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    flags = (*TINY_KV, "--max-num-batched-tokens", "64", "--speculative-config", json.dumps(speculative))
    cut = 0
    with serving_quickly(tiny_model, tmp_path / "log", *flags) as server:
        for seed in range(410, 440):
            body = {"prompt": prompt_of(4, seed=seed) * 9, "max_tokens": 150, "ignore_eos": True}
            chunks = server.stream(**ASK, **body)
            free, end = answer_of(chunks), 0
            check(free, oracle)
            for group in (choice["token_ids"] for chunk in chunks for choice in chunk["choices"]):
                begin, end = end, end + len(group)
                if len(group) < 2 or len(free.text) != len(free.tokens):
                    continue
                # The shortest text that ends with the group's first token and is not found before.
                stop = next(s for k in range(begin, -1, -1) if free.text.index(s := free.text[k : begin + 1]) == k)
                for ending, reason in (({"stop": [stop]}, "stop"), ({"max_tokens": begin + 1}, "length")):
                    answer = one(server, **{**body, **ending})
                    assert (answer.finish_reason, answer.tokens) == (reason, free.tokens[: begin + 1])
                    check(answer, oracle)
                cut += 1
                break
            if cut == 3:
                return
    raise AssertionError(f"only {cut} answers ended inside an accepted group")


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
        model.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
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
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert any(delta.get("reasoning") for delta in deltas)


def _at_rest(server: Server, metric: str) -> float:
    """Once it does not change: one of the API processes has the engine's numbers, and it may be behind."""
    seen = [server.metric(metric)]
    while len(seen) < 4 or len(set(seen[-4:])) > 1:
        time.sleep(0.5)
        seen.append(server.metric(metric))
    return seen[-1]


def test_two_api_servers(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Each API process takes its own requests' rows off the one engine's outputs."""
    with serving(tiny_model, tmp_path / "log", *TINY_KV, "--api-server-count", "2") as server:
        for seed in (700, 720, 740):
            check_mix(server, oracle, seed)
        returned = server.metric("routed_experts_rows_returned_total")
        captured = _at_rest(server, "routed_experts_rows_captured_total")
        for seed in range(750, 762):  # whichever of the two answers
            one(server, prompt=prompt_of(20, seed=seed), max_tokens=4, ignore_eos=True)  # twice
        wait_until_idle(server)
        assert server.metric("routed_experts_rows_returned_total") - returned == 24 * (20 + 3)
        assert 24 * 23 <= _at_rest(server, "routed_experts_rows_captured_total") - captured <= 24 * 24
        body = {"model": "tiny", **ASK, "prompt": prompt_of(30, seed=760), "max_tokens": 300, "stream": True}
        for _ in range(6):  # clients that leave
            with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
                assert next(response.iter_lines())
        for _ in range(8):
            wait_until_idle(server)
        log = (tmp_path / "log").read_text()  # before it ends: vLLM may stop the engine before an API process
    assert "ApiServer_0" in log
    assert "ApiServer_1" in log
    assert " ERROR " not in log


@pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank")
def test_tensor_parallel(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    with left_without_state(tiny_model, tmp_path / "log", *TINY_KV, "-tp", "2") as server:
        check_mix(server, oracle, 800)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank")
def test_sequence_parallel(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    flags = (*TINY_KV, "-tp", "2", "-dp", "2", "--enable-expert-parallel", "--data-parallel-rpc-port", str(free_port()))
    flags += ("--api-server-count", "1")
    with left_without_state(tiny_model, tmp_path / "log", *flags, module="tests.e2e.ranks_on_cpu") as server:
        for length in (1, 2, 31, 64, 65, 150):
            (answer,) = answers_of(server.complete(**ASK, prompt=prompt_of(length, 830 + length), max_tokens=6))
            check(answer, oracle)
        check_mix(server, oracle, 850)


@contextmanager
def two_nodes(
    model: Path, folder: Path, commands: str, *more: str, module: str = "routed_experts.server.cli"
) -> Iterator[Server]:
    """A server of which another node is a part, as the documentation's two commands start them; both on this host."""
    values = {"FIRST": "127.0.0.1", "13345": str(free_port()), "13346": str(free_port())}
    first, second = ([values.get(word, word) for word in words[3:]] for words in shell_words(commands))
    env = {"VLLM_HOST_IP": "127.0.0.1"}
    with (
        headless(model, folder / "second", *TINY_KV, *second, env=env, module=module) as node,
        serving(model, folder / "log", *TINY_KV, *first, *more, env=env, module=module, beside=[node]) as server,
    ):
        yield server
        assert " ERROR " not in (folder / "log").read_text() + (folder / "second").read_text()


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
    assert " ERROR " not in (tmp_path / "log").read_text()


@pytest.mark.skipif(ON_GPU, reason="the layers that skip steps there are bound in another way")
def test_a_layer_that_skips_some_steps_is_found_at_start(tiny_model: Path, tmp_path: Path) -> None:
    log, flags = tmp_path / "log", (*SMALL_KV, "--max-model-len", "512")
    with (
        pytest.raises(AssertionError, match="did not start"),
        serving(tiny_model, log, *flags, module="tests.e2e.skipping_layer"),
    ):
        pass
    assert "MoE layers [0, 1, 2, 3, 4] wrote no ids for some tokens" in log.read_text()
