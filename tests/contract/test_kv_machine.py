"""KV from offloading and from another instance, in any order of what can happen to it.

Each row that is sent is of the very computation whose KV its request read (`loads.TracedReceived`),
or is unknown, with a cause and only where the request allows it; each request ends;
nothing is left in the engine.

The same in every run; the long run tries others, and more, of each case.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from vllm.v1.engine import FinishReason

from routed_experts.capture.scheduler.kv import pulls
from routed_experts.capture.scheduler.kv.pulls import Pulls
from routed_experts.capture.wire.prefill_rows import PARAM
from tests.conftest import Cases
from tests.contract.engine import BLOCK, Client, tokens
from tests.contract.loads import LEASE_S, PULL, engine_with_store, store
from tests.contract.offloading import NAME as OFFLOADING
from tests.contract.offloading import check_keys, engine_that_offloads, num_loaded
from tests.long_runs import times

SETTINGS = settings(
    max_examples=2,
    stateful_step_count=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
MORE = settings(SETTINGS, max_examples=3)
"""Until something comes late."""
MANY = settings(SETTINGS, max_examples=20 + times(20), derandomize=False)
FEW = {"num_blocks": 24, "max_num_seqs": 4}
ENOUGH = {"num_blocks": 48, "max_num_seqs": 4}
"""Blocks. With fewer, vLLM 0.32 may wait for ever for those of a request whose pull failed."""


@dataclass(frozen=True)
class Case:
    connectors: tuple[str, ...]
    outside: dict[str, Any] = field(
        default_factory=dict
    )  # how the store and other instances behave
    engine: dict[str, Any] = field(default_factory=lambda: FEW)
    happens: str = "loads"  # what has to, in all examples together
    is_async: bool = False  # in the short run; the long run has both


FAILS = {"fails": 0.4}
FAILS_WHOLE = {"fails": 0.4, "fails_as": "request"}
PULLS = [(PULL,), (PULL, OFFLOADING), (OFFLOADING, PULL)]
CASES = {
    "offloading": Case((OFFLOADING,), engine={**FEW, "answers": True}, is_async=True),
    "offloading, large chunks": Case(
        (OFFLOADING,), engine={**FEW, "chunks": 13, "blocks_per_chunk": 3}
    ),
    # Each chunk is let go again and again, and sometimes there is none for a store.
    "offloading, few chunks": Case(
        (OFFLOADING,),
        engine={**FEW, "chunks": 6, "answers": True, "num_blocks": 14},
        is_async=True,
    ),
    # Rejected drafts leave rows behind the last token, and few blocks are soon another's.
    "offloading, drafts": Case(
        (OFFLOADING,), engine={**FEW, "drafts": 3, "answers": True, "num_blocks": 14}
    ),
    "offloading, stages": Case((OFFLOADING,), engine={**FEW, "stages": 2}, is_async=True),
    "offloading, weights": Case((OFFLOADING,), engine={**FEW, "chunks": 12, "weights": True}),
    **{
        " then ".join(names): Case(
            names, outside=FAILS, engine=ENOUGH, happens="late", is_async=names[0] == OFFLOADING
        )
        for names in PULLS
    },
    "pull, fails as a whole": Case(
        (PULL,), outside=FAILS_WHOLE, engine={**ENOUGH, "failures": "fail"}, happens="late"
    ),
}


# ---- what a turn may be ----


def prompt_of(text: int, length: int, tail: int) -> list[int]:
    """The beginning of one of two texts, and perhaps tokens of its own."""
    return tokens(7 * BLOCK, seed=text)[:length] + tokens(tail, seed=tail)


@dataclass(frozen=True)
class Ask:
    """A request of a client."""

    prompt: list[int]
    start: float | None  # of the rows that it asks for, as a share of the prompt; None for no rows
    max_tokens: int
    at_end: bool = False  # whether it needs its rows at its end only
    allow_missing: bool = False
    weights: bool = False


class Meanwhile(StrEnum):
    """What happens to a pull while it is under way."""

    NOTHING = "nothing"
    IS_SLOW = "it takes almost as long as the lease"
    IS_TOO_LATE = "it takes longer than the lease"


SHARE_OF_LEASE = {Meanwhile.IS_SLOW: 0.95, Meanwhile.IS_TOO_LATE: 1.2}


@dataclass(frozen=True)
class Pull:
    """How another instance's KV comes."""

    offer: int  # 0 for KV that was computed last, 1 for that before it, ...
    brings_rows: bool  # whether the prefill leg is asked for rows
    meanwhile: Meanwhile
    steps: int  # that the engine makes while it may be under way
    overwritten_by: int  # seed of the prompt that then gets the other instance's free blocks


