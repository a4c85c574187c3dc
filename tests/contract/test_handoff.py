"""Prefill and decode in two engines: the rows of the prompt come with its KV."""

import gc
import pickle
import tracemalloc
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture import handoff
from routed_experts.capture.engine.kv_transfer import transfer_params
from routed_experts.capture.engine.kv_transfer.remote_prefill import RemotePrefillRows
from routed_experts.capture.engine.kv_transfer.tracker import KVLoad
from routed_experts.capture.host_cache import HostCache
from routed_experts.protocol.codec import UNKNOWN
from tests.contract.engine import BLOCK, Client, K, L, engine, tokens
from tests.contract.loads import (
    LEASE_S,
    NAME,
    PULL,
    Clock,
    Store,
    TracingClient,
    dice,
    empty_prefix_cache,
    engine_with_store,
    store,
)

NUM_SEQS = 2
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False, handoff.PARAM: True}


class Pair:
    """A prefill and a decode instance, and what a proxy does."""

    def __init__(self, kept: Store, num_blocks: int | None = None, failures: str = "recompute", **about: Any) -> None:
        """`num_blocks` are the decode instance's, and so is `failures`."""
        self.kept = kept
        self.prefill = TracingClient(engine_with_store(connectors=(PULL,), **about))
        about |= {"num_blocks": num_blocks, "failures": failures}
        self.decode = TracingClient(engine_with_store(connectors=(PULL,), **about))
        self._count = 0
        self.decode.add("warm up", [1])  # as the probe of a server does
        self.decode.run()

    def export_rows(self, prompt: list[int], start: int | None = 0, **params: Any) -> dict[str, Any]:
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


@pytest.fixture
def pair() -> Iterator[Pair]:
    with store() as kept:
        yield Pair(kept)


def test_every_row_is_there(is_async: bool) -> None:
    with store() as kept:
        pair = Pair(kept, is_async=is_async)
        for index, length in enumerate((1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 170)):
            prompt = tokens(length, seed=length)
            params = pair.export_rows(prompt)
            assert params[handoff.PARAM]["shape"] == [length, L, K]
            name = pair.add(prompt, params, max_tokens=9)
            pair.decode.run()
            assert kept.num_loaded == index + 1
            assert pair.missing(name) == []


@pytest.mark.parametrize(
    ("start", "own", "others"),
    [(0, BLOCK, 0), (0, 4 * BLOCK, 0), (0, 100, 0), (0, 0, 70), (1, 0, 0), (50, 0, 0), (99, 0, 0), (100, 0, 0)],
)
def test_starts_and_prefixes_that_an_instance_has(pair: Pair, start: int, own: int, others: int) -> None:
    prompt = tokens(100)
    for client, count in ((pair.decode, own), (pair.prefill, others)):
        if count:
            client.add("before", prompt[:count])
            client.run()
    name = pair.add(prompt, pair.export_rows(prompt, start), start)
    pair.decode.run()
    assert pair.missing(name) == []


@pytest.mark.parametrize("start", [0, None])
def test_later_turns_hit_what_was_pulled(pair: Pair, start: int | None) -> None:
    """Also where who pulled it did not ask for rows."""
    prompt = tokens(100)
    name = pair.add(prompt, pair.export_rows(prompt), start, max_tokens=30)
    pair.decode.run()
    turn = [*pair.decode.received[name].sequence, *tokens(20, seed=1)]
    direct = pair.add(turn, None)
    pair.decode.run()
    assert (pair.missing(direct), pair.kept.num_loaded) == ([], 1)
    again = pair.add(turn, pair.export_rows(turn))
    pair.decode.run()
    assert pair.missing(again) == []


def test_a_prefill_leg_that_did_not_ask_for_rows(pair: Pair) -> None:
    """What was pulled has no rows then; a later request pulls again."""
    prompt = tokens(100)
    params = pair.export_rows(prompt, start=None)
    assert handoff.PARAM not in params
    name = pair.add(prompt, params)
    pair.decode.run()
    assert pair.missing(name) == list(range(99))
    pair.prefill.steps(3)  # learns that its blocks were pulled
    empty_prefix_cache(pair.prefill.engines[0])
    again = pair.add(prompt, pair.export_rows(prompt))
    direct = pair.add(prompt, None)
    pair.decode.run()
    assert pair.missing(again) == []
    assert pair.missing(direct) == []


