"""KV that vLLM's `OffloadingConnector` keeps and loads again: its rows come with it, and are of its computation."""

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from routed_experts.capture.engine.kv_transfer.connectors import ON_LOAD_VARIABLE
from routed_experts.capture.engine.kv_transfer.offloading import OffloadedRows, OffloadLoad, OffloadStore
from routed_experts.capture.handoff import PARAM
from tests.contract.engine import BLOCK, Core, tokens
from tests.contract.loads import NAME as STORE
from tests.contract.loads import PULL, TracingClient, computed_before, empty_prefix_cache, mix, store
from tests.contract.offloading import NAME, engine_that_offloads, keys_kept, offloaded_rows, worker_of


@pytest.fixture(autouse=True, params=["recompute"])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(ON_LOAD_VARIABLE, request.param)
    return str(request.param)


def check_keys(core: Core) -> None:
    """From now on, that rows are kept of the chunks that vLLM keeps, and of no others, whenever a step is scheduled."""
    schedule = core.scheduler.schedule

    def checked(*args: Any, **kwargs: Any) -> SchedulerOutput:
        step = schedule(*args, **kwargs)
        assert offloaded_rows(core)._chunks.keys() == keys_kept(core).keys()
        return step

    core.scheduler.schedule = checked


def mix_that_reloads(core: Core, seed: int) -> TracingClient:
    """vLLM 0.32 fails when running requests are preempted by a reset, and load what the connector kept at once."""
    check_keys(core)
    client = mix(core, seed, turns=150, resets=0.04, resets_running=False)
    assert all(request.finish is FinishReason.LENGTH for request in client.received.values())
    return client


ALL_TOKENS = {"offload_prompt_only": False}


@pytest.mark.parametrize(
    ("policy", "seed", "about"),
    [
        ("recompute", 0, {"extra": ALL_TOKENS}),
        ("missing", 1, {"chunks": 13, "blocks_per_chunk": 3}),
        # Each chunk is let go again and again, and sometimes there is none for a store.
        ("recompute", 1, {"chunks": 6, "extra": ALL_TOKENS, "num_blocks": 14}),
        # Drafts that are rejected leave rows behind the last token, and few blocks are soon another's.
        ("recompute", 1, {"drafts": 3, "extra": ALL_TOKENS, "num_blocks": 14}),
        ("recompute", 3, {"stages": 2}),
    ],
    indirect=["policy"],
)
def test_at_random(is_async: bool, seed: int, about: dict[str, Any], policy: str) -> None:
    """Every row is there, whatever the policy, as no chunk is without."""
    core = engine_that_offloads(**{"is_async": is_async, "num_blocks": 24, "max_num_seqs": 4, **about})
    assert mix_that_reloads(core, seed).missing() == 0
    assert worker_of(core).num_loaded > 5
    assert worker_of(core).num_stored > (100 if "num_blocks" in about else 5)


@pytest.mark.parametrize(
    ("policy", "connectors"), [("recompute", (NAME, STORE)), ("missing", (STORE, NAME))], indirect=["policy"]
)
def test_at_random_beside_a_store(is_async: bool, connectors: tuple[str, str], policy: str) -> None:
    """What comes from there has no rows, and keeps none."""
    sizes: dict[str, Any] = {"extra": ALL_TOKENS, "is_async": is_async, "num_blocks": 18, "max_num_seqs": 4}
    with store(policy) as kept:
        client = mix_that_reloads(engine_that_offloads(20, connectors=connectors, **sizes), seed=0)
        assert kept.num_loaded > 3
    assert (client.missing() == 0) == (policy == "recompute")


@pytest.mark.parametrize("broken", [(OffloadLoad, "apply"), (OffloadStore, "apply")], ids=["reload", "keep"])
def test_without_it_rows_are_of_other_computations(monkeypatch: pytest.MonkeyPatch, broken: tuple[type, str]) -> None:
    """That the tests here see it."""
    monkeypatch.setattr(*broken, lambda *_: None)
    monkeypatch.setattr(OffloadedRows, "_look_up", lambda rows, key, context: rows._lookup(key, context))
    core = engine_that_offloads(is_async=False, num_blocks=24, max_num_seqs=4)
    if broken[0] is OffloadStore:  # then there are none
        assert mix_that_reloads(core, seed=1).missing() > 0
        return
    with pytest.raises(AssertionError, match="another computation"):
        mix_that_reloads(core, seed=1)


# ---- one at a time ----


