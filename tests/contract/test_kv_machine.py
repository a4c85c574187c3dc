"""KV from a store, from offloading and from another instance, in any order of what can happen to
it.

Each row that is sent is of the very computation whose KV its request read (`loads.TracedReceived`),
or is unknown, with a cause and only where a setting or the request allows it; each request ends;
nothing is left in the engine.

The same in every run; the long run tries others, and more, of each case.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from tests.contract.loads import LEASE_S, NAME, NOTHING, PULL, engine_with_store, slots_of, store
from tests.contract.offloading import NAME as OFFLOADING
from tests.contract.offloading import check_keys, engine_that_offloads, num_loaded
from tests.long_runs import times

SETTINGS = settings(
    max_examples=4,
    stateful_step_count=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
MANY = settings(SETTINGS, max_examples=20 + times(20), derandomize=False)
FEW, ENOUGH = {"num_blocks": 24, "max_num_seqs": 4}, {"num_blocks": 48, "max_num_seqs": 4}
"""Blocks. With fewer, vLLM 0.32 may wait for ever for those of a request whose pull failed."""


@dataclass(frozen=True)
class Case:
    connectors: tuple[str, ...]
    policy: str = "recompute"
    kept: dict[str, Any] = field(default_factory=dict)  # how the store and other instances behave
    engine: dict[str, Any] = field(default_factory=lambda: FEW)
    happens: str = "loads"  # what has to, in all examples together

    @property
    def may_miss(self) -> bool:
        """Whether rows that are asked for may be unknown: not where only chunks with their rows are
        loaded."""
        return "fetches_hits" in self.kept or (
            self.policy == "missing" and self.connectors != (OFFLOADING,)
        )


FAILS, FAILS_WHOLE = (
    {"fails": 0.4, "is_async": True},
    {"fails": 0.4, "is_async": True, "fails_as": "request"},
)
PULLS = [(PULL,), (PULL, OFFLOADING), (OFFLOADING, PULL), (PULL, NAME), (NAME, PULL)]
CASES = {
    "store": Case((NAME,)),
    "store, beside steps": Case((NAME,), kept={"is_async": True}),
    # Blocks of those that only produce are not fenced.
    "store, missing": Case((NAME,), "missing", engine={**FEW, "role": "kv_producer"}),
    # Over prefix hits: rows of running requests may get lost, but never become another's (E2).
    "store, over hits": Case(
        (NAME,), kept={"fetches_hits": True}, engine={**FEW, "role": "kv_producer"}
    ),
    "store, over hits beside steps": Case((NAME,), kept={"fetches_hits": True, "is_async": True}),
    # As vLLM's ExampleConnector, which offers less than nothing where a preempted request hits more
    # than its prompt.
    "store of prompts": Case(
        (NAME,),
        kept={"has_prompts": True},
        engine={"num_blocks": 14, "max_num_seqs": 3},
        happens="less than nothing",
    ),
    # With asynchronous scheduling vLLM 0.32 computes what fails in a step again with the tokens
    # that it had expected.
    "loads fail": Case(
        (NAME,), kept={"fails": 0.4}, engine={**FEW, "is_async": False}, happens="fails"
    ),
    "loads fail, missing": Case((NAME,), "missing", FAILS, {**FEW, "failures": "fail"}, "fails"),
    "loads fail as a whole": Case((NAME,), kept=FAILS_WHOLE, happens="fails"),
    "offloading": Case((OFFLOADING,), engine={**FEW, "answers": True}),
    "offloading, large chunks": Case(
        (OFFLOADING,), "missing", engine={**FEW, "chunks": 13, "blocks_per_chunk": 3}
    ),
    # Each chunk is let go again and again, and sometimes there is none for a store.
    "offloading, few chunks": Case(
        (OFFLOADING,), engine={**FEW, "chunks": 6, "answers": True, "num_blocks": 14}
    ),
    # Rejected drafts leave rows behind the last token, and few blocks are soon another's.
    "offloading, drafts": Case(
        (OFFLOADING,), engine={**FEW, "drafts": 3, "answers": True, "num_blocks": 14}
    ),
    "offloading, stages": Case((OFFLOADING,), engine={**FEW, "stages": 2}),
    "offloading, weights": Case(
        (OFFLOADING,), "missing", engine={**FEW, "chunks": 12, "weights": True}
    ),
    "store, weights": Case((NAME,), engine={**FEW, "weights": True}),
    "offloading, store": Case((OFFLOADING, NAME), engine={**FEW, "answers": True}),
    "store, offloading": Case((NAME, OFFLOADING), "missing", engine={**FEW, "answers": True}),
    **{
        " then ".join(each): Case(each, kept=FAILS, engine=ENOUGH, happens="late") for each in PULLS
    },
    "pull, weights": Case((PULL, OFFLOADING), engine={**ENOUGH, "weights": True}),
    "pull, missing": Case((PULL, NAME), "missing", FAILS, {**ENOUGH, "failures": "fail"}, "late"),
    "pull, fails as a whole": Case(
        (PULL,), kept=FAILS_WHOLE, engine={**ENOUGH, "failures": "fail"}, happens="late"
    ),
}


class Machine(RuleBasedStateMachine):
    """An engine with connectors, its clients, and where its KV comes from."""

    def __init__(self, case: Case, is_async: bool, happened: Counter[str]) -> None:
        super().__init__()
        self.case, self._happened = case, happened
        self._opened = ExitStack()
        self.kept = self._opened.enter_context(store(case.policy, **case.kept))
        self._opened.enter_context(patch.object(pulls, "time", self.kept.clock))
        self._opened.enter_context(patch.object(Pulls, "end", self._counted(Pulls.end)))
        self.offloads, self.pulls = OFFLOADING in case.connectors, PULL in case.connectors
        about = {"is_async": is_async, **case.engine}
        make = engine_that_offloads if self.offloads else engine_with_store
        self.core = make(*(() if self.offloads else case.connectors), **about, **self._connectors())
        if self.offloads:
            check_keys(self.core)
        self.client = Client(self.core)
        self.client.answer("warm up", [1])
        weights = case.engine.get("weights", False)
        self.prefill = Client(
            engine_with_store(PULL, is_async=False, num_blocks=32, weights=weights)
        )
        # prompts that another instance computed, and where their KV is
        self.offers: list[tuple[list[int], Any]] = []
        self.is_sound = True  # whether nothing failed in a turn
        self.gone: set[str] = set()
        self.may_miss: set[str] = set()
        self.names = (f"r{index}" for index in range(1 << 20))

    def _connectors(self) -> dict[str, Any]:
        return {"connectors": self.case.connectors} if self.offloads else {}

    def _counted(self, end: Any) -> Any:
        def counted(of: Pulls, request_id: str) -> bool:
            is_late: bool = end(of, request_id)
            self._happened["late"] += is_late
            return is_late

        return counted

    def step(self, seconds: float = 0) -> None:
        self.kept.clock.passed += seconds
        left = {block.block_id for block in self._not_loaded() if block.ref_cnt == 0}
        self.core.scheduler.kv_cache_manager.evict_blocks(left)
        self.client.step()
        self.prefill.step()

    def run(self) -> None:
        """Steps until every request has ended (E1)."""
        for _ in range(3_000):
            if not self.core.is_busy():
                return
            self.step(LEASE_S / 50)
        raise AssertionError("the engine does not come to an end")

    # ---- what happens ----

    # One rule, as hypothesis leaves rules out of most runs, and too little would happen.
    @rule(
        asks=st.sampled_from(
            ["a prefix", "a prefix", "the next turn", "a pull", "a pull", "the same pull", None]
        ),
        prompt=st.builds(
            lambda stem, length, tail: (
                tokens(7 * BLOCK, seed=stem)[:length] + tokens(tail, seed=tail)
            ),
            st.integers(0, 1),
            st.sampled_from([7 * BLOCK, 5 * BLOCK + 3, 4 * BLOCK]) | st.integers(1, 7 * BLOCK),
            st.integers(0, 2),
        ),
        at=st.integers(0, 99),
        start=st.sampled_from([None, 0, 0, 0.5, 1]),
        flags=st.sets(st.sampled_from(["at_end", "allow_missing", "weights"])),
        max_tokens=st.integers(1, 30),
        event=st.sampled_from(
            [None, None, None, "abort", "empty", "reset", "reset all", "lease ends"]
        ),
        steps=st.integers(0, 6),
        seconds=st.sampled_from([0, 0, 0, 1, LEASE_S / 3]),
    )
    def turn(
        self, asks: str | None, prompt: list[int], at: int, event: str | None, **about: Any
    ) -> None:
        steps, seconds, self.is_sound = about.pop("steps"), about.pop("seconds"), False
        names = list(self.client.received)
        if asks in ("a pull", "the same pull") and self.pulls:
            self._pull(prompt, asks == "a pull", at, **about)
        elif asks == "the next turn":
            before = self.client.received[names[at % len(names)]].sequence
            self._ask([*before[: 9 * BLOCK], *prompt[:3]], **about)
        elif asks is not None:
            self._ask(prompt, **about)
        if event == "abort" and all(block.ref_cnt < 2 for block in self._not_loaded()):
            self.gone.add(name := names[at % len(names)])
            self.client.abort(name)
        elif event == "empty":
            self.run()
            self.core.empty_prefix_cache()
        elif event in ("reset", "reset all") and at % 3 == 0 and not self._is_fenced():
            self._reset(event == "reset all")
        elif event == "lease ends":  # while no step runs
            self.kept.clock.passed += 1.1 * LEASE_S
        for _ in range(steps):
            self.step(seconds)
        self.is_sound = True

    def _ask(
        self,
        prompt: list[int],
        start: float | None,
        flags: set[str],
        max_tokens: int,
        params: Any = None,
    ) -> None:
        name, about = next(self.names), dict.fromkeys(flags, True)
        about["weights"] = (
            "weights" in flags and "weights" in self.case.engine and "allow_missing" not in flags
        )
        first = None if start is None else int(start * len(prompt))
        self.client.add(
            name, prompt, first, max_tokens=max_tokens, kv_transfer_params=params, **about
        )
        if "allow_missing" in flags or (params is not None and PARAM not in params):
            self.may_miss.add(name)

    def _pull(self, prompt: list[int], is_new: bool, at: int, **about: Any) -> None:
        """Both legs; or a decode leg with KV that another came for, perhaps long ago."""
        if is_new or not self.offers:
            ask = {"do_remote_decode": True, "do_remote_prefill": False} | (
                {PARAM: True} if at % 5 else {}
            )
            weights = at % 2 == 0 and "weights" in self.case.engine
            offer = self.prefill.answer(
                next(self.names), prompt, max_tokens=1, kv_transfer_params=ask, weights=weights
            )
            if not at % 5:  # as with vLLM alone, nobody looks at the lease
                self._ask(prompt, params=offer.kv_transfer_params, **about)
                self.run()
                return
            self.offers.append((prompt, offer.kv_transfer_params))
        if not is_new:
            self._overwrite(at)
        prompt, params = self.offers[-1 if is_new else -1 - at % min(3, len(self.offers))]
        self._ask(prompt, params=dict(params), **about)
        for _ in range(at % 5):
            self.step()
            if self.core.model_executor.underway and not at % 3:  # it is a slow one
                self.kept.clock.passed += (0.95, 1.2)[at % 2] * LEASE_S
                self.step()  # the other instance lets go of what is not pulled
                self._overwrite(at)
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

    def _not_loaded(self) -> list[Any]:
        """Blocks in the prefix cache whose load within a step failed, and those computed from them.

        With "recompute", `Scheduler._handle_invalid_blocks` of vLLM 0.32 leaves them there, for the
        first request that has them to compute again. If that is preempted or aborted before, others
        read whatever KV they hold, with or without this capture; it is not so here.
        """
        if self.kept.is_async or not self.kept.fails:
            return []
        cached = [
            each
            for each in self.core.scheduler.kv_cache_manager.block_pool.blocks
            if each.block_hash
        ]
        return [
            each
            for each in cached
            if NOTHING in self.core.model_executor.get(slots_of(each.block_id))
        ]

    # ---- what must be so then ----

    def teardown(self) -> None:
        with self._opened:
            if not self.is_sound:
                return
            self.run()
            fails = "fails" in self.case.kept
            ends = (FinishReason.LENGTH, FinishReason.ERROR) if fails else (FinishReason.LENGTH,)
            self.client.finish(but=self.gone, missing=None, ends=ends)
            missing = {name for name, received in self.client.received.items() if received.missing}
            assert self.case.may_miss or missing <= self.may_miss
            assert self.client.faults() == 0, "E2"
            self._happened["loads"] += self.kept.num_loaded + (
                num_loaded(self.core) if self.offloads else 0
            )
            self._happened["fails"] += self.kept.num_failed
            self._happened["less than nothing"] += self.kept.num_negative


def run_at_random(case: Case, is_async: bool, examples: settings = SETTINGS) -> Counter[str]:
    """What happened, and how often."""
    happened: Counter[str] = Counter()
    run_state_machine_as_test(lambda: Machine(case, is_async, happened), settings=examples)
    return happened


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_at_random(case: Case, is_async: bool) -> None:
    happened = run_at_random(case, is_async)
    assert happened[case.happens] > 0


@pytest.mark.long
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kv_machine_often_at_random(case: Case, is_async: bool, cases: Cases) -> None:
    happened = run_at_random(case, is_async, MANY)
    assert happened[case.happens] > 0
    cases.add(MANY.max_examples)
