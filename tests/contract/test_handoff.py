"""Prefill and decode in two engines: the rows of the prompt come with its KV."""

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import FinishReason

from routed_experts.capture import handoff
from tests.contract.arithmetic import BLOCK, VOCAB, K, L
from tests.contract.loads import PULL, Store, TracingClient, empty_prefix_cache, engine_with_store, store
from tests.contract.test_loads import dice

REMOTE = {"do_remote_decode": True, "do_remote_prefill": False, handoff.PARAM: True}


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


class Pair:
    """A prefill and a decode instance, and what a proxy does."""

    def __init__(self, kept: Store, **about: Any) -> None:
        self.kept = kept
        self.prefill = TracingClient(engine_with_store(connectors=(PULL,), **about))
        self.decode = TracingClient(engine_with_store(connectors=(PULL,), **about))
        self._count = 0

    def hand_over(self, prompt: list[int], start: int | None = 0, **params: Any) -> dict[str, Any]:
        """The prefill leg; what its answer says of the KV."""
        self._count += 1
        name = f"prefill-{self._count}"
        self.prefill.add(name, prompt, start, max_tokens=1, kv_transfer_params=dict(REMOTE), **params)
        self.prefill.run()
        answer = self.prefill.received[name].kv_transfer_params
        assert answer is not None
        return answer

    def add(self, prompt: list[int], params: dict[str, Any] | None, start: int | None = 0, **about: Any) -> str:
        """The decode leg; its rows are checked as they come."""
        self._count += 1
        name = f"decode-{self._count}"
        for request_id in self.decode.add(name, prompt, start, kv_transfer_params=params, **about):
            self.decode.received[request_id].missing.clear()  # type: ignore[attr-defined]
        return name

    def missing(self, name: str) -> list[int]:
        """Positions of a decode leg whose rows did not come."""
        received = self.decode.received[name]
        assert received.finish is FinishReason.LENGTH
        return received.missing  # type: ignore[attr-defined,no-any-return]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with store() as kept:
        both = Pair(kept, is_async=request.param)
        both.decode.add("warm up", [1])  # as the probe of a server does
        both.decode.run()
        yield both


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 170])
def test_every_row_is_there(pair: Pair, length: int) -> None:
    prompt = tokens(length)
    params = pair.hand_over(prompt)
    assert params[handoff.PARAM]["shape"] == [length, L, K]
    name = pair.add(prompt, params, max_tokens=9)
    pair.decode.run()
    assert pair.kept.num_loaded == 1
    assert pair.missing(name) == []


@pytest.mark.parametrize("own", [BLOCK, 4 * BLOCK, 100])
def test_a_prefix_that_the_decode_instance_has_keeps_its_own_rows(pair: Pair, own: int) -> None:
    prompt = tokens(100)
    pair.decode.add("own", prompt[:own])
    pair.decode.run()
    name = pair.add(prompt, pair.hand_over(prompt))
    pair.decode.run()
    assert pair.missing(name) == []


def test_a_prefix_that_the_prefill_instance_has(pair: Pair) -> None:
    prompt = tokens(100)
    pair.prefill.add("before", prompt[:70])
    pair.prefill.run()
    name = pair.add(prompt, pair.hand_over(prompt))
    pair.decode.run()
    assert pair.missing(name) == []


def test_later_turns_hit_what_was_pulled(pair: Pair) -> None:
    prompt = tokens(100)
    name = pair.add(prompt, pair.hand_over(prompt), max_tokens=30)
    pair.decode.run()
    turn = [*pair.decode.received[name].sequence, *tokens(20, seed=1)]
    direct = pair.add(turn, None)
    pair.decode.run()
    again = pair.add(turn, pair.hand_over(turn))
    pair.decode.run()
    assert pair.missing(direct) == pair.missing(again) == []


@pytest.mark.parametrize("start", [1, 50, 99, 100])
def test_a_start_within_the_prompt(pair: Pair, start: int) -> None:
    prompt = tokens(100)
    name = pair.add(prompt, pair.hand_over(prompt, start), start)
    pair.decode.run()
    assert pair.missing(name) == []


def test_a_prefill_leg_that_did_not_ask_for_rows(pair: Pair) -> None:
    """What was pulled has no rows then; a later request pulls again."""
    prompt = tokens(100)
    params = pair.hand_over(prompt, start=None)
    assert handoff.PARAM not in params
    name = pair.add(prompt, params)
    pair.decode.run()
    assert pair.missing(name) == list(range(99))
    empty_prefix_cache(pair.prefill.engines[0])
    again = pair.add(prompt, pair.hand_over(prompt))
    direct = pair.add(prompt, None)
    pair.decode.run()
    assert pair.missing(again) == []
    assert pair.missing(direct) == []


def test_a_decode_leg_that_does_not_ask_for_rows_brings_them_to_others(pair: Pair) -> None:
    prompt = tokens(100)
    pair.add(prompt, pair.hand_over(prompt), start=None)
    pair.decode.run()
    pulled = pair.kept.num_loaded
    direct = pair.add(prompt, None)
    pair.decode.run()
    assert (pair.missing(direct), pair.kept.num_loaded) == ([], pulled)


def test_programs_that_do_not_say_that_they_want_them_get_no_bytes(pair: Pair) -> None:
    """They may make JSON of what they get."""
    params = {key: value for key, value in REMOTE.items() if key != handoff.PARAM}
    pair.prefill.add("theirs", tokens(20), max_tokens=1, kv_transfer_params=params)
    pair.prefill.run()
    answer = pair.prefill.received["theirs"].kv_transfer_params
    assert answer is not None
    assert handoff.PARAM not in answer
    assert pair.prefill.engines[0].scheduler.aux_output_connector._to_hand_over == set()


