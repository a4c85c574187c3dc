"""The rules of the request's routing fields."""

from typing import Any

import pytest

from routed_experts.protocol.models import FieldError, RoutingFields, RoutingOptions, check_defaults, parse_options

OPT_IN = {"return_routed_experts": True}
OTHERS = [
    name for name in RoutingFields.model_fields if name not in ("return_routed_experts", "routed_experts_histogram")
]
VALID: dict[str, Any] = {
    "routed_experts_prompt_start": 3,
    "routed_experts_start_len": 3,
    "routed_experts_format": "npy",
    "routed_experts_dtype": "auto",
    "routed_experts_layout": "joined",
    "routed_experts_layers": "all",
}
WITH_HISTOGRAM = ("routed_experts_prompt_start", "routed_experts_start_len", "routed_experts_layers")
ALONE: dict[str, Any] = {"routed_experts_histogram": True}
BAD = {
    "return_routed_experts": [None, 0, 1, 1.0, "true", "1", "", [], {}],
    "routed_experts_prompt_start": [None, -1, "1", 1.0, 1.5, True, False, [], {}],
    "routed_experts_start_len": [None, -1, "1", 1.0, 1.5, True, False, [], {}],
    "routed_experts_format": [None, "", "OBJECT", "base64", 1, True, ["npy"]],
    "routed_experts_dtype": [None, "", "int8", "uint16", "int64", 16, True],
    "routed_experts_layout": [None, "", "Split", "both", 0, True],
    "routed_experts_layers": [None, "", "ALL", "dense", 1, True, ["all"]],
    "routed_experts_histogram": [None, 0, 1, "true", "", [], {}],
}


def test_nothing_asked_for() -> None:
    assert parse_options({"model": "tiny", "prompt": "abc", "n": 3}) is None


def test_opt_in_alone_gives_the_defaults_of_the_contract() -> None:
    options = parse_options({"model": "tiny", **OPT_IN})
    assert options == RoutingOptions(prompt_start=0, format="object", dtype="int16", layout="split")


def test_opt_in_that_is_false() -> None:
    assert parse_options({"return_routed_experts": False}) is None


def test_every_field_is_tried_here() -> None:
    assert sorted(VALID) == sorted(OTHERS)
    assert sorted(BAD) == sorted(RoutingFields.model_fields)


@pytest.mark.parametrize(
    ("field", "value", "attribute"),
    [
        ("routed_experts_prompt_start", 0, "prompt_start"),
        ("routed_experts_prompt_start", 1 << 40, "prompt_start"),
        ("routed_experts_start_len", 7, "prompt_start"),
        *(("routed_experts_format", form, "format") for form in ("object", "npy", "raw", "list")),
        *(("routed_experts_dtype", dtype, "dtype") for dtype in ("int16", "uint8", "int32", "auto")),
        *(("routed_experts_layout", layout, "layout") for layout in ("split", "joined")),
        *(("routed_experts_layers", layers, "layers") for layers in ("moe", "all")),
    ],
)
def test_values_that_are_taken(field: str, value: Any, attribute: str) -> None:
    options = parse_options({**OPT_IN, field: value})
    assert getattr(options, attribute) == value


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_values_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(FieldError) as raised:
        parse_options({**OPT_IN, field: value})
    assert raised.value.param == field
    assert field in str(raised.value)


@pytest.mark.parametrize("opt_in", [{}, {"return_routed_experts": False}])
@pytest.mark.parametrize("field", OTHERS)
def test_a_field_needs_the_opt_in(field: str, opt_in: dict[str, Any]) -> None:
    """A gateway that strips the opt-in must not lose the routing without a word."""
    with pytest.raises(FieldError, match=f"{field} needs return_routed_experts: true") as raised:
        parse_options({field: VALID[field], **opt_in})
    assert raised.value.param == field


def test_a_field_with_its_default_needs_the_opt_in_too() -> None:
    with pytest.raises(FieldError) as raised:
        parse_options({"routed_experts_prompt_start": 0})
    assert raised.value.param == "routed_experts_prompt_start"


def test_two_names_of_one_value() -> None:
    both = {**OPT_IN, "routed_experts_prompt_start": 4, "routed_experts_start_len": 4}
    assert parse_options(both) == RoutingOptions(prompt_start=4)
    with pytest.raises(FieldError, match="two names for one value and differ") as raised:
        parse_options({**both, "routed_experts_start_len": 5})
    assert raised.value.param == "routed_experts_start_len"
    with pytest.raises(FieldError):
        parse_options({**both, "routed_experts_prompt_start": 0})


def test_histograms_come_alone_or_beside_rows() -> None:
    alone = parse_options(ALONE)
    assert alone == RoutingOptions(rows=False, histogram=True)
    assert parse_options({**ALONE, **OPT_IN}) == RoutingOptions(rows=True, histogram=True)
    assert parse_options({**ALONE, "return_routed_experts": False}) == alone
    assert parse_options({**ALONE, "routed_experts_prompt_start": 3}) == RoutingOptions(
        rows=False, histogram=True, prompt_start=3
    )
    assert parse_options({**ALONE, "routed_experts_layers": "all"}) == RoutingOptions(
        rows=False, histogram=True, layers="all"
    )
    assert parse_options({"routed_experts_histogram": False}) is None
    for field in set(OTHERS) - set(WITH_HISTOGRAM):
        with pytest.raises(FieldError, match=f"{field} needs return_routed_experts: true"):
            parse_options({**ALONE, field: VALID[field]})


