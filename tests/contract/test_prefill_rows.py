"""Prefill and decode in two engines: the rows of the prompt come with its KV."""

import pickle
from collections.abc import Iterator
from itertools import count, product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.engine import transfer_params
from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.kv.loads import KVLoad
from routed_experts.capture.scheduler.kv.pulls import Pulls
from routed_experts.capture.wire import prefill_rows
from routed_experts.capture.wire.message import OPT_IN_ARG, Cause, OptIn
from routed_experts.capture.wire.prefill_rows import PARAM
from routed_experts.protocol.codec import UNKNOWN
from tests.contract.engine import (
    BLOCK,
    NUM_BLOCKS,
    Client,
    K,
    L,
    Received,
    engine,
    tokens,
)
from tests.contract.loads import (
    LEASE_S,
    PULL,
    REMOTE,
    TRANSFER,
    Clock,
    Store,
    engine_with_store,
    store,
)

NUM_SEQS = 2
PROMPT = tokens(100)


def changed(params: dict[str, Any], **options: Any) -> dict[str, Any]:
    """`params` with other rows."""
    return {**params, PARAM: {**params[PARAM], **options}}


class Pair:
    """A prefill and a decode instance, and what a proxy does."""

    def __init__(
        self,
        kv_store: Store,
        num_blocks: int | None = None,
        failures: str = "recompute",
        **options: Any,
    ) -> None:
        """`num_blocks` are the decode instance's, and so is `failures`."""
        self.kv_store = kv_store
        self.prefill = Client(engine_with_store(PULL, **options))
        self.core = engine_with_store(PULL, num_blocks=num_blocks, failures=failures, **options)
        self.decode = Client(self.core)
        self._count = count(1)
        self.decode.answer("warm up", [1])  # as the probe of a server does

    def export_rows(
        self, prompt: list[int], start: int | None = 0, ask: dict[str, Any] = REMOTE, **options: Any
    ) -> dict[str, Any]:
        """The prefill leg; what its answer says of the KV."""
        name = f"prefill-{next(self._count)}"
        received = self.prefill.answer(
            name, prompt, start, max_tokens=1, kv_transfer_params=dict(ask), **options
        )
        params = received.kv_transfer_params
        assert params is not None
        return params

    def add(
        self,
        prompt: list[int],
        params: Any,
        start: int | None = 0,
        max_tokens: int = 4,
        **options: Any,
    ) -> Received:
        """The decode leg; its rows are checked as they come."""
        name = f"decode-{next(self._count)}"
        self.decode.add(
            name, prompt, start, kv_transfer_params=params, max_tokens=max_tokens, **options
        )
        return self.decode.received[name]

    def missing(
        self, prompt: list[int], params: Any, start: int | None = 0, **options: Any
    ) -> list[int]:
        """Positions whose rows did not come, of a decode leg to its end."""
        received = self.add(prompt, params, start, **options)
        self.decode.run()
        assert received.finish is FinishReason.LENGTH
        return received.missing

    def legs(self, prompt: list[int], **options: Any) -> list[int]:
        """The same, after a prefill leg."""
        return self.missing(prompt, self.export_rows(prompt), **options)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with store() as kv_store:
        yield (made := Pair(kv_store))
        made.decode.finish(missing=None)


def test_every_row_is_there(is_async: bool) -> None:
    with store() as kv_store:
        pair = Pair(kv_store, is_async=is_async)
        for index, length in enumerate((1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 170)):
            params = pair.export_rows(prompt := tokens(length, seed=length))
            assert params[PARAM]["shape"] == [length, L, K]
            assert pair.missing(prompt, params, max_tokens=9) == []
            assert kv_store.num_loaded == index + 1
        pair.decode.finish()


def test_a_row_that_the_prefill_instance_did_not_know_is_computed_for_the_next(pair: Pair) -> None:
    params = pair.export_rows(PROMPT)
    rows = np.frombuffer(params[PARAM]["data"], dtype=np.int16).reshape(100, L, K).copy()
    rows[5] = UNKNOWN
    assert pair.missing(PROMPT, changed(params, data=rows.tobytes())) == [5]
    assert pair.missing(PROMPT, None) == []


