"""A KV connector around `engine`: which computation the KV in each slot is of, and whether rows are of the same.

Every token that is computed gets a number, which is in its row and stays with its KV, in a store and in other engines
too. So a row is right only if a request's own forward passes read KV of that very number.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.engine.kv_transfer import transfer_params
from routed_experts.capture.engine.kv_transfer.connectors import CONNECTORS, ON_LOAD_VARIABLE, Connector, Kind
from routed_experts.capture.handoff import PARAM
from routed_experts.protocol.codec import UNKNOWN
from tests.contract.engine import (
    BLOCK,
    NUM_BLOCKS,
    ArithmeticExecutor,
    Client,
    Core,
    K,
    L,
    Received,
    Rows,
    Sequence,
    Tokens,
    engine,
    requests_at_random,
)

Slot = tuple[bytes | None, int]
"""The prefix whose last token's KV it is, and the number of its computation."""

LEASE_S = 30.0
"""For how long a prefill instance keeps KV for whoever is to pull it."""

NAME, TRANSFER, PULL = "StoreOfTheTests", "TransferOfTheTests", "PullOfTheTests"
KVConnectorFactory.register_connector(NAME, __name__, "StoreConnector")
KVConnectorFactory.register_connector(TRANSFER, __name__, "TransferConnector")
KVConnectorFactory.register_connector(PULL, __name__, "PullConnector")


class Clock:
    """In the place of the module `time`."""

    def __init__(self) -> None:
        self.passed = 0.0

    def time(self) -> float:
        return time.time() + self.passed

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


@dataclass
class Sent:
    """KV of a prompt that another instance may pull: where it lies, in the memory of the instance that computed it.

    Attributes:
        expires: when its blocks are given to others, as `Clock.monotonic` counts.
    """

    executor: "TracingExecutor"
    slots: list[int]
    expires: float
    is_pulled: bool = False


@dataclass
class Store:
    """What is kept outside the engines, and how a connector to it behaves.

    Attributes:
        blocks: by the prefix that they end.
        sent: the KV of prompts that another instance may pull, by request.
        clock: what leases go by.
        heartbeats: whether those of requests that are to pull, in every step, arrive.
        refused: what prefill instances were told to let go without a pull, by their names for it.
        offers_aborted: whether the KV of aborted requests is offered too.
        is_async: whether loads run beside steps.
        delay: steps that such a load takes.
        fails: whether to fail a load, asked for each.
        fails_as: what of a failed load is reported: the blocks, or the request.
        fetches_hits: whether a load writes over what was found in the prefix cache.
        has_prompts: whether it has whole prompts only, and offers what they are longer than the prefix hit: less than
            nothing, where a request hits its own answer.
    """

    blocks: dict[bytes, list[Slot]] = field(default_factory=dict)
    sent: dict[str, Sent] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    heartbeats: bool = True
    refused: list[str] = field(default_factory=list)
    offers_aborted: bool = False
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    is_async: bool = False
    delay: int = 2
    fails: Callable[[], bool] = lambda: False
    fails_as: str = "blocks"
    fetches_hits: bool = False
    has_prompts: bool = False
    num_negative: int = 0
    is_writing: bool = True
    num_loaded: int = 0
    num_failed: int = 0


STORE = Store()

_MARK = 0x4100
"""Ids from here on stand for numbers: no prefix gives any of them, so that no row has an id twice."""


@dataclass
class _Load:
    request_id: str
    blocks: list[tuple[int, bytes]]
    is_async: bool
    steps: int
    remote: str | None = None


@dataclass
class _Metadata(KVConnectorMetadata):
    loads: list[_Load]
    saves: list[tuple[int, bytes]]
    sends: dict[str, list[int]] = field(default_factory=dict)


class StoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The scheduler's side; the executor is the worker's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._requests: dict[str, Request] = {}
        self._asked: dict[str, int] = {}
        self._loads: list[_Load] = []

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if STORE.dice.random() < 0.1:
            return None, False  # still looking
        keys = _keys(request)[: (request.num_tokens - 1) // BLOCK]
        first = end = num_computed_tokens // BLOCK
        while end < len(keys) and keys[end] in STORE.blocks:
            end += 1
        self._asked[request.request_id] = num_computed_tokens
        if STORE.has_prompts:
            num_blocks = (request.num_prompt_tokens - 1) // BLOCK
            end = num_blocks if all(key in STORE.blocks for key in keys[:num_blocks]) else first
            STORE.num_negative += end < first
        count = (end - first) * BLOCK
        return count, STORE.is_async and count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        first = self._asked[request.request_id] // BLOCK
        end = first + num_external_tokens // BLOCK
        pairs = list(zip(blocks.get_block_ids()[0], _keys(request), strict=False))
        first = 0 if STORE.fetches_hits else first
        self._loads.append(_Load(request.request_id, pairs[first:end], STORE.is_async, STORE.delay))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        saves = []
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            end = (request.num_computed_tokens + count) // BLOCK
            saves += list(zip(state.resolve_block_ids(request_id)[0], _keys(request)[:end], strict=False))
        return _Metadata(loads, saves)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        STORE.blocks.clear()
        return True

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class TransferConnector(StoreConnector):
    """Loads where a request says so."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class PullConnector(StoreConnector):
    """Prefill and decode apart, as with NIXL: the whole of a prompt is pulled beside the steps, once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sends: dict[str, list[int]] = {}
        self._expecting: dict[str, str] = {}

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            self._expecting[request.request_id] = params["remote_request_id"]

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.finished_recving or ():
            self._expecting.pop(request_id, None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._asked[request.request_id] = num_computed_tokens
        params = request.kv_transfer_params or {}
        assert PARAM not in params, "connectors are not shown rows"
        count = request.num_prompt_tokens - num_computed_tokens if params.get("do_remote_prefill") else 0
        return count, count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if num_external_tokens:
            first = self._asked[request.request_id] // BLOCK
            pairs = [(block, b"%d" % index) for index, block in enumerate(blocks.get_block_ids()[0])]
            remote = params["remote_request_id"]
            self._loads.append(_Load(request.request_id, pairs[first:], True, STORE.delay, remote))
        params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        sends, self._sends = self._sends, {}
        for remote in self._expecting.values() if STORE.heartbeats else ():
            if (sent := STORE.sent.get(remote)) is not None:
                sent.expires = max(sent.expires, STORE.clock.monotonic() + LEASE_S * 2 / 3)
        return _Metadata(loads, [], sends)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        self._expecting.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            STORE.refused.append(params["remote_request_id"])
        is_offered = STORE.offers_aborted or request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        if not params.get("do_remote_decode") or not is_offered:
            return False, None
        self._sends[request.request_id] = block_ids
        return True, {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": request.request_id}


def _keys(request: Request) -> list[bytes]:
    return Tokens(request.all_token_ids).prefixes()[BLOCK - 1 :: BLOCK]


class TracingExecutor(ArithmeticExecutor):
    """Numbers every computation of a token, and moves KV as `StoreConnector` says."""

    _numbers = iter(range(1, 1 << 30))  # of all engines

    def _init_executor(self) -> None:
        super()._init_executor()
        self._number = [0] * (NUM_BLOCKS * BLOCK)
        self._underway: list[_Load] = []
        self._sending: dict[str, Sent] = {}
        self._bad_blocks: set[int] = set()
        self.seen: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))

    def compute(self, request_id: str, sequence: Sequence, tokens: Tokens, start: int, end: int) -> Rows:
        if self._bad_blocks.intersection(sequence.blocks):  # the step runs all the same, for nothing
            return np.zeros((end - start, L, K), np.int16)
        rows = super().compute(request_id, sequence, tokens, start, end)
        for row, slot in zip(rows, sequence.slots(start, end), strict=True):
            self._number[slot] = number = next(self._numbers)
            row[:2, -1] = _MARK + (number & 0x1FFF), _MARK + (number >> 13)
        for position, slot in enumerate(sequence.slots(0, end)):
            self.seen[request_id][position].add(self._number[slot])
        return rows

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        metadata = _Metadata([], [])
        given = scheduler_output.kv_connector_metadata
        for each in given.metadata if isinstance(given, MultiKVConnectorMetadata) else (given,):
            assert isinstance(each, _Metadata)
            metadata.loads += each.loads
            metadata.saves += each.saves
            metadata.sends |= each.sends
        now = STORE.clock.monotonic()
        for request_id, blocks in metadata.sends.items():
            slots = [slot for block in blocks for slot in range(block * BLOCK, (block + 1) * BLOCK)]
            STORE.sent[request_id] = self._sending[request_id] = Sent(self, slots, now + LEASE_S)
        done = {name for name, sent in self._sending.items() if sent.is_pulled or now > sent.expires}
        for request_id in done:
            del self._sending[request_id]
        report = KVConnectorOutput(finished_recving=set(), finished_sending=done)
        self._underway += metadata.loads
        for load in self._underway:
            load.steps -= 1
            if not load.is_async or load.steps < 0:
                self._finish(load, report)
        self._underway = [load for load in self._underway if load.is_async and load.steps >= 0]
        self._bad_blocks = report.invalid_block_ids
        result = super().execute_model(scheduler_output, non_block)
        output = self._output
        assert isinstance(output, ModelRunnerOutput)
        for request_id, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            sequence = self._sequences[request_id]
            if sampled and self._bad_blocks.intersection(sequence.blocks):  # vLLM does not take it
                sequence.tokens = Tokens(sequence.tokens[:-1])
        if not report.is_empty():
            output.kv_connector_output = report
        for block, key in metadata.saves if STORE.is_writing and not report.invalid_block_ids else ():
            slots = range(block * BLOCK, (block + 1) * BLOCK)
            if self._kv[slots[-1]] == key:  # else it was given away since
                STORE.blocks.setdefault(key, [(self._kv[slot], self._number[slot]) for slot in slots])
        return result

    def _finish(self, load: _Load, report: KVConnectorOutput) -> None:
        failed = STORE.fails()
        bad = range(STORE.dice.randrange(len(load.blocks)) if failed else len(load.blocks), len(load.blocks))
        for index, (block, key) in enumerate(load.blocks):
            kept = STORE.blocks.get(key, [(None, 0)] * BLOCK)
            if load.remote is not None:
                sent = STORE.sent[load.remote]  # whatever its blocks hold by now
                slots = sent.slots[int(key) * BLOCK :][:BLOCK]
                kept = [(sent.executor._kv[slot], sent.executor._number[slot]) for slot in slots]
                kept = [*kept, *[(None, 0)] * BLOCK][:BLOCK]
            if index in bad:
                kept = [(None, 0)] * BLOCK
            for slot, (prefix, number) in zip(range(block * BLOCK, (block + 1) * BLOCK), kept, strict=True):
                self._kv[slot], self._number[slot] = prefix, number
        if load.remote is not None and not failed:
            STORE.sent[load.remote].is_pulled = True
        STORE.num_loaded += 1
        STORE.num_failed += failed
        if load.is_async:
            assert report.finished_recving is not None
            report.finished_recving.add(load.request_id)
        if failed and STORE.fails_as == "request":
            report.failed_recving.add(load.request_id)
        elif failed:
            report.invalid_block_ids.update(load.blocks[index][0] for index in bad)


@dataclass
class TracedReceived(Received):
    """Checks that rows are of the computations whose KV the request's forward passes read."""

    seen: dict[int, set[int]] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)

    def check(self, rows: Rows, first: int, end: int) -> None:
        expected = self.sequence.rows(first, end).copy()
        assert rows.shape == expected.shape
        for position, row, right in zip(range(first, end), rows, expected, strict=True):
            if (row == UNKNOWN).all():
                self.missing.append(position)
                continue
            right[:2, -1] = row[:2, -1]
            number = (int(row[0, -1]) - _MARK) | (int(row[1, -1]) - _MARK) << 13
            is_own = np.array_equal(row, right) and number in self.seen[position]
            assert is_own, f"position {position}: a row of another computation"


