"""The request and response fields of the HTTP contract, as pydantic models."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

try:
    from pydantic import BaseModel, Field, StrictBool, StrictInt, ValidationError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "routed_experts.protocol.models needs pydantic: pip install 'pydantic>=2'", name=error.name
    ) from None

from routed_experts.protocol.codec import Format, WireDtype

Layout = Literal["split", "joined"]
Layers = Literal["moe", "all"]
VllmDtype = Literal["vllm"]
"""As vLLM's own capture has it: `uint8` up to 256 experts, else `uint16`."""

OPT_IN = "return_routed_experts"
PROMPT_START = "routed_experts_prompt_start"
HISTOGRAM = "routed_experts_histogram"
LAYERS = "routed_experts_layers"
_START_LEN = "routed_experts_start_len"
_PREFIXES = ("return_routed", "routed_expert")
"""A field whose name begins like this is meant for this server, not for vLLM, which ignores fields it does not know."""
_LONGEST_NAME = 64  # that is compared and shown: comparing takes time quadratic in the length


class FieldError(ValueError):
    """A routing field that the server cannot accept.

    Attributes:
        param: the field's name, as sent.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class RoutingFields(BaseModel):
    """What a completion or chat request may say about routing."""

    return_routed_experts: StrictBool = Field(
        default=False, description="Return the experts that every token was routed to, in every MoE layer."
    )
    routed_experts_prompt_start: StrictInt = Field(
        default=0,
        ge=0,
        description="Leave out the prompt rows before this position; at most the number of prompt tokens. "
        "Turn n of a conversation asks only for what it has not seen.",
    )
    routed_experts_start_len: StrictInt = Field(
        default=0, ge=0, description="Another name for `routed_experts_prompt_start`, as SGLang has it."
    )
    routed_experts_format: Format = Field(
        default="object",
        description="Form of an array: `object`, `npy` (base64 of a .npy file), `raw` (base64 of the bare "
        "little-endian array) or `list` (nested lists).",
    )
    routed_experts_dtype: WireDtype = Field(
        default="int16",
        description="Element type on the wire; `auto` is `uint8` up to 256 experts, else `int16`. `uint8` cannot "
        "say that a row is not known (-1) and is an error where that is needed.",
    )
    routed_experts_layout: Layout = Field(
        default="split",
        description="`split`: prompt rows at the top level, generated rows in each choice. `joined`: both in one "
        "array in each choice.",
    )
    routed_experts_layers: Layers = Field(
        default="moe",
        description="Layers of a row: `moe`, the layers with experts; `all`, every decoder layer, with zeros in layers "
        "without experts (-1 in a row that is not known), as in vLLM's own capture. A histogram has the same layers.",
    )
    routed_experts_histogram: StrictBool = Field(
        default=False,
        description="Return how often each expert of each layer was chosen, in place of the rows or beside them.",
    )


@dataclass(frozen=True)
class RoutingOptions:
    """What a request wants of routing, checked.

    Attributes:
        rows: whether it wants rows.
        histogram: whether it wants histograms.
        prompt_start_param: which of its two names the client gave the prompt start.
        explicit_fields: names of the fields that the request, or the server's default for it, gave.
        by_default: whether the request has no routing field of its own: only the server-wide default asks.
    """

    rows: bool = True
    histogram: bool = False
    prompt_start: int = 0
    prompt_start_param: str = PROMPT_START
    format: Format = "object"
    dtype: WireDtype | VllmDtype = "int16"
    layout: Layout = "split"
    layers: Layers = "moe"
    explicit_fields: frozenset[str] = field(default=frozenset(), compare=False)
    by_default: bool = field(default=False, compare=False)

    def with_vllms_forms(self) -> "RoutingOptions":
        """The same, for an endpoint where vLLM has a form of its own: rows get it unless another form was asked for."""
        if not self.rows or {"routed_experts_format", "routed_experts_layout"} & self.explicit_fields:
            return self
        dtype = self.dtype if "routed_experts_dtype" in self.explicit_fields else "vllm"
        layers = self.layers if LAYERS in self.explicit_fields else "all"
        return replace(self, format="npy", layout="joined", dtype=dtype, layers=layers)


def parse_options(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> RoutingOptions | None:
    """The routing options in the JSON object `body` of a request; None if it does not ask for routing.

    Args:
        defaults: values of fields that the request leaves out.

    Raises:
        FieldError: a wrong type or value, a name like ours that is no field, or a field without the opt-in. A gateway
            that strips the opt-in would otherwise lose the routing silently.
    """
    check_names(body)
    own = given = {name: body[name] for name in RoutingFields.model_fields if name in body}
    if defaults and given.get(OPT_IN) is not False:
        filled = {**_left_out(defaults, given), **given}
        if filled.get(OPT_IN) or filled.get(HISTOGRAM):  # a default form alone asks for nothing
            given = filled
    if not given:
        return None
    fields = _validated(given)
    if not fields.return_routed_experts:
        _check_needs(given, fields)
        if not fields.routed_experts_histogram:
            return None
    start, param = _prompt_start(given, fields)
    return RoutingOptions(
        rows=fields.return_routed_experts,
        histogram=fields.routed_experts_histogram,
        prompt_start=start,
        prompt_start_param=param,
        format=fields.routed_experts_format,
        dtype=fields.routed_experts_dtype,
        layout=fields.routed_experts_layout,
        layers=fields.routed_experts_layers,
        explicit_fields=frozenset(given),
        by_default=not own,
    )


def check_names(names: Iterable[str]) -> None:
    """Raises `FieldError` for a name that looks like one of the routing fields, but is none of them."""
    for name in names:
        if name.startswith(_PREFIXES) and name not in RoutingFields.model_fields:
            _refuse_unknown(name)


def _refuse_unknown(name: str) -> NoReturn:
    name = name.encode("utf-8", "replace").decode()  # JSON can hold lone surrogates, which no response can
    shown = name[:_LONGEST_NAME]
    (nearest,) = difflib.get_close_matches(shown, RoutingFields.model_fields, n=1, cutoff=0)
    raise FieldError(name, f"{shown} is not a routing field; the nearest is {nearest}")


def check_defaults(defaults: object) -> dict[str, Any]:
    """`defaults` for `parse_options`, from the command line.

    Raises:
        FieldError: a field that does not exist, or a value that no request could have.
    """
    if not isinstance(defaults, dict):
        raise FieldError("", "the defaults must be a JSON object of routing fields")
    for name in defaults:
        if name not in RoutingFields.model_fields:
            _refuse_unknown(name)
    _validated(defaults)
    parse_options({**defaults, OPT_IN: True})
    return defaults


def _left_out(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    starts = {PROMPT_START, _START_LEN}
    return {name: value for name, value in defaults.items() if not (name in starts and starts & given.keys())}


def _validated(given: dict[str, Any]) -> RoutingFields:
    for name, value in given.items():
        if value is None:
            raise FieldError(name, f"{name} must not be null; leave it out for its default")
    try:
        return RoutingFields.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise FieldError(name, f"{name}: {first['msg']}") from None


def _check_needs(given: Mapping[str, Any], fields: RoutingFields) -> None:
    """Without rows, their form means nothing; a histogram alone has a start and layers only."""
    alone = {HISTOGRAM, PROMPT_START, _START_LEN, LAYERS} if fields.routed_experts_histogram else {HISTOGRAM}
    for name in RoutingFields.model_fields:
        if name in given and name != OPT_IN and name not in alone:
            raise FieldError(name, f"{name} needs {OPT_IN}: true in the same request")


def _prompt_start(given: Mapping[str, Any], fields: RoutingFields) -> tuple[int, str]:
    """The first prompt row to return, and the name that the client gave it."""
    if _START_LEN not in given:
        return fields.routed_experts_prompt_start, PROMPT_START
    if PROMPT_START not in given:
        return fields.routed_experts_start_len, _START_LEN
    if fields.routed_experts_prompt_start != fields.routed_experts_start_len:
        raise FieldError(_START_LEN, f"{_START_LEN} and {PROMPT_START} are two names for one value and differ")
    return fields.routed_experts_prompt_start, PROMPT_START


class RoutedExpertsArray(BaseModel):
    """The `object` form of one array of rows."""

    data: str = Field(description="base64 (standard alphabet) of the little-endian array, C order")
    shape: list[int] = Field(
        description="[rows, layers, experts per token]; which layers: `routed_experts_layers`",
        min_length=3,
        max_length=3,
    )
    dtype: Literal["int16", "uint8", "int32"]
    start: int = Field(description="absolute position of the first row", ge=0)
    missing: int = Field(description="rows that the server cannot know; they are filled with -1", ge=0)


class RoutedExpertsHistogram(BaseModel):
    """How often each expert was chosen."""

    counts: list[list[int]] = Field(description="for each layer of `routed_experts_layers`, for each expert")
    rows: int = Field(description="rows that were counted, the missing ones included", ge=0)
    missing: int = Field(description="rows that the server cannot know, at least in part", ge=0)


class CaptureInfo(BaseModel):
    """Where and how the routing is captured."""

    runner: Literal["v1", "v2"]
    device: str
    kv_slots: int = Field(description="rows that the host cache can hold: one per KV slot")
    host_cache_bytes: int = Field(description="upper bound; the operating system reserves it as it is written")
    device_bytes: int = Field(description="memory on each worker's device that the capture takes")
    pinned_bytes: int = Field(description="pinned host memory that each worker's capture takes")


class RoutedExpertsInfo(BaseModel):
    """What the arrays mean for the served model: the response of `GET /v1/routed_experts`, constant while it runs."""

    model: str
    num_layers: int
    top_k: int
    num_experts: int
    layer_ids: list[int] = Field(description="absolute decoder-layer index of each of the L layers in a row")
    dtype: Literal["int16"] = "int16"
    version: str = Field(description="of routed-experts-server")
    vllm_version: str
    capture: CaptureInfo