class Kind(StrEnum):
    """What a turn begins with."""

    PREFIX = "a request, perhaps with a known prefix"
    NEXT_TURN = "a request that goes on where another was"
    PULL = "a request that pulls what another instance has just computed"
    SAME_PULL = "a request that comes for KV that another came for, perhaps long ago"
    NO_REQUEST = "no request"


class Event(StrEnum):
    """What happens then."""

    NOTHING = "nothing"
    ABORT = "a request is aborted"
    EMPTY = "all requests end, and the prefix cache is emptied"
    RESET = "the prefix cache is reset, as for new weights"
    RESET_ALL = "what the connector keeps is reset too"
    LEASE_ENDS = "the leases of all KV end while no step runs"


def often(chances: dict[Any, int]) -> st.SearchStrategy[Any]:
    """Each of the keys, as often as its value says."""
    return st.sampled_from([key for key, chance in chances.items() for _ in range(chance)])


PROMPTS = st.builds(
    prompt_of,
    text=st.integers(0, 1),
    # up to the end of a block, into one, or anything
    length=st.sampled_from([7 * BLOCK, 5 * BLOCK + 3, 4 * BLOCK]) | st.integers(1, 7 * BLOCK),
    tail=st.integers(0, 2),
)
ASKS = st.builds(
    Ask,
    PROMPTS,
    start=often({None: 1, 0: 2, 0.5: 1, 1: 1}),
    max_tokens=st.integers(1, 30),
    at_end=st.booleans(),
    allow_missing=st.booleans(),
    weights=st.booleans(),
)
PULL_CASES = st.builds(
    Pull,
    offer=st.integers(0, 2),
    brings_rows=often({True: 4, False: 1}),
    meanwhile=often({Meanwhile.NOTHING: 4, Meanwhile.IS_SLOW: 1, Meanwhile.IS_TOO_LATE: 1}),
    steps=st.integers(0, 4),
    overwritten_by=st.integers(0, 99),
)
KINDS = often(
    {Kind.PREFIX: 2, Kind.NEXT_TURN: 1, Kind.PULL: 2, Kind.SAME_PULL: 1, Kind.NO_REQUEST: 1}
)
EVENTS = often(
    {
        Event.NOTHING: 13,
        Event.ABORT: 3,
        Event.EMPTY: 3,
        Event.RESET: 1,
        Event.RESET_ALL: 1,
        Event.LEASE_ENDS: 3,
    }
)