class TracingClient(Client):
    """Keeps with each request what its forward passes read."""

    def expect(self, request_id: str, *about: Any) -> Received:
        choice = request_id.partition("_")[0]
        executor = self.engines[int(choice) % len(self.engines) if choice.isdigit() else 0].model_executor
        assert isinstance(executor, TracingExecutor)
        return TracedReceived(*about, seen=executor.seen[request_id])

    def run(self, *others: Client, steps: int = 10_000) -> None:
        """As `Client.run`; KV that waits to be pulled may stay."""
        while any(_is_busy(core) for core in self.engines):
            assert steps > 0, "the engine does not come to an end"
            steps -= 1
            self.step(*others)

    def missing(self) -> int:
        """How many rows that came were not known."""
        return sum(len(request.missing) for request in self.received.values() if isinstance(request, TracedReceived))


def _is_busy(core: Core) -> bool:
    scheduler = core.scheduler
    if not core.model_executor._sending:
        return bool(scheduler.has_requests() or core.batch_queue)
    # vLLM goes on with empty steps until that KV was pulled.
    is_waited_for = scheduler.has_unfinished_requests() or len(core.capture.output_queue) > 0
    runs = any(step.total_num_scheduled_tokens for _, step, *_ in core.batch_queue or ())
    return is_waited_for or runs or bool(scheduler.finished_req_ids)


