"""Settings: what is valid, and that flags, `additional_config` and the documentation mean the same."""

import re
from pathlib import Path
from typing import Any

import pytest

from routed_experts.capture.rows import WEIGHTS_KEY
from routed_experts.server.cli import serve
from routed_experts.server.settings import HELP, KINDS, Settings, SettingsError

RECORD = {"routed_experts_record": "folder"}
WEIGHTS = {"return_routed_expert_weights": True}
VALID: list[tuple[str, Any, str | None]] = [  # name, value, text of the flag; None: it has none
    ("routed_experts_default", {"return_routed_experts": True}, '{"return_routed_experts": true}'),
    ("routed_experts_delivery", "reference", None),
    ("routed_experts_max_response_bytes", 1, "1"),
    ("routed_experts_page", False, ""),
    ("routed_experts_store", "5", "5"),
    ("routed_experts_store_bytes", 1 << 40, str(1 << 40)),
    ("routed_experts_store_seconds", 0.5, "0.5"),
    ("routed_experts_store_seconds", 1e9, "1000000000"),
    ("routed_experts_store_paths", True, ""),
    ("routed_experts_record", "folder", "folder"),
    ("routed_experts_record_tokens", False, ""),
    ("routed_experts_record_share", 1e-9, "1e-9"),
    ("routed_experts_record_bytes", 1, "1"),
    ("enable_return_routed_expert_weights", True, ""),
]


def with_record(name: str, value: Any) -> dict[str, Any]:
    return {**(RECORD if name.startswith("routed_experts_record_") else {}), name: value}


def flags(given: dict[str, Any], text: str) -> list[str]:
    """The command line that has these settings, the last of them by `text`."""
    *others, (name, value) = given.items()
    flag = serve.flag_of(name) if value is not False else serve.flag_of(f"no_{name}")
    return [*(word for other, folder in others for word in (serve.flag_of(other), folder)), flag, *filter(None, [text])]


@pytest.mark.parametrize(("name", "value", "text"), VALID)
def test_a_setting_is_a_key_and_a_flag(name: str, value: Any, text: str | None) -> None:
    given = with_record(name, value)
    settings = Settings.of({**given, "another": 1})
    assert getattr(settings, name) == value
    assert settings != Settings.of({}) == Settings.of(None) == Settings.of(dict.fromkeys(KINDS))
    assert (text is None) == (HELP[name] is None)
    if text is not None:
        args = serve.parse(["model", "--additional-config", '{"another": 1}', *flags(given, text)])
        assert serve.configure(args) == settings
        engines = {name: value for name, value in given.items() if name == WEIGHTS_KEY}
        assert args.additional_config == {"another": 1, **engines}


def test_every_setting_is_tried() -> None:
    assert {name for name, *_ in VALID} == set(KINDS)


BYTES = ("max_response", "store", "record")
NOT_POSITIVE = (0, -1, 1.5, True, "1GB", float("inf"))
INVALID: list[tuple[str, tuple[Any, ...], str]] = [
    ("routed_experts_default", ([], "{"), "a JSON object with routing fields"),
    ("routed_experts_delivery", ("by mail", True), "inline or reference"),
    *((f"routed_experts_{name}_bytes", NOT_POSITIVE, "a positive integer") for name in BYTES),
    ("routed_experts_store_seconds", (0, -1, "1h", True, 2e9, float("nan")), "a positive number up to 1,000,000,000"),
    ("routed_experts_record_share", (0, -0.5, 1.01, True, "all", float("nan")), "a number above 0, at most 1"),
    *((f"routed_experts_{name}", (5, "", False), "a path") for name in ("store", "record")),
    *((name, ("yes", 1, 0), "true or false") for name, kind in KINDS.items() if kind.metavar is None),
]


@pytest.mark.parametrize(("name", "values", "expected"), INVALID)
def test_a_value_that_a_setting_cannot_have(name: str, values: tuple[Any, ...], expected: str) -> None:
    for value in values:
        with pytest.raises(SettingsError, match=re.escape(f"{name} must be {expected}, not {value!r}.")):
            Settings.of(with_record(name, value))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"routed_experts_record_share": 0.5}, "routed_experts_record_share needs routed_experts_record"),
        ({"routed_experts_record_tokens": False}, "routed_experts_record_tokens needs routed_experts_record"),
        ({"routed_experts_default": {"return_experts": True}}, "return_experts is not a routing field"),
        ({"routed_experts_default": {"routed_experts_format": "xml"}}, "routed_experts_default: routed_experts_format"),
        ({"routed_experts_default": WEIGHTS}, "weights needs enable_return_routed_expert_weights"),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.of(given)


def test_paths_of_programs() -> None:
    assert Settings.of({"routed_experts_store": Path("folder")}).routed_experts_store == Path("folder")