class Machine(RuleBasedStateMachine):
    """An engine with connectors, its clients, and where its KV comes from."""

    def __init__(self, case: Case, is_async: bool, happened: Counter[str]) -> None:
        super().__init__()
        self.case = case
        self._happened = happened
        self._opened = ExitStack()
        self.outside = self._opened.enter_context(store(**case.outside))
        self._opened.enter_context(patch.object(pulls, "time", self.outside.clock))
        self._opened.enter_context(patch.object(Pulls, "end", self._counted(Pulls.end)))
        self.offloads = OFFLOADING in case.connectors
        self.pulls = PULL in case.connectors
        options = {"is_async": is_async, **case.engine}
        if self.offloads:
            self.core = engine_that_offloads(connectors=case.connectors, **options)
            check_keys(self.core)
        else:
            self.core = engine_with_store(*case.connectors, **options)
        self.captures_weights = case.engine.get("weights", False)
        self.client = Client(self.core)
        self.client.answer("warm up", [1])
        self.prefill = Client()  # of the instance that others pull from
        if self.pulls:
            self.prefill = Client(engine_with_store(PULL, is_async=False, num_blocks=32))
        # prompts that another instance computed, and where their KV is
        self.offers: list[tuple[list[int], Any]] = []
        self.is_sound = True  # whether nothing failed in a turn
        self.gone: set[str] = set()  # requests that were aborted
        self.may_miss: set[str] = set()  # requests whose rows may be unknown
        self.names = (f"r{index}" for index in range(1 << 20))

    def _counted(self, end: Any) -> Any:
        def counted(of: Pulls, request_id: str) -> bool:
            is_late: bool = end(of, request_id)
            self._happened["late"] += is_late
            return is_late

        return counted

    def step(self, seconds: float = 0) -> None:
        self.outside.clock.passed += seconds
        self.client.step()
        self.prefill.step()

    def run(self) -> None:
        """Steps until every request has ended."""
        for _ in range(3_000):
            if not self.core.is_busy():
                return
            self.step(LEASE_S / 50)
        raise AssertionError("the engine does not come to an end")

    # ---- what happens ----

    # One rule, as hypothesis leaves rules out of most runs, and too little would happen.
    @rule(
        kind=KINDS,
        ask=ASKS,
        pull=PULL_CASES,
        event=EVENTS,
        earlier=st.integers(0, 99),
        steps=st.integers(0, 6),
        seconds=often({0: 3, 1: 1, LEASE_S / 3: 1}),
    )
    def turn(
        self,
        kind: Kind,
        ask: Ask,
        pull: Pull,
        event: Event,
        earlier: int,  # the number of an earlier request, for a next turn and an abort
        steps: int,
        seconds: float,  # that pass in each step
    ) -> None:
        self.is_sound = False
        names = list(self.client.received)
        name = names[earlier % len(names)]
        self._begin(kind, ask, pull, name)
        self._let_happen(event, name)
        for _ in range(steps):
            self.step(seconds)
        self.is_sound = True

    def _begin(self, kind: Kind, ask: Ask, pull: Pull, name: str) -> None:
        match kind:
            case Kind.PULL if self.pulls:
                self._pull_new(ask, pull)
            case Kind.SAME_PULL if self.pulls:
                self._pull_again(ask, pull)
            case Kind.NEXT_TURN:
                before = self.client.received[name].sequence
                self._ask(replace(ask, prompt=[*before[: 9 * BLOCK], *ask.prompt[:3]]))
            case Kind.NO_REQUEST:
                pass
            case _:
                self._ask(ask)

    def _let_happen(self, event: Event, name: str) -> None:
        match event:
            case Event.ABORT:
                self.gone.add(name)
                self.client.abort(name)
            case Event.EMPTY:
                self.run()
                self.core.empty_prefix_cache()
            case Event.RESET | Event.RESET_ALL if not self._is_fenced():
                self._reset(both=event is Event.RESET_ALL)
            case Event.LEASE_ENDS:
                self.outside.clock.passed += 1.1 * LEASE_S

    def _ask(self, ask: Ask, params: dict[str, Any] | None = None) -> None:
        """Adds a request, with `kv_transfer_params` if it pulls."""
        name = next(self.names)
        self.client.add(
            name,
            ask.prompt,
            None if ask.start is None else int(ask.start * len(ask.prompt)),
            max_tokens=ask.max_tokens,
            kv_transfer_params=params,
            at_end=ask.at_end,
            allow_missing=ask.allow_missing,
            # The test looks for weights of all rows, of which `allow_missing` may lack some.
            weights=ask.weights and self.captures_weights and not ask.allow_missing,
        )
        if ask.allow_missing or (params is not None and PARAM not in params):
            self.may_miss.add(name)

    def _pull_new(self, ask: Ask, pull: Pull) -> None:
        """Both legs."""
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        if pull.brings_rows:
            wanted[PARAM] = True
        prefilled = self.prefill.answer(
            next(self.names), ask.prompt, max_tokens=1, kv_transfer_params=wanted
        )
        params = prefilled.kv_transfer_params
        if not pull.brings_rows:  # as with vLLM alone, nobody looks at the lease
            self._ask(ask, params)
            self.run()
            return
        self.offers.append((ask.prompt, params))
        self._pull(0, ask, pull)

    def _pull_again(self, ask: Ask, pull: Pull) -> None:
        """A decode leg with KV that another came for, perhaps long ago; the first time both legs."""
        if not self.offers:
            self._pull_new(ask, replace(pull, brings_rows=True))
            return
        self._overwrite(pull.overwritten_by)
        self._pull(pull.offer % len(self.offers), ask, pull)

    def _pull(self, offer: int, ask: Ask, pull: Pull) -> None:
        """A decode leg, and what happens until it has its KV."""
        prompt, params = self.offers[-1 - offer]
        self._ask(replace(ask, prompt=prompt), dict(params))
        for _ in range(pull.steps):
            self.step()
            if self.core.model_executor.underway and pull.meanwhile is not Meanwhile.NOTHING:
                self.outside.clock.passed += SHARE_OF_LEASE[pull.meanwhile] * LEASE_S
                self.step()  # the other instance lets go of what is not pulled
                self._overwrite(pull.overwritten_by)
                return

    def _overwrite(self, seed: int) -> None:
        """The other instance gives all blocks that nobody is to pull to another prompt."""
        free = self.prefill.engines[0].scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free > 2:
            self.prefill.answer(
                next(self.names), tokens((free - 1) * BLOCK, seed=1000 + seed), max_tokens=1
            )

    def _reset(self, both: bool) -> None:
        """As for new weights, with what is kept outside (`both`) or without. Running requests are
        preempted; not where they would load what the connector kept at once, of which vLLM 0.32
        fails."""
        self.core.scheduler.reset_prefix_cache(
            reset_running_requests=both or not self.offloads, reset_connector=both
        )
        self.step()

    def _is_fenced(self) -> bool:
        """Whether loads or steps under way keep vLLM from a reset."""
        (manager,) = self.core.scheduler.kv_cache_manager.coordinator.single_type_managers
        loading = manager.req_to_blocks.keys() - {
            request.request_id for request in self.core.scheduler.running
        }
        return bool(loading or (self.core.scheduler.defer_block_free and self.core.batch_queue))

    # ---- what must be so then ----

    def teardown(self) -> None:
        with self._opened:
            if not self.is_sound:
                return
            self.run()
            fails = "fails" in self.case.outside
            ends = (FinishReason.LENGTH, FinishReason.ERROR) if fails else (FinishReason.LENGTH,)
            self.client.finish(but=self.gone, missing=None, ends=ends)
            missing = {name for name, received in self.client.received.items() if received.missing}
            assert missing <= self.may_miss
            assert self.client.faults() == 0, "a row is unknown without a cause"
            self._happened["loads"] += self.outside.num_loaded + (
                num_loaded(self.core) if self.offloads else 0
            )
            self._happened["fails"] += self.outside.num_failed


def run_at_random(case: Case, is_async: bool, examples: settings) -> Counter[str]:
    """What happened, and how often."""
    happened: Counter[str] = Counter()
    run_state_machine_as_test(lambda: Machine(case, is_async, happened), settings=examples)
    return happened


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_at_random(case: Case) -> None:
    happened = run_at_random(case, case.is_async, MORE if case.happens == "late" else SETTINGS)
    assert happened[case.happens] > 0


@pytest.mark.long
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kv_machine_often_at_random(case: Case, is_async: bool, cases: Cases) -> None:
    happened = run_at_random(case, is_async, MANY)
    assert happened[case.happens] > 0
    cases.add(MANY.max_examples)