@contextmanager
def store(policy: str = "recompute", **about: Any) -> Iterator[Store]:
    """An empty store that behaves like that, and what is done about its KV."""
    global STORE
    STORE = Store(**about)
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in ((NAME, Kind.STORE), (TRANSFER, Kind.TRANSFER), (PULL, Kind.TRANSFER)):
            connector = Connector(
                kind, writes_behind_hit=not STORE.fetches_hits, lease_s=LEASE_S if name == PULL else None
            )
            patch.setitem(CONNECTORS, name, connector)
        patch.setitem(transfer_params.READ_BY, PULL, (transfer_params.NIXL, ("remote_request_id",)))
        patch.setenv(ON_LOAD_VARIABLE, policy)
        yield STORE


def engine_with_store(
    failures: str = "recompute", role: str = "kv_both", connectors: tuple[str, ...] = (NAME,), **about: Any
) -> Core:
    """An engine with the connector, or several; `failures` is what vLLM does about loads that fail."""
    config = KVTransferConfig(kv_connector=connectors[0], kv_role=role, kv_load_failure_policy=failures)
    if len(connectors) > 1:
        children = [{"kv_connector": connector, "kv_role": role} for connector in connectors]
        config.kv_connector, config.kv_connector_extra_config = "MultiConnector", {"connectors": children}
    return engine(kv_transfer=config, executor=TracingExecutor, **about)


def dice(seed: int, chance: float) -> Callable[[], bool]:
    """For `Store.fails`."""
    rolls = random.Random(seed)
    return lambda: rolls.random() < chance


def empty_prefix_cache(core: Core) -> None:
    """What is in the store stays there."""
    assert core.scheduler.reset_prefix_cache()


def computed_before(core: Core, prompt: list[int]) -> TracingClient:
    """A client of an engine that has computed a prompt, for a request without the opt-in, and whose prefix cache does
    not have it any more."""
    client = TracingClient(core)
    client.add("before", prompt, start=None)
    client.run()
    empty_prefix_cache(core)
    return client


def mix(core: Core, seed: int, turns: int = 45, resets: float = 0.1, resets_running: bool = True) -> TracingClient:
    """Shared prefixes, with and without the opt-in, preemptions, aborts and resets.

    Args:
        resets: how often.
        resets_running: whether the prefix cache is reset under running requests without the connector's too.
    """
    dice = random.Random(seed)
    client = TracingClient(core)

    def reset() -> None:
        (manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
        loading = manager.req_to_blocks.keys() - {request.request_id for request in core.scheduler.running}
        fenced = core.scheduler.defer_block_free and core.batch_queue  # in both cases vLLM cannot reset
        if not loading and not fenced and dice.random() < resets:
            both = dice.random() < 0.3
            core.scheduler.reset_prefix_cache(reset_running_requests=both or resets_running, reset_connector=both)

    gone = requests_at_random(client, dice, turns, reset, length=150, chances=(0.7, 0.2))
    client.run()
    for request_id in gone:
        client.received.pop(request_id)
    assert core.capture._steps == {}
    assert core.capture.num_tracked == 0
    assert all(stats.rows_forgotten == 0 for stats in client.stats), "the connector did what is not expected of it"
    return client
