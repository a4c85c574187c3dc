"""KV that vLLM's `OffloadingConnector` keeps and loads again: its rows come with it, and are of its computation."""

from collections import Counter
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from routed_experts.capture.engine.kv_transfer.connectors import ON_LOAD_VARIABLE
from routed_experts.capture.engine.kv_transfer.offloading import OffloadedRows, OffloadLoad, OffloadStore
from routed_experts.capture.handoff import PARAM
from routed_experts.capture.host_cache import Cause
from tests.contract.engine import BLOCK, Client, Core, tokens
from tests.contract.loads import NAME as STORE
from tests.contract.loads import PULL, computed_before, mix, store
from tests.contract.offloading import NAME, engine_that_offloads

PROMPT = tokens(5 * BLOCK + 3)


@pytest.fixture(autouse=True, params=["recompute"])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(ON_LOAD_VARIABLE, request.param)
    return str(request.param)


def rows_of(core: Core) -> OffloadedRows:
    (rows,) = (rows for rows in core.capture.external_kv._offloaded if rows is not None)
    return rows


def keys_kept(core: Core) -> list[bytes]:
    """The chunks that are there, by vLLM's account, or soon will be; the oldest first."""
    connectors = getattr(core.scheduler.connector, "_connectors", [core.scheduler.connector])
    (connector,) = (each for each in connectors if isinstance(each, OffloadingConnector))
    return list(connector.scheduler.manager._policy.chunks)


def num_loaded(client: Client) -> int:
    return client.engines[0].model_executor.worker.num_loaded


def check_keys(core: Core) -> None:
    """From now on, that rows are kept of the chunks that vLLM keeps, and of no others, whenever a step is scheduled."""
    schedule = core.scheduler.schedule

    def checked(*args: Any, **kwargs: Any) -> SchedulerOutput:
        step = schedule(*args, **kwargs)
        assert set(rows_of(core)._chunks) == set(keys_kept(core))
        return step

    core.scheduler.schedule = checked


def mix_that_reloads(core: Core, seed: int) -> Client:
    """vLLM 0.32 fails when running requests are preempted by a reset, and load what the connector kept at once."""
    check_keys(core)
    return mix(core, seed, turns=150, resets=0.04, resets_running=False)


@pytest.mark.parametrize(
    ("policy", "seed", "about"),
    [
        ("recompute", 0, {"answers": True}),
        ("missing", 1, {"chunks": 13, "blocks_per_chunk": 3}),
        # Each chunk is let go again and again, and sometimes there is none for a store.
        ("recompute", 1, {"chunks": 6, "answers": True, "num_blocks": 14}),
        # Drafts that are rejected leave rows behind the last token, and few blocks are soon another's.
        ("recompute", 1, {"drafts": 3, "answers": True, "num_blocks": 14}),
        ("recompute", 3, {"stages": 2}),
    ],
    indirect=["policy"],
)
def test_at_random(is_async: bool, seed: int, about: dict[str, Any], policy: str) -> None:
    """Every row is there, whatever the policy, as no chunk is without."""
    core = engine_that_offloads(**{"is_async": is_async, "num_blocks": 24, "max_num_seqs": 4, **about})
    client = mix_that_reloads(core, seed)
    assert client.missing() == 0
    assert num_loaded(client) > 5
    assert core.model_executor.worker.num_stored > (100 if "num_blocks" in about else 5)


@pytest.mark.parametrize(
    ("policy", "connectors"), [("recompute", (NAME, STORE)), ("missing", (STORE, NAME))], indirect=["policy"]
)
def test_at_random_beside_a_store(is_async: bool, connectors: tuple[str, str], policy: str) -> None:
    """What comes from there has no rows, and keeps none."""
    sizes: dict[str, Any] = {"answers": True, "is_async": is_async, "num_blocks": 18, "max_num_seqs": 4}
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
    core = engine_that_offloads(answers=True, is_async=True, num_blocks=12, chunk=256, drafts=drafts)
    came_first: list[bool] = []
    apply = OffloadStore.apply
    monkeypatch.setattr(OffloadStore, "apply", lambda *at: came_first.append(at[0].comes_first) or apply(*at))
    client = Client(core)
    client.add("first", tokens(BLOCK + 1), max_tokens=num_tokens)
    client.steps(2)
    client.answer("needs all blocks", tokens(10 * BLOCK + 1, seed=1), max_tokens=2)
    assert any(came_first) == (num_tokens == 16)
    client.add("again", [*client.received["first"].sequence, 1])
    client.finish()
    assert num_loaded(client) == (BLOCK + num_tokens) // BLOCK


