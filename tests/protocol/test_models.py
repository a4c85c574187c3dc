"""The rules for the routing fields of a request."""

from collections.abc import Callable
from typing import Any, get_args

import pytest

from routed_experts.protocol.codec import Format
from routed_experts.protocol.models import (
    FieldError,
    RoutingFields,
    RoutingOptions,
    check_defaults,
    parse_options,
)

OPT_IN = {"return_routed_experts": True}
HISTOGRAM = {"routed_experts_histogram": True}
STARTS = ("routed_experts_prompt_start", "routed_experts_start_len")
VALID: dict[str, Any] = {
    **dict.fromkeys(STARTS, 3),
    "routed_experts_format": "npy",
    "routed_experts_dtype": "auto",
    "routed_experts_layout": "joined",
    "routed_experts_layers": "all",
    "return_routed_expert_weights": True,
    "routed_experts_steps": True,
    "routed_experts_delivery": "reference",
    "routed_experts_stream": "at_end",
}
WITH_HISTOGRAM = (*STARTS, "routed_experts_layers")
ACCEPTED: dict[str, list[Any]] = {
    "prompt_start": [0, 1 << 40],
    "format": [*get_args(Format)],
    "dtype": ["int16", "uint8", "int32", "auto"],
    "layout": ["split", "joined"],
    "layers": ["moe", "all"],
}
INVALID = {
    "return_routed_experts": [None, 0, 1, 1.0, "true", "1", "", [], {}],
    **{name: [None, -1, "1", 1.0, 1.5, True, False, [], {}] for name in STARTS},
    "routed_experts_format": [None, "", "OBJECT", "base64", 1, True, ["npy"]],
    "routed_experts_dtype": [None, "", "int8", "uint16", "int64", 16, True],
    "routed_experts_layout": [None, "", "Split", "both", 0, True],
    "routed_experts_layers": [None, "", "ALL", "dense", 1, True, ["all"]],
    "routed_experts_histogram": [None, 0, 1, "true", "", [], {}],
    "return_routed_expert_weights": [None, 0, 1, "true", "", [], {}],
    "routed_experts_steps": [None, 0, 1, "true", "", [], {}],
    "routed_experts_delivery": [None, "", "Reference", "url", 1, True],
    "routed_experts_stream": [None, "", "at end", True, False, 1],
    "routed_experts_label": [None, "x" * 65, 1, True, ["a"], {"a": "b"}, "\ud800"],
}
LABEL = {"routed_experts_label": "é" * 64}


def parse(*body_and_defaults: Any) -> RoutingOptions:
    options = parse_options(*body_and_defaults)
    assert options is not None
    return options


