"""KV that a connector loads: each row that is sent is of the computation whose KV was read, or it is missing."""

from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from routed_experts.capture.engine.kv_transfer.tracker import ExternalKVTracker
from tests.contract.engine import BLOCK, tokens
from tests.contract.loads import (
    NAME,
    TRANSFER,
    Store,
    TracingClient,
    computed_before,
    dice,
    empty_prefix_cache,
    engine_with_store,
    mix,
    store,
)


@pytest.fixture(params=[False, True], ids=["loads first", "loads beside"])
def beside(request: pytest.FixtureRequest) -> bool:
    """Loads that run beside steps."""
    return request.param


@pytest.mark.parametrize(("seed", "policy"), [(0, "recompute"), (1, "missing")])
def test_at_random(is_async: bool, beside: bool, policy: str, seed: int) -> None:
    with store(policy, is_async=beside) as kept:
        role = ("kv_both", "kv_producer")[seed]  # blocks of those that only produce are not fenced
        client = mix(engine_with_store(role=role, is_async=is_async, num_blocks=24, max_num_seqs=4), seed)
        assert kept.num_loaded > 1
    assert all(request.finish is FinishReason.LENGTH for request in client.received.values())
    assert (client.missing() == 0) == (policy == "recompute")


def test_stores_that_fetch_what_is_there_already(is_async: bool, beside: bool) -> None:
    """Then rows of a request that is running may get lost, but never become another's."""
    with store(is_async=beside, fetches_hits=True) as kept:
        core = engine_with_store(role="kv_producer", is_async=is_async, num_blocks=24, max_num_seqs=4)
        client = mix(core, seed=1)
        assert kept.num_loaded > 1
    assert all(request.finish is FinishReason.LENGTH for request in client.received.values())


@pytest.mark.parametrize(("start", "policy"), [(0, "recompute"), (0, "missing"), (None, "recompute")])
def test_a_store_that_offers_less_than_nothing(is_async: bool, policy: str, start: int | None) -> None:
    """As vLLM's ExampleConnector does, where a preempted request hits more than its prompt: the hit is what counts."""
    with store(policy, has_prompts=True) as kept:
        client = TracingClient(engine_with_store(is_async=is_async, num_blocks=8, max_num_seqs=2))
        for name, max_tokens in (("stays", 24), ("is preempted", 40)):
            client.add(name, tokens(2 * BLOCK + 3, seed=max_tokens), start, max_tokens=max_tokens)
        client.run()
        assert kept.num_negative > 0
        assert kept.num_loaded == 0
    assert all(request.finish is FinishReason.LENGTH for request in client.received.values())
    assert client.missing() == 0


