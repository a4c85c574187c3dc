"""vLLM's front end in Rust, the real program, before a real engine with this capture: every row
against that of vLLM's server in Python, bit for bit, and against a Hugging Face forward pass.

`TEST_RUST_FRONT_END` names the program, as builds for CPUs have none: `vllm/vllm-rs` in a CUDA
wheel of 0.33 or later.
"""

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Cases
from tests.contract.rust import binary
from tests.e2e.harness import (
    ONE_PROCESS,
    SERVER_FLAGS,
    Oracle,
    Server,
    prompt_of,
    serving,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

GENERATE = "/inference/v1/generate"
VLLM = "bench.vllm_command"
FLAGS = (*SERVER_FLAGS, *ONE_PROCESS, "--enable-return-routed-experts", "--enable-scale-out")
FEW_BLOCKS = "28"  # two of the longest sequences
DENSE_LAYERS = 1  # before the others: vLLM's form has rows for them too, of zeros


@contextmanager
def vllms_server(model: Path, log: Path, **env: str) -> Iterator[Server]:
    """vLLM's own command, whose engine has this capture."""
    flags = (*FLAGS, "--num-gpu-blocks-override", FEW_BLOCKS)
    with serving(model, log, *flags, module=VLLM, env=env) as running:
        yield running


@pytest.fixture(scope="module")
def rust(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    chosen = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(binary())}
    with vllms_server(tiny_model, tmp_path_factory.mktemp("rust") / "log", **chosen) as running:
        yield running


@pytest.fixture(scope="module")
def python(
    rust: Server, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with vllms_server(tiny_model, tmp_path_factory.mktemp("python") / "log") as running:
        yield running


def generate(
    server: Server, prompt: list[int], max_tokens: int, start: int = 0, **body: Any
) -> dict[str, Any]:
    """The choice of a request, sampled greedily."""
    sampling = {
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "routed_experts_prompt_start": start,
    }
    answer = server._post(GENERATE, {"token_ids": prompt, "sampling_params": sampling, **body})
    (choice,) = answer["choices"]
    return choice


def decoded(text: str) -> np.ndarray[Any, Any]:
    """vLLM's form, [tokens, layers, K]."""
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def check(choice: dict[str, Any], prompt: list[int], oracle: Oracle, start: int = 0) -> None:
    """Every row of all tokens but the last."""
    rows = decoded(choice["routed_experts"])
    tokens = [*prompt, *choice["token_ids"]][:-1]
    assert rows.dtype == np.uint8
    assert not rows[:, :DENSE_LAYERS].any()
    routed = rows[:, DENSE_LAYERS:].astype(np.int16)
    assert oracle.wrong(routed, tokens, start) == []


def hit_tokens(server: Server) -> float:
    return server.metric("vllm:prefix_cache_hits_total")


@pytest.mark.parametrize(
    ("length", "start", "max_tokens"),
    [(1, 0, 9), (5, 5, 1), (63, 0, 24), (64, 20, 24), (65, 0, 24), (300, 0, 30), (300, 290, 2)],
)
def test_every_row_is_that_of_the_server_in_python_and_of_the_model(
    rust: Server,
    python: Server,
    oracle: Oracle,
    cases: Cases,
    length: int,
    start: int,
    max_tokens: int,
) -> None:
    prompt = prompt_of(length, seed=1000 + length + start)
    in_python = generate(python, prompt, max_tokens, start)
    for is_hit in (False, True):
        before = hit_tokens(rust)
        choice = generate(rust, prompt, max_tokens, start)
        assert choice["token_ids"] == in_python["token_ids"]
        assert choice["routed_experts"] == in_python["routed_experts"]
        check(choice, prompt, oracle, start)
        assert (hit_tokens(rust) > before) == (is_hit and length > 32)
        cases.add()


def test_a_prompt_that_begins_as_another_did(
    rust: Server, python: Server, oracle: Oracle, cases: Cases
) -> None:
    """Its first rows are those of the other's KV."""
    first = prompt_of(200, seed=7)
    longer = [*first[:150], *prompt_of(60, seed=8)]
    for prompt in (first, longer):
        before = hit_tokens(rust)
        choice = generate(rust, prompt, 20)
        assert choice["routed_experts"] == generate(python, prompt, 20)["routed_experts"]
        check(choice, prompt, oracle)
        cases.add()
    assert hit_tokens(rust) - before == 128  # whole blocks of 32


def test_requests_beside_each_other_some_of_which_are_preempted(
    rust: Server, oracle: Oracle, cases: Cases
) -> None:
    prompts = [prompt_of(40 + 11 * number, seed=50 + number) for number in range(16)]
    before = rust.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(len(prompts)) as pool:
        choices = list(pool.map(lambda prompt: generate(rust, prompt, 120), prompts))
    for prompt, choice in zip(prompts, choices, strict=True):
        check(choice, prompt, oracle)
        cases.add()
    assert rust.metric("vllm:num_preemptions_total") > before


def test_a_stream_has_the_rows_in_its_last_chunk(
    rust: Server, python: Server, oracle: Oracle
) -> None:
    prompt = prompt_of(90, seed=3)
    sampling = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    chunks = rust.stream(GENERATE, token_ids=prompt, sampling_params=sampling)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    having = [choice for choice in choices if choice.get("routed_experts") is not None]
    assert [choice["finish_reason"] for choice in having] == ["length"]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    whole = {**having[0], "token_ids": tokens}
    check(whole, prompt, oracle)
    in_python = generate(python, prompt, 12)
    assert (whole["token_ids"], whole["routed_experts"]) == (
        in_python["token_ids"],
        in_python["routed_experts"],
    )


def test_a_request_that_its_client_leaves(rust: Server, oracle: Oracle) -> None:
    """Its blocks are given to others, whose rows are their own."""
    left = prompt_of(100, seed=4)
    sampling = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
    body = {"model": "tiny", "token_ids": left, "sampling_params": sampling, "stream": True}
    for _ in range(3):
        with rust.client() as client, client.stream("POST", GENERATE, json=body) as response:
            next(response.iter_lines())
        prompt = prompt_of(300, seed=5)
        check(generate(rust, prompt, 20), prompt, oracle)
        check(generate(rust, left, 20), left, oracle)
