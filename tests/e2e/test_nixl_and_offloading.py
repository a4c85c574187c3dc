"""Prefill and decode in two servers that both offload: NIXL and offloading in a `MultiConnector`, as people run them.

On a CPU only what copies KV out of the KV cache and back is the tests'. The ids that are handed over are made others on
the way, as in `test_nixl.py`, so that each row shows whether it came with the KV or was computed again.
"""

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.prefill_decode import CONFIG
from tests.e2e.harness import (
    ASK,
    Oracle,
    Server,
    answers_of,
    answers_of_stream,
    check,
    decode,
    prompt_of,
    unknown,
    wait_until_idle,
)
from tests.e2e.offload_on_cpu import kv_transfer_config
from tests.e2e.test_nixl import BLOCK, EXPERTS, Legs, nixl, running, tagged, untagged
from tests.e2e.test_nixl import pytestmark as needs_nixl

pytestmark = [*needs_nixl, pytest.mark.slow]

BLOCKS = 40
FEW = ("--num-gpu-blocks-override", str(BLOCKS))
OFFLOADED_BYTES = 128 << 20  # for all that is computed here
LEASE_S = 180


def multi(children: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Several connectors, the first of which that has KV loads it."""
    config = {**CONFIG, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
    return "--kv-transfer-config", json.dumps(config)


@dataclass(frozen=True)
class Setting:
    """Of both servers.

    Attributes:
        nixl_first: whether KV is pulled that is offloaded as well, or else loaded from there.
        policy: for loads without rows.
    """

    nixl_first: bool
    policy: str

    @property
    def flags(self) -> tuple[str, ...]:
        children = [nixl(LEASE_S), kv_transfer_config(OFFLOADED_BYTES)]
        connectors = multi(children if self.nixl_first else children[::-1])
        return (*FEW, *connectors, "--routed-experts-on-load", self.policy)


SETTINGS = {
    "NIXL first, recompute": Setting(nixl_first=True, policy="recompute"),
    "offloading first, missing": Setting(nixl_first=False, policy="missing"),
}


@pytest.fixture(scope="module", params=[*SETTINGS.values()], ids=[*SETTINGS])
def setting(request: pytest.FixtureRequest) -> Setting:
    setting: Setting = request.param
    return setting


@pytest.fixture(scope="module")
def legs(setting: Setting, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Legs]:
    with running(tiny_model, tmp_path_factory.mktemp("legs") / "log", *setting.flags) as legs:
        yield legs


def loaded(server: Server) -> dict[str, int]:
    """How many tokens a server has loaded so far, from the other one and from where it offloads to.

    The last token of what is pulled counts, too, though it is computed again.
    """
    sources = {"pulled": "p2p", "offloaded": "host"}
    name = "vllm:prompt_tokens_cached_by_source_total"
    return {what: int(server.metric(name, source=source)) for what, source in sources.items()}


def crowd_out(server: Server, seed: int) -> None:
    """Gives all blocks of the KV cache to other prompts."""
    for prompt in range(2 * BLOCKS * BLOCK // 400):
        server.complete(prompt=prompt_of(400, seed=10_000 + 100 * seed + prompt), max_tokens=1)


def whole_blocks(prompt: list[int]) -> int:
    """How many tokens of a prompt are offloaded."""
    return len(prompt) // BLOCK * BLOCK


def pull(legs: Legs, prompt: list[int], oracle: Oracle, max_tokens: int = 9) -> list[int]:
    """Has the decode server pull a prompt's KV with rows that were made others; returns the tokens of the answer."""
    before = loaded(legs.decode)
    (answer,) = answers_of(legs.second(prompt, max_tokens, tagged(legs.first(prompt))))
    check(untagged(answer, slice(0, len(prompt) - 1)), oracle)
    assert loaded(legs.decode) == {**before, "pulled": before["pulled"] + len(prompt)}
    return answer.tokens


def load(legs: Legs, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """Has the decode server load a prompt from where it was offloaded to; returns the answer."""
    before, count = loaded(legs.decode), whole_blocks(prompt)
    answer = legs.decode.complete(prompt=prompt, ignore_eos=True, **fields)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == count
    assert loaded(legs.decode) == {**before, "offloaded": before["offloaded"] + count}
    return answer


ROWS: dict[str, Any] = {**ASK, "max_tokens": 9}


@pytest.mark.parametrize("length", [33, 64, 100, 170])
def test_what_was_pulled_keeps_its_rows_where_it_is_offloaded(legs: Legs, oracle: Oracle, length: int) -> None:
    prompt = prompt_of(length, seed=600 + length)
    pull(legs, prompt, oracle)
    crowd_out(legs.decode, seed=length)
    (answer,) = answers_of(load(legs, prompt, **ROWS))
    check(untagged(answer, slice(0, min(whole_blocks(prompt), length - 1))), oracle)


def test_the_next_turn_loads_what_was_pulled_and_what_was_computed(legs: Legs, oracle: Oracle) -> None:
    prompt = prompt_of(170, seed=610)
    tokens = pull(legs, prompt, oracle, max_tokens=30)
    crowd_out(legs.decode, seed=1)
    turn = [*prompt, *tokens[:-1], 40]
    assert whole_blocks(turn) > len(prompt)
    (answer,) = answers_of(load(legs, turn, **ROWS))
    check(untagged(answer, slice(0, len(prompt) - 1)), oracle)


def test_rows_are_those_of_the_child_that_loads(legs: Legs, oracle: Oracle, setting: Setting) -> None:
    prompt = prompt_of(100, seed=620)
    pull(legs, prompt, oracle)
    crowd_out(legs.decode, seed=2)
    before, offloaded = loaded(legs.decode), whole_blocks(prompt)
    (answer,) = answers_of(legs.second(prompt, 9, tagged(tagged(legs.first(prompt)))))
    if setting.nixl_first:
        assert loaded(legs.decode) == {**before, "pulled": before["pulled"] + 100}
        answer = untagged(answer, slice(0, 99))
        check(untagged(answer, slice(0, 99)), oracle)
    else:
        assert loaded(legs.decode) == {**before, "offloaded": before["offloaded"] + offloaded}
        check(untagged(answer, slice(0, offloaded)), oracle)


def test_what_was_pulled_without_rows_is_a_stores_kv(legs: Legs, oracle: Oracle, setting: Setting) -> None:
    prompt = prompt_of(100, seed=630)
    params = legs.first(prompt)
    del params["routed_experts"]
    (answer,) = answers_of(legs.second(prompt, 4, params))
    assert unknown(answer, oracle) == list(range(99))
    crowd_out(legs.decode, seed=3)
    load(legs, prompt, max_tokens=1)  # a request that asks for no rows, with either policy
    crowd_out(legs.decode, seed=4)
    if setting.policy == "missing":
        (answer,) = answers_of(load(legs, prompt, **ROWS))
        assert unknown(answer, oracle) == list(range(96))
    else:
        before = loaded(legs.decode)
        check(answers_of(legs.second(prompt, 9))[0], oracle)
        assert loaded(legs.decode) == before


def test_a_prompt_that_was_offloaded_is_handed_over_with_its_rows(legs: Legs, oracle: Oracle) -> None:
    prompt = prompt_of(100, seed=640)
    pull(legs, prompt, oracle)
    crowd_out(legs.decode, seed=5)
    before, offloaded = loaded(legs.decode), whole_blocks(prompt)
    turned = Legs(legs.proxy, prefill=legs.decode, decode=legs.prefill)
    params = turned.first(prompt)
    assert loaded(legs.decode) == {**before, "offloaded": before["offloaded"] + offloaded}
    rows = decode({**params["routed_experts"], "missing": 0}).astype(np.int16)
    rows[:offloaded] = (rows[:offloaded] - 1) % EXPERTS
    assert oracle.wrong(rows, prompt) == []
    turned.second(prompt, 2, params)  # else its KV would wait to be pulled


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
            check(answers_of_stream(chunks)[0], oracle)
    after = [loaded(server) for server in (legs.prefill, legs.decode)]
    assert all(now["offloaded"] > then["offloaded"] for now, then in zip(after, before, strict=True))
    assert after[1]["pulled"] > before[1]["pulled"]


def test_nothing_is_left(legs: Legs) -> None:
    for server in (legs.prefill, legs.decode):
        wait_until_idle(server)
