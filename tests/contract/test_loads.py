"""KV that a connector loads: each row that is sent is of the computation whose KV was read, or it
is missing."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from routed_experts.capture.scheduler.kv.tracker import ExternalKVTracker, Offer
from routed_experts.capture.wire.message import Cause
from tests.contract.engine import BLOCK, SHARED, Client, share_partly, tokens
from tests.contract.loads import NAME, TRANSFER, Store, computed_before, engine_with_store, store

PROMPT = tokens(5 * BLOCK + 3)
LOADED = list(range(5 * BLOCK))


@pytest.fixture(params=[False, True], ids=["loads first", "loads beside"])
def beside(request: pytest.FixtureRequest) -> bool:
    """Loads that run beside steps."""
    return request.param


Warm = tuple[Client, Store]


@pytest.fixture
def warm(is_async: bool, beside: bool, request: pytest.FixtureRequest) -> Iterator[Warm]:
    """An engine whose store has PROMPT, which its prefix cache has not."""
    with store(getattr(request, "param", "recompute"), is_async=beside) as kv_store:
        yield computed_before(engine_with_store(is_async=is_async), PROMPT), kv_store


PLAIN, ASKS, RECORDED = {"start": None}, {"start": 0}, {"allow_missing": True}
REST = {"start": 5 * BLOCK}


@pytest.mark.parametrize(
    ("warm", "requests"),
    [
        # Nothing is loaded for who asks. What others loaded is in the prefix cache, without rows.
        ("recompute", [(ASKS, 0), ("empty", 0), (PLAIN, 1), (ASKS, 1), (PLAIN, 1)]),
        ("recompute", [(REST, 1), ({"start": 5 * BLOCK - 1}, 1)]),
        # For the server's own record nothing is computed again, and what it lacks is no fault.
        ("recompute", [(RECORDED, 1, LOADED), (RECORDED, 1, LOADED), (ASKS, 1)]),
        ("missing", [(ASKS, 1, LOADED), (ASKS, 1, LOADED)]),
    ],
    ids=["asks", "asks for the rest", "recorded", "missing"],
    indirect=["warm"],
)
def test_who_loads_and_what_is_missing(warm: Warm, requests: list[Any]) -> None:
    """Each request, how many loads there were by then, and the positions of its unknown rows."""
    client, kv_store = warm
    for index, (options, num_loaded, *missing) in enumerate(requests):
        if options == "empty":
            client.engines[0].empty_prefix_cache()
            continue
        assert client.answer(str(index), PROMPT, **options).missing == (
            missing[0] if missing else []
        )
        assert kv_store.num_loaded == num_loaded
    lost = client.missing()
    client.finish(missing=lost)
    assert client.causes == Counter({Cause.KV_STORE: lost})


def test_a_hit_is_cut_where_rows_are_asked_for(warm: Warm) -> None:
    """And not before, though no block has rows."""
    client, kv_store = warm
    client.answer("plain", PROMPT, start=None)
    assert client.answer("asks", PROMPT, start=2 * BLOCK).missing == []
    assert kv_store.num_loaded == 1
    read = client.engines[0].model_executor.seen
    is_same = [read["asks"][at] == read["plain"][at] for at in range(0, 5 * BLOCK, BLOCK)]
    assert is_same == [True, True, False, False, False]
    client.finish()


def test_rows_that_no_setting_leaves_out_are_a_fault(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix hit is not cut where it should be, as requests that ask for rows compute them."""
    client, _ = warm
    monkeypatch.setattr(ExternalKVTracker, "truncate_prefix_hit", lambda self, request, hit: hit)
    client.answer("plain", PROMPT, start=None)
    assert client.answer("hits", PROMPT).missing == LOADED
    client.finish(missing=len(LOADED))
    assert not client.causes


@pytest.mark.parametrize("connectors", [(TRANSFER,), (TRANSFER, NAME), (NAME, TRANSFER)])
def test_what_another_instance_computed_is_loaded_for_all(
    connectors: tuple[str, ...], is_async: bool
) -> None:
    """It is what the request came for. Where there are several connectors, the one that loads is
    what counts."""
    is_pulled = connectors[0] == TRANSFER
    with store() as kv_store:
        client = computed_before(engine_with_store(*connectors, is_async=is_async), PROMPT)
        client.answer("asks", PROMPT)
        assert kv_store.num_loaded == 0
        client.engines[0].empty_prefix_cache()
        decodes = client.answer("decodes", PROMPT, kv_transfer_params={"do_remote_prefill": True})
        assert kv_store.num_loaded == is_pulled
        assert decodes.missing == LOADED * is_pulled
        client.finish(missing=len(decodes.missing))
        assert client.causes == Counter({Cause.KV_TRANSFER: len(decodes.missing)})


