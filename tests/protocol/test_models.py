"""The rules for the routing fields of a request."""

from typing import Any, get_args

import pytest

from routed_experts.protocol.codec import Format
from routed_experts.protocol.models import FieldError, RoutingFields, RoutingOptions, check_defaults, parse_options

OPT_IN = {"return_routed_experts": True}
HISTOGRAM = {"routed_experts_histogram": True}
VALID: dict[str, Any] = {
    "routed_experts_prompt_start": 3,
    "routed_experts_start_len": 3,
    "routed_experts_format": "npy",
    "routed_experts_dtype": "auto",
    "routed_experts_layout": "joined",
    "routed_experts_layers": "all",
}
WITH_HISTOGRAM = ("routed_experts_prompt_start", "routed_experts_start_len", "routed_experts_layers")
ACCEPTED: dict[str, list[Any]] = {
    "prompt_start": [0, 1 << 40],
    "format": [*get_args(Format)],
    "dtype": ["int16", "uint8", "int32", "auto"],
    "layout": ["split", "joined"],
    "layers": ["moe", "all"],
}
INVALID = {
    "return_routed_experts": [None, 0, 1, 1.0, "true", "1", "", [], {}],
    "routed_experts_prompt_start": [None, -1, "1", 1.0, 1.5, True, False, [], {}],
    "routed_experts_start_len": [None, -1, "1", 1.0, 1.5, True, False, [], {}],
    "routed_experts_format": [None, "", "OBJECT", "base64", 1, True, ["npy"]],
    "routed_experts_dtype": [None, "", "int8", "uint16", "int64", 16, True],
    "routed_experts_layout": [None, "", "Split", "both", 0, True],
    "routed_experts_layers": [None, "", "ALL", "dense", 1, True, ["all"]],
    "routed_experts_histogram": [None, 0, 1, "true", "", [], {}],
}


def parse(body: dict[str, Any], defaults: Any = None) -> RoutingOptions:
    options = parse_options(body, defaults) if defaults is not None else parse_options(body)
    assert options is not None
    return options


def refuse(body: dict[str, Any], param: str, message: str | None = None, defaults: Any = None) -> None:
    with pytest.raises(FieldError, match=message) as raised:
        parse_options(body, defaults) if defaults is not None else parse_options(body)
    assert raised.value.param == param


def test_the_tables_above_have_every_field() -> None:
    assert set(INVALID) == set(RoutingFields.model_fields)
    assert set(VALID) == set(INVALID) - set(OPT_IN) - set(HISTOGRAM)


def test_accepted_values() -> None:
    body = {"model": "tiny", "prompt": "abc", "n": 3}
    assert parse_options(body) is None
    assert parse_options({**body, "return_routed_experts": False}) is None
    default = RoutingOptions(prompt_start=0, format="object", dtype="int16", layout="split", layers="moe")
    assert parse({**body, **OPT_IN}) == default
    for attribute, values in ACCEPTED.items():
        for value in values:
            sent = {**OPT_IN, f"routed_experts_{attribute}": value}
            before = dict(sent)
            assert getattr(parse(sent), attribute) == value
            assert sent == before
    assert parse({**OPT_IN, "routed_experts_start_len": 7}).prompt_start == 7


def test_invalid_values() -> None:
    for field, value in ((field, value) for field, values in INVALID.items() for value in values):
        refuse({**OPT_IN, field: value}, field, field)
        with pytest.raises(FieldError) as raised:
            check_defaults({field: value})
        assert raised.value.param == field


def test_a_field_requires_the_opt_in() -> None:
    """So that a gateway that drops the opt-in does not drop the routing silently."""
    refuse({"routed_experts_prompt_start": 0}, "routed_experts_prompt_start")
    for field, value in VALID.items():
        body, message = {field: value}, f"{field} needs return_routed_experts: true"
        refuse(body, field, message)
        refuse({**body, "return_routed_experts": False}, field, message)
        refuse({**body, "return_routed_experts": False}, field, message, {**OPT_IN})
        if field not in WITH_HISTOGRAM:
            refuse({**body, **HISTOGRAM}, field, message)
        # A server's default requires none.
        assert parse_options({}, body) is None
        assert parse_options({"return_routed_experts": False}, body) is None
        assert parse_options(OPT_IN, body) == parse({**OPT_IN, **body})


