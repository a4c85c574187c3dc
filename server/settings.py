import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from routed_experts.protocol.buckets import SCHEMES, is_broken_url, is_bucket
from routed_experts.protocol.input_fields import FieldsOfInput, parse_input, take_input
from routed_experts.protocol.models import WEIGHTS, FieldError, check_defaults
from routed_experts.server import MAX_RESPONSE_BYTES

_LONGEST_S = 1e9
_LONGEST_SIGNED_S = 7 * 86400.0
DEFAULT_LIFETIME_S = 3600.0
"""Of an array in the store."""
INPUT_BYTES = 1 << 30
"""Of what running requests say of their routing."""


VLLM_FLAG_ENABLED = "routed_experts.every_request"
"""Key in `VllmConfig.additional_config`; true if the engine returns the rows of all requests."""


class SettingsError(ValueError):
    """A setting has a value that it cannot have. The message says what it must be."""


# ---- what values are valid ----


def _check_place(place: str | Path) -> str | Path:
    """A path, or a URL without anything that is secret."""
    if place == "" or is_broken_url(place):
        raise ValueError
    scheme, has_scheme, rest = str(place).partition("://")
    if not has_scheme:
        return place
    if scheme not in ("file", *SCHEMES) or rest == "" or {*"@?#"} & {*rest}:
        raise ValueError
    return place


Bytes = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=_LONGEST_S)]
Share = Annotated[float, Field(gt=0, le=1)]
Place = Annotated[str | Path, AfterValidator(_check_place)]


# ---- how they are written ----


def json_or_text(text: str) -> Any:
    """The value of a flag: JSON, or a number as Python reads it, such as `.5`. Other text is
    refused as a value of the setting."""
    for read in (json.loads, int, float):
        with suppress(ValueError):
            return read(text)
    return text


def json_or_file(text: str) -> Any:
    """The same; with `@` and a file's name, what the file holds."""
    return json_or_text(Path(text[1:]).read_text() if text.startswith("@") else text)


@dataclass(frozen=True)
class Kind:
    """How a setting is written, and what errors say that it must be."""

    expected: str  # in words
    metavar: str | None = None  # of the flag; None: a switch
    parse: Callable[[str], Any] = json_or_text  # reads the text of the flag


_BYTES = Kind("a positive integer", "BYTES")
_FIELDS = Kind("a JSON object with routing fields", "JSON|@FILE", json_or_file)
_PLACE = Kind(
    "a path, or a URL as text, such as s3://bucket/prefix (also gs://, az://; keys and the endpoint "
    "come from the environment)",
    "URL",
    str,
)
_SECONDS = Kind(f"a positive number up to {_LONGEST_S:,.0f}", "SECONDS")
_SHARE = Kind("a number above 0, at most 1", "SHARE")
_SWITCH = Kind("true or false")


# ---- the settings ----


