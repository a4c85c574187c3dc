"""What a request says about its experts: there and back as bytes, and what is refused."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.routing_input import (
    INPUT_ARG,
    MAX_BIAS,
    EncodedInput,
    Groups,
    RoutingInput,
    RoutingInputError,
    routing_args,
    steering_bias,
)

NEVER, ALWAYS = -np.inf, np.inf
MODEL = {"num_layers": 2, "top_k": 2, "num_experts": 8}
INFO = {"layer_ids": [1, 3], "num_experts": 8}


def rows_of(num_tokens: int, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).random((num_tokens, 2, 8)).argsort(axis=2)
    return order[:, :, :2].astype(np.int16)


def bias_of(values: dict[tuple[int, int], float]) -> np.ndarray:
    bias = np.zeros((2, 8), np.float32)
    for index, value in values.items():
        bias[index] = value
    return bias


@pytest.mark.parametrize(
    "said",
    [
        {"rows": rows_of(5), "start": 3},
        {"bias": bias_of({(0, 1): NEVER, (1, 2): ALWAYS, (1, 3): -0.5})},
        {"rows": rows_of(3), "bias": bias_of({(0, 1): 2.0})},
    ],
)
def test_there_and_back(said: dict[str, Any]) -> None:
    back = RoutingInput.decode(RoutingInput(**said).encode())
    assert back.start == said.get("start", 0)
    assert back.largest == (said["rows"].max() if "rows" in said else -1)
    for name in ("rows", "bias"):
        sent, array = said.get(name), getattr(back, name)
        assert (array is None) == (sent is None)
        if array is not None:
            np.testing.assert_array_equal(array, sent)
            assert array.dtype == sent.dtype


def test_the_digest_tells_inputs_apart() -> None:
    inputs = [
        RoutingInput(rows=rows_of(4)),
        RoutingInput(rows=rows_of(4), start=1),
        RoutingInput(rows=rows_of(4).reshape(2, 4, 2)),
        RoutingInput(rows=rows_of(4, seed=1)),
        RoutingInput(bias=bias_of({(0, 0): 1.0})),
        RoutingInput(bias=bias_of({(0, 0): 1.0}).reshape(4, 4)),
    ]
    assert len({routing_input.encode().digest for routing_input in inputs}) == len(inputs)
    assert RoutingInput(rows=rows_of(4)).encode().digest == inputs[0].encode().digest


def test_no_copy_of_a_request_prints_the_bytes_or_copies_them() -> None:
    args = routing_args(rows=rows_of(5000))
    assert len(repr(args)) < 100
    for other in (copy.copy(args), copy.deepcopy(args)):
        assert other[INPUT_ARG].arrays is args[INPUT_ARG].arrays
    assert pickle.loads(pickle.dumps(args)) == args


def test_what_a_program_changes_later_is_what_it_gave() -> None:
    """What was checked is what is sent, at any time."""
    rows, bias = rows_of(5), np.zeros((2, 8), np.float32)
    expected = rows.copy()
    of_rows, of_bias = RoutingInput(rows=rows), RoutingInput(bias=bias)
    rows[:] = 99
    bias[:] = np.nan
    encoded = of_rows.encode()
    decoded = RoutingInput.decode(encoded)
    np.testing.assert_array_equal(decoded.rows, expected)
    assert decoded.largest == expected.max()
    assert not RoutingInput.decode(of_bias.encode()).bias.any()
    with pytest.raises(ValueError, match="read-only"):
        encoded.arrays[0] = 1


def test_inputs_are_equal_by_what_they_say() -> None:
    one = RoutingInput(rows=rows_of(4)).encode()
    same = RoutingInput(rows=rows_of(4)).encode()
    assert one == same
    assert len({one, same}) == 1
    assert one != RoutingInput(rows=rows_of(4, seed=1)).encode()
    assert one != one.header


def test_what_a_message_brought_without_its_frame_is_refused_and_not_passed_over() -> None:
    encoded = EncodedInput.of(
        SimpleNamespace(
            extra_args={
                INPUT_ARG: {
                    "header": RoutingInput(rows=rows_of(9)).encode().header,
                    "arrays": ["|u1", [72], 1],
                }
            }
        )
    )
    assert encoded is not None
    with pytest.raises(ValueError, match="these bytes are"):
        RoutingInput.decode(encoded)


@pytest.mark.parametrize(
    "value",
    ["text", 1, ["a"], {"header": "text", "arrays": ["|u1", [1], 1]}, {"arrays": ""}, {}, None],
)
def test_json_cannot_forge_it(value: object) -> None:
    assert EncodedInput.of(SimpleNamespace(extra_args={INPUT_ARG: value})) is None


ENCODED = RoutingInput(rows=rows_of(3)).encode()


@pytest.mark.parametrize(
    ("header", "arrays"),
    [
        (b"", ENCODED.arrays),
        (b"x" * len(ENCODED.header), ENCODED.arrays),
        (ENCODED.header[:-1], ENCODED.arrays),
        (ENCODED.header, ENCODED.arrays[:-1]),
        (ENCODED.header, np.tile(ENCODED.arrays, 2)),
    ],
)
def test_bytes_of_something_else_are_refused(header: bytes, arrays: np.ndarray) -> None:
    with pytest.raises(ValueError, match="these bytes are"):
        RoutingInput.decode(EncodedInput(header, arrays))


TWICE = np.full((1, 2, 2), 3)

IMPOSSIBLE: list[tuple[dict[str, Any], str, str]] = [
    ({}, "rows", "both missing"),
    ({"start": 1, "bias": bias_of({})}, "start", "give rows, too"),
    ({"rows": rows_of(1), "start": -1}, "start", "must be from 0 to"),
    ({"rows": rows_of(1)[0]}, "rows", "the shape"),
    ({"rows": rows_of(0)}, "rows", "the shape"),
    ({"rows": TWICE}, "rows", "have an expert twice in MoE layer 0 of row 0: 3, 3"),
    ({"rows": np.array([[[0, -2]]])}, "rows", "not -2"),
    ({"rows": np.array([[[0, 1 << 15]]])}, "rows", "not 32768"),
    ({"bias": np.zeros(8)}, "bias", "the shape"),
    ({"bias": np.full((2, 8), np.nan)}, "bias", "NaN"),
    ({"bias": np.full((2, 8), 2 * MAX_BIAS)}, "bias", "at most"),
    ({"bias": np.full((2, 8), 1e300)}, "bias", "at most"),
    ({"bias": np.full((2, 8), np.iinfo(np.int64).min)}, "bias", "at most"),
    (
        {"rows": np.array([[[4, 5], [6, 7]]]), "bias": bias_of({(1, 7): NEVER})},
        "rows",
        "have expert 7 in MoE layer 1 of row 0, which is never to be chosen",
    ),
]


@pytest.mark.parametrize(("said", "field", "words"), IMPOSSIBLE)
def test_what_no_model_can_do_is_refused(said: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RoutingInputError, match=words) as raised:
        RoutingInput(**said)
    assert raised.value.field == field
    assert str(raised.value).startswith(f"{field} ")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize("said", [{"rows": "text"}, {"rows": np.zeros((1, 1, 1))}, {"start": 0.5}])
def test_other_types_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be"):
        RoutingInput(**said)


WRONG_MODEL: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"rows": rows_of(3)}, {"num_layers": 3}, "rows", "3 layers and 2 experts per token"),
    ({"rows": rows_of(3)}, {"top_k": 4}, "rows", "2 layers and 4 experts per token"),
    ({"rows": np.array([[[0, 8], [0, 1]]])}, {}, "rows", "expert 8, but the model's are 0 to 7"),
    ({"rows": rows_of(3), "start": 2}, {"num_prompt_tokens": 4}, "rows", "end at position 5"),
    ({"bias": bias_of({(0, 0): 1})}, {"num_experts": 16}, "bias", "2 layers and 16 experts"),
    (
        {"bias": bias_of({(1, expert): ALWAYS for expert in range(3)})},
        {},
        "activate",
        "has 3 experts of MoE layer 1, but 2 are chosen",
    ),
    (
        {"bias": bias_of({(1, expert): NEVER for expert in range(7)})},
        {},
        "deactivate",
        "leaves 1 experts in MoE layer 1",
    ),
    (
        {"bias": bias_of({(0, 0): ALWAYS, (0, 7): ALWAYS})},
        {"groups": Groups(4, 1)},
        "activate",
        "has experts in 2 groups of MoE layer 0",
    ),
]


@pytest.mark.parametrize(("said", "model", "field", "words"), WRONG_MODEL)
def test_what_this_model_cannot_do_is_refused(
    said: dict[str, Any], model: dict[str, Any], field: str, words: str
) -> None:
    routing_input = RoutingInput(**said)
    with pytest.raises(RoutingInputError, match=words) as raised:
        routing_input.check(**{**MODEL, **model})
    assert raised.value.field == field


def test_what_the_model_can_do_passes() -> None:
    RoutingInput(rows=rows_of(3), start=2).check(**MODEL, num_prompt_tokens=5)
    RoutingInput(rows=np.full((3, 2, 2), -1)).check(**MODEL)
    steering = bias_of({(0, expert): NEVER for expert in range(6)} | {(0, 6): ALWAYS})
    RoutingInput(bias=steering).check(**MODEL)


@pytest.mark.parametrize("summed", [1, 2])
def test_groups_that_can_be_chosen_have_enough_experts(summed: int) -> None:
    """Against all orders in which groups of that many experts can be chosen."""
    rng = np.random.default_rng(0)
    groups = Groups(count=4, chosen=2, summed=summed)
    for _ in range(100):
        of_layer = np.where(rng.random(16) < 0.6, NEVER, 0).astype(np.float32)
        fewest = 16
        for _ in range(60):
            liked = rng.random(16) + 10 * rng.random(4).repeat(4)
            scores = np.where(of_layer == NEVER, -1e6, liked).reshape(4, 4)
            of_group = np.sort(scores, axis=1)[:, -summed:].sum(axis=1)
            chosen = np.argsort(of_group)[-2:]
            fewest = min(fewest, int((of_layer.reshape(4, 4)[chosen] > NEVER).sum()))
        routing_input = RoutingInput(bias=np.stack([of_layer]))
        model = {"num_layers": 1, "num_experts": 16, "groups": groups}
        for top_k in range(1, 5):
            is_refused = False
            try:
                routing_input.check(top_k=top_k, **model)
            except RoutingInputError:
                is_refused = True
            assert is_refused == (fewest < top_k), (of_layer, top_k)


def test_experts_of_decoder_layers_are_activated_and_deactivated() -> None:
    args = routing_args(activate=[(1, 2)], deactivate=[(3, 4)], info=INFO)
    bias = RoutingInput.decode(args[INPUT_ARG]).bias
    np.testing.assert_array_equal(bias, bias_of({(0, 2): ALWAYS, (1, 4): NEVER}))


def test_a_bias_and_an_activated_expert_are_given_together() -> None:
    bias = steering_bias(**INFO, bias=bias_of({(0, 1): 0.5}), activate=[(3, 0)])
    np.testing.assert_array_equal(bias, bias_of({(0, 1): 0.5, (1, 0): ALWAYS}))


@pytest.mark.parametrize(
    ("said", "field", "words"),
    [
        ({"activate": [(2, 0)]}, "activate", "decoder layer 2, which has no experts: .* 1, 3"),
        ({"deactivate": [(1, 8)]}, "deactivate", "expert 8 of decoder layer 1"),
        ({"activate": [(1, 0)], "deactivate": [(1, 0)]}, "deactivate", "to choose always"),
        (
            {"activate": [(1, 0)], "bias": bias_of({(0, 0): NEVER})},
            "activate",
            "to choose never",
        ),
        ({"activate": [(1, 0)], "bias": np.zeros((3, 8))}, "bias", "the shape"),
    ],
)
def test_contradictory_steering_is_refused(said: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RoutingInputError, match=words) as raised:
        routing_args(**said, info=INFO)
    assert raised.value.field == field


def test_an_error_names_the_decoder_layer_where_the_model_is_known() -> None:
    with pytest.raises(RoutingInputError, match="twice in decoder layer 1 of row 0"):
        routing_args(rows=TWICE, info=INFO)
    banned = RoutingInput(bias=bias_of({(1, expert): NEVER for expert in range(7)}))
    with pytest.raises(RoutingInputError, match="in MoE layer 1") as raised:
        banned.check(**MODEL)
    copied = pickle.loads(pickle.dumps(raised.value))
    assert str(copied.in_model(INFO["layer_ids"])).startswith(
        "deactivate leaves 1 experts in decoder layer 3,"
    )


def test_steering_needs_the_names_of_the_layers() -> None:
    with pytest.raises(RoutingInputError, match="activate needs info"):
        routing_args(activate=[(1, 0)])