def test_the_two_names_of_prompt_start() -> None:
    both = {**OPT_IN, "routed_experts_prompt_start": 4, "routed_experts_start_len": 4}
    assert parse(both) == RoutingOptions(prompt_start=4)
    for other in ({"routed_experts_start_len": 5}, {"routed_experts_prompt_start": 0}):
        refuse({**both, **other}, "routed_experts_start_len", "two names for one value and differ")


def test_histograms() -> None:
    alone = RoutingOptions(rows=False, histogram=True)
    assert parse(HISTOGRAM) == parse({**HISTOGRAM, "return_routed_experts": False}) == alone
    assert parse({**HISTOGRAM, **OPT_IN}) == RoutingOptions(rows=True, histogram=True)
    for more in ({"prompt_start": 3}, {"layers": "all"}):
        body = {**HISTOGRAM, **{f"routed_experts_{name}": value for name, value in more.items()}}
        assert parse(body) == RoutingOptions(rows=False, histogram=True, **more)  # type: ignore[arg-type]
    assert parse_options({"routed_experts_histogram": False}) is None


def test_a_request_overrides_the_servers_defaults() -> None:
    defaults = {**OPT_IN, "routed_experts_format": "npy", "routed_experts_start_len": 4}
    assert check_defaults({**OPT_IN, **VALID}) == {**OPT_IN, **VALID}
    start: Any = {"prompt_start": 4, "prompt_start_param": "routed_experts_start_len"}
    assert parse({}, defaults) == RoutingOptions(format="npy", **start)
    assert parse({"routed_experts_format": "raw"}, defaults) == RoutingOptions(format="raw", **start)
    assert parse({"routed_experts_prompt_start": 2}, defaults) == RoutingOptions(format="npy", prompt_start=2)
    assert parse_options({"return_routed_experts": False}, defaults) is None


def test_by_default() -> None:
    defaults = {**OPT_IN, "routed_experts_format": "npy"}
    for body, by_default in (({}, True), ({"prompt": "abc"}, True), (OPT_IN, False)):
        assert parse(body, defaults).by_default is by_default
    assert parse({"routed_experts_format": "raw"}, defaults).by_default is False


def test_invalid_defaults() -> None:
    with pytest.raises(FieldError, match="return_experts is not a routing field: did you mean return_routed_experts"):
        check_defaults({"return_experts": True})
    with pytest.raises(FieldError, match="JSON object"):
        check_defaults([])


def test_vllms_formats_apply_where_no_other_was_asked_for() -> None:
    vllm: Any = {"format": "npy", "layout": "joined", "dtype": "vllm", "layers": "all"}
    assert parse(OPT_IN).with_vllms_forms() == RoutingOptions(**vllm)
    typed = parse({**OPT_IN, "routed_experts_dtype": "int32"})
    assert typed.with_vllms_forms() == RoutingOptions(**{**vllm, "dtype": "int32"})
    moe = parse(OPT_IN, {"routed_experts_layers": "moe"})
    assert moe.with_vllms_forms() == RoutingOptions(**{**vllm, "layers": "moe"})
    for body in ({**OPT_IN, "routed_experts_format": "npy"}, {**OPT_IN, "routed_experts_layout": "split"}, HISTOGRAM):
        assert parse(body).with_vllms_forms() == parse(body)


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
def test_unknown_routing_fields(name: str, nearest: str) -> None:
    for body in ({}, OPT_IN, {"return_routed_experts": False}):
        for value in (None, False, 1):
            with pytest.raises(FieldError, match=f"not a routing field: did you mean {nearest}") as raised:
                parse_options({"model": "tiny", **body, name: value})
            assert raised.value.param == name
            assert len(str(raised.value)) < 200
    with pytest.raises(FieldError) as raised:
        check_defaults({name: 1})
    assert raised.value.param == name


def test_field_names_of_others_and_names_that_cannot_be_encoded() -> None:
    assert parse_options({"route": 1, "expert": 2, "my_return_routed_experts": True, "Routed_Experts": 1}) is None
    with pytest.raises(FieldError) as raised:
        parse_options({"return_routed_\ud800": True})
    assert f"{raised.value} {raised.value.param}".encode().count(b"return_routed_?") == 2