@pytest.mark.parametrize("warm", ["missing"], indirect=True)
@pytest.mark.parametrize(
    "offer",
    [Offer("another", 0, False), Offer("asks", 5 * BLOCK, False)],
    ids=["of another", "behind its blocks"],
)
def test_a_load_that_nobody_was_asked_for(warm: Warm, offer: Offer) -> None:
    """Which of the request's blocks it fills is not known: none of them has rows, and the engine
    goes on."""
    client, kv_store = warm
    core = client.engines[0]
    load = core.scheduler.connector.update_state_after_alloc

    def unasked(*args: Any) -> None:
        core.capture.external_kv._offer = offer
        load(*args)

    core.scheduler.connector.update_state_after_alloc = unasked
    assert client.answer("asks", PROMPT).missing == LOADED
    assert kv_store.num_loaded == 1
    client.finish(missing=len(LOADED), forgets=True)
    assert not client.causes, "it is a fault"


def test_a_load_over_the_answer_of_a_running_request(is_async: bool) -> None:
    """Another request finds it in the prefix cache, and loads more: what comes in groups is not
    lost."""
    with store(fetches_hits=True) as kv_store:
        client = Client(engine_with_store(is_async=is_async))
        before = client.answer("before", PROMPT, start=None, max_tokens=8 * BLOCK)
        client.engines[0].empty_prefix_cache()
        client.add("running", PROMPT, max_tokens=6 * BLOCK, at_end=True)
        client.steps(4 * BLOCK)
        client.answer("hits", before.sequence, start=None)
        assert kv_store.num_loaded == 1
        client.finish()


def test_a_load_over_a_block_that_its_step_computes(is_async: bool) -> None:
    """A load beside steps ends later than the step that it begins with."""
    with store(is_async=True, fetches_hits=True) as kv_store:
        client = computed_before(engine_with_store(is_async=is_async), PROMPT)
        client.add("computes", PROMPT[: BLOCK + 1])
        client.add("loads", PROMPT, start=None)
        client.run()
        assert (
            client.answer("recorded", PROMPT[: BLOCK + 1], allow_missing=True).missing
            == LOADED[:BLOCK]
        )
        assert client.answer("asks", PROMPT[: BLOCK + 1]).missing == []
        assert kv_store.num_loaded == 1
        client.finish(missing=BLOCK)
        assert client.causes == {Cause.KV_STORE: BLOCK}, "no fault"


def test_an_offer_of_less_than_nothing(is_async: bool) -> None:
    """Of a store that has prompts only, to a preempted request that finds a part of its answer in
    the prefix cache. vLLM would compute that part again, over blocks that others may read."""
    with store(has_prompts=True) as kv_store:
        client = Client(engine_with_store(is_async=is_async, num_blocks=10, max_num_seqs=2))
        client.add("stays", tokens(2 * BLOCK + 1, seed=1), max_tokens=60)
        client.add("preempted", tokens(BLOCK + 1), start=None, max_tokens=60)
        client.finish()
        assert kv_store.num_negative > 0
        numbers_read = client.engines[0].model_executor.seen["preempted"]
        assert all(len(numbers_read[position]) == 1 for position in range(3 * BLOCK))
        assert len(numbers_read[3 * BLOCK]) == 2, "it kept all its blocks"


def test_blocks_whose_load_failed_and_that_nobody_computed(warm: Warm) -> None:
    """vLLM 0.32 leaves those of loads within steps in the prefix cache: who asks for rows does not
    use them."""
    client, kv_store = warm
    kv_store.fails = 1
    client.add("left", PROMPT, start=None)
    while not kv_store.num_failed:
        client.step()
    client.abort("left")
    client.answer("asks", PROMPT)
    client.finish(but="left")


def test_a_block_without_rows_that_is_copied_over_has_those_of_its_source(is_async: bool) -> None:
    """So that a request which asks for rows takes it as a prefix hit, and computes nothing
    again."""
    with store():
        client = computed_before(engine_with_store(is_async=is_async, num_blocks=13), PROMPT)
        core = client.engines[0]
        client.answer("loads", PROMPT, start=None)
        core.empty_prefix_cache()
        without = core.capture.external_kv.blocks_without_rows.without_ids
        client.add("takes the others", tokens(3 * BLOCK, seed=2), start=None, max_tokens=BLOCK)
        client.add("source", prompt := tokens(SHARED + 4, seed=1), max_tokens=20)
        client.steps(4)
        before = set(without)
        copies = share_partly(core, client, prompt, max_tokens=20)
        client.run()
        assert {target for _, target in copies} <= before
        client.answer("hits", client.received["shares"].sequence)
        client.finish()
        seen = core.model_executor.seen
        assert all(
            seen["hits"][position] == seen["shares"][position] for position in range(3 * BLOCK)
        )