def test_rows_that_nobody_asked_for_are_not_handed_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that do not say that they want them may make JSON of what they get."""
    ask = {key: value for key, value in REMOTE.items() if key != PARAM}
    assert PARAM not in pair.export_rows(tokens(20), ask=ask)
    assert not pair.prefill.engines[0].capture.prefill_rows._to_export
    pulls = pair.prefill.engines[0].capture.prefill_rows.pulls
    monkeypatch.setattr(pulls, "lease_s", None)  # nobody knows for how long
    assert PARAM not in pair.export_rows(PROMPT)


def test_rows_that_are_too_large_are_missing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_rows, "MAX_BYTES", 50 * L * K * 2)
    params = pair.export_rows(PROMPT[:51])
    assert PARAM not in params
    assert pair.missing(PROMPT[:51], params) == list(range(50))
    params = pair.export_rows(other := tokens(50, seed=1))
    assert PARAM in params
    monkeypatch.setattr(prefill_rows, "MAX_BYTES", 50 * L * K * 2 - 1)  # the sender's may be larger
    assert pair.missing(other, params) == list(range(49))


def test_rows_that_do_not_come_with_kv_are_not_believed(pair: Pair) -> None:
    params = pair.export_rows(PROMPT)
    poisoned = changed(params, data=bytes(len(params[PARAM]["data"]))) | {
        "do_remote_prefill": False
    }
    # the second hits what the first has computed
    for untrusted in ({PARAM: poisoned[PARAM]}, poisoned):
        assert pair.missing(PROMPT, untrusted) == []


# ---- leases ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What leases go by, also in the instance that keeps the KV."""
    monkeypatch.setattr("routed_experts.capture.scheduler.kv.pulls.time", clock := Clock())
    return clock


@pytest.fixture
def leased(clock: Clock) -> Iterator[Pair]:
    """A pair whose leases end."""
    with store(clock=clock) as kv_store:
        yield (made := Pair(kv_store, max_num_seqs=NUM_SEQS))
        made.decode.finish(
            but=[name for name, received in made.decode.received.items() if received.finish is None]
        )


@pytest.mark.parametrize(
    ("seconds", "waits", "num_loaded"),
    [(26, False, 1), (28, False, 0), (26, True, 1), (28, True, 0)],
)
def test_a_leg_that_comes_late(
    leased: Pair, clock: Clock, seconds: float, waits: bool, num_loaded: int
) -> None:
    """Or that `waits` while there are no steps, as during a pause: there are no heartbeats
    either."""
    params = leased.export_rows(PROMPT)
    clock.passed = 0 if waits else seconds
    leased.add(PROMPT, params)
    clock.passed = seconds
    leased.decode.finish()
    assert leased.kv_store.num_loaded == num_loaded


@pytest.mark.parametrize(
    ("failures", "end"),
    [("recompute", FinishReason.LENGTH), ("fail", FinishReason.ERROR)],
    ids=["recompute", "fail"],
)
def test_a_pull_that_ends_late(
    clock: Clock, failures: str, end: FinishReason, is_async: bool
) -> None:
    """The prefill instance may have given the blocks to another prompt by then, whose KV was
    read."""
    with store(clock=clock) as kv_store:
        pair = Pair(kv_store, failures=failures, is_async=is_async)
        received = pair.add(PROMPT, pair.export_rows(PROMPT))
        while not pair.core.model_executor.underway:
            pair.decode.step()
        clock.passed = 1.1 * LEASE_S
        pair.prefill.step()  # lets go of what nobody has pulled
        pair.prefill.answer("another", tokens((NUM_BLOCKS - 2) * BLOCK, seed=1), max_tokens=1)
        pair.decode.finish(ends=(FinishReason.LENGTH, end))
        assert received.finish is end
        assert kv_store.num_loaded == 1


@pytest.mark.parametrize(
    ("kept", "num_loaded"),
    [
        ({"remote_num_tokens": 6 * BLOCK + 1}, 1),
        ({"remote_num_tokens": 6 * BLOCK}, 0),
        ({"remote_block_ids": [[*range(7)]]}, 1),
        ({"remote_block_ids": [[*range(6)]]}, 0),
        ({"remote_block_ids": [[*range(7)], [*range(7)]]}, 0),
    ],
    ids=str,
)
def test_a_prefill_instance_that_does_not_have_the_whole_prompt(
    leased: Pair, kept: dict[str, Any], num_loaded: int
) -> None:
    """Of the seven blocks that the prompt has here, in one KV cache group: NIXL's worker would end
    the engine."""
    params = leased.export_rows(PROMPT) | kept
    assert leased.missing(PROMPT, params) == []
    assert leased.kv_store.num_loaded == num_loaded


def test_who_came_is_forgotten_after_a_lease(clock: Clock) -> None:
    """Whatever a client says, so that nothing is kv_store for longer than KV is."""
    pulls = Pulls(lease_s=30)

    def comes(name: str, source: int, seconds: float) -> bool:
        request = cast(Request, SimpleNamespace(request_id=name))
        rows = prefill_rows.PrefillRows(np.zeros((1, L, K), dtype=np.uint8), clock.time() + seconds)
        arrival = pulls.arrival(request, rows, ("engine", source), is_first=True)
        pulls.add(request, arrival)
        return arrival.pull is not None

    assert not comes("too far", 0, 1e9)
    assert comes("far", 0, 30)
    assert comes("near", 1, 10)
    clock.passed = 9
    assert not comes("far again", 0, 30)
    assert not comes("near again", 1, 1)
    clock.passed = 31
    assert comes("far after a lease", 0, 30)
    assert comes("near after a lease", 1, 10)