@pytest.fixture
def warm(is_async: bool) -> Client:
    """Of an engine that keeps chunks of PROMPT, which its prefix cache has not."""
    return computed_before(engine_that_offloads(is_async=is_async), PROMPT)


def test_what_was_kept_is_loaded_with_its_rows(warm: Client) -> None:
    for name in ("asks", "hits"):
        warm.answer(name, PROMPT)
        assert num_loaded(warm) == 5
    warm.finish()


@pytest.mark.parametrize("policy", ["recompute", "missing"], indirect=True)
def test_chunks_without_rows(warm: Client, policy: str) -> None:
    """Up to the first of them, a request that asks for its rows loads; others load all."""
    core = warm.engines[0]
    del rows_of(core)._chunks[keys_kept(core)[2]]
    recompute = policy == "recompute"
    lost = [] if recompute else list(range(2 * BLOCK, 3 * BLOCK))
    loaded = 0
    for name, start, count in (
        ("asks", 0, 2 if recompute else 5),
        ("asks for the rest", 3 * BLOCK, 5),
        ("plain", None, 5),
    ):
        assert warm.answer(name, PROMPT, start).missing == (lost if start == 0 else [])
        assert num_loaded(warm) - loaded == count
        loaded += count
        if name != "plain":
            core.empty_prefix_cache()
    assert warm.answer("hits", PROMPT).missing == lost
    warm.finish(missing=2 * len(lost))
    assert warm.causes == Counter({Cause.KV_STORE: 2 * len(lost)})


def test_a_text_that_was_computed_twice(warm: Client) -> None:
    """What is loaded is of the first time, and so are its rows."""
    warm.answer("computes again", PROMPT, kv_transfer_params={"max_load_tokens": 0})
    assert num_loaded(warm) == 0
    warm.engines[0].empty_prefix_cache()
    warm.add("loads", PROMPT)
    warm.finish()
    assert num_loaded(warm) == 5


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("ends", ["abort", "reset"])
def test_an_end_of_what_is_being_loaded(warm: Client, steps: int, ends: str) -> None:
    """Others take the blocks of a request that is aborted, and the chunks that are let go, while the load goes on."""
    warm.add("loads", PROMPT)
    warm.steps(steps)
    if ends == "abort":
        warm.abort("loads")
    else:
        assert warm.engines[0].scheduler.reset_connector_cache()
    for index in range(4):
        warm.add(str(index), tokens(6 * BLOCK, seed=index + 1), max_tokens=20)
        warm.add(f"again {index}", PROMPT)
    warm.finish(but=["loads"] if ends == "abort" else ())


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_a_reset_while_rows_are_kept(is_async: bool, steps: int) -> None:
    """As with new weights: nothing of before is there again."""
    core = engine_that_offloads(answers=True, is_async=is_async)
    check_keys(core)
    client = Client(core)
    client.add("before", PROMPT, max_tokens=40)
    client.add("beside", tokens(3 * BLOCK, seed=1), max_tokens=40)
    client.steps(steps)
    if core.batch_queue and core.scheduler.defer_block_free:
        client.run()  # vLLM cannot reset while blocks are fenced
    assert keys_kept(core)
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not keys_kept(core)
    client.run()
    core.empty_prefix_cache()
    client.add("after", PROMPT)
    client.finish()


# ---- what a connector must not do: the engine goes on, gives rows up, and says so ----