def test_without_the_hook_rows_are_of_other_computations(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests here see it."""
    monkeypatch.setattr(ExternalKVTracker, "take", lambda *_: [])
    with store("missing"), pytest.raises(AssertionError, match="another computation"):
        mix(engine_with_store(is_async=False, num_blocks=24, max_num_seqs=4), seed=1)


@pytest.mark.parametrize(
    ("policy", "failures", "fails_as", "beside"),
    [
        ("recompute", "recompute", "blocks", False),
        ("missing", "recompute", "blocks", True),
        ("recompute", "recompute", "request", True),  # which vLLM knows of loads beside steps only
        ("missing", "fail", "blocks", False),
        ("recompute", "fail", "blocks", True),
        ("missing", "fail", "request", True),
    ],
)
def test_loads_that_fail(beside: bool, policy: str, failures: str, fails_as: str) -> None:
    with store(policy, is_async=beside, fails=dice(1, 0.4), fails_as=fails_as) as kept:
        core = engine_with_store(failures, is_async=False, num_blocks=24, max_num_seqs=4)
        client = mix(core, seed=5)
        assert kept.num_failed > 1
    ends = {request.finish for request in client.received.values()}
    assert ends <= {FinishReason.LENGTH, FinishReason.ERROR}
    assert (FinishReason.ERROR in ends) == (failures == "fail")
    assert policy == "missing" or client.missing() == 0


def test_rows_before_a_failed_load_are_read_again() -> None:
    """The request's first step, whose output vLLM throws away, was to bring all of them."""
    with store("missing") as kept:
        core = engine_with_store(is_async=False)
        prompt = tokens(6 * BLOCK)
        client = computed_before(core, prompt)
        kept.fails = lambda: True
        client.add("after", prompt)
        client.run()
        assert kept.num_failed == 1
        lost = client.received["after"].missing
        assert lost == list(range(len(lost)))  # of blocks that were loaded well
        assert len(lost) % BLOCK == 0
        assert len(lost) < 5 * BLOCK


# ---- one at a time ----


Warm = tuple[TracingClient, list[int], Store]


@pytest.fixture
def warm(is_async: bool, beside: bool, request: pytest.FixtureRequest) -> Any:
    """An engine whose store has a prompt that its prefix cache has not."""
    with store(getattr(request, "param", "recompute"), is_async=beside) as kept:
        prompt = tokens(5 * BLOCK + 3)
        yield computed_before(engine_with_store(is_async=is_async), prompt), prompt, kept


def test_blocks_that_another_request_loaded(warm: Warm) -> None:
    """With the opt-in nothing is loaded; what others loaded is in the prefix cache, without rows."""
    client, prompt, kept = warm
    client.add("asks", prompt)
    client.run()
    assert kept.num_loaded == 0
    empty_prefix_cache(client.engines[0])
    client.add("plain", prompt, start=None)
    client.run()
    assert kept.num_loaded == 1
    client.add("asks again", prompt)
    client.run()
    assert client.missing() == 0
    client.add("hits", prompt, start=None)
    client.run()
    assert kept.num_loaded == 1


def test_rows_that_are_not_asked_for_may_be_loaded(warm: Warm) -> None:
    client, prompt, kept = warm
    client.add("asks for the rest", prompt, start=5 * BLOCK)
    client.run()
    assert kept.num_loaded == 1
    client.add("asks for more", prompt, start=5 * BLOCK - 1)
    client.run()
    assert client.missing() == 0


@pytest.mark.parametrize("warm", ["missing"], indirect=True)
def test_what_is_loaded_is_missing(warm: Warm) -> None:
    client, prompt, kept = warm
    client.add("asks", prompt)
    client.run()
    assert kept.num_loaded == 1
    assert client.received["asks"].missing == list(range(5 * BLOCK))
    client.add("hits", prompt)
    client.run()
    assert client.received["hits"].missing == list(range(5 * BLOCK))


@pytest.mark.parametrize("connectors", [(TRANSFER,), (TRANSFER, NAME), (NAME, TRANSFER)])
def test_what_another_instance_computed_is_loaded_for_all(connectors: tuple[str, ...], is_async: bool) -> None:
    """It is what the request came for. Where there are several connectors, the one that loads is what counts."""
    with store() as kept:
        core = engine_with_store(connectors=connectors, is_async=is_async)
        prompt = tokens(5 * BLOCK + 3)
        client = computed_before(core, prompt)
        client.add("asks", prompt)
        client.run()
        assert kept.num_loaded == 0
        empty_prefix_cache(core)
        client.add("decodes", prompt, kv_transfer_params={"do_remote_prefill": True})
        client.run()
        is_pulled = connectors[0] == TRANSFER
        assert kept.num_loaded == is_pulled
        assert client.received["decodes"].missing == list(range(5 * BLOCK * is_pulled))
        assert client.missing() == 5 * BLOCK * is_pulled


@pytest.mark.parametrize("warm", ["missing"], indirect=True)
@pytest.mark.parametrize("asked", [("another", 0), ("asks", 1 << 20)], ids=["of another", "behind its blocks"])
def test_a_load_that_nobody_was_asked_for(warm: Warm, asked: tuple[str, int]) -> None:
    """Which of the request's blocks it fills is not known: none of them has rows, and the engine goes on."""
    client, prompt, kept = warm
    core = client.engines[0]
    loads = core.capture._loads
    load = core.scheduler.connector.update_state_after_alloc

    def unasked(*args: Any) -> None:
        loads._asked = asked
        load(*args)

    core.scheduler.connector.update_state_after_alloc = unasked
    client.add("asks", prompt)
    client.run()
    assert kept.num_loaded == 1
    assert client.received["asks"].finish is FinishReason.LENGTH
    assert client.received["asks"].missing == list(range(5 * BLOCK))
    assert client.stats[-1].rows_forgotten > 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_an_abort_around_a_load(is_async: bool, steps: int) -> None:
    """Blocks of a request that is aborted while they are loaded are another's soon."""
    with store("missing", is_async=True):
        core = engine_with_store(is_async=is_async, num_blocks=16)
        prompt = tokens(8 * BLOCK)
        client = computed_before(core, prompt)
        client.add("gone", prompt)
        client.steps(steps)
        client.abort("gone")
        for index in range(4):
            client.add(str(index), tokens(6 * BLOCK, seed=index), max_tokens=20)
            client.add(f"again {index}", prompt)
        client.run()
        assert client.received.pop("gone").finish is not FinishReason.ERROR
    assert all(request.finish is FinishReason.LENGTH for request in client.received.values())


@pytest.mark.parametrize("steps", range(4, 8))
def test_a_write_in_flight_does_not_come_after_a_load(steps: int) -> None:
    """A request is aborted while its step runs, and another's KV is loaded into its last block.

    vLLM fences the blocks of engines that say that they consume KV, so this one does not say so.
    """
    with store("missing") as kept:
        core = engine_with_store(role="kv_producer", is_async=True, num_blocks=12, chunk=256)
        stem = tokens(9 * BLOCK + 1)
        client = computed_before(core, stem)
        client.add("gone", tokens(2 * BLOCK + 8, seed=1), start=None, max_tokens=100)
        client.steps(steps)
        client.abort("gone")
        client.add("after", stem)
        client.run()
        assert kept.num_loaded == 1
        assert client.received["after"].missing == list(range(9 * BLOCK))