class Settings(BaseModel, frozen=True, strict=True, extra="forbid"):
    """All settings by their keys: the type, the kind, and the help of its flag."""

    routed_experts_default: Annotated[
        dict[str, Any],
        _FIELDS,
        "defaults of routing fields, for requests that omit them, for example '{\"return_routed_experts\": true}', or "
        "@ and the name of a file that has them",
    ] = Field(default_factory=dict)
    routed_experts_max_response_bytes: Annotated[
        Bytes, _BYTES, "maximum bytes of routing in one response (default: 1 GiB)"
    ] = MAX_RESPONSE_BYTES
    routed_experts_page: Annotated[
        bool,
        _SWITCH,
        "serve a page at /routed_experts that shows the experts of a response while it is generated",
    ] = True
    routed_experts_store: Annotated[
        Place | None,
        _PLACE,
        "where arrays are that are returned by reference (routed_experts_delivery): a folder, which servers of one "
        "host may share, or a bucket, s3://BUCKET/PREFIX, gs://…, az://…, which those of many may; keys and endpoint "
        "come from the environment (default: a folder for this port in /dev/shm, which the command removes when it "
        "starts and stops)",
    ] = None
    routed_experts_store_bytes: Annotated[
        Bytes | None,
        _BYTES,
        "maximum size of a folder of arrays (default: half of the space that is free there)",
    ] = None
    routed_experts_store_seconds: Annotated[
        Seconds,
        _SECONDS,
        f"time after which stored arrays are deleted (default: {DEFAULT_LIFETIME_S:.0f})",
    ] = DEFAULT_LIFETIME_S
    routed_experts_store_paths: Annotated[
        bool, _SWITCH, "name the files in references, for clients on the same machine"
    ] = False
    routed_experts_record: Annotated[
        Place | None,
        _PLACE,
        "record the routing of what clients ask, whether or not they ask for routing, in files *.jsonl of a folder, "
        "which export and view read; the files contain the token ids of prompts and answers",
    ] = None
    routed_experts_record_tokens: Annotated[
        bool,
        _SWITCH,
        "whether recorded files contain token ids; expert ids alone still tell something about a text",
    ] = True
    routed_experts_record_share: Annotated[
        Share,
        _SHARE,
        "share of the prompts to record, above 0 and at most 1 (default: 1), drawn for each",
    ] = 1.0
    routed_experts_record_bytes: Annotated[
        Bytes,
        _BYTES,
        "maximum bytes of all files in the folder, with those found at start (default: 10 GiB); then recording stops",
    ] = 10 << 30
    routed_experts_input_bytes: Annotated[
        Bytes,
        _BYTES,
        "maximum bytes of what the running requests of an API process say of their routing, with their bodies "
        "(default: 1 GiB); then new ones get 503",
    ] = INPUT_BYTES
    enable_return_routed_expert_weights: Annotated[
        bool,
        _SWITCH,
        "capture the routers' weights beside the ids, for requests with return_routed_expert_weights; takes three "
        "times the memory for rows",
    ] = False
    enable_routed_experts_input: Annotated[
        bool,
        _SWITCH,
        "let requests say which experts their tokens take, with routed_experts_replay, routed_experts_activate, "
        "routed_experts_deactivate and routed_experts_bias",
    ] = False
    enable_routed_experts_replay_on_recompute: Annotated[
        bool,
        _SWITCH,
        "where KV is computed again, after a preemption or a failed load, give each token the experts that it had "
        "before; needs --enable-routed-experts-input",
    ] = False

    def __init__(self, **values: Any) -> None:
        """Raises `SettingsError`."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _first_of(error) from None

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

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for name, setting in Settings.model_fields.items():
            is_of_record = name.startswith("routed_experts_record_")
            is_set = getattr(self, name) != setting.default
            if is_of_record and is_set and self.routed_experts_record is None:
                raise SettingsError(f"{name} needs routed_experts_record.")
        if is_bucket(self.routed_experts_record):
            raise SettingsError(
                "routed_experts_record must be a folder: have a tool such as rclone move its complete files to a "
                "bucket."
            )
        if is_bucket(self.routed_experts_store):
            self._check_bucket()
        self._check_default()
        return self

    def _check_default(self) -> None:
        try:
            check_defaults(self.routed_experts_default)
            said = self.input_default
        except FieldError as error:
            end = "" if str(error).endswith("?") else "."
            raise SettingsError(f"routed_experts_default: {error}{end}") from None
        asks_for_weights = self.routed_experts_default.get(WEIGHTS)
        if asks_for_weights and not self.enable_return_routed_expert_weights:
            # Else requests that do not name them would be refused.
            raise SettingsError(
                f"routed_experts_default: {WEIGHTS} needs enable_return_routed_expert_weights."
            )
        if said.says_nothing:
            return
        if not self.enable_routed_experts_input:
            raise SettingsError(
                f"routed_experts_default: {said.first_field} needs enable_routed_experts_input."
            )
        if self.routed_experts_record is not None:
            raise SettingsError(
                f"routed_experts_default: {said.first_field} holds for all requests, and routed_experts_record leaves "
                "out requests whose experts are not the router's own choice: set one of them."
            )

    @cached_property
    def input_default(self) -> FieldsOfInput:
        """What requests that leave the fields out say of their tokens' experts."""
        return parse_input(take_input(dict(self.routed_experts_default)))

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


KINDS: dict[str, Kind] = {
    name: next(part for part in setting.metadata if isinstance(part, Kind))
    for name, setting in Settings.model_fields.items()
}
HELP: dict[str, str] = {
    name: next(part for part in setting.metadata if isinstance(part, str))
    for name, setting in Settings.model_fields.items()
}
"""Of the flags."""


def _first_of(error: ValidationError) -> SettingsError:
    """What is wrong with the first setting, in our words."""
    first = error.errors()[0]
    if not first["loc"]:  # settings that do not go together
        return SettingsError(str(first["ctx"]["error"]))
    name = str(first["loc"][0])
    if name not in KINDS:
        return SettingsError(f"{name} is no setting.")
    return SettingsError(f"{name} must be {KINDS[name].expected}, not {first['input']!r}.")


def asks_for_every_request(config: Any) -> bool:
    """Whether the program set vLLM's own argument, so that all requests return rows."""
    return isinstance(config.additional_config, dict) and bool(
        config.additional_config.get(VLLM_FLAG_ENABLED)
    )
