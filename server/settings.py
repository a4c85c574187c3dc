"""The settings of a server, or of an engine in a program: keys of vLLM's `additional_config`.

With `routed-experts serve` they come as flags of the same names. They are checked here and nowhere
else.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_args

from routed_experts.protocol.buckets import SCHEMES, is_broken_url, is_bucket
from routed_experts.protocol.models import WEIGHTS, Delivery, FieldError, check_defaults
from routed_experts.server import MAX_RESPONSE_BYTES

_LONGEST_S = 1e9
_LONGEST_SIGNED_S = 7 * 86400.0
DEFAULT_LIFETIME_S = 3600.0
"""Of an array in the store."""


VLLM_FLAG_ENABLED = "routed_experts.every_request"
"""Key in `VllmConfig.additional_config`; true if the engine returns the rows of all requests."""


class SettingsError(ValueError):
    """A setting has a value that it cannot have. The message says what it must be."""


def json_or_text(text: str) -> Any:
    """The value of a flag: JSON, or a number as Python reads it, such as `.5`. Its kind refuses
    other text."""
    for read in (json.loads, int, float):
        with suppress(ValueError):
            return read(text)
    return text


@dataclass(frozen=True)
class Kind:
    """What values a setting has."""

    expected: str  # in words
    is_valid: Callable[[Any], bool]
    metavar: str | None = None  # of the flag; None: a switch
    parse: Callable[[str], Any] = json_or_text  # reads the text of the flag


_BYTES = Kind("a positive integer", lambda value: type(value) is int and value > 0, "BYTES")
_DELIVERIES = get_args(Delivery)
_DELIVERY = Kind(" or ".join(_DELIVERIES), lambda value: value in _DELIVERIES, "DELIVERY")
_FIELDS = Kind("a JSON object with routing fields", lambda value: isinstance(value, dict), "JSON")
_FOLDER = Kind("a path", lambda value: isinstance(value, str | Path) and value != "", "FOLDER", str)


def _is_place(value: object) -> bool:
    """A path, or a URL without anything that is secret."""
    if not isinstance(value, str | Path) or value == "" or is_broken_url(value):
        return False
    scheme, has_scheme, rest = str(value).partition("://")
    if not has_scheme:
        return True
    return scheme in ("file", *SCHEMES) and rest != "" and not {*"@?#"} & {*rest}


_PLACE = Kind(
    "a path, or a URL as text, such as s3://bucket/prefix (also gs://, az://; keys and the endpoint "
    "come from the environment)",
    _is_place,
    "URL",
    str,
)
_SECONDS = Kind(
    f"a positive number up to {_LONGEST_S:,.0f}",
    lambda value: type(value) in (int, float) and 0 < value <= _LONGEST_S,
    "SECONDS",
)
_SHARE = Kind(
    "a number above 0, at most 1",
    lambda value: type(value) in (int, float) and 0 < value <= 1,
    metavar="SHARE",
)
_SWITCH = Kind("true or false", lambda value: type(value) is bool)


@dataclass(frozen=True)
class Settings:
    """All settings by their keys. Raises `SettingsError` for values that are not valid."""

    routed_experts_default: Annotated[
        dict[str, Any],
        _FIELDS,
        "defaults of routing fields, for requests that omit them, for example '{\"return_routed_experts\": true}'",
    ] = field(default_factory=dict)
    routed_experts_delivery: Annotated[str, _DELIVERY, None] = "inline"  # of engines in programs
    routed_experts_max_response_bytes: Annotated[
        int, _BYTES, "maximum bytes of routing in one response (default: 1 GiB)"
    ] = MAX_RESPONSE_BYTES
    routed_experts_page: Annotated[
        bool,
        _SWITCH,
        "serve a page at /routed_experts that shows the experts of a response while it is generated",
    ] = True
    routed_experts_store: Annotated[
        str | Path | None,
        _PLACE,
        "where arrays are that are returned by reference (routed_experts_delivery): a folder, which servers of one "
        "host may share, or a bucket, s3://BUCKET/PREFIX, gs://…, az://…, which those of many may; keys and endpoint "
        "come from the environment (default: a folder for this port in /dev/shm, removed at start and stop if no "
        "process uses it)",
    ] = None
    routed_experts_store_bytes: Annotated[
        int | None,
        _BYTES,
        "maximum size of a folder of arrays (default: half of the space that is free there)",
    ] = None
    routed_experts_store_seconds: Annotated[
        float,
        _SECONDS,
        f"time after which stored arrays are deleted (default: {DEFAULT_LIFETIME_S:.0f})",
    ] = DEFAULT_LIFETIME_S
    routed_experts_store_paths: Annotated[
        bool, _SWITCH, "name the files in references, for clients on the same machine"
    ] = False
    routed_experts_record: Annotated[
        str | Path | None,
        _PLACE,
        "record the routing of what clients ask, whether or not they ask for routing, in files *.jsonl of a folder or "
        "bucket, which export and view read; the files contain the token ids of prompts and answers",
    ] = None
    routed_experts_record_tokens: Annotated[
        bool,
        _SWITCH,
        "whether recorded files contain token ids; expert ids alone still tell something about a text",
    ] = True
    routed_experts_record_share: Annotated[
        float,
        _SHARE,
        "share of the prompts to record, above 0 and at most 1 (default: 1), drawn for each",
    ] = 1.0
    routed_experts_record_bytes: Annotated[
        int,
        _BYTES,
        "maximum bytes of all files in the folder, with those found at start (default: 10 GiB), or of those that "
        "are not sent to the bucket yet; then recording stops",
    ] = 10 << 30
    enable_return_routed_expert_weights: Annotated[
        bool,
        _SWITCH,
        "capture the routers' weights beside the ids, for requests with return_routed_expert_weights; takes three "
        "times the memory for rows",
    ] = False

    @classmethod
    def of(cls, additional_config: object, args: object = None) -> "Settings":
        """The settings in an `additional_config`, or, before that, in the arguments of
        `routed-experts serve`: only the flags that were given are there. Both may have others'
        names too, and None for a default.

        Flags stay in the arguments because vLLM hashes `additional_config`, for its caches and in
        its responses.
        """
        values = {
            **(additional_config if isinstance(additional_config, Mapping) else {}),
            **getattr(args, "__dict__", {}),
        }
        return cls(**{name: values[name] for name in KINDS if values.get(name) is not None})

    def __post_init__(self) -> None:
        for setting in fields(self):
            kind, value = KINDS[setting.name], getattr(self, setting.name)
            if value is not setting.default and not kind.is_valid(value):
                raise SettingsError(f"{setting.name} must be {kind.expected}, not {value!r}.")
            is_of_record = setting.name.startswith("routed_experts_record_")
            if is_of_record and value != setting.default and self.routed_experts_record is None:
                raise SettingsError(f"{setting.name} needs routed_experts_record.")
        if is_bucket(self.routed_experts_store):
            self._check_bucket()
        try:
            check_defaults(self.routed_experts_default)
        except FieldError as error:
            raise SettingsError(f"routed_experts_default: {error}.") from None
        if (
            self.routed_experts_default.get(WEIGHTS)
            and not self.enable_return_routed_expert_weights
        ):
            # Else requests that do not name them would be refused.
            raise SettingsError(
                f"routed_experts_default: {WEIGHTS} needs enable_return_routed_expert_weights."
            )

    def _check_bucket(self) -> None:
        for name in ("routed_experts_store_bytes", "routed_experts_store_paths"):
            if getattr(self, name):
                raise SettingsError(
                    f"{name} is for a folder: a bucket has its own limit, and no paths."
                )
        if self.routed_experts_store_seconds > _LONGEST_SIGNED_S:
            raise SettingsError(
                "routed_experts_store_seconds must be at most 604800 (7 days) for a bucket: its signed URLs are not "
                "valid for longer."
            )


_SETTINGS: list[tuple[str, Any]] = [(setting.name, setting.type) for setting in fields(Settings)]
KINDS: dict[str, Kind] = {name: annotated.__metadata__[0] for name, annotated in _SETTINGS}
HELP: dict[str, str | None] = {name: annotated.__metadata__[1] for name, annotated in _SETTINGS}
"""Of the flags; None: a setting has none."""


def asks_for_every_request(config: Any) -> bool:
    """Whether the program set vLLM's own argument, so that all requests return rows."""
    return isinstance(config.additional_config, dict) and bool(
        config.additional_config.get(VLLM_FLAG_ENABLED)
    )
