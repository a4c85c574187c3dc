"""Pulls whose lease ends, beside texts that a store or offloading has too: each request ends, its rows are right."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.engine import FinishReason

from routed_experts.capture.engine.kv_transfer import pulls
from routed_experts.capture.prefill_rows import PARAM
from tests.contract.engine import BLOCK, Client, Core, tokens
from tests.contract.loads import LEASE_S, NAME, PULL, Store, engine_with_store, store
from tests.contract.offloading import NAME as OFFLOADING
from tests.contract.offloading import engine_that_offloads

BOUND = 2_000
"""Steps within which every request ends; those here need a few hundred together."""

CONNECTORS = [(PULL,), (OFFLOADING,), (NAME,), (PULL, OFFLOADING), (OFFLOADING, PULL), (PULL, NAME), (NAME, PULL)]


def engine_of(*connectors: str, **about: Any) -> Core:
    if OFFLOADING in connectors:
        return engine_that_offloads(connectors=connectors, answers=True, **about)
    return engine_with_store(*connectors, **about)


@dataclass
class Legs:
    """A prefill and a decode instance, and the time that passes while they step."""

    kept: Store
    decode: Client
    prefill: Client = field(default_factory=lambda: Client(engine_with_store(PULL, is_async=False)))

    def params(self, name: str, prompt: list[int], with_rows: bool = True) -> dict[str, Any] | None:
        ask = {"do_remote_decode": True, "do_remote_prefill": False} | ({PARAM: True} if with_rows else {})
        return self.prefill.answer(name, prompt, max_tokens=1, kv_transfer_params=ask).kv_transfer_params

    def step(self, seconds: float = 0) -> None:
        self.kept.clock.passed += seconds
        self.decode.step()
        if self.prefill.engines[0].is_busy():
            self.prefill.step()

    def run(self, seconds: float = 0) -> int:
        """Steps until every request has ended; how many steps that took."""
        for steps in range(BOUND):
            if not self.decode.engines[0].is_busy():
                return steps
            self.step(seconds)
        raise AssertionError("the engine does not come to an end")


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Iterator[Store]:
    about = getattr(request, "param", {})
    with store(**about) as kept, patch.object(pulls, "time", kept.clock):
        yield kept


@pytest.mark.parametrize("failures", ["recompute", "fail"])
def test_a_late_pull_of_a_text_that_is_offloaded_too(kept: Store, failures: str) -> None:
    """E1: what is loaded in its place is no pull, and not late."""
    core = engine_of(PULL, OFFLOADING, failures=failures, is_async=False, num_blocks=11)
    legs = Legs(kept, Client(core))
    legs.decode.answer("warm up", [1])
    legs.decode.answer("before", prompt := tokens(4 * BLOCK + 1), max_tokens=20)
    core.empty_prefix_cache()
    legs.decode.add("late", prompt, kv_transfer_params=legs.params("first", prompt), max_tokens=60)
    while not core.model_executor.underway:
        legs.step()
    legs.step(2 * LEASE_S)
    legs.run()
    late = legs.decode.received["late"]
    assert (late.finish, len(late.tokens)) == (
        (FinishReason.LENGTH, 60) if failures == "recompute" else (FinishReason.ERROR, 0)
    )
    legs.decode.finish(ends=(FinishReason.LENGTH, FinishReason.ERROR))


@pytest.mark.parametrize("connectors", CONNECTORS, ids=" then ".join)
@pytest.mark.parametrize(
    ("kept", "failures"),
    [
        ({"policy": "recompute", "is_async": True}, "recompute"),
        ({"policy": "recompute", "is_async": True, "fails": 0.3}, "recompute"),
        ({"policy": "recompute", "fails": 0.3, "fails_as": "request", "is_async": True}, "fail"),
        ({"policy": "missing", "is_async": True, "fails": 0.3}, "recompute"),
        ({"policy": "missing", "is_async": True, "fails": 0.3}, "fail"),
    ],
    indirect=["kept"],
    ids=["nothing fails", "fails", "fails as a whole", "missing", "missing, fails"],
)
@pytest.mark.parametrize("seed", range(2))
def test_leases_of_a_few_steps(kept: Store, failures: str, connectors: tuple[str, ...], seed: int) -> None:
    """E1: whatever is late or fails, no request is tried for ever. Under `recompute` those that ask miss no row, and
    what the server's own record misses is no fault (E2)."""
    # In a smaller KV cache vLLM 0.32 waits for ever by itself: blocks stay reserved for a request whose pull failed,
    # also while it is that request which needs them.
    core = engine_of(*connectors, failures=failures, is_async=False, num_blocks=48, max_num_seqs=4)
    legs, dice = Legs(kept, Client(core)), random.Random(seed)
    legs.decode.answer("warm up", [1])
    stems, gone, best_effort = [tokens(6 * BLOCK + 5, seed=stem) for stem in range(2)], set(), set()
    for turn in range(30):
        prompt = dice.choice(stems)[: dice.choice((6 * BLOCK + 5, dice.randrange(1, 6 * BLOCK + 5)))] + tokens(
            dice.randrange(3), seed=turn
        )
        is_pulled = PULL in connectors and dice.random() < 0.6
        params = legs.params(f"p{turn}", prompt, with_rows=dice.random() < 0.8) if is_pulled else None
        start, name = dice.choice((0, 0, None, dice.randrange(len(prompt) + 1))), f"r{turn}"
        about = {"best_effort": dice.random() < 0.2, "at_end": dice.random() < 0.5}
        legs.decode.add(name, prompt, start, max_tokens=dice.randrange(1, 30), kv_transfer_params=params, **about)
        best_effort |= {name} if about["best_effort"] or (params and PARAM not in params) else set()
        if dice.random() < 0.15:
            gone.add(one := dice.choice(list(legs.decode.received)))
            legs.decode.abort(one)
        if dice.random() < 0.3:
            legs.run(LEASE_S / 8)
            core.empty_prefix_cache()
        for _ in range(dice.randrange(8)):
            legs.step(dice.choice((0, 0, 1, LEASE_S * 1.1)))
    legs.run(LEASE_S / 8)
    legs.decode.finish(but=gone, missing=None, ends=(FinishReason.LENGTH, FinishReason.ERROR))
    missing = {name for name, request in legs.decode.received.items() if request.missing}
    assert kept.policy == "missing" or missing <= best_effort
    assert legs.decode.faults() == 0
