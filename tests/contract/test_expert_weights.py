"""Weights beside the ids through vLLM's scheduler: in every situation, of every request that asks, and of no other."""

from typing import Any

import numpy as np
import pytest

from routed_experts.capture import prefill_rows
from routed_experts.capture.rows import joined
from routed_experts.server.outputs import prefill_param
from tests.contract.engine import BLOCK, Client, K, L, tokens, weights_for
from tests.contract.loads import PULL, engine_with_store, store
from tests.contract.offloading import NAME as OFFLOADS
from tests.contract.offloading import engine_that_offloads
from tests.contract.test_prefill_rows import REMOTE, Pair


class Pairs(Pair):
    """Instances that capture weights; `plain_prefill` does not."""

    def __init__(self, kept: Any, plain_prefill: bool = False) -> None:
        super().__init__(kept, weights=True)
        if plain_prefill:
            self.prefill = Client(engine_with_store(PULL))


def over_http(params: dict[str, Any]) -> dict[str, Any]:
    """As the answer of one instance and the request to another have them."""
    wire = prefill_param.to_wire(params)
    assert wire is not None
    handed = prefill_param.PrefillRowsParam(wire[prefill_rows.PARAM])
    handed.parse((L, K), 1 << 15, with_weights=True)
    return {**wire, prefill_rows.PARAM: handed.take()}


@pytest.mark.parametrize("way", [lambda params: params, over_http], ids=["program", "http"])
@pytest.mark.parametrize("length", [1, BLOCK, 100])
def test_they_are_handed_over_with_the_ids(way: Any, length: int) -> None:
    with store() as kept:
        pair, prompt = Pairs(kept), tokens(length)
        params = way(pair.export_rows(prompt, weights=True))
        assert params[prefill_rows.PARAM]["dtype"] == prefill_rows.WORDS
        assert pair.missing(prompt, params, weights=True, max_tokens=9) == []
        assert pair.missing([*prompt, *tokens(20, seed=2)], None, weights=True) == []
        assert kept.num_loaded == 1
        assert pair.decode.num_weights == length + 8 + length + 20 + 3


@pytest.mark.parametrize("plain_prefill", [False, True])
def test_a_decode_leg_that_is_handed_no_weights(plain_prefill: bool) -> None:
    """If it wants weights, it computes the prompt. If not, it uses the ids; who wants weights later computes then."""
    with store() as kept:
        pair, prompt = Pairs(kept, plain_prefill), tokens(100)
        assert (pair.missing(prompt, pair.export_rows(prompt), weights=True), kept.num_loaded) == ([], 0)
        prompt = tokens(100, seed=1)
        assert (pair.missing(prompt, pair.export_rows(prompt)), kept.num_loaded) == ([], 1)
        again = pair.add(prompt, None)
        assert pair.missing(prompt, None, weights=True) == again.missing == []
        assert pair.missing(prompt, None, weights=True) == []


@pytest.mark.parametrize("connectors", [(PULL, OFFLOADS), (OFFLOADS, PULL)], ids=["pull first", "offload first"])
def test_ids_that_came_alone_and_were_offloaded(is_async: bool, connectors: tuple[str, str]) -> None:
    """Who asks for ids loads them again; who asks for weights does not, nor hits what was loaded so."""
    prompt = tokens(5 * BLOCK + 3)
    with store(is_async=True):
        prefill, decode = (
            Client(engine_that_offloads(connectors=connectors, weights=True, is_async=is_async)) for _ in range(2)
        )
        core = decode.engines[0]
        decode.answer("warm up", [1])
        params = prefill.answer("first", prompt, max_tokens=1, kv_transfer_params=dict(REMOTE)).kv_transfer_params
        decode.answer("pulls", prompt, kv_transfer_params=params)
        for index, (weights, num_loads) in enumerate([(True, 0), (False, 1), (True, 0), (False, 1)]):
            if index != 2:  # which hits what was loaded
                core.empty_prefix_cache()
            before = core.model_executor.worker.num_loaded
            decode.answer(str(index), prompt, weights=weights)
            assert core.model_executor.worker.num_loaded - before == 5 * num_loads
        decode.finish()
    assert decode.num_weights == 2 * (len(prompt) + 3)


