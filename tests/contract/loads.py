"""A KV connector around `engine`: which computation the KV in each slot is of, and whether rows are
of the same.

Every token that is computed gets a number, which is in its row and stays with its KV, in other
engines too. So a row is right only if a request's own forward passes read KV of that
very number.
"""

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
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
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.engine.connectors import CONNECTORS, KnownConnector, KVSource
from routed_experts.capture.wire.prefill_rows import PARAM
from routed_experts.protocol.codec import UNKNOWN
from tests.contract import engine as around
from tests.contract.engine import BLOCK, NUM_BLOCKS, Client, Core, Rows, Sequence, Tokens

Slot = tuple[bytes | None, int]
"""The prefix whose last token's KV it is, and the number of its computation."""
NOTHING: Slot = None, 0

LEASE_S = 30.0
"""For how long a prefill instance keeps KV for whoever is to pull it."""

REMOTE = {"do_remote_decode": True, "do_remote_prefill": False, PARAM: True}
"""What a prefill instance is asked, with the rows of what it computes."""

TRANSFER, PULL = "TransferOfTheTests", "PullOfTheTests"
for _name, _class in ((TRANSFER, "TransferConnector"), (PULL, "PullConnector")):
    KVConnectorFactory.register_connector(_name, __name__, _class)


class Clock:
    """In the place of the module `time`. It stands still but for what a test says has `passed`."""

    passed = 0.0

    def __init__(self) -> None:
        self._time, self._monotonic = time.time(), time.monotonic()  # clock: where it begins

    def time(self) -> float:
        return self._time + self.passed

    def monotonic(self) -> float:
        return self._monotonic + self.passed


@dataclass
class Sent:
    """KV of a prompt that another instance may pull: where it lies, in the memory of the instance
    that computed it."""

    executor: "TracingExecutor"
    slots: list[int]
    expires: float  # when its blocks are given to others, as `Clock.monotonic` counts
    is_pulled: bool = False


@dataclass
class Store:
    """What is kept outside the engines, and how a connector to it behaves."""

    blocks: dict[bytes, list[Slot]] = field(default_factory=dict)  # by the prefix that they end
    # KV of prompts that may be pulled, by request
    sent: dict[str, Sent] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)  # what leases go by
    # what prefill instances were told to let go without a pull
    refused: list[str] = field(default_factory=list)
    offers_aborted: bool = False  # whether the KV of aborted requests is offered too
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    fails: float = 0  # how likely a load fails
    fail_dice: random.Random = field(default_factory=lambda: random.Random(1))
    fails_as: str = "blocks"  # what of a failed load is reported: them, or the "request"
    num_loaded: int = 0
    num_failed: int = 0


STORE = Store()

_MARK = 0x4100
"""Ids from here on stand for numbers: no prefix gives any of them, so that no row has an id
twice."""


@dataclass
class _Load:
    request_id: str
    blocks: list[tuple[int, bytes]]
    remote: str | None = None
    steps: int = 2


@dataclass
class _Metadata(KVConnectorMetadata):
    loads: list[_Load]
    saves: list[tuple[int, bytes]]
    sends: dict[str, list[int]] = field(default_factory=dict)


class TransferConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads, where a request says so, what any engine has computed; beside steps, of which each load
    takes two. The scheduler's side; the executor is the worker's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._requests: dict[str, Request] = {}
        self._asked: dict[str, int] = {}
        self._loads: list[_Load] = []

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        if STORE.dice.random() < 0.1:
            return None, False  # still looking
        keys = _keys(request)[: (request.num_tokens - 1) // BLOCK]
        first = end = num_computed_tokens // BLOCK
        while end < len(keys) and keys[end] in STORE.blocks:
            end += 1
        self._asked[request.request_id] = num_computed_tokens
        count = (end - first) * BLOCK
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            first = self._asked[request.request_id] // BLOCK
            pairs = list(zip(blocks.get_block_ids()[0], _keys(request), strict=False))
            loaded = slice(first, first + num_external_tokens // BLOCK)
            self._loads.append(_Load(request.request_id, pairs[loaded]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        saves = []
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            end = (request.num_computed_tokens + count) // BLOCK
            saves += list(
                zip(state.resolve_block_ids(request_id)[0], _keys(request)[:end], strict=False)
            )
        return _Metadata(loads, saves)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        STORE.blocks.clear()
        return True

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class PullConnector(TransferConnector):
    """Prefill and decode apart, as with NIXL: the whole of a prompt is pulled beside the steps,
    once."""

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

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._asked[request.request_id] = num_computed_tokens
        params = request.kv_transfer_params or {}
        assert PARAM not in params, "connectors are not shown rows"
        count = (
            request.num_prompt_tokens - num_computed_tokens
            if params.get("do_remote_prefill")
            else 0
        )
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params or {}
        if num_external_tokens:
            first = self._asked[request.request_id] // BLOCK
            pairs = [
                (block, b"%d" % index) for index, block in enumerate(blocks.get_block_ids()[0])
            ]
            self._loads.append(
                _Load(request.request_id, pairs[first:], params["remote_request_id"])
            )
        params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        sends, self._sends = self._sends, {}
        for remote in self._expecting.values():  # heartbeats
            if (sent := STORE.sent.get(remote)) is not None:
                sent.expires = max(sent.expires, STORE.clock.monotonic() + LEASE_S * 2 / 3)
        return _Metadata(loads, [], sends)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        self._expecting.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            STORE.refused.append(params["remote_request_id"])
        is_offered = STORE.offers_aborted or request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        if not params.get("do_remote_decode") or not is_offered:
            return False, None
        self._sends[request.request_id] = block_ids
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": request.request_id,
        }


def _keys(request: Request) -> list[bytes]:
    return Tokens(request.all_token_ids).prefixes()[BLOCK - 1 :: BLOCK]


def slots_of(block: int) -> range:
    return range(block * BLOCK, (block + 1) * BLOCK)


class TracedReceived(around.Received):
    """Checks that rows are of the computations whose KV the request's forward passes read."""

    def check(self, rows: Rows, first: int, end: int) -> None:
        expected = self.sequence.rows(first, end).copy()
        assert rows.shape == expected.shape
        for position, row, right in zip(range(first, end), rows, expected, strict=True):
            if (row == UNKNOWN).all():
                self.missing.append(position)
                continue
            right[:2, -1] = row[:2, -1]
            number = (int(row[0, -1]) - _MARK) | (int(row[1, -1]) - _MARK) << 13
            is_own = (
                np.array_equal(row, right)
                and number in self.executor.seen[self.request_id][position]
            )
            assert is_own, f"position {position}: a row of another computation"


def take_out(scheduler_output: SchedulerOutput, kind: type[KVConnectorMetadata]) -> Any:
    """Gives the metadata of the connector of that kind, and puts that of one with nothing to do in
    its place."""
    metadata = scheduler_output.kv_connector_metadata
    is_several = isinstance(metadata, MultiKVConnectorMetadata)
    children = metadata.metadata if is_several else (metadata,)
    (taken,) = (child for child in children if isinstance(child, kind))
    rest = tuple(_Metadata([], []) if child is taken else child for child in children)
    scheduler_output.kv_connector_metadata = MultiKVConnectorMetadata(rest)
    return taken


def _children_of(scheduler_output: SchedulerOutput) -> list[_Metadata]:
    """What each KV connector of the step's scheduler says."""
    metadata = scheduler_output.kv_connector_metadata
    is_several = isinstance(metadata, MultiKVConnectorMetadata)
    children = list(metadata.metadata) if is_several else [metadata]
    assert all(isinstance(child, _Metadata) for child in children)
    return children


class TracingExecutor(around.ArithmeticExecutor):
    """Numbers every computation of a token, and moves KV as the connectors say."""

    received = TracedReceived
    _numbers = iter(range(1, 1 << 30))  # of all engines

    def _init_executor(self) -> None:
        super()._init_executor()
        self._number = [0] * (NUM_BLOCKS * BLOCK)
        self.underway: list[_Load] = []
        # By request and position, the numbers of the KV that its forward passes read.
        self.seen: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))

    def compute(
        self, request_id: str, sequence: Sequence, tokens: Tokens, start: int, end: int
    ) -> Rows:
        rows = super().compute(request_id, sequence, tokens, start, end)
        for row, slot in zip(rows, sequence.slots(start, end), strict=True):
            self._number[slot] = number = next(self._numbers)
            row[:2, -1] = _MARK + (number & 0x1FFF), _MARK + (number >> 13)
        for position, slot in enumerate(sequence.slots(0, end)):
            self.seen[request_id][position].add(self._number[slot])
        return rows

    def _copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        pairs = list(pairs)
        super()._copy(pairs)
        copies = [
            (target, [self._number[slot] for slot in slots_of(source)]) for source, target in pairs
        ]
        for target, numbers in copies:
            self._number[target * BLOCK : (target + 1) * BLOCK] = numbers

    def get(self, slots: Any) -> list[Slot]:
        return [(self._kv[slot], self._number[slot]) for slot in slots]

    def put(self, block: int, contents: list[Slot]) -> None:
        for slot, one in zip(slots_of(block), contents, strict=True):
            self._kv[slot], self._number[slot] = one

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        children = _children_of(scheduler_output)
        for child in children:
            self._offer(child)
        report = KVConnectorOutput(finished_recving=set(), finished_sending=self._end_offers())
        for child in children:
            self.underway += child.loads
        self._load(report)
        result = super().execute_model(scheduler_output, non_block)
        output = self._output
        assert output is not None
        if not report.is_empty():
            output.kv_connector_output = report
        for child in children:
            self._save(child)
        return result

    def _offer(self, child: _Metadata) -> None:
        """Holds KV of requests for the instance that pulls it."""
        expires = STORE.clock.monotonic() + LEASE_S
        for request_id, blocks in child.sends.items():
            slots = [slot for block in blocks for slot in slots_of(block)]
            STORE.sent[request_id] = self.sending[request_id] = Sent(self, slots, expires)

    def _end_offers(self) -> set[str]:
        """The requests whose KV was pulled, or waited for too long."""
        now = STORE.clock.monotonic()
        ended = {
            request_id
            for request_id, sent in self.sending.items()
            if sent.is_pulled or now > sent.expires
        }
        for request_id in ended:
            del self.sending[request_id]
        return ended

    def _load(self, report: KVConnectorOutput) -> None:
        """Ends the loads that are due in this step."""
        for load in list(self.underway):
            load.steps -= 1
            if load.steps < 0:
                self._finish(load, report)
                self.underway.remove(load)

    def _save(self, child: _Metadata) -> None:
        for block, key in child.saves:
            if self._kv[slots_of(block)[-1]] == key:  # else it was given away since
                STORE.blocks.setdefault(key, self.get(slots_of(block)))

    def _contents_of(self, load: _Load, key: Any) -> list[Slot]:
        """What a load puts into a block."""
        if load.remote is None:
            return STORE.blocks.get(key, [])
        sent = STORE.sent[load.remote]  # whatever its blocks hold by now
        return sent.executor.get(sent.slots[int(key) * BLOCK :][:BLOCK])

    def _finish(self, load: _Load, report: KVConnectorOutput) -> None:
        failed = STORE.fail_dice.random() < STORE.fails
        good = STORE.dice.randrange(len(load.blocks)) if failed else len(load.blocks)
        for index, (block, key) in enumerate(load.blocks):
            contents = self._contents_of(load, key) if index < good else []
            self.put(block, [*contents, *[NOTHING] * BLOCK][:BLOCK])
        if load.remote is not None and not failed:
            STORE.sent[load.remote].is_pulled = True
        STORE.num_loaded += 1
        STORE.num_failed += failed
        assert report.finished_recving is not None
        report.finished_recving.add(load.request_id)
        if failed and STORE.fails_as == "request":
            report.failed_recving.add(load.request_id)
        elif failed:
            report.invalid_block_ids.update(block for block, _ in load.blocks[good:])


@contextmanager
def store(**options: Any) -> Iterator[Store]:
    """An empty store that behaves like that, until the end; then the one before it is there again."""
    pulls = KnownConnector(KVSource.TRANSFER, lease_s=LEASE_S, pull_fields=("remote_request_id",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONNECTORS, TRANSFER, KnownConnector(KVSource.TRANSFER))
        patch.setitem(CONNECTORS, PULL, pulls)
        patch.setitem(globals(), "STORE", Store(**options))
        yield STORE


def engine_with(
    *children: dict[str, Any],
    failures: str = "recompute",
    executor: type[TracingExecutor] = TracingExecutor,
    **options: Any,
) -> Core:
    """An engine with connectors, given as vLLM's configuration of each; `failures` is what it does
    about loads that fail."""
    if len(children) > 1:
        extra = {"connectors": [{"kv_role": "kv_both", **child} for child in children]}
        children = ({"kv_connector": "MultiConnector", "kv_connector_extra_config": extra},)
    config = KVTransferConfig(
        **{"kv_role": "kv_both", "kv_load_failure_policy": failures, **children[0]}
    )
    return around.engine(kv_transfer=config, executor=executor, **options)


def engine_with_store(*connectors: str, role: str = "kv_both", **options: Any) -> Core:
    return engine_with(
        *({"kv_connector": name, "kv_role": role} for name in connectors or (TRANSFER,)), **options
    )


def computed_before(core: Core, prompt: list[int]) -> Client:
    """A client of an engine that has computed a prompt, for a request without the opt-in, and whose
    prefix cache does not have it any more."""
    client = Client(core)
    client.answer("before", prompt, start=None)
    core.empty_prefix_cache()
    return client
