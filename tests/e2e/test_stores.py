"""A real engine with vLLM's ExampleConnector, a store of KV on disk that does not say which
computation it kept.

It loads in the step that needs the KV, and all blocks of a prompt, over those that the prefix cache
has.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.served import serving_quickly
from tests.e2e.harness import (
    ASK,
    SMALL_KV,
    Answer,
    Oracle,
    Server,
    answer_of,
    check,
    prompt_of,
    unknown,
)

pytestmark = pytest.mark.e2e

BLOCK, BLOCKS = 32, 24
# It stores a prompt in one piece.
FLAGS = (
    *SMALL_KV,
    "--block-size",
    str(BLOCK),
    "--num-gpu-blocks-override",
    str(BLOCKS),
    "--no-enable-chunked-prefill",
)
FLAGS += ("--max-model-len", "256", "--max-num-batched-tokens", "256", "--max-num-seqs", "4")


@pytest.fixture(
    scope="module", params=["recompute", pytest.param("missing", marks=pytest.mark.slow)]
)
def policy(request: pytest.FixtureRequest) -> str:
    policy: str = request.param
    return policy


@pytest.fixture(scope="module")
def server(
    policy: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("store")
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    config = json.dumps(
        {**connector, "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")}}
    )
    flags = (*FLAGS, "--kv-transfer-config", config, "--routed-experts-on-load", policy)
    with serving_quickly(tiny_model, folder / "log", *flags) as server:
        yield server


def ask(server: Server, prompt: list[int], max_tokens: int) -> Answer:
    return answer_of(server.complete(prompt=prompt, max_tokens=max_tokens, ignore_eos=True, **ASK))


def loaded(server: Server) -> float:
    """Tokens so far."""
    return server.metric("vllm:external_prefix_cache_hits_total")


def evicted(server: Server, seed: int) -> float:
    """Tokens loaded so far, when nothing is left of prompts in the prefix cache."""
    for number in range(BLOCKS // 4):
        server.complete(prompt=prompt_of(4 * BLOCK, seed=seed + number), max_tokens=1)
    return loaded(server)


UNKNOWN = {"recompute": [], "missing": list(range(3 * BLOCK))}


def test_who_asks_for_rows_has_those_of_what_was_computed(
    server: Server, policy: str, oracle: Oracle
) -> None:
    prompt = prompt_of(100, seed=1)
    check(ask(server, prompt, 5), oracle)
    before = evicted(server, 100)
    assert unknown(ask(server, prompt, 5), oracle) == UNKNOWN[policy]
    assert loaded(server) - before == (3 * BLOCK if policy == "missing" else 0)