@pytest.mark.parametrize("num_rows", [0, BLOCK])
def test_weights_of_fewer_rows_than_what_is_pulled_follows(num_rows: int) -> None:
    """All rows that came are before what is pulled: none is left, and the engine goes on."""
    with store() as kept:
        pair, prompt = Pairs(kept), tokens(100)
        pair.decode.answer("computed before", prompt[: 2 * BLOCK], weights=True)
        params = pair.export_rows(prompt, weights=True)
        value = params[prefill_rows.PARAM]
        few = {"data": value["data"][: num_rows * 3 * L * K * 2], "shape": [num_rows, 3 * L, K]}
        params = {**params, prefill_rows.PARAM: {**value, **few}}
        assert pair.missing(prompt, params, weights=True) == [*range(2 * BLOCK, 99)]
        assert kept.num_loaded == 1
        assert pair.missing(prompt, None, weights=True) == []
        pair.decode.finish(missing=None)


def test_an_instance_without_weights_uses_the_ids_that_are_handed_over_with_some() -> None:
    with store() as kept:
        pair, prompt = Pairs(kept), tokens(100)
        pair.decode = Client(engine_with_store(PULL))
        pair.decode.answer("warm up", [1])
        assert (pair.missing(prompt, pair.export_rows(prompt, weights=True)), kept.num_loaded) == ([], 1)


def test_too_many_to_be_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are handed over then without weights."""
    monkeypatch.setattr(prefill_rows, "MAX_BYTES", 50 * L * K * 2)
    with store() as kept:
        pair = Pairs(kept)
        assert pair.export_rows(tokens(50), weights=True)[prefill_rows.PARAM]["dtype"] == prefill_rows.WORDS
        monkeypatch.setattr(prefill_rows, "_WORDS_BYTES", 1)
        params = pair.export_rows(tokens(50, seed=1), weights=True)
        assert params[prefill_rows.PARAM]["dtype"] != prefill_rows.WORDS
        assert params[prefill_rows.PARAM]["shape"] == [50, L, K]


def test_odd_values_over_http() -> None:
    ids = np.arange(2 * L * K, dtype=np.int16).reshape(2, L, K) % 300
    rows = joined(ids, weights_for(ids))
    handed = {"data": rows.tobytes(), "dtype": prefill_rows.WORDS, "shape": list(rows.shape), "until": 1.0}
    wire = prefill_param.to_wire({prefill_rows.PARAM: handed})
    assert wire is not None
    value = wire[prefill_rows.PARAM]
    assert (value["dtype"], value["shape"]) == ("int16", [2, L, K])

    def read(with_weights: bool = True, **changed: Any) -> Any:
        one = prefill_param.PrefillRowsParam({**value, **changed})
        one.parse((L, K), 300, with_weights)
        return one.take()

    assert read() == handed
    assert read(with_weights=False)["dtype"] != prefill_rows.WORDS
    for changed in (
        *(
            {"weights": "x"},
            {"weights": 7},
            {"weights": ""},
            {"weights": value["weights"][4:]},
            {"weights": "*" * 8192},
        ),
        *({"dtype": prefill_rows.WORDS}, {"dtype": prefill_rows.WORDS, "shape": [2, 3 * L, K]}),
    ):
        with pytest.raises(prefill_param.PrefillRowsError):
            read(**changed)
    forged = prefill_param.PrefillRowsParam({**value, "dtype": prefill_rows.WORDS, "shape": [2, 3, L * K // 3]})
    with pytest.raises(prefill_param.PrefillRowsError):
        forged.parse((3, L * K // 3), 300)