def refuse(param: str, message: str, check: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(FieldError, match=message) as raised:
        check(*args)
    assert raised.value.param == param
    return str(raised.value)


def test_the_tables_above_have_every_field() -> None:
    assert set(INVALID) == set(RoutingFields.model_fields)
    assert set(VALID) == set(INVALID) - set(OPT_IN) - set(HISTOGRAM) - set(LABEL)


def test_accepted_values() -> None:
    body = {"model": "tiny", "prompt": "abc", "n": 3}
    assert parse_options(body) is None
    assert parse_options({**body, "return_routed_experts": False}) is None
    default = RoutingOptions(
        prompt_start=0, format="object", dtype="int16", layout="split", layers="moe"
    )
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
        refuse(field, field, parse_options, {**OPT_IN, field: value})
        refuse(field, ".", check_defaults, {field: value})


def test_a_field_requires_the_opt_in() -> None:
    """So that a gateway that drops the opt-in does not drop the routing silently."""
    refuse("routed_experts_prompt_start", ".", parse_options, {"routed_experts_prompt_start": 0})
    for field, value in VALID.items():
        message = f"{field} needs return_routed_experts: true"
        body = {field: value}
        refuse(field, message, parse_options, body)
        refuse(field, message, parse_options, {**body, "return_routed_experts": False})
        refuse(field, message, parse_options, {**body, "return_routed_experts": False}, OPT_IN)
        if field not in WITH_HISTOGRAM:
            refuse(field, message, parse_options, {**body, **HISTOGRAM})
        # A server's default requires none, and one that a request does not go with is left out.
        assert parse_options({}, body) is None
        assert parse_options({"return_routed_experts": False}, body) is None
        assert parse_options(OPT_IN, body) == parse({**OPT_IN, **body})
        assert parse(HISTOGRAM, body).rows is False


def test_a_label_asks_for_nothing() -> None:
    assert parse_options(LABEL) is None
    assert parse_options({}, LABEL) is None
    for ask in (OPT_IN, HISTOGRAM):
        assert parse({**ask, **LABEL}) == parse(ask) == parse(ask, LABEL)
        assert parse(LABEL, ask) == parse({}, ask)
    assert parse(LABEL, OPT_IN).by_default
    refuse("routed_experts_label", ".", parse_options, {"routed_experts_label": 1})


def test_the_two_names_of_prompt_start() -> None:
    both = {**OPT_IN, **dict.fromkeys(STARTS, 4)}
    assert parse(both) == RoutingOptions(prompt_start=4)
    for other in ({"routed_experts_start_len": 5}, {"routed_experts_prompt_start": 0}):
        differ = "two names for one value and differ"
        refuse("routed_experts_start_len", differ, parse_options, {**both, **other})


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
    valid = {
        **OPT_IN,
        **VALID,
        "routed_experts_format": "object",
        "routed_experts_steps": False,
    }
    assert check_defaults(valid) == valid
    for name in ("routed_experts_format", "routed_experts_steps"):
        refuse(name, "needs .*: inline", check_defaults, {**valid, name: VALID[name]})
    start: Any = {"prompt_start": 4, "prompt_start_param": "routed_experts_start_len"}
    for body, expected, by_default in (
        ({}, RoutingOptions(format="npy", **start), True),
        ({"prompt": "abc"}, RoutingOptions(format="npy", **start), True),
        (OPT_IN, RoutingOptions(format="npy", **start), False),
        ({"routed_experts_format": "raw"}, RoutingOptions(format="raw", **start), False),
        ({"routed_experts_prompt_start": 2}, RoutingOptions(format="npy", prompt_start=2), False),
    ):
        options = parse(body, defaults)
        assert options == expected
        assert options.by_default is by_default
    assert parse_options({"return_routed_experts": False}, defaults) is None
    counts = {"return_routed_experts": False, **HISTOGRAM}
    of_all_layers = {**defaults, "routed_experts_layers": "all"}
    assert parse(counts, of_all_layers) == RoutingOptions(
        rows=False, histogram=True, layers="all", **start
    )
    with pytest.raises(
        FieldError,
        match="return_experts is not a routing field: did you mean return_routed_experts",
    ):
        check_defaults({"return_experts": True})
    with pytest.raises(FieldError, match="JSON object"):
        check_defaults([])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        *((f"return_routed_expert{end}", "return_routed_experts") for end in ("", "s_")),
        *(
            (f"routed_{middle}", "routed_experts_format")
            for middle in ("experts_formt", "expert_format")
        ),
        ("routed_experts_layer", "routed_experts_layers"),
        ("routed_experts", "return_routed_experts"),
        ("return_routed_expert_weight", "return_routed_expert_weights"),
        # Only what they share is alike
        *((f"routed_experts_{end}", "") for end in ("top", "x" * 100_000)),
    ],
)
def test_unknown_routing_fields(name: str, nearest: str) -> None:
    for body in ({}, OPT_IN, {"return_routed_experts": False}):
        for value in (None, False, 1):
            message = "not a routing field: " + (
                f"did you mean {nearest}\\?" if nearest else "the fields are .*format"
            )
            assert (
                len(
                    refuse(
                        name[:64], message, parse_options, {"model": "tiny", **body, name: value}
                    )
                )
                < 600
            )
    refuse(name[:64], ".", check_defaults, {name: 1})


def test_field_names_of_others_and_names_that_cannot_be_encoded() -> None:
    assert (
        parse_options(
            {"route": 1, "expert": 2, "my_return_routed_experts": True, "Routed_Experts": 1}
        )
        is None
    )
    said = refuse("return_routed_?", ".", parse_options, {"return_routed_\ud800": True})
    assert said.encode().count(b"return_routed_?") == 1


def test_of_steps_and_references_what_the_request_says_wins_over_the_default() -> None:
    by_reference = {"routed_experts_delivery": "reference"}
    steps = {**OPT_IN, "routed_experts_steps": True}
    assert not parse(steps, by_reference).by_reference
    assert not parse({**OPT_IN, **by_reference}, steps).steps
    refuse("routed_experts_steps", "needs .*: inline", parse, {**steps, **by_reference})