def test_a_row_that_the_prefill_instance_did_not_know_is_computed_for_the_next(pair: Pair) -> None:
    prompt = tokens(100)
    params = pair.export_rows(prompt)
    rows = np.frombuffer(params[handoff.PARAM]["data"], dtype=np.int16).reshape(100, L, K).copy()
    rows[5] = UNKNOWN
    name = pair.add(prompt, {**params, handoff.PARAM: {**params[handoff.PARAM], "data": rows.tobytes()}})
    pair.decode.run()
    assert pair.missing(name) == [5]
    again = pair.add(prompt, None)
    pair.decode.run()
    assert pair.missing(again) == []


def test_programs_that_do_not_say_that_they_want_them_get_no_bytes(pair: Pair) -> None:
    """They may make JSON of what they get."""
    params = {key: value for key, value in REMOTE.items() if key != handoff.PARAM}
    pair.prefill.add("theirs", tokens(20), max_tokens=1, kv_transfer_params=params)
    pair.prefill.run()
    answer = pair.prefill.received["theirs"].kv_transfer_params
    assert answer is not None
    assert handoff.PARAM not in answer
    assert pair.prefill.engines[0].capture._to_export == set()


def test_rows_that_are_too_large_are_missing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "MAX_BYTES", 50 * L * K * 2)
    prompt = tokens(51)
    params = pair.export_rows(prompt)
    assert handoff.PARAM not in params
    name = pair.add(prompt, params)
    pair.decode.run()
    assert pair.missing(name) == list(range(50))
    assert handoff.PARAM in pair.export_rows(prompt[:50])


def test_rows_that_do_not_come_with_kv_are_not_believed(pair: Pair) -> None:
    prompt = tokens(100)
    params = pair.export_rows(prompt)
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
        name = pair.add(prompt, pair.export_rows(prompt))
        pair.decode.run()
        assert pair.missing(name) == []
    assert pair.kept.num_failed > 1