@pytest.mark.parametrize(("of", "keys"), [("asks", slice(1, None)), ("asks", slice(0, 0)), ("another", slice(None))])
def test_a_load_of_others_than_were_prepared(warm: Client, of: str, keys: slice) -> None:
    """Also one that was prepared for another request, whose keys may be of another prompt."""
    core = warm.engines[0]
    rows, manager = rows_of(core), core.scheduler.connector.scheduler.manager
    prepare = manager.prepare_load

    def fewer(asked: Any, context: Any) -> Any:
        spec = prepare(asked, context)
        rows._loaded = of, rows._loaded[1][keys]
        return spec

    manager.prepare_load = fewer
    assert warm.answer("asks", PROMPT).missing == list(range(5 * BLOCK))
    warm.finish(missing=5 * BLOCK, forgets=True)


def unknown_spec(rows: OffloadedRows, job: Any) -> None:
    job.dst_spec = CPULoadStoreSpec(job.dst_spec.chunk_ids.tolist())


def one_key_more(rows: OffloadedRows, job: Any) -> None:
    rows._stores = [(spec, [*keys, b"another"]) for spec, keys in rows._stores]


def one_block_less(rows: OffloadedRows, job: Any) -> None:
    job.src_spec.block_ids = job.src_spec.block_ids[:-1]
    job.src_spec.group_sizes = (job.src_spec.group_sizes[0] - 1,)


@pytest.mark.parametrize("change", [unknown_spec, one_key_more, one_block_less])
def test_a_store_of_other_chunks_than_were_prepared(
    warm: Client, change: Callable[[OffloadedRows, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chunk has rows that are surely its own: also none of those that were kept before."""
    core = warm.engines[0]
    assert rows_of(core)._chunks
    loads, jobs = core.capture.external_kv, []
    build = loads.take_stores

    def changed(step: SchedulerOutput) -> Any:
        for job in step.kv_connector_metadata.store_jobs.values():
            jobs.append(job)
            before = copy(job.src_spec), copy(job.dst_spec)
            change(rows_of(core), job)
            keeps = build(step)
            job.src_spec, job.dst_spec = before  # what the worker gets
            return keeps
        return build(step)

    with monkeypatch.context() as patch:
        patch.setattr(loads, "take_stores", changed)
        warm.answer("stores", tokens(3 * BLOCK, seed=1))
    assert jobs
    core.empty_prefix_cache()
    warm.add("asks", PROMPT)  # is computed again
    warm.finish(forgets=True)


# ---- beside another connector ----


@pytest.mark.parametrize("connectors", [(PULL, NAME), (NAME, PULL)], ids=["pull first", "offload first"])
@pytest.mark.parametrize("with_rows", [True, False], ids=["rows", "no rows"])
def test_rows_are_of_the_connector_that_loads(is_async: bool, connectors: tuple[str, str], with_rows: bool) -> None:
    ask = {"do_remote_decode": True, "do_remote_prefill": False} | ({PARAM: True} if with_rows else {})
    with store(is_async=True):
        prefill, decode = (Client(engine_that_offloads(connectors=connectors, is_async=is_async)) for _ in range(2))
        decode.answer("own", PROMPT[: 3 * BLOCK], start=None)
        decode.engines[0].empty_prefix_cache()
        # Offloading has three blocks of it, another instance all.
        params = prefill.answer("first", PROMPT, max_tokens=1, kv_transfer_params=ask).kv_transfer_params
        pulls = decode.answer("pulls", PROMPT, kv_transfer_params=params)
        loads_own = connectors[0] == NAME
        loaded = 3 if loads_own else 0
        assert num_loaded(decode) == loaded
        lost = 0 if with_rows or loads_own else len(PROMPT) - 1
        assert len(pulls.missing) == lost
        # The next turn comes without another instance.
        decode.engines[0].empty_prefix_cache()
        decode.add("turn", [*pulls.sequence, 7, 8, 9])
        decode.finish(missing=lost)
        # Chunks of what was pulled without rows were kept so, and are no chunks for it.
        assert num_loaded(decode) == loaded + (5 if lost == 0 else 3)