@pytest.mark.parametrize(("num_tokens", "drafts"), [(15, 0), (16, 0), (16, 3), (17, 0)])
def test_blocks_that_are_copied_out_as_another_gets_them(
    num_tokens: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of a request is stored when it has ended. If it is another's by then, that is before the step."""
    core = engine_that_offloads(extra=ALL_TOKENS, is_async=True, num_blocks=12, chunk=256, drafts=drafts)
    came_first: list[bool] = []
    apply = OffloadStore.apply
    monkeypatch.setattr(OffloadStore, "apply", lambda *at: came_first.append(at[0].comes_first) or apply(*at))
    client = TracingClient(core)
    client.add("first", tokens(BLOCK + 1), max_tokens=num_tokens)
    client.steps(2)
    client.add("needs all blocks", tokens(10 * BLOCK + 1, seed=1), max_tokens=2)
    client.run()
    assert any(came_first) == (num_tokens == 16)
    client.add("again", [*client.received["first"].sequence, 1])
    client.run()
    assert worker_of(core).num_loaded == (BLOCK + num_tokens) // BLOCK
    assert client.missing() == 0


@pytest.fixture
def warm(is_async: bool) -> tuple[TracingClient, list[int]]:
    """An engine that keeps chunks of a prompt that its prefix cache has not."""
    prompt = tokens(5 * BLOCK + 3)
    return computed_before(engine_that_offloads(is_async=is_async), prompt), prompt


def test_what_was_kept_is_loaded_with_its_rows(warm: tuple[TracingClient, list[int]]) -> None:
    client, prompt = warm
    client.add("asks", prompt)
    client.run()
    assert worker_of(client.engines[0]).num_loaded == 5
    assert client.missing() == 0
    client.add("hits", prompt)
    client.run()
    assert worker_of(client.engines[0]).num_loaded == 5
    assert client.missing() == 0


@pytest.mark.parametrize("policy", ["recompute", "missing"], indirect=True)
def test_chunks_without_rows(warm: tuple[TracingClient, list[int]], policy: str) -> None:
    """Up to the first of them, a request that asks for its rows loads; others load all."""
    client, prompt = warm
    core = client.engines[0]
    keys = list(keys_kept(core))
    del offloaded_rows(core)._chunks[keys[2]]
    client.add("asks", prompt)
    client.run()
    assert worker_of(core).num_loaded == (2 if policy == "recompute" else 5)
    lost = list(range(2 * BLOCK, 3 * BLOCK))
    assert client.received["asks"].missing == ([] if policy == "recompute" else lost)
    empty_prefix_cache(core)
    client.add("asks for the rest", prompt, start=3 * BLOCK)
    client.run()
    assert worker_of(core).num_loaded == (7 if policy == "recompute" else 10)
    empty_prefix_cache(core)
    loaded = worker_of(core).num_loaded
    client.add("plain", prompt, start=None)
    client.run()
    assert worker_of(core).num_loaded == loaded + 5
    client.add("hits", prompt)
    client.run()
    assert client.received["hits"].missing == ([] if policy == "recompute" else lost)


def test_a_text_that_was_computed_twice(warm: tuple[TracingClient, list[int]]) -> None:
    """What is loaded is of the first time, and so are its rows."""
    client, prompt = warm
    client.add("computes again", prompt, kv_transfer_params={"max_load_tokens": 0})
    client.run()
    assert worker_of(client.engines[0]).num_loaded == 0
    empty_prefix_cache(client.engines[0])
    client.add("loads", prompt)
    client.run()
    assert worker_of(client.engines[0]).num_loaded == 5
    assert client.missing() == 0


def test_equal_prompts_at_once(is_async: bool) -> None:
    core = engine_that_offloads(is_async=is_async)
    client = TracingClient(core)
    for turn in range(3):
        for index in range(4):
            client.add(f"{turn} {index}", tokens(5 * BLOCK + 3), start=(0, None)[index % 2])
        client.run()
        empty_prefix_cache(core)
    assert worker_of(core).num_loaded == 10
    assert client.missing() == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_an_abort_around_a_load(warm: tuple[TracingClient, list[int]], steps: int) -> None:
    client, prompt = warm
    client.add("gone", prompt)
    client.steps(steps)
    client.abort("gone")
    for index in range(4):
        client.add(str(index), tokens(6 * BLOCK, seed=index + 1), max_tokens=20)
        client.add(f"again {index}", prompt)
    client.run()
    client.received.pop("gone")
    assert all(request.finish is FinishReason.LENGTH for request in client.received.values())
    assert client.missing() == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_reset_of_what_is_being_loaded(warm: tuple[TracingClient, list[int]], steps: int) -> None:
    """Its chunks are let go, and others take their place, while it goes on."""
    client, prompt = warm
    client.add("loads", prompt)
    client.steps(steps)
    assert client.engines[0].scheduler.reset_connector_cache()
    for index in range(3):
        client.add(str(index), tokens(6 * BLOCK, seed=index + 1))
        client.add(f"again {index}", prompt)
    client.run()
    assert client.missing() == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_a_reset_while_rows_are_kept(is_async: bool, steps: int) -> None:
    """As with new weights: nothing of before is there again."""
    core = engine_that_offloads(extra=ALL_TOKENS, is_async=is_async)
    check_keys(core)
    client = TracingClient(core)
    prompt = tokens(5 * BLOCK + 3)
    client.add("before", prompt, max_tokens=40)
    client.add("beside", tokens(3 * BLOCK, seed=1), max_tokens=40)
    client.steps(steps)
    if core.batch_queue and core.scheduler.defer_block_free:
        client.run()  # vLLM cannot reset while blocks are fenced
    before = set(keys_kept(core))
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert before
    assert not set(keys_kept(core))
    client.run()
    empty_prefix_cache(core)
    client.add("after", prompt)
    client.run()
    assert client.missing() == 0


# ---- what a connector must not do ----


def check_forgotten(client: TracingClient, *names: str) -> None:
    """That the engine went on, gave rows up, and says so; which rows are right was checked as they came."""
    assert all(client.received[name].finish is FinishReason.LENGTH for name in names)
    assert client.stats[-1].rows_forgotten > 0


@pytest.mark.parametrize(("of", "keys"), [("asks", slice(1, None)), ("asks", slice(0, 0)), ("another", slice(None))])
def test_a_load_of_others_than_were_prepared(warm: tuple[TracingClient, list[int]], of: str, keys: slice) -> None:
    """Also one that was prepared for another request, whose keys may be of another prompt."""
    client, prompt = warm
    core = client.engines[0]
    rows = offloaded_rows(core)
    manager = core.scheduler.connector.scheduler.manager
    prepare = manager.prepare_load

    def fewer(asked: Any, context: Any) -> Any:
        spec = prepare(asked, context)
        rows._loaded = of, rows._loaded[1][keys]
        return spec

    manager.prepare_load = fewer
    client.add("asks", prompt)
    client.run()
    assert client.received["asks"].missing == list(range(5 * BLOCK))
    check_forgotten(client, "asks")


def unknown_spec(rows: OffloadedRows, job: Any) -> None:
    job.dst_spec = CPULoadStoreSpec(job.dst_spec.chunk_ids.tolist())


def one_key_more(rows: OffloadedRows, job: Any) -> None:
    rows._stores = [(spec, [*keys, b"another"]) for spec, keys in rows._stores]


def one_block_less(rows: OffloadedRows, job: Any) -> None:
    job.src_spec.block_ids = job.src_spec.block_ids[:-1]
    job.src_spec.group_sizes = (job.src_spec.group_sizes[0] - 1,)


@pytest.mark.parametrize("change", [unknown_spec, one_key_more, one_block_less])
def test_a_store_of_other_chunks_than_were_prepared(
    is_async: bool, change: Callable[[OffloadedRows, Any], None]
) -> None:
    """No chunk has rows that are surely its own: also none of those that were kept before."""
    core = engine_that_offloads(is_async=is_async)
    prompt = tokens(5 * BLOCK + 3)
    client = computed_before(core, prompt)
    assert offloaded_rows(core)._chunks
    build = core.capture._loads.take_stores

    def changed(step: SchedulerOutput) -> Any:
        for job in step.kv_connector_metadata.store_jobs.values():
            jobs.append(job)
            before = copy(job.src_spec), copy(job.dst_spec)
            change(offloaded_rows(core), job)
            keeps = build(step)
            job.src_spec, job.dst_spec = before  # what the worker gets
            return keeps
        return build(step)

    jobs: list[Any] = []
    core.capture._loads.take_stores = changed
    client.add("stores", tokens(3 * BLOCK, seed=1))
    client.run()
    assert jobs
    core.capture._loads.take_stores = build
    empty_prefix_cache(core)
    client.add("asks", prompt)
    client.run()
    assert client.missing() == 0  # computed again
    check_forgotten(client, "stores", "asks")


# ---- beside another connector ----


def pulled(client: TracingClient, name: str, prompt: list[int], with_rows: bool = True) -> dict[str, Any]:
    """What another instance gives for a request to pull the KV of its prompt."""
    params = {"do_remote_decode": True, "do_remote_prefill": False} | ({PARAM: True} if with_rows else {})
    client.add(name, prompt, max_tokens=1, kv_transfer_params=params)
    client.run()
    given = client.received[name].kv_transfer_params
    assert given is not None
    return given


@pytest.mark.parametrize("connectors", [(PULL, NAME), (NAME, PULL)], ids=["pull first", "offload first"])
@pytest.mark.parametrize("with_rows", [True, False], ids=["rows", "no rows"])
def test_rows_are_of_the_connector_that_loads(is_async: bool, connectors: tuple[str, str], with_rows: bool) -> None:
    with store(is_async=True):
        prefill, decode = (
            TracingClient(engine_that_offloads(connectors=connectors, is_async=is_async)) for _ in range(2)
        )
        core = decode.engines[0]
        prompt = tokens(5 * BLOCK + 3)
        decode.add("own", prompt[: 3 * BLOCK], start=None)
        decode.run()
        empty_prefix_cache(core)
        # Offloading has three blocks of it, another instance all.
        decode.add("pulls", prompt, kv_transfer_params=pulled(prefill, "first", prompt, with_rows))
        decode.run()
        loads_own = connectors[0] == NAME
        assert worker_of(core).num_loaded == (3 if loads_own else 0)
        lost = 0 if with_rows or loads_own else len(prompt) - 1
        assert decode.missing() == lost
        # The next turn comes without another instance.
        empty_prefix_cache(core)
        decode.add("turn", [*decode.received["pulls"].sequence, 7, 8, 9])
        decode.run()
        assert decode.missing() == lost
        # Chunks of what was pulled without rows were kept so, and are no chunks for it.
        loaded = 5 if lost == 0 else 3
        assert worker_of(core).num_loaded == (3 if loads_own else 0) + loaded
