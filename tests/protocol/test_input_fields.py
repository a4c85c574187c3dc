"""The rules for the fields that say which experts a request's tokens take."""

from typing import Any

import pytest

from routed_experts.protocol.input_fields import (
    BiasArray,
    InputFields,
    ReplayedArray,
    ReplayedReference,
    parse_input,
    take_input,
)
from routed_experts.protocol.models import (
    INPUT_FIELDS,
    FieldError,
    check_defaults,
    check_names,
    parse_options,
)

REPLAY, ACTIVATE, DEACTIVATE, BIAS = INPUT_FIELDS
ARRAY: dict[str, Any] = {"data": "AAA=", "shape": [1, 1, 1], "dtype": "int16", "start": 3}
BIASES = {"data": "AAAAAA==", "shape": [1, 1], "dtype": "float32"}


def refused(**fields: Any) -> str:
    """The message of a refusal of the only field."""
    (name,) = fields
    with pytest.raises(FieldError) as raised:
        parse_input(fields)
    assert raised.value.param == name
    assert str(raised.value).startswith(name)
    return str(raised.value)


def test_fields_are_taken_out_of_a_body() -> None:
    body = {"prompt": "a", REPLAY: ARRAY, BIAS: [], "return_routed_experts": True}
    assert take_input(body) == {REPLAY: ARRAY, BIAS: []}
    assert body == {"prompt": "a", "return_routed_experts": True}
    assert set(InputFields.model_fields) == set(INPUT_FIELDS)


def test_an_array_as_a_response_has_it() -> None:
    parsed = parse_input({REPLAY: {**ARRAY, "missing": 0}})
    (array,) = parsed.replay
    assert array == ReplayedArray(data="AAA=", shape=[1, 1, 1], dtype="int16", start=3)
    assert parsed.first_field == REPLAY
    assert not parsed.has_bias


def test_a_list_of_an_array_and_a_reference() -> None:
    reference = {"id": "0" * 40, "url": "routed_experts/rows/x", "start": 7, "dtype": "int16"}
    parsed = parse_input({REPLAY: [ARRAY, reference]})
    assert parsed.replay[1] == ReplayedReference(id="0" * 40, start=7)


def test_experts_and_biases() -> None:
    parsed = parse_input({ACTIVATE: [[1, 2]], DEACTIVATE: [[1, 3], [2, 0]], BIAS: [[4, 5, -1]]})
    assert parsed.activate == ((1, 2),)
    assert parsed.deactivate == ((1, 3), (2, 0))
    assert parsed.bias == ((4, 5, -1.0),)
    assert parsed.has_bias
    of_all = parse_input({BIAS: BIASES})
    assert isinstance(of_all.bias, BiasArray)


def test_what_says_nothing() -> None:
    assert parse_input({}).says_nothing
    assert parse_input({name: [] for name in INPUT_FIELDS}).says_nothing
    for name in INPUT_FIELDS:
        value = ARRAY if name == REPLAY else [[1, 2, 3.0]] if name == BIAS else [[1, 2]]
        assert not parse_input({name: value}).says_nothing


def test_a_field_of_a_request_wins_over_its_default() -> None:
    default = parse_input({ACTIVATE: [[1, 2]], DEACTIVATE: [[1, 3]], BIAS: [[1, 4, 0.5]]})
    said = {REPLAY: ARRAY, DEACTIVATE: [], BIAS: [[2, 0, 1.0]]}
    whole = parse_input(said).with_defaults(default, said)
    assert vars(whole) == vars(parse_input({**said, ACTIVATE: [[1, 2]]}))


@pytest.mark.parametrize("name", INPUT_FIELDS)
def test_values_of_other_types(name: str) -> None:
    for value in (None, 1, True, "a", 0.5, [1], ["a"], [None], {"a": 1}, [{}]):
        refused(**{name: value})


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"data": None}, ".data"),
        ({"shape": [1, 1]}, ".shape"),
        ({"shape": [1, -1, 1]}, r".shape[1]"),
        ({"shape": [1, 1, 1 << 70]}, r".shape[2]"),
        ({"shape": [1.0, 1, 1]}, r".shape[0]"),
        ({"dtype": "float32"}, ".dtype"),
        ({"start": -1}, ".start"),
        ({"start": True}, ".start"),
        ({"start": 1 << 40}, ".start"),
    ],
)
def test_arrays_that_no_model_allows(changes: dict[str, Any], where: str) -> None:
    assert where in refused(**{REPLAY: {**ARRAY, **changes}})


def test_a_reference_says_where_it_begins() -> None:
    """Rows of an answer would else be taken for rows of the first tokens."""
    assert ".start: Field required" in refused(**{REPLAY: {"id": "0" * 40}})
    assert ".id" in refused(**{REPLAY: {"id": "0" * 65, "start": 0}})
    assert ".id" in refused(**{REPLAY: {"id": 5, "start": 0}})


def test_an_error_says_the_form() -> None:
    pairs = "(the form is [[decoder layer, expert], …])"
    for value in ([1, 3], [[1]], [[1, 2, 3]], [[1, "2"]], [[1, True]], [[1.0, 2]], {"1": [3]}):
        assert refused(**{DEACTIVATE: value}).endswith(pairs)
        assert refused(**{ACTIVATE: value}).endswith(pairs)
    triples = "(the form is [[decoder layer, expert, value], …], or an array of float32 [layers, experts])"
    array = {"data": "AA", "shape": [1, 2, 3], "dtype": "float32"}
    for biases in (5, [[1, 3]], [[1, 2, "3"]], [[1, 2, True]], array):
        assert refused(**{BIAS: biases}).endswith(triples)
    rows = "(the form is [rows, layers, experts per token])"
    assert refused(**{REPLAY: {**ARRAY, "shape": [1, 2]}}).endswith(rows)
    assert "the form is" not in refused(**{REPLAY: {**ARRAY, "start": -1}})


def test_an_object_without_data_is_no_reference() -> None:
    for value in ({}, {"shape": [1, 2, 3], "dtype": "int16", "rows": "AA"}):
        message = refused(**{REPLAY: value})
        assert message == f"{REPLAY} must have data, as an array, or id, as a reference"


def test_an_error_repeats_no_data() -> None:
    text = "A" * 1000
    for changes in ({"shape": text}, {"dtype": text}, {"start": text}):
        assert text[:100] not in refused(**{REPLAY: {**ARRAY, **changes}})
    assert text[:100] not in refused(**{REPLAY: [text]})


@pytest.mark.parametrize("name", INPUT_FIELDS)
def test_the_names_are_known(name: str) -> None:
    check_names([name])
    assert parse_options({name: "anything"}) is None  # which says nothing of what is returned
    if name != REPLAY:
        check_defaults({name: []})
    with pytest.raises(FieldError, match=f"did you mean {name}?"):
        check_names([f"{name}s"])


def test_rows_have_no_default() -> None:
    with pytest.raises(FieldError, match=f"{REPLAY} cannot have a default"):
        check_defaults({REPLAY: ARRAY})
