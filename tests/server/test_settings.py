"""Settings: what is valid, and that flags, `additional_config` and the documentation mean the
same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from routed_experts.capture.wire.rows import INPUT_KEY, RECOMPUTE_KEY, WEIGHTS_KEY
from routed_experts.server.cli import serve
from routed_experts.server.cli.console import CommandError
from routed_experts.server.settings import (
    DEFAULT_LIFETIME_S,
    HELP,
    KINDS,
    Settings,
    SettingsError,
)
from tests.documentation import ROOT

FOR_THE_ENGINE = (WEIGHTS_KEY, INPUT_KEY, RECOMPUTE_KEY)
"""Settings that each process of the engine reads."""
RECORD = {"routed_experts_record": "folder"}
MASK = {"routed_experts_deactivate": [[1, 2]]}
VALID = [
    {"routed_experts_default": {"return_routed_experts": True}},
    {"routed_experts_default": MASK, INPUT_KEY: True},
    {"routed_experts_max_response_bytes": 1},
    {"routed_experts_page": False},
    {"routed_experts_store": "5"},
    {"routed_experts_store": "s3://bucket/some/prefix"},
    {"routed_experts_store_bytes": 1 << 40},
    *({"routed_experts_store_seconds": value} for value in (0.5, 10**9)),
    {"routed_experts_store_paths": True},
    RECORD,
    *(
        {**RECORD, f"routed_experts_record_{name}": value}
        for name, value in (("tokens", False), ("share", 1e-9))
    ),
    {**RECORD, "routed_experts_record_bytes": 1},
    {"routed_experts_input_bytes": 1},
    *({key: True} for key in FOR_THE_ENGINE),
]


def flags_of(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [serve.flag_of(name if value else f"no_{name}")]
    return [serve.flag_of(name), value if isinstance(value, str) else json.dumps(value)]


@pytest.mark.parametrize("values", VALID)
def test_a_setting_is_a_key_and_a_flag(values: dict[str, Any]) -> None:
    settings = Settings.of({**values, "another": 1})
    assert {name: getattr(settings, name) for name in values} == values
    assert settings != Settings.of({}) == Settings.of(None) == Settings.of(dict.fromkeys(KINDS))
    flags = [word for setting in values.items() for word in flags_of(*setting)]
    args = serve.parse(["model", "--additional-config", '{"another": 1}', *flags])
    assert serve.configure(args) == settings
    # vLLM hashes what is there, also for its answers.
    assert args.additional_config == {
        "another": 1,
        **{key: True for key in FOR_THE_ENGINE if key in values},
    }


def test_numbers_that_are_not_json() -> None:
    flags = ["--routed-experts-store-seconds", ".5", "--routed-experts-store-bytes", "1_000"]
    settings = serve.configure(serve.parse(["model", *flags]))
    assert settings == Settings(routed_experts_store_seconds=0.5, routed_experts_store_bytes=1000)


def test_defaults_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mask.json").write_text(json.dumps(MASK))
    flags = ["--enable-routed-experts-input", "--routed-experts-default"]
    settings = serve.configure(serve.parse(["model", *flags, f"@{tmp_path}/mask.json"]))
    assert settings is not None
    assert settings.routed_experts_default == MASK
    with pytest.raises(CommandError, match="No such file"):
        serve.parse(["model", *flags, f"@{tmp_path}/other.json"])


def test_every_setting_is_tried() -> None:
    assert {name for values in VALID for name in values} == set(KINDS)


BYTES = ("max_response", "store", "record", "input")
NOT_POSITIVE = (0, -1, 1.5, True, "1GB", float("inf"))
BUCKET = {"routed_experts_store": "s3://bucket/prefix"}
PLACE = (
    "a path, or a URL as text, such as s3://bucket/prefix (also gs://, az://; keys and the endpoint "
    "come from the environment)"
)
SECRET = ("s3://key:secret@bucket/x", "s3://bucket/x?endpoint=http://y")
OF_PATHS = (Path("s3://bucket/prefix"), Path("file:///x"))  # have one slash
NO_PLACES = (5, "", False, "ftp://host/x", "s3://", *SECRET, *OF_PATHS)
INVALID: list[tuple[str, tuple[Any, ...], str]] = [
    ("routed_experts_default", ([], "{"), "a JSON object with routing fields"),
    *((f"routed_experts_{name}_bytes", NOT_POSITIVE, "a positive integer") for name in BYTES),
    (
        "routed_experts_store_seconds",
        (0, -1, "1h", True, 2e9, float("nan")),
        "a positive number up to 1,000,000,000",
    ),
    (
        "routed_experts_record_share",
        (0, -0.5, 1.01, True, "all", float("nan")),
        "a number above 0, at most 1",
    ),
    *((f"routed_experts_{name}", NO_PLACES, PLACE) for name in ("store", "record")),
    *(
        (name, ("yes", 1, 0), "true or false")
        for name, kind in KINDS.items()
        if kind.metavar is None
    ),
]


@pytest.mark.parametrize(("name", "values", "expected"), INVALID)
def test_a_value_that_a_setting_cannot_have(
    name: str, values: tuple[Any, ...], expected: str
) -> None:
    for value in values:
        with pytest.raises(
            SettingsError, match=re.escape(f"{name} must be {expected}, not {value!r}.")
        ):
            Settings.of({**RECORD, name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"routed_experts_record": "gs://bucket/prefix"},
            "routed_experts_record must be a folder",
        ),
        (
            {"routed_experts_record_share": 0.5},
            "routed_experts_record_share needs routed_experts_record",
        ),
        (
            {"routed_experts_record_tokens": False},
            "routed_experts_record_tokens needs routed_experts_record",
        ),
        (
            {"routed_experts_default": {"return_experts": True}},
            r"return_experts is not a routing field: did you mean return_routed_experts\?$",
        ),
        (
            {"routed_experts_default": {"routed_experts_format": "xml"}},
            "routed_experts_default: routed_experts_format",
        ),
        (
            {"routed_experts_default": {"return_routed_expert_weights": True}},
            f"weights needs {WEIGHTS_KEY}",
        ),
        (
            {"routed_experts_default": {"routed_experts_deactivate": [[1, 2, 3]]}},
            r"routed_experts_default: routed_experts_deactivate\[0\]",
        ),
        (
            {"routed_experts_default": MASK},
            f"routed_experts_default: routed_experts_deactivate needs {INPUT_KEY}",
        ),
        (
            {**RECORD, "routed_experts_default": MASK, INPUT_KEY: True},
            "routed_experts_deactivate holds for all requests, and routed_experts_record",
        ),
        ({**BUCKET, "routed_experts_store_bytes": 100}, "store_bytes is for a folder"),
        ({**BUCKET, "routed_experts_store_paths": True}, "store_paths is for a folder"),
        ({**BUCKET, "routed_experts_store_seconds": 1e6}, "at most 604800"),
    ],
)
def test_settings_that_do_not_go_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.of(values)


def test_what_is_made_without_a_configuration_is_checked_too() -> None:
    with pytest.raises(SettingsError, match="routed_experts_page must be true or false"):
        Settings(routed_experts_page=1)
    with pytest.raises(SettingsError, match="routed_experts_size is no setting"):
        Settings(routed_experts_size=1)


def test_the_help_and_the_page_say_how_long_arrays_are_stored_by_default() -> None:
    (seconds,) = re.findall(r"default: (\d+)", str(HELP["routed_experts_store_seconds"]))
    assert float(seconds) == DEFAULT_LIFETIME_S
    page = (ROOT / "docs/run.md").read_text(encoding="utf-8")
    assert ("kept for an hour" in page) == (DEFAULT_LIFETIME_S == 3600)
