"""KV that vLLM's `OffloadingConnector` keeps and loads again: its rows come with it, and are of its
computation."""

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from routed_experts.capture.engine.connectors import CONNECTORS, KnownConnector, KVSource
from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.scheduler.kv.offloading import OffloadedRows, OffloadStore
from tests.contract.engine import BLOCK, Client, tokens
from tests.contract.loads import computed_before
from tests.contract.offloading import DERIVED, engine_that_offloads, keys_kept, rows_of
from tests.contract.offloading import num_loaded as num_loaded_by

PROMPT = tokens(5 * BLOCK + 3)


def num_loaded(client: Client) -> int:
    return num_loaded_by(client.engines[0])


@pytest.mark.parametrize(("num_tokens", "drafts"), [(15, 0), (16, 0), (16, 3), (17, 0)])
def test_blocks_that_are_copied_out_as_another_gets_them(
    num_tokens: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of a request is stored when it has ended. If it is another's by then, that is
    before the step."""
    core = engine_that_offloads(
        answers=True, is_async=True, num_blocks=12, chunk=256, drafts=drafts
    )
    came_first: list[bool] = []
    apply = OffloadStore.apply
    monkeypatch.setattr(
        OffloadStore, "apply", lambda *at: came_first.append(at[0].runs_before_step) or apply(*at)
    )
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


def test_chunks_without_rows(warm: Client) -> None:
    """Up to the first of them, a request that asks for its rows loads; others load all."""
    core = warm.engines[0]
    del rows_of(core)._chunks[keys_kept(core)[2]]
    loaded = 0
    for name, start, count in (
        ("asks", 0, 2),
        ("asks for the rest", 3 * BLOCK, 5),
        ("plain", None, 5),
    ):
        assert warm.answer(name, PROMPT, start).missing == []
        assert num_loaded(warm) - loaded == count
        loaded += count
        if name != "plain":
            core.empty_prefix_cache()
    assert warm.answer("hits", PROMPT).missing == []
    warm.finish()


def test_a_class_that_derives_from_vllms_is_one_line_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CONNECTORS, DERIVED, KnownConnector(KVSource.OFFLOAD))
    client = computed_before(engine_that_offloads(connectors=(DERIVED,)), PROMPT)
    assert client.answer("asks", PROMPT).missing == []
    assert num_loaded(client) == 5
    client.finish()


class OtherManager(CPUOffloadingManager):  # type: ignore[misc]
    """Somebody's own, of chunks that may come from elsewhere."""


def test_a_manager_that_is_not_vllms_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.kv_offload.cpu.spec.CPUOffloadingManager", OtherManager)
    with pytest.raises(UnsupportedConfig, match="remove spec_name"):
        engine_that_offloads()


# ---- what a KV connector must not do: the engine goes on, gives rows up, and says so ----


@pytest.mark.parametrize(
    ("of", "keys"), [("asks", slice(1, None)), ("asks", slice(0, 0)), ("another", slice(None))]
)
def test_a_load_of_others_than_were_prepared(warm: Client, of: str, keys: slice) -> None:
    """Also one that was prepared for another request, whose keys may be of another prompt."""
    core = warm.engines[0]
    rows, manager = rows_of(core), core.scheduler.connector.scheduler.manager
    prepare = manager.prepare_load

    def fewer(request: Any, context: Any) -> Any:
        spec = prepare(request, context)
        prepared = rows._prepared_load
        rows._prepared_load = prepared._replace(request_id=of, keys=prepared.keys[keys])
        return spec

    manager.prepare_load = fewer
    assert warm.answer("asks", PROMPT).missing == list(range(5 * BLOCK))
    warm.finish(missing=5 * BLOCK, forgets=True)


def unknown_spec(rows: OffloadedRows, job: Any) -> None:
    job.dst_spec = CPULoadStoreSpec(job.dst_spec.chunk_ids.tolist())


def one_key_more(rows: OffloadedRows, job: Any) -> None:
    rows._prepared_stores = [
        store._replace(keys=[*store.keys, b"another"]) for store in rows._prepared_stores
    ]


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
    build = loads.pop_stores

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
        patch.setattr(loads, "pop_stores", changed)
        warm.answer("stores", tokens(3 * BLOCK, seed=1))
    assert jobs
    core.empty_prefix_cache()
    warm.add("asks", PROMPT)  # is computed again
    warm.finish(forgets=True)
