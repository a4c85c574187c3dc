"""Prefill and decode in two servers that both offload: NIXL and offloading in a `MultiConnector`, as people run them.

On a CPU only what copies KV out of the KV cache and back is the tests'. The ids that are handed over are made others on
the way, as in `test_nixl.py`, so that each row shows whether it came with the KV or was computed again.
"""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from examples.prefill_decode import CONFIG
from tests.e2e.harness import ASK, Oracle, Server, answer_of, cached_tokens, check, prompt_of
from tests.e2e.offload_on_cpu import kv_transfer_config
from tests.e2e.test_nixl import BLOCK, Legs, nixl, running, untagged
from tests.e2e.test_nixl import pytestmark as needs_nixl

pytestmark = [*needs_nixl, pytest.mark.slow]

BLOCKS = 40
OFFLOADED_BYTES = 128 << 20  # for all that is computed here
ROWS: dict[str, Any] = {**ASK, "max_tokens": 9}


def flags(nixl_first: bool, policy: str) -> tuple[str, ...]:
    """Of both servers.

    Args:
        nixl_first: whether KV is pulled that is offloaded as well, or else loaded from there: the first connector that
            has KV loads it.
        policy: for loads without rows.
    """
    children = [nixl(180), kv_transfer_config(OFFLOADED_BYTES)]
    connectors = {"connectors": children if nixl_first else children[::-1]}
    config = {**CONFIG, "kv_connector": "MultiConnector", "kv_connector_extra_config": connectors}
    size = ("--num-gpu-blocks-override", str(BLOCKS))
    return (*size, "--routed-experts-on-load", policy, "--kv-transfer-config", json.dumps(config))


SETTINGS = {"NIXL first, recompute": flags(True, "recompute"), "offloading first, missing": flags(False, "missing")}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS)
def legs(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Legs]:
    with running(tiny_model, tmp_path_factory.mktemp("legs") / "log", *request.param) as legs:
        yield legs


def loaded(server: Server) -> dict[str, int]:
    """How many tokens a server has loaded so far, from the other one and from where it offloads to.

    The last token of what is pulled counts, too, though it is computed again.
    """
    sources = {"pulled": "p2p", "offloaded": "host"}
    name = "vllm:prompt_tokens_cached_by_source_total"
    return {what: int(server.metric(name, source=source)) for what, source in sources.items()}


@contextmanager
def loads(server: Server, **more: int) -> Iterator[None]:
    """The server loads so many tokens meanwhile, and none from elsewhere."""
    before = loaded(server)
    yield
    assert loaded(server) == {what: tokens + more.get(what, 0) for what, tokens in before.items()}


_seeds = count(10_000)


def crowd_out(server: Server) -> None:
    """Gives all blocks of the KV cache to other prompts."""
    for _ in range(2 * BLOCKS * BLOCK // 400):
        server.complete(prompt=prompt_of(400, seed=next(_seeds)), max_tokens=1)


def whole_blocks(prompt: list[int]) -> int:
    """How many tokens of a prompt are offloaded."""
    return len(prompt) // BLOCK * BLOCK


def pull(legs: Legs, prompt: list[int], oracle: Oracle, max_tokens: int = 9) -> list[int]:
    """Has the decode server pull a prompt's KV with rows that were made others, and others take its blocks then.

    Returns the tokens of the answer.
    """
    with loads(legs.decode, pulled=len(prompt)):
        answer = legs.through_both(prompt, max_tokens)
        check(answer, oracle)
    crowd_out(legs.decode)
    return answer.tokens


def load(legs: Legs, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """Has the decode server load a prompt from where it was offloaded to; returns the answer."""
    with loads(legs.decode, offloaded=whole_blocks(prompt)):
        answer = legs.decode.complete(prompt=prompt, ignore_eos=True, **fields)
        assert cached_tokens(answer) == whole_blocks(prompt)
    return answer


@pytest.mark.parametrize("length", [33, 64, 100, 170])
def test_what_was_pulled_keeps_its_rows_where_it_is_offloaded(legs: Legs, oracle: Oracle, length: int) -> None:
    prompt = prompt_of(length, seed=600 + length)
    pull(legs, prompt, oracle)
    answer = answer_of(load(legs, prompt, **ROWS))
    check(untagged(answer, slice(0, min(whole_blocks(prompt), length - 1))), oracle)


def test_many_at_once(legs: Legs, oracle: Oracle) -> None:
    before = [loaded(server) for server in (legs.prefill, legs.decode)]
    dice = random.Random(0)
    stems = [prompt_of(250, seed=650 + stem) for stem in range(6)]
    asked: list[tuple[Server, dict[str, Any]]] = []
    for request in range(60):
        prompt = [*dice.choice(stems)[: dice.randrange(40, 250)], 40 + request % 3]
        body = {**ASK, "prompt": prompt, "max_tokens": dice.randrange(1, 40), "ignore_eos": True}
        asked.append((dice.choice((legs.proxy, legs.decode)), body))
    with ThreadPoolExecutor(6) as threads:
        for chunks in threads.map(lambda each: each[0].stream(**each[1]), asked):
            check(answer_of(chunks), oracle)
    after = [loaded(server) for server in (legs.prefill, legs.decode)]
    assert all(now["offloaded"] > then["offloaded"] for now, then in zip(after, before, strict=True))
    assert after[1]["pulled"] > before[1]["pulled"]
    legs.nothing_is_left()
