"""KV that a connector loads without its rows: each row that is sent is of the computation whose KV was
read, or it is missing."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from routed_experts.capture.scheduler.kv.tracker import Offer
from routed_experts.capture.wire.message import Cause
from tests.contract.engine import BLOCK, NUM_BLOCKS, SHARED, Client, share_partly, tokens
from tests.contract.loads import Store, computed_before, engine_with_store, store

PROMPT = tokens(5 * BLOCK + 3)
LOADED = list(range(5 * BLOCK))
LOADS: dict[str, Any] = {"kv_transfer_params": {"do_remote_prefill": True}}

Warm = tuple[Client, Store]


@pytest.fixture
def warm(is_async: bool) -> Iterator[Warm]:
    """An engine whose prefix cache has PROMPT no more, which can be loaded."""
    with store() as kv_store:
        yield computed_before(engine_with_store(is_async=is_async), PROMPT), kv_store


ASKS = {"start": 0}
REST = {"start": 5 * BLOCK}
RECORDED = {"allow_missing": True}


@pytest.mark.parametrize(
    "requests",
    [
        # It is loaded for whoever comes for it, and computed for who hits it.
        [(ASKS, 0, []), (ASKS | LOADS, 1, LOADED), (ASKS, 1, []), (ASKS, 1, [])],
        [(REST | LOADS, 1, []), (REST, 1, []), ({"start": 5 * BLOCK - 1}, 1, [])],
        # For the server's own record nothing is computed again, and what it lacks is no fault.
        [(RECORDED | LOADS, 1, LOADED), (RECORDED, 1, LOADED), (ASKS, 1, [])],
    ],
    ids=["asks", "asks for the rest", "recorded"],
)
def test_who_loads_and_what_is_missing(
    warm: Warm, requests: list[tuple[dict[str, Any], int, list[int]]]
) -> None:
    """Each request, how many loads there were by then, and the positions of its unknown rows."""
    client, kv_store = warm
    for index, (options, num_loaded, missing) in enumerate(requests):
        if options.get("kv_transfer_params"):
            client.engines[0].empty_prefix_cache()
        assert client.answer(str(index), PROMPT, **options).missing == missing
        assert kv_store.num_loaded == num_loaded
    lost = client.missing()
    client.finish(missing=lost)
    assert client.causes == Counter({Cause.KV_TRANSFER: lost})


def test_a_hit_is_cut_where_rows_are_asked_for(warm: Warm) -> None:
    """And not before, though no block has rows."""
    client, kv_store = warm
    client.answer("plain", PROMPT, start=None, **LOADS)
    assert client.answer("asks", PROMPT, start=2 * BLOCK).missing == []
    assert kv_store.num_loaded == 1
    read = client.engines[0].model_executor.seen
    is_same = [read["asks"][at] == read["plain"][at] for at in range(0, 5 * BLOCK, BLOCK)]
    assert is_same == [True, True, False, False, False]
    client.finish()


@pytest.mark.parametrize(
    "offer",
    [Offer("another", 0), Offer("asks", 5 * BLOCK)],
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
    assert client.answer("asks", PROMPT, **LOADS).missing == LOADED
    assert kv_store.num_loaded == 1
    client.finish(missing=len(LOADED), forgets=True)
    assert not client.causes, "it is a fault"


def test_a_block_without_rows_that_is_copied_over_has_those_of_its_source(is_async: bool) -> None:
    """So that a request which asks for rows takes it as a prefix hit, and computes nothing
    again."""
    with store():
        client = computed_before(engine_with_store(is_async=is_async, num_blocks=13), PROMPT)
        core = client.engines[0]
        client.answer("loads", PROMPT, start=None, **LOADS)
        core.empty_prefix_cache()
        without = core.capture.external_kv.blocks_without_rows
        client.add("takes the others", tokens(3 * BLOCK, seed=2), start=None, max_tokens=BLOCK)
        client.add("source", prompt := tokens(SHARED + 4, seed=1), max_tokens=20)
        client.steps(4)
        before = {block for block in range(NUM_BLOCKS) if block in without}
        copies = share_partly(core, client, prompt, max_tokens=20)
        client.run()
        assert {target for _, target in copies} <= before
        client.answer("hits", client.received["shares"].sequence)
        client.finish()
        seen = core.model_executor.seen
        assert all(
            seen["hits"][position] == seen["shares"][position] for position in range(3 * BLOCK)
        )
