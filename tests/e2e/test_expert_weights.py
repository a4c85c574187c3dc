"""The routers' weights of a real model over HTTP, against a Hugging Face forward pass of the same weights."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from routed_experts.protocol.batch import verify
from routed_experts.protocol.collect import Routing, collect
from tests.contract.served import serving_quickly
from tests.e2e.harness import SMALL_KV, Oracle, Server, check_weights, prompt_of

pytestmark = pytest.mark.e2e

ASK: dict[str, Any] = {
    "return_routed_experts": True,
    "return_routed_expert_weights": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def weighing(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (*SMALL_KV, "--max-num-batched-tokens", "64", "--max-model-len", "512")
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serving_quickly(tiny_model, log, *flags, "--enable-return-routed-expert-weights") as server:
        yield server


def check(oracle: Oracle, routing: Routing) -> None:
    tokens = [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())][:-1]
    assert routing.weights is not None
    assert len(routing.rows) == len(tokens) - routing.start
    assert oracle.wrong(routing.rows, tokens, routing.start) == []
    verify(routing, 16, weights_sum=1.0)
    check_weights(routing.weights, routing.rows, tokens, oracle, routing.start)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_every_weight_of_whole_and_streamed_answers(weighing: Server, oracle: Oracle, length: int) -> None:
    """Chunked prompts, several choices, and prefix hits by the second time."""
    body = {"prompt": prompt_of(length, seed=length), "n": 2, "max_tokens": 20, "temperature": 1.0}
    for _ in range(2):
        for source in (weighing.complete(**body, **ASK), iter(weighing.stream(**body, **ASK))):
            routings = collect(source, n=2)
            assert len(routings) == 2
            for routing in routings:
                check(oracle, routing)


def test_turns_of_a_conversation(weighing: Server, oracle: Oracle) -> None:
    first, *_ = collect(weighing.complete(prompt=prompt_of(40, seed=3), max_tokens=12, **ASK))
    turn = [*(first.prompt_token_ids or ()), *(first.token_ids or ()), *prompt_of(30, seed=4)]
    start = {"routed_experts_prompt_start": first.end}
    second, *_ = collect(weighing.complete(prompt=turn, max_tokens=12, **ASK, **start), prompt_start=first.end)
    assert second.start == first.end
    check(oracle, second)


def test_many_requests_at_once(weighing: Server, oracle: Oracle) -> None:
    """Shared prefixes, every form and layout, streamed or not, and among them requests for ids alone or for nothing."""
    dice = random.Random(7)
    stems = [prompt_of(150, seed=seed) for seed in range(3)]

    def body_of(index: int) -> dict[str, Any]:
        prompt = dice.choice(stems)[: dice.randrange(1, 150)] + prompt_of(dice.randrange(1, 30), seed=100 + index)
        body: dict[str, Any] = {"prompt": prompt, "n": dice.choice([1, 1, 2]), "max_tokens": dice.randrange(1, 40)}
        body |= {"temperature": 1.0, "return_token_ids": True, "stream": dice.random() < 0.5}
        if (kind := index % 4) == 3:
            return body
        body |= ASK if kind else {"return_routed_experts": True}
        body["routed_experts_format"] = dice.choice(["object", "npy", "list"])
        body["routed_experts_layout"] = dice.choice(["split", "joined"])
        return body | {"routed_experts_prompt_start": dice.choice([0, 0, dice.randrange(len(prompt) + 1)])}

    def ask(body: dict[str, Any]) -> list[Routing]:
        start = body.get("routed_experts_prompt_start", 0)
        asked = {name: value for name, value in body.items() if name != "stream"}
        source = iter(weighing.stream(**asked)) if body["stream"] else weighing.complete(**body)
        return [] if "routed_experts_format" not in body else collect(source, n=body["n"], prompt_start=start)

    bodies = [body_of(index) for index in range(60)]
    with ThreadPoolExecutor(12) as pool:
        for body, routings in zip(bodies, pool.map(ask, bodies), strict=True):
            for routing in routings:
                assert (routing.weights is not None) == ("return_routed_expert_weights" in body)
                if routing.weights is not None:
                    check(oracle, routing)