@pytest.fixture(params=["recompute", "missing"])
def leased(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair with each policy for loads; leases end."""
    with store(request.param) as kept:
        yield Pair(kept, max_num_seqs=NUM_SEQS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Clock:
    """What leases go by, also in the instance that keeps the KV."""
    clock = Clock()
    monkeypatch.setattr("routed_experts.capture.engine.kv_transfer.remote_prefill.time", clock)
    if "leased" in request.fixturenames:
        request.getfixturevalue("leased").kept.clock = clock
    return clock


@pytest.mark.parametrize(("seconds", "waits", "num_loaded"), [(9, False, 1), (10, False, 0), (5.1, True, 0)])
def test_a_leg_that_comes_late(leased: Pair, clock: Clock, seconds: float, waits: bool, num_loaded: int) -> None:
    """Or that `waits` while there are no steps, as during a pause: there are no heartbeats either."""
    params = leased.export_rows(tokens(100))
    clock.passed = 0 if waits else seconds
    name = leased.add(tokens(100), params)
    clock.passed = seconds
    leased.decode.run()
    assert leased.missing(name) == []
    assert leased.kept.num_loaded == num_loaded


def test_a_leg_that_waits_while_others_have_steps(leased: Pair, clock: Clock) -> None:
    """Every one of them may send a heartbeat, so that it can be long. What was before it came does not count."""
    clock.passed = 100
    params = leased.export_rows(tokens(100))
    both = [leased.add(tokens(40, seed=10 + seed), None, max_tokens=60) for seed in range(NUM_SEQS)]
    leased.decode.steps(3)
    name = leased.add(tokens(100), params)
    for _ in range(40):
        clock.passed += 4
        leased.decode.step()
        assert leased.kept.num_loaded == 0
    leased.decode.run()
    assert [leased.missing(each) for each in (*both, name)] == [[]] * (NUM_SEQS + 1)
    assert leased.kept.num_loaded == 1


def test_a_second_leg_with_the_same_kv(leased: Pair) -> None:
    """The first one's pull, or its end, gives it up: a proxy that tries again has to begin with the prefill leg."""
    params = leased.export_rows(tokens(100))
    first = leased.add(tokens(100, seed=1), params)
    leased.decode.abort(first)
    name = leased.add(tokens(100), params)
    leased.decode.run()
    assert leased.missing(name) == []
    assert leased.kept.num_loaded == 0  # what would be pulled is another request's
    assert len(leased.decode.engines[0].capture._loads.handed) == 0  # nor does it wait for the first


def test_who_came_is_forgotten_after_a_lease(clock: Clock) -> None:
    """Whatever a client says, so that nothing is kept for longer than KV is."""
    handed, rows = RemotePrefillRows(lease_s=30), np.zeros((1, L, K), dtype=np.uint8)

    def comes(name: str, source: int, seconds: float) -> bool:
        request = cast(Request, SimpleNamespace(request_id=name))
        return handed.add(request, rows, ("engine", source), clock.time() + seconds, is_first=True)

    assert comes("far", 0, 1e9)
    assert comes("near", 1, 10)
    clock.passed = 9
    assert not comes("far again", 0, 1e9)
    assert not comes("near again", 1, 1)
    clock.passed = 31
    assert comes("far after a lease", 0, 1e9)
    assert comes("near after a lease", 1, 10)


@pytest.mark.parametrize(
    ("failures", "start", "seconds"),
    [("recompute", 0, 1), ("recompute", None, 1), ("fail", 0, 1), ("fail", None, 1), ("fail", 0, -1)],
)
def test_a_pull_that_outlives_the_lease(failures: str, start: int | None, seconds: float, clock: Clock) -> None:
    """It reads whatever other prompts put into those blocks meanwhile, as vLLM does not know of the lease's end."""
    with store(clock=clock, heartbeats=False) as kept:
        pair = Pair(kept, failures=failures)
        name = pair.add(tokens(100), pair.export_rows(tokens(100)), start)
        while not pair.decode.engines[0].model_executor._underway:  # type: ignore[attr-defined]
            pair.decode.step()
        clock.passed = LEASE_S + seconds
        for seed in range(20 if seconds > 0 else 0):
            pair.prefill.add(f"other {seed}", tokens(100, seed=20 + seed), max_tokens=1)
        pair.prefill.run()
        later = pair.add(tokens(100), None)
        pair.decode.run()
        assert kept.num_loaded == 1
        assert pair.missing(later) == []
        if failures == "fail" and seconds > 0:
            assert pair.decode.received[name].finish is FinishReason.ERROR
            return
        assert pair.missing(name) == []
        if seconds < 0:
            read, made = (client.engines[0].model_executor.seen for client in (pair.decode, pair.prefill))  # type: ignore[attr-defined]
            assert all(read[name][position] == made["prefill-1"][position] for position in range(99))


def test_an_aborted_prefill_hands_no_rows_over(pair: Pair) -> None:
    """Whatever its connector offers: steps are under way whose rows have not arrived."""
    pair.kept.offers_aborted = True
    scheduler = pair.prefill.engines[0].scheduler
    offered = []
    finished = scheduler._connector_finished
    scheduler._connector_finished = lambda request: offered.append(finished(request)) or offered[-1]
    pair.prefill.add("first", tokens(100, seed=1))  # so that rows are known of
    pair.prefill.run()
    pair.prefill.add("aborted", tokens(200), max_tokens=1, kv_transfer_params=dict(REMOTE))
    pair.prefill.step()
    pair.prefill.abort("aborted")
    _, params = offered[-1]
    assert params["do_remote_prefill"]
    assert handoff.PARAM not in params


def test_choices_of_a_prompt_pull_it_once(pair: Pair) -> None:
    """The others hit what it brought, and compute the last block, as the rows of the prompt are those of one choice."""
    params = pair.export_rows(tokens(100))
    names = pair.decode.add("n", tokens(100), start=100, n=3, kv_transfer_params=params, max_tokens=9)
    pair.decode.run()
    assert pair.decode.missing() == 0
    read = [pair.decode.engines[0].model_executor.seen[name] for name in names]  # type: ignore[attr-defined]
    for position in range(100 // BLOCK * BLOCK):
        assert read[0][position] == read[1][position] == read[2][position]
    assert pair.kept.num_loaded == 1


def test_choices_in_several_engines(pair: Pair) -> None:
    """With data parallelism no engine knows of the other's pull, which gives the KV up."""
    other = engine_with_store(connectors=(PULL,), is_async=pair.kept.is_async)
    both = TracingClient(*pair.decode.engines, other)
    params = pair.export_rows(tokens(100))
    both.add("n", tokens(100), start=100, n=4, kv_transfer_params=params, max_tokens=9)
    both.run()
    assert both.missing() == 0
    assert pair.kept.num_loaded == 1


def test_rows_are_not_handed_over_where_nobody_knows_for_how_long(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.prefill.engines[0].capture._loads, "handed", None)
    assert handoff.PARAM not in pair.export_rows(tokens(100))


def test_an_abort_around_a_pull(is_async: bool) -> None:
    with store() as kept:
        pair = Pair(kept, is_async=is_async)
        for steps in range(5):
            prompt = tokens(100, seed=steps)
            name = pair.add(prompt, pair.export_rows(prompt), max_tokens=30)
            pair.decode.steps(steps)
            pair.decode.abort(name)
            others = [pair.add(prompt, None), pair.add(tokens(100, seed=10 + steps), None)]
            pair.decode.run()
            assert [pair.missing(other) for other in others] == [[], []]
            assert len(pair.decode.engines[0].capture._loads.handed) == 0


def test_few_blocks(pair: Pair) -> None:
    """Requests that are preempted compute their prompt again; what was sent by then stays."""
    both = Pair(pair.kept, is_async=False, num_blocks=16)
    names = []
    for seed in range(4):
        prompt = tokens(50, seed)
        names.append(both.add(prompt, both.export_rows(prompt), max_tokens=60))
    requests = list(both.decode.engines[0].scheduler.requests.values())
    both.decode.run()
    assert any(request.num_preemptions for request in requests)
    assert [both.missing(name) for name in names] == [[]] * 4


# ---- what is in kv_transfer_params ----


def encode(rows: np.ndarray) -> dict[str, Any] | None:
    def read(first: int, out: np.ndarray) -> None:
        out[:] = rows[first : first + len(out)]

    return handoff.encode(read, len(rows), rows.shape[1:], until=1.5)


@pytest.mark.parametrize("num_rows", [0, 1, 256, 257, 1000])
def test_rows_come_back(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the one is that takes more than a byte."""
    monkeypatch.setattr(handoff, "_PIECE_BYTES", 256 * 48 * 8)
    ids = np.random.default_rng(num_rows).integers(0, 256, (num_rows, 48, 8), dtype=np.int16)
    for other, at in product((0, 255, 256, 32767, -1), {0, num_rows // 2, num_rows - 1}):
        rows = ids.copy()
        rows[at : at + 1, 47, 7] = other
        handed = encode(rows)
        assert handed is not None
        is_narrow = not num_rows or other in (0, 255)
        assert (handed["dtype"], handed["shape"]) == ("uint8" if is_narrow else "int16", [num_rows, 48, 8])
        decoded, until = handoff.decode(handed)  # type: ignore[misc]
        assert np.array_equal(decoded, rows)
        assert until == 1.5


def test_too_many_rows_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "MAX_BYTES", 100 * 48 * 8)
    narrow, wide = np.zeros((100, 48, 8), np.int16), np.full((100, 48, 8), 300, np.int16)
    assert encode(narrow) is not None
    assert encode(wide) is None
    assert encode(wide[:50]) is not None
    assert handoff.encode(lambda first, out: pytest.fail("read"), 101, (48, 8), 0) is None


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
@pytest.mark.parametrize("num_rows", [0, 1, 256, 1000, 1008])
def test_what_came_is_written_and_nothing_else(num_rows: int, dtype: type[np.integer[Any]]) -> None:
    """In pieces, at the slots of a block table; what else is loaded has no rows, whatever was there before."""
    dice = np.random.default_rng(num_rows)
    blocks, rows = dice.permutation(70)[:63], dice.integers(0, 256, (num_rows, 3, 2)).astype(dtype)
    slots = (blocks[:, np.newaxis] * 16 + np.arange(16)).reshape(-1)
    cache = HostCache(num_blocks=70, block_size=16, num_layers=3, top_k=2)
    cache.write(np.arange(70 * 16), np.full((70 * 16, 3, 2), 7, np.int16))
    KVLoad(slots, rows).apply(cache)
    read, untouched = np.empty((63 * 16, 3, 2), np.int16), np.empty((7 * 16, 3, 2), np.int16)
    cache.read(blocks, 0, read)
    cache.read(np.setdiff1d(np.arange(70), blocks), 0, untouched)
    assert np.array_equal(read[:num_rows], rows)
    assert (read[num_rows:] == -1).all()
    assert (untouched == 7).all()


GOOD = {"data": bytes(12), "dtype": "int16", "shape": [1, 3, 2], "until": 1e9}
WRONG: dict[str, list[Any]] = {
    "data": ["AAAA", bytes(11), b"\xfe\xff" * 6],  # what JSON can say, too little, -2
    "dtype": ["float16", ["int16"]],
    "shape": [[3, 2], [-1, 3, -2], [1.0, 3, 2], [True, 3, 2], "132", [10**400, 3, 2]],
    "until": ["noon", None, True, -1, float("nan"), float("inf"), 10**400],
}


def test_the_engine_takes_nothing_else() -> None:
    assert handoff.decode(GOOD) is not None
    wrong = [{**GOOD, key: value} for key, values in WRONG.items() for value in values]
    wrong += [None, [], {}, {key: value for key, value in GOOD.items() if key != "until"}]
    assert [each for each in wrong if handoff.decode(each) is not None] == []


# ---- what programs can put there ----


class Anything:
    """Cannot be compared, hashed or printed."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError

    __eq__ = __hash__ = __str__ = __repr__ = _raise


VALUES = [[], {}, [[]], {"a": []}, "text", b"bytes", -1, 1.5, float("nan"), True, 10**400, Anything()]


def hostile_params(value: Any) -> list[Any]:
    """`value` in the place of the whole, of our field, of what is in it, or of what is beside it."""
    good = {**GOOD, "shape": [1, 1, 6]}
    beside = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_num_tokens", "do_remote_prefill")
    pull = {"do_remote_prefill": True, "remote_request_id": "r", "remote_engine_id": "e"}
    bodies = [value, {handoff.PARAM: value}, {**pull, handoff.PARAM: value}]
    bodies += [{"do_remote_decode": True, handoff.PARAM: value}]
    bodies += [{**pull, handoff.PARAM: {**good, key: value}} for key in good]
    return bodies + [{**pull, handoff.PARAM: good, key: value} for key in beside]


@pytest.mark.parametrize("connectors", [(PULL,), (NAME,), (NAME, PULL), ()])
def test_no_value_ends_the_engine(connectors: tuple[str, ...]) -> None:
    with store(is_async=True):
        core = engine_with_store(connectors=connectors) if connectors else engine()
        client = TracingClient(core) if connectors else Client(core)
        for index, params in enumerate(params for value in VALUES for params in hostile_params(value)):
            sampling = SamplingParams(max_tokens=2)
            sampling.extra_args = {"kv_transfer_params": params}
            core.scheduler.add_request(Request(f"r{index}", tokens(20), sampling, None))
            core.scheduler.finish_requests(f"r{index}", RequestStatus.FINISHED_ABORTED)
        client.add("after", tokens(40))
        client.run()
        assert client.received["after"].finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    "change", [{"shape": [100, K, L]}, {"shape": [50, 2 * L, K]}, {"until": None}, {"until": 0}], ids=str
)
def test_rows_that_cannot_be_these_are_unknown(pair: Pair, change: dict[str, Any]) -> None:
    """And so they are for whoever hits what was pulled: they compute it."""
    params = pair.export_rows(tokens(100))
    name = pair.add(tokens(100), {**params, handoff.PARAM: {**params[handoff.PARAM], **change}})
    pair.decode.run()
    later = pair.add([*tokens(100), 1], None)
    pair.decode.run()
    assert set(pair.missing(name)) <= set(range(99))
    assert pair.missing(later) == []


def test_rows_of_ended_requests_are_not_kept(pair: Pair) -> None:
    """Measured by what the process holds of the messages in which they came."""

    def held() -> int:
        gc.collect()
        traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*serial_utils.py")])
        return sum(trace.size for trace in traces.traces)

    handed = [pair.export_rows(tokens(100, seed=seed)) for seed in range(6)]
    row_bytes = len(handed[0][handoff.PARAM]["data"])
    tracemalloc.start()
    try:
        names = [pair.add(tokens(100, seed=seed), params) for seed, params in enumerate(handed)]
        assert held() > 6 * row_bytes
        pair.decode.abort(*names[:3])
        pair.decode.run()
        pair.decode.received.clear()
        assert held() < row_bytes
    finally:
        tracemalloc.stop()
    assert len(pair.decode.engines[0].capture._loads.handed) == 0


def test_workers_do_not_get_rows(pair: Pair) -> None:
    sent: list[int] = []
    executor = pair.decode.engines[0].model_executor
    execute = executor.execute_model

    def measured(step: Any, **kwargs: Any) -> Any:
        sent.append(len(pickle.dumps(step)))
        return execute(step, **kwargs)

    executor.execute_model = measured
    params = pair.export_rows(tokens(100))
    name = pair.add(tokens(100), params)
    pair.decode.run()
    assert pair.missing(name) == []
    assert len(params[handoff.PARAM]["data"]) > 100_000
    assert max(sent) < 10_000


def test_what_moriio_reads_is_checked() -> None:
    """Its scheduler makes keys and numbers of these."""
    config = KVTransferConfig(kv_connector="MoRIIOConnector", kv_role="kv_both")
    wrong = {"transfer_id": [], "remote_host": 1, "remote_notify_port": "x", "remote_dp_size": -1, "tp_size": {}}
    for name, value in wrong.items():
        with pytest.raises(transfer_params.TransferParamsError) as raised:
            transfer_params.check({"do_remote_prefill": True, name: value}, config)
        assert raised.value.param == f"kv_transfer_params.{name}"
        assert str(raised.value).startswith(f"{raised.value.param} must be ")
    transfer_params.check({"do_remote_prefill": True, "transfer_id": "tx", "remote_notify_port": "61005"}, config)