def test_defaults_are_what_a_request_leaves_out() -> None:
    defaults = {**OPT_IN, "routed_experts_format": "npy", "routed_experts_start_len": 4}
    assert parse_options({}, defaults) == RoutingOptions(
        format="npy", prompt_start=4, prompt_start_param="routed_experts_start_len"
    )
    assert parse_options({"routed_experts_format": "raw"}, defaults) == RoutingOptions(
        format="raw", prompt_start=4, prompt_start_param="routed_experts_start_len"
    )
    assert parse_options({"routed_experts_prompt_start": 2}, defaults) == RoutingOptions(format="npy", prompt_start=2)
    assert parse_options({"return_routed_experts": False}, defaults) is None
    with pytest.raises(FieldError):
        parse_options({"return_routed_experts": False, "routed_experts_format": "raw"}, defaults)
    assert parse_options({**OPT_IN}, {"routed_experts_dtype": "auto"}) is not None


@pytest.mark.parametrize("field", OTHERS)
def test_a_default_form_alone_asks_for_nothing(field: str) -> None:
    assert parse_options({}, {field: VALID[field]}) is None
    assert parse_options({"return_routed_experts": False}, {field: VALID[field]}) is None
    assert parse_options(OPT_IN, {field: VALID[field]}) == parse_options({**OPT_IN, field: VALID[field]})


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_wrong_defaults(field: str, value: Any) -> None:
    with pytest.raises(FieldError) as raised:
        check_defaults({field: value})
    assert raised.value.param == field


def test_defaults_that_are_no_fields() -> None:
    with pytest.raises(FieldError, match="return_experts is not a routing field; the nearest is return_routed_experts"):
        check_defaults({"return_experts": True})
    with pytest.raises(FieldError, match="JSON object"):
        check_defaults([])
    assert check_defaults({**OPT_IN, **VALID}) == {**OPT_IN, **VALID}


def test_vllms_forms_where_no_other_was_asked_for() -> None:
    plain = parse_options(OPT_IN)
    assert plain is not None
    assert plain.with_vllms_forms() == RoutingOptions(format="npy", layout="joined", dtype="vllm", layers="all")
    for said in ({"routed_experts_format": "npy"}, {"routed_experts_layout": "split"}):
        options = parse_options({**OPT_IN, **said})
        assert options is not None
        assert options.with_vllms_forms() == options
    typed = parse_options({**OPT_IN, "routed_experts_dtype": "int32"})
    assert typed is not None
    assert typed.with_vllms_forms() == RoutingOptions(format="npy", layout="joined", dtype="int32", layers="all")
    counted = parse_options(ALONE)
    assert counted is not None
    assert counted.with_vllms_forms() == counted, "a histogram has no form"
    moe = parse_options(OPT_IN, {"routed_experts_layers": "moe"})
    assert moe is not None
    assert moe.with_vllms_forms() == RoutingOptions(format="npy", layout="joined", dtype="vllm", layers="moe")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("return_routed_expert", "return_routed_experts"),
        ("return_routed_experts_", "return_routed_experts"),
        ("return_routed_expert_weights", "return_routed_experts"),  # a later part of the contract
        ("routed_experts_formt", "routed_experts_format"),
        ("routed_expert_format", "routed_experts_format"),
        ("routed_experts_layer", "routed_experts_layers"),
        ("routed_experts", ""),
        ("routed_experts_" + "x" * 100_000, ""),
    ],
)
def test_names_that_nobody_knows(name: str, nearest: str) -> None:
    """Whatever their value, and whether routing is asked for or not."""
    for body in ({}, OPT_IN, {"return_routed_experts": False}):
        for value in (None, False, 1):
            with pytest.raises(FieldError, match=f"not a routing field; the nearest is {nearest}") as raised:
                parse_options({"model": "tiny", **body, name: value})
            assert raised.value.param == name
            assert len(str(raised.value)) < 200
    with pytest.raises(FieldError) as raised:
        check_defaults({name: 1})
    assert raised.value.param == name


def test_a_name_that_no_answer_can_hold() -> None:
    with pytest.raises(FieldError) as raised:
        parse_options({"return_routed_\ud800": True})
    assert f"{raised.value} {raised.value.param}".encode().count(b"return_routed_?") == 2


def test_other_names_are_vllms() -> None:
    assert parse_options({"route": 1, "expert": 2, "my_return_routed_experts": True, "Routed_Experts": 1}) is None


def test_who_asked() -> None:
    """The request itself, or only the server's default for it."""
    defaults = {**OPT_IN, "routed_experts_format": "npy"}
    bodies = {False: [OPT_IN, {"routed_experts_format": "raw"}], True: [{}, {"prompt": "abc"}]}
    for by_default, of_kind in bodies.items():
        for body in of_kind:
            options = parse_options(body, defaults)
            assert options is not None
            assert options.by_default == by_default


def test_the_body_is_left_as_it_is() -> None:
    body = {**OPT_IN, "routed_experts_start_len": 2, "prompt": "abc"}
    before = dict(body)
    parse_options(body)
    assert body == before
