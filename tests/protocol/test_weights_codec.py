"""The routers' weights in the client library: decoded, collected, checked, joined and padded beside their ids."""

import base64
import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.batch import align, align_weights, join_turns, scaled, splice, spread_layers, verify
from routed_experts.protocol.codec import UNKNOWN_WEIGHT, CodecError, count_missing, decode, decode_weights
from routed_experts.protocol.collect import Routing, RoutingError, collect

L, K = 2, 3
P, G = 4, 3
BITS = np.array([-1, 0x7FC00001, 0x80000000 - (1 << 32), 0x3F000000, 1, -65536], dtype=np.int32)


def weights_of(count: int, seed: int = 0) -> np.ndarray:
    """[count, L, K] of any bits."""
    return np.random.default_rng(seed).choice(BITS[1:], size=(count, L, K)).view(np.float32)


def ids_of(count: int) -> np.ndarray:
    return np.tile(np.arange(K, dtype=np.int16), (count, L, 1)) + np.arange(count, dtype=np.int16)[:, None, None]


def base64_of(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def as_object(array: np.ndarray, start: int) -> dict[str, Any]:
    missing = int((array.view(np.int32 if array.dtype == np.float32 else array.dtype) == -1).any(axis=(1, 2)).sum())
    about = {"shape": list(array.shape), "dtype": array.dtype.name, "start": start, "missing": missing}
    return {"data": base64_of(array), **about}


def as_npy(array: np.ndarray, start: int) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def as_list(array: np.ndarray, start: int) -> Any:
    text = json.dumps(array.tolist()).replace("NaN", "null")
    return json.loads(text)


FORMS = {"object": as_object, "npy": as_npy, "list": as_list, "raw": lambda array, start: base64_of(array)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_every_form(form: str, count: int) -> None:
    weights = weights_of(count)
    if count:
        weights[0] = UNKNOWN_WEIGHT
    value = FORMS[form](weights, 7)
    for found in (decode_weights(value, num_layers=L, top_k=K), decode_weights(packed(value), num_layers=L, top_k=K)):
        assert found.shape == (count, L, K)
        assert found.dtype == np.float32
        if form == "list":
            assert np.array_equal(found, weights, equal_nan=True)
        else:
            assert np.array_equal(found.view(np.int32), weights.view(np.int32))
        assert count_missing(found) >= (count > 0)


def packed(value: Any) -> Any:
    """As MessagePack has it."""
    if isinstance(value, dict):
        return {**value, "data": base64.b64decode(value["data"])}
    return base64.b64decode(value) if isinstance(value, str) else value


@pytest.mark.parametrize(
    "value",
    [7, None, "*", base64_of(ids_of(1)), as_npy(ids_of(1), 0), as_object(ids_of(1), 0), [[1.0]], [[["x"]]], {}],
)
def test_what_is_no_array_of_weights(value: Any) -> None:
    with pytest.raises(CodecError):
        decode_weights(value)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_not_taken_for_ids(form: str) -> None:
    if form != "raw":  # bare bytes may be anything
        with pytest.raises(CodecError):
            decode(FORMS[form](np.full((1, L, K), 0.5, np.float32), 0), num_layers=L, top_k=K)


def test_known_weights_are_not_missing() -> None:
    """Whatever their bits, but for the ones that stand for unknown."""
    weights = np.tile(BITS[1:], L * K)[: L * K * 4].reshape(-1, L, K).view(np.float32)
    assert count_missing(weights) == 0
    weights[1, 1, 2] = UNKNOWN_WEIGHT
    assert count_missing(weights) == 1


def answer(form: str = "object", layout: str = "split", weights: bool = True) -> dict[str, Any]:
    rows, of_rows = ids_of(P + G - 1), weights_of(P + G - 1)
    make = FORMS[form]

    def arrays(prefix: str, first: int, end: int) -> dict[str, Any]:
        found = {f"{prefix}routed_experts": make(rows[first:end], first)}
        if weights:
            found[f"{prefix}routed_expert_weights"] = make(of_rows[first:end], first)
        return found

    choice = {"index": 0, "prompt_token_ids": list(range(P)), "token_ids": list(range(G)), "finish_reason": "length"}
    if layout == "joined":
        return {"choices": [choice | arrays("", 0, P + G - 1)]}
    return {"choices": [choice | arrays("", P, P + G - 1)], **arrays("prompt_", 0, P)}


@pytest.mark.parametrize("layout", ["split", "joined"])
@pytest.mark.parametrize("form", FORMS)
def test_whole_answers(form: str, layout: str) -> None:
    asked: Any = {"num_layers": L, "top_k": K} if form == "raw" else {}
    (routing,) = collect(answer(form, layout), **asked)
    assert np.array_equal(routing.rows, ids_of(P + G - 1))
    assert routing.weights is not None
    assert np.array_equal(routing.weights, weights_of(P + G - 1), equal_nan=True)
    if form != "list":
        assert routing.weights.tobytes() == weights_of(P + G - 1).tobytes()
    (routing,) = collect(answer(form, layout, weights=False), **asked)
    assert routing.weights is None


def chunks(weights: bool = True) -> list[dict[str, Any]]:
    """A stream: the prompt in two pieces, then a row with each token."""
    whole, rows, of_rows = answer(), ids_of(P + G - 1), weights_of(P + G - 1)
    pieces = [(0, 3), (3, 4), (4, 5), (5, 6)]
    made = []
    for index, (first, end) in enumerate(pieces):
        arrays = {"routed_experts": as_object(rows[first:end], first)}
        if weights:
            arrays["routed_expert_weights"] = as_object(of_rows[first:end], first)
        choice = {**whole["choices"][0], "token_ids": [[], [0], [1], [2]][index], "finish_reason": None}
        del choice["routed_experts"], choice["routed_expert_weights"]
        if end <= P:
            made.append({"choices": [choice], **{f"prompt_{name}": array for name, array in arrays.items()}})
        else:
            made.append({"choices": [choice | arrays]})
    made[-1]["choices"][0]["finish_reason"] = "length"
    return made


def test_streams() -> None:
    (routing,) = collect(iter(chunks()))
    assert routing.weights is not None
    assert routing.weights.tobytes() == weights_of(P + G - 1).tobytes()
    (routing,) = collect(iter(chunks(weights=False)))
    assert routing.weights is None


def test_several_prompts() -> None:
    one = answer()
    both = {
        "choices": [one["choices"][0], {**one["choices"][0], "index": 1}],
        **{name: [one[name]] * 2 for name in ("prompt_routed_experts", "prompt_routed_expert_weights")},
    }
    for routing in collect(both):
        assert routing.weights is not None
        assert routing.weights.tobytes() == weights_of(P + G - 1).tobytes()
    both["prompt_routed_expert_weights"].pop()
    with pytest.raises(RoutingError, match="weights of 1"):
        collect(both)


@pytest.mark.parametrize("place", ["prompt", "choice"])
@pytest.mark.parametrize(
    "change", [{"start": 1}, {"missing": 1}, {"shape": [2, K, L]}, {"shape": [1, L, 2 * K]}, {"dtype": "int32"}, None]
)
def test_arrays_that_disagree(place: str, change: dict[str, Any] | None) -> None:
    whole = answer()
    container, prefix = (whole, "prompt_") if place == "prompt" else (whole["choices"][0], "")
    name = f"{prefix}routed_expert_weights"
    if change is None:
        del container[name]
    else:
        container[name] = {**container[name], **change}
    with pytest.raises(RoutingError):
        collect(whole)


def test_a_stream_that_loses_weights() -> None:
    for index in range(4):
        stream = chunks()
        container, prefix = (stream[index], "prompt_") if index < 2 else (stream[index]["choices"][0], "")
        del container[f"{prefix}routed_expert_weights"]
        with pytest.raises(RoutingError, match="some of its rows"):
            collect(iter(stream))


def routing(first: int, end: int, weights: bool = True, **about: Any) -> Routing:
    rows = ids_of(20)[first:end]
    return Routing(rows, start=first, weights=weights_of(20)[first:end] if weights else None, **about)


def test_verify() -> None:
    found = Routing(ids_of(3), weights=np.full((3, L, K), 1 / 3, np.float32))
    verify(found, num_experts=9)
    verify(found, num_experts=9, weights_sum=1.0)
    for wrong, match in ((np.nan, "not finite"), (np.inf, "not finite"), (0.5, "add up to 1.0")):
        weights = np.full((3, L, K), 1 / 3, np.float32)
        weights[2, 1, 0] = wrong
        with pytest.raises(RoutingError, match=f"position 2, layer 1: weights that .*{match}"):
            verify(replace(found, weights=weights), num_experts=9, weights_sum=1.0)
    with pytest.raises(RoutingError, match="no weights"):
        verify(replace(found, weights=None), num_experts=9, weights_sum=1.0)


def test_turns() -> None:
    joined = join_turns([routing(0, 8), routing(5, 12), routing(12, 20)])
    assert joined.weights is not None
    assert joined.weights.tobytes() == weights_of(20).tobytes()
    assert join_turns([routing(0, 8, weights=False), routing(8, 9, weights=False)]).weights is None
    with pytest.raises(RoutingError, match="some turns have weights"):
        join_turns([routing(0, 8), routing(8, 9, weights=False)])


@pytest.mark.parametrize("prefill_has", [True, False])
def test_legs(prefill_has: bool) -> None:
    decode_leg = routing(0, 10, prompt_len=8)
    rows, weights = decode_leg.rows.copy(), decode_leg.weights
    assert weights is not None
    weights = weights.copy()
    rows[[2, 5]], weights[[2, 5]] = -1, UNKNOWN_WEIGHT
    cut = replace(decode_leg, rows=rows, weights=weights)
    spliced = splice(cut, routing(1, 8, weights=prefill_has, prompt_len=8))
    assert np.array_equal(spliced.rows, decode_leg.rows)
    assert spliced.weights is not None
    expected = decode_leg.weights if prefill_has else weights
    assert expected is not None
    assert spliced.weights.tobytes() == expected.tobytes()


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_batches(padding: Any) -> None:
    """A weight stands where its id stands."""
    routings = [routing(0, 5, prompt_len=3), routing(0, 9, prompt_len=4)]
    ids = align(routings, 12, padding=padding, last=-1)
    weights = align_weights(routings, 12, padding=padding)
    assert weights.shape == ids.shape
    for place, one in enumerate(routings):
        at = np.flatnonzero((ids[place] >= 0).all(axis=(1, 2)))
        assert one.weights is not None
        assert weights[place, at].tobytes() == one.weights.tobytes()
        assert np.isnan(np.delete(weights[place], at, axis=0)).all()
    repeated = align_weights(routings, 12, padding=padding, last="repeat", pad=0.0)
    assert not np.isnan(repeated[:, [0, -1]]).all()
    with pytest.raises(RoutingError, match="has no weights"):
        align_weights([routing(0, 5, weights=False)], 12)


def test_layers_without_experts_have_no_weight() -> None:
    weights = np.full((3, L, K), -1.0, np.float32)  # which is no unknown weight
    weights[1] = UNKNOWN_WEIGHT
    spread = spread_layers(weights, [1, 2], 4)
    assert spread[[0, 2]][:, [0, 3]].any() == np.False_
    assert np.isnan(spread[1]).all()
    assert np.array_equal(spread[[0, 2]][:, [1, 2]], weights[[0, 2]])


def test_scaled() -> None:
    weights = np.ones((3, L, K), np.float32)
    found = scaled(weights, {"weights_scale": [2.5, 1.0]})
    assert found.dtype == np.float32
    assert found[:, 0].tolist() == [[2.5] * K] * 3
    assert found[:, 1].tolist() == [[1.0] * K] * 3
    with pytest.raises(ValueError, match="2 layers"):
        scaled(weights, {"weights_scale": [1.0]})