def test_rows_that_are_too_large_are_missing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "MAX_BYTES", 50 * L * K * 2)
    prompt = tokens(51)
    params = pair.hand_over(prompt)
    assert handoff.PARAM not in params
    name = pair.add(prompt, params)
    pair.decode.run()
    assert pair.missing(name) == list(range(50))
    assert handoff.PARAM in pair.hand_over(prompt[:50])


def test_rows_that_do_not_come_with_kv_are_not_believed(pair: Pair) -> None:
    prompt = tokens(100)
    params = pair.hand_over(prompt)
    poisoned = {**params[handoff.PARAM], "data": bytes(len(params[handoff.PARAM]["data"]))}
    own = pair.add(prompt, {"do_remote_prefill": False, handoff.PARAM: poisoned})
    pair.decode.run()
    hit = pair.add(prompt, {**params, "do_remote_prefill": False, handoff.PARAM: poisoned})
    pair.decode.run()
    assert pair.missing(own) == pair.missing(hit) == []


@pytest.mark.parametrize("fails_as", ["blocks", "request"])
def test_a_prefill_instance_that_died(pair: Pair, fails_as: str) -> None:
    """The decode instance computes what did not come, and has rows of that."""
    pair.kept.fails, pair.kept.fails_as = dice(3, 0.7), fails_as
    for turn in range(6):
        prompt = tokens(100, seed=turn)
        name = pair.add(prompt, pair.hand_over(prompt))
        pair.decode.run()
        assert pair.missing(name) == []
    assert pair.kept.num_failed > 1


@pytest.mark.parametrize("policy", ["recompute", "missing"])
@pytest.mark.parametrize(("seconds", "is_late"), [(24.0, False), (26.0, True)])
def test_kv_that_was_given_up(monkeypatch: pytest.MonkeyPatch, policy: str, seconds: float, is_late: bool) -> None:
    """What is pulled then is another request's: rows of this prompt must not stand for it. The prefill instance says
    until when it keeps the KV, here for 30 seconds, of which vLLM's heartbeats may take 5 to begin."""
    prompt = tokens(100)
    with store(policy) as kept:
        pair = Pair(kept)
        pair.decode.add("warm up", [1])
        pair.decode.run()
        params = pair.hand_over(prompt)
        before = params[handoff.PARAM]["until"] - 25
        monkeypatch.setattr(time, "time", lambda: before + seconds)
        name = pair.add(prompt, params)
        pair.decode.run()
        assert pair.missing(name) == (list(range(99)) if is_late and policy == "missing" else [])
        assert kept.num_loaded == (0 if is_late and policy == "recompute" else 1)


@pytest.mark.parametrize("steps", range(5))
def test_an_abort_around_a_pull(pair: Pair, steps: int) -> None:
    prompt = tokens(100)
    name = pair.add(prompt, pair.hand_over(prompt), max_tokens=30)
    for _ in range(steps):
        pair.decode.step()
    pair.decode.abort(name)
    others = [pair.add(prompt, None), pair.add(tokens(100, seed=1), None)]
    pair.decode.run()
    assert [pair.missing(other) for other in others] == [[], []]
    assert pair.decode.engines[0].scheduler.aux_output_connector._loads._handed == {}


def test_few_blocks(pair: Pair) -> None:
    """Requests that are preempted compute their prompt again; what was sent by then stays."""
    both = Pair(pair.kept, is_async=False, num_blocks=16)
    both.decode.add("warm up", [1])
    both.decode.run()
    names = []
    for seed in range(4):
        prompt = tokens(50, seed)
        names.append(both.add(prompt, both.hand_over(prompt), max_tokens=60))
    requests = list(both.decode.engines[0].scheduler.requests.values())
    both.decode.run()
    assert any(request.num_preemptions for request in requests)
    assert [both.missing(name) for name in names] == [[]] * 4


# ---- what is in kv_transfer_params ----


@pytest.mark.parametrize(("highest", "dtype"), [(255, "uint8"), (256, "int16"), (32767, "int16")])
def test_rows_come_back(highest: int, dtype: str) -> None:
    rows = np.array([[[0, highest]], [[highest, 1]]], np.int16)
    handed = handoff.encode(rows)
    assert handed is not None
    assert handed["dtype"] == dtype
    assert np.array_equal(handoff.decode(handed), rows)


def test_unknown_rows_come_back() -> None:
    rows = np.array([[[-1, -1]], [[3, 1]]], np.int16)
    assert np.array_equal(handoff.decode(handoff.encode(rows)), rows)


GOOD = {"data": bytes(12), "dtype": "int16", "shape": [1, 3, 2]}


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {**GOOD, "data": "AAAA"},  # what JSON can say
        {**GOOD, "data": bytes(11)},
        {**GOOD, "dtype": "float16"},
        {**GOOD, "dtype": ["int16"]},
        {**GOOD, "shape": [3, 2]},
        {**GOOD, "shape": [-1, 3, -2]},
        {**GOOD, "shape": [1.0, 3, 2]},
        {**GOOD, "shape": [True, 3, 2]},
        {**GOOD, "shape": "132"},
        {**GOOD, "until": "noon"},
        {**GOOD, "until": None},
    ],
)
def test_the_engine_takes_nothing_else(wrong: Any) -> None:
    assert handoff.decode(GOOD) is not None
    assert handoff.decode(wrong) is None