# ---- who pulls, and what ends meanwhile ----


def test_an_aborted_prefill_hands_no_rows_over(pair: Pair) -> None:
    """Whatever its connector offers: steps are under way whose rows have not arrived."""
    pair.kv_store.offers_aborted = True
    scheduler = pair.prefill.engines[0].scheduler
    offered = []
    finished = scheduler._connector_finished
    scheduler._connector_finished = lambda request: offered.append(finished(request)) or offered[-1]
    pair.prefill.answer("first", tokens(100, seed=1))  # so that rows are known of
    pair.prefill.add("aborted", tokens(200), max_tokens=1, kv_transfer_params=dict(REMOTE))
    pair.prefill.step()
    pair.prefill.abort("aborted")
    _, params = offered[-1]
    assert params["do_remote_prefill"]
    assert PARAM not in params


def test_choices_of_a_prompt_pull_it_once(pair: Pair) -> None:
    """The others hit what it brought, and compute the last block, as the rows of the prompt are
    those of one choice."""
    params = pair.export_rows(PROMPT)
    names = pair.decode.add("n", PROMPT, start=100, n=3, kv_transfer_params=params, max_tokens=9)
    pair.decode.finish()
    read = [pair.core.model_executor.seen[name] for name in names]
    for position in range(100 // BLOCK * BLOCK):
        assert read[0][position] == read[1][position] == read[2][position]
    assert pair.kv_store.num_loaded == 1


def test_choices_in_several_engines(pair: Pair) -> None:
    """With data parallelism no engine knows of the other's pull, which gives the KV up."""
    both = Client(pair.core, engine_with_store(PULL))
    both.add("n", PROMPT, start=100, n=4, kv_transfer_params=pair.export_rows(PROMPT), max_tokens=9)
    both.finish()
    assert pair.kv_store.num_loaded == 1


def test_a_request_that_is_refused_leaves_nothing(pair: Pair) -> None:
    """The KV that it came for is still there for the request that comes instead of it."""
    params = pair.export_rows(PROMPT)
    pair.decode.add("runs", tokens(20, seed=1), max_tokens=20)
    pair.decode.steps(3)
    other = Client(pair.core, index=1)
    other.add("runs", PROMPT, kv_transfer_params=params)
    pair.decode.run(other)
    assert other.received.pop("runs").finish is FinishReason.ERROR
    assert not pair.core.capture.prefill_rows.pulls
    assert pair.missing(PROMPT, params) == []
    assert pair.kv_store.num_loaded == 1


# ---- what is in kv_transfer_params ----


@pytest.mark.parametrize("num_rows", [0, 1, 1000])
def test_rows_come_back(num_rows: int) -> None:
    """Wherever the one is that takes more than a byte."""
    ids = np.random.default_rng(num_rows).integers(0, 256, (num_rows, 48, 8), dtype=np.int16)
    for other, at in product((0, 255, 256, 32767, -1), {0, num_rows // 2, num_rows - 1}):
        rows = ids.copy()
        rows[at : at + 1, 47, 7] = other
        handed = prefill_rows.encode(rows, until=1.5)
        assert handed is not None
        is_narrow = not num_rows or other in (0, 255)
        assert (handed["dtype"], handed["shape"]) == (
            "uint8" if is_narrow else "int16",
            [num_rows, 48, 8],
        )
        decoded = prefill_rows.decode(handed)
        assert np.array_equal(decoded.rows, rows)
        assert decoded.until == 1.5


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
@pytest.mark.parametrize("num_rows", [0, 256, 1000])
def test_what_came_is_written_and_nothing_else(num_rows: int, dtype: type[np.integer[Any]]) -> None:
    """In pieces, at the slots of a block table; what else is loaded has no rows, whatever was there
    before."""
    dice = np.random.default_rng(num_rows)
    blocks, rows = dice.permutation(70)[:63], dice.integers(0, 256, (num_rows, 3, 2)).astype(dtype)
    slots = (blocks[:, np.newaxis] * 16 + np.arange(16)).reshape(-1)
    cache = HostCache(num_blocks=70, block_size=16)
    cache.write(np.arange(70 * 16), np.full((70 * 16, 3, 2), 7, np.int16))
    KVLoad(slots, prefill_rows.PrefillRows(rows, 0), Cause.KV_TRANSFER).apply(cache)
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
    "until": ["noon", None, True, -1, 1 << 40, float("inf"), float("nan"), 10**400],
}


def test_the_engine_takes_nothing_else() -> None:
    assert prefill_rows.decode(GOOD) is not None
    assert [until for until in WRONG["until"] if prefill_rows.is_time(until)] == []
    wrong = [{**GOOD, key: value} for key, values in WRONG.items() for value in values]
    # JSON can have half a surrogate pair
    wrong += [{**GOOD, "dtype": "\ud800"}, {**GOOD, "\ud800": "\ud800"}]
    wrong += [None, [], {}, {key: value for key, value in GOOD.items() if key != "until"}]
    # as the host cache's before the first step
    wrong += [{**GOOD, "data": b"", "shape": [100, 0, 0]}]
    assert [
        wrong_value for wrong_value in wrong if prefill_rows.decode(wrong_value) is not None
    ] == []


# ---- what programs can put there ----


class Anything:
    """Cannot be compared, hashed or printed."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError

    __eq__ = __hash__ = __str__ = __repr__ = _raise


VALUES = [[], {}, [[]], {"a": []}, "text", b"bytes", -1, float("nan"), True, 10**400, Anything()]


def hostile_params(value: Any) -> list[Any]:
    """`value` in the place of the whole, of our field, of what is in it, or of what is beside
    it."""
    good = {**GOOD, "shape": [1, 1, 6]}
    beside = (
        "remote_engine_id",
        "remote_request_id",
        "remote_block_ids",
        "remote_num_tokens",
        "do_remote_prefill",
    )
    pull = {"do_remote_prefill": True, "remote_request_id": "r", "remote_engine_id": "e"}
    bodies = [value, {PARAM: value}, {**pull, PARAM: value}]
    bodies += [{"do_remote_decode": True, PARAM: value}]
    bodies += [{**pull, PARAM: {**good, key: value}} for key in good]
    return bodies + [{**pull, PARAM: good, key: value} for key in beside]


@pytest.mark.parametrize("connectors", [(PULL,), (TRANSFER,), ()])
def test_no_value_ends_the_engine(connectors: tuple[str, ...]) -> None:
    with store():
        core = engine_with_store(*connectors) if connectors else engine()
        for index, params in enumerate(
            params for value in VALUES for params in hostile_params(value)
        ):
            sampling = SamplingParams(max_tokens=2)
            opt_in = {OPT_IN_ARG: OptIn(0, bytes(16), False).encode()} if index % 2 else {}
            sampling.extra_args = {"kv_transfer_params": params, **opt_in}
            core.scheduler.add_request(Request(f"r{index}", tokens(20), sampling, None))
            core.scheduler.finish_requests(f"r{index}", RequestStatus.FINISHED_ABORTED)
        assert Client(core).answer("after", tokens(40)).finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    "change",
    [{"shape": [100, K, L]}, {"shape": [50, 2 * L, K]}, {"until": None}, {"until": 0}],
    ids=str,
)
def test_rows_that_cannot_be_these_are_unknown(pair: Pair, change: dict[str, Any]) -> None:
    """And so they are for whoever hits what was pulled: they compute it."""
    assert set(pair.missing(PROMPT, changed(pair.export_rows(PROMPT), **change))) <= set(range(99))
    assert pair.missing([*PROMPT, 1], None) == []


def test_workers_do_not_get_rows(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    execute = pair.core.model_executor.execute_model

    def measured(step: Any, **kwargs: Any) -> Any:
        sent.append(len(pickle.dumps(step)))
        return execute(step, **kwargs)

    monkeypatch.setattr(pair.core.model_executor, "execute_model", measured)
    params = pair.export_rows(PROMPT)
    assert pair.missing(PROMPT, params) == []
    assert len(params[PARAM]["data"]) > 100_000
    assert max(sent) < 10_000


@pytest.mark.parametrize(
    ("connector", "params", "field"),
    [
        ("MooncakeConnector", {"transfer_id": []}, "transfer_id must be "),
        ("MooncakeConnector", {"transfer_id": "a"}, None),
        (
            "NixlConnector",
            {"remote_block_ids": [1, 2]},
            "remote_block_ids must be a list of block ids for each KV ca",
        ),
    ],
)
def test_what_other_connectors_read_is_checked(
    connector: str, params: dict[str, Any], field: str | None
) -> None:
    config = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    if field is None:
        transfer_params.check({"do_remote_decode": True, **params}, config)
    else:
        with pytest.raises(
            transfer_params.TransferParamsError, match=rf"^kv_transfer_params\.{field}"
        ):
            transfer_params.check({"do_remote_decode": True, **params}, config)
