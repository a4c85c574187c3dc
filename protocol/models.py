"""The request and response fields of the HTTP contract, as pydantic models."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args

try:
    from pydantic import (
        BaseModel,
        ConfigDict,
        Field,
        StrictBool,
        StrictInt,
        StrictStr,
        ValidationError,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "routed_experts.protocol.models needs pydantic: pip install 'pydantic>=2'", name=error.name
    ) from None

from routed_experts.protocol.codec import Format, WireDtype

Layout = Literal["split", "joined"]
Layers = Literal["moe", "all"]
Delivery = Literal["inline", "reference"]
StreamTime = Literal["with_tokens", "at_end"]
VllmDtype = Literal["vllm"]
"""The dtype of vLLM's own capture: `uint8` up to 256 experts, else `uint16`."""

OPT_IN = "return_routed_experts"
PROMPT_START = "routed_experts_prompt_start"
HISTOGRAM = "routed_experts_histogram"
FORMAT = "routed_experts_format"
DTYPE = "routed_experts_dtype"
LAYOUT = "routed_experts_layout"
LAYERS = "routed_experts_layers"
WEIGHTS = "return_routed_expert_weights"
STEPS = "routed_experts_steps"
DELIVERY = "routed_experts_delivery"
STREAM = "routed_experts_stream"
LABEL = "routed_experts_label"
_START_LEN = "routed_experts_start_len"
PROMPT_STARTS = (PROMPT_START, _START_LEN)
"""Two names of one field."""
REPLAY = "routed_experts_replay"
ACTIVATE = "routed_experts_activate"
DEACTIVATE = "routed_experts_deactivate"
BIAS = "routed_experts_bias"
INPUT_FIELDS = (REPLAY, ACTIVATE, DEACTIVATE, BIAS)
"""Fields that say which experts tokens take: see `input_fields`. All others say what is returned."""
PREFIXES = ("return_routed", "routed_expert")
"""Unknown fields with these prefixes are rejected. vLLM ignores other unknown fields."""
_LONGEST_NAME = 64  # characters that are compared and shown: the comparison takes quadratic time


class FieldError(ValueError):
    """An invalid routing field.

    Attributes:
        param: the field's name, as sent, but cut.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class RoutingFields(BaseModel):
    """The routing fields of a request."""

    return_routed_experts: StrictBool = Field(
        default=False,
        description="Return the experts that the router chose for every token in every MoE layer.",
    )
    routed_experts_prompt_start: StrictInt = Field(
        default=0,
        ge=0,
        description="First prompt row to return; at most the number of prompt tokens.",
    )
    routed_experts_start_len: StrictInt = Field(
        default=0, ge=0, description="SGLang's name for `routed_experts_prompt_start`."
    )
    routed_experts_format: Format = Field(
        default="object",
        description="Form of an array: `object`, `npy` (base64 of a .npy file), `raw` (base64 of the bare "
        "little-endian array) or `list` (nested lists).",
    )
    routed_experts_dtype: WireDtype = Field(
        default="int16",
        description="Element type on the wire; `auto` is `uint8` up to 256 experts, else `int16`. `uint8` cannot hold "
        "-1, so unknown rows are an error.",
    )
    routed_experts_layout: Layout = Field(
        default="split",
        description="`split`: prompt rows at the top level, generated rows in each choice. `joined`: both in one "
        "array in each choice.",
    )
    routed_experts_layers: Layers = Field(
        default="moe",
        description="Layers of a row and of a histogram. `moe`: the MoE layers. `all`: every decoder layer, as in "
        "vLLM's own capture, with zeros in dense layers (-1 in unknown rows).",
    )
    routed_experts_histogram: StrictBool = Field(
        default=False,
        description="Return how often each expert of each layer was chosen, with or without the rows.",
    )
    return_routed_expert_weights: StrictBool = Field(
        default=False,
        description="Return the router's weight of each id too, in arrays of float32 beside those of ids. The server "
        "needs `--enable-return-routed-expert-weights`.",
    )
    routed_experts_steps: StrictBool = Field(
        default=False,
        description="Return the engine's step that computed each row too, in arrays beside those of ids; not with "
        "references.",
    )
    routed_experts_delivery: Delivery = Field(
        default="inline",
        description="`reference`: instead of an array, return where it is: see `GET /v1/routed_experts/rows/{id}`. "
        "In a stream, references come with the chunk that has `finish_reason`. Arrays that a full store "
        "cannot take are returned inline.",
    )
    routed_experts_stream: StreamTime = Field(
        default="with_tokens",
        description="`with_tokens`: each chunk of a stream has the rows that its tokens made known. `at_end`: all "
        "rows of a choice come with the chunk that has its `finish_reason`, the prompt's with the first such chunk.",
    )
    routed_experts_label: StrictStr = Field(
        default="",
        max_length=64,
        description="Stands beside the request's rows in what the server records (`--routed-experts-record`), and "
        "changes nothing else.",
    )


FIELDS = (*RoutingFields.model_fields, *INPUT_FIELDS)
"""The names of all routing fields of a request."""


class Need(NamedTuple):
    """A field, or a value of it, that is refused without others.

    Attributes:
        field: its name.
        value: the value; None for any.
        others: values of other fields by their names, one of which has to be there.
    """

    field: str
    value: Any
    others: Mapping[str, Any]

    def is_unmet(self, values: Mapping[str, Any]) -> bool:
        """Whether the fields of a request have the value without the others."""
        if self.field not in values or self.value not in (None, values[self.field]):
            return False
        return not any(
            values.get(name, RoutingFields.model_fields[name].default) == value
            for name, value in self.others.items()
        )

    @property
    def problem(self) -> str:
        value = "" if self.value is None else f": {str(self.value).lower()}"
        others = [f"{name}: {str(other).lower()}" for name, other in self.others.items()]
        return f"{self.field}{value} needs {' or '.join(others)} in the same request"


_ROWS = {OPT_IN: True}
_ROWS_OR_COUNTS = {OPT_IN: True, HISTOGRAM: True}
_INLINE = {DELIVERY: "inline"}

NEEDS = (
    Need(PROMPT_START, None, _ROWS_OR_COUNTS),
    Need(_START_LEN, None, _ROWS_OR_COUNTS),
    Need(FORMAT, None, _ROWS),
    # arrays in the store have one format
    *(Need(FORMAT, name, _INLINE) for name in get_args(Format) if name != "object"),
    Need(STEPS, True, _INLINE),
    Need(DTYPE, None, _ROWS),
    Need(LAYOUT, None, _ROWS),
    Need(LAYERS, None, _ROWS_OR_COUNTS),
    Need(WEIGHTS, None, _ROWS),
    Need(STEPS, None, _ROWS),
    Need(DELIVERY, None, _ROWS),
    Need(STREAM, None, _ROWS),
)
"""The combinations of fields that nobody reads. An opt-in that is missing was perhaps removed by a
gateway."""


@dataclass(frozen=True)
class RoutingOptions:
    """The checked routing options of a request: what to return, from which prompt row on, and in
    which form."""

    rows: bool = True
    histogram: bool = False
    weights: bool = False  # of the routers, beside the rows
    steps: bool = False  # of the engine, beside the rows
    prompt_start: int = 0
    prompt_start_param: str = PROMPT_START  # the name that the client used
    format: Format = "object"
    dtype: WireDtype | VllmDtype = "int16"
    layout: Layout = "split"
    layers: Layers = "moe"
    by_reference: bool = False
    at_end: bool = False  # rows of a stream come at the end of each choice, as references do
    # by the request or the default
    explicit_fields: frozenset[str] = field(default=frozenset(), compare=False)
    # only the server-wide default asks for routing
    by_default: bool = field(default=False, compare=False)

    @property
    def asks_for_inline(self) -> bool:
        """Whether the request, or the server-wide default, says that arrays are to be inline."""
        return DELIVERY in self.explicit_fields and not self.by_reference

    def with_vllms_forms(self) -> "RoutingOptions":
        """The options for an endpoint where vLLM has its own form, which applies unless the request
        sets another."""
        if not self.rows or self.by_reference or {FORMAT, LAYOUT} & self.explicit_fields:
            return self
        dtype = self.dtype if DTYPE in self.explicit_fields else "vllm"
        layers = self.layers if LAYERS in self.explicit_fields else "all"
        return replace(self, format="npy", layout="joined", dtype=dtype, layers=layers)


def parse_options(
    body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> RoutingOptions | None:
    """The routing options in the JSON object `body` of a request; None if it does not ask for
    routing.

    Args:
        defaults: values of fields that the request leaves out.

    Raises:
        FieldError: an invalid value, an unknown routing field, or a combination that `NEEDS`
            refuses.
    """
    check_names(body)
    of_request = {name: body[name] for name in RoutingFields.model_fields if name in body}
    values = _with_defaults(of_request, defaults)
    if not values:
        return None
    fields = _validated(values)
    for need in NEEDS:
        if need.is_unmet(values):
            raise FieldError(need.field, need.problem)
    if not fields.return_routed_experts and not fields.routed_experts_histogram:
        return None
    start, start_param = _prompt_start(values, fields)
    by_reference = fields.routed_experts_delivery == "reference"
    return RoutingOptions(
        rows=fields.return_routed_experts,
        histogram=fields.routed_experts_histogram,
        weights=fields.return_routed_expert_weights,
        steps=fields.routed_experts_steps,
        prompt_start=start,
        prompt_start_param=start_param,
        format=fields.routed_experts_format,
        dtype=fields.routed_experts_dtype,
        layout=fields.routed_experts_layout,
        layers=fields.routed_experts_layers,
        by_reference=by_reference,
        at_end=by_reference or fields.routed_experts_stream == "at_end",
        explicit_fields=frozenset(values),
        by_default=not of_request.keys() - {LABEL},
    )


def _with_defaults(
    of_request: dict[str, Any], defaults: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The fields of a request, and those that it leaves out as the server's defaults have them."""
    opts_out = of_request.get(OPT_IN) is False and not of_request.get(HISTOGRAM)
    if not defaults or opts_out:
        return of_request
    values = {**_left_out(defaults, of_request), **of_request}
    for need in NEEDS:  # a request's own fields win over defaults that do not go with them
        if need.is_unmet(values):
            for name in (need.field, *need.others):
                if name not in of_request:
                    values.pop(name, None)
    asks_for_routing = values.get(OPT_IN) or values.get(HISTOGRAM)
    return values if asks_for_routing else of_request  # defaults without an opt-in have no effect


def check_names(names: Iterable[str]) -> None:
    """Raises `FieldError` for a name that has the prefix of routing fields but is unknown."""
    for name in names:
        if name.startswith(PREFIXES) and name not in FIELDS:
            _refuse_unknown(name)


def _refuse_unknown(name: str) -> NoReturn:
    # Without lone surrogates, which JSON allows and responses do not.
    shown = name[:_LONGEST_NAME].encode("utf-8", "replace").decode()
    fields = {_own_part(field_name): field_name for field_name in FIELDS}
    hint = f"the fields are {', '.join(fields.values())}"
    near = difflib.get_close_matches(_own_part(shown), fields, n=1)
    if near:
        hint = f"did you mean {fields[near[0]]}?"
    raise FieldError(shown, f"{shown} is not a routing field: {hint}")


def _own_part(name: str) -> str:
    """What sets a field's name apart from the others'; all look alike with what they share."""
    return re.sub(r"^(return_)?(routed_?)?(experts?)?_?", "", name)


def check_defaults(defaults: object) -> dict[str, Any]:
    """Checks the server-wide `defaults` from the command line. Of those that say which experts
    tokens take, `input_fields.parse_input` checks the values.

    Raises:
        FieldError: an unknown field or an invalid value.
    """
    if not isinstance(defaults, dict):
        raise FieldError("", "the defaults must be a JSON object with routing fields")
    for name in defaults:
        if name == REPLAY:
            raise FieldError(name, f"{name} cannot have a default: rows are of one prompt")
        if name not in FIELDS:
            _refuse_unknown(name)
    _validated(defaults)
    parse_options({**defaults, OPT_IN: True})
    return defaults


def _left_out(defaults: Mapping[str, Any], of_request: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults but those of a start under its other name, if the request has one."""
    if not any(name in of_request for name in PROMPT_STARTS):
        return dict(defaults)
    return {name: value for name, value in defaults.items() if name not in PROMPT_STARTS}


def _validated(values: dict[str, Any]) -> RoutingFields:
    for name, value in values.items():
        if value is None:
            raise FieldError(name, f"{name} must not be null: leave it out to get its default")
    try:
        return RoutingFields.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise FieldError(name, f"{name}: {first['msg']}") from None


def _prompt_start(values: Mapping[str, Any], fields: RoutingFields) -> tuple[int, str]:
    """The first prompt row to return, and the name of the field that sets it."""
    if _START_LEN not in values:
        return fields.routed_experts_prompt_start, PROMPT_START
    if PROMPT_START not in values:
        return fields.routed_experts_start_len, _START_LEN
    if fields.routed_experts_prompt_start != fields.routed_experts_start_len:
        raise FieldError(
            _START_LEN, f"{_START_LEN} and {PROMPT_START} are two names for one value and differ"
        )
    return fields.routed_experts_prompt_start, PROMPT_START


Shape = Annotated[
    list[int], Field(description="[rows, layers, experts per token]", min_length=3, max_length=3)
]
Start = Annotated[int, Field(description="absolute position of the first row", ge=0)]


class RoutedExpertsArray(BaseModel):
    """The `object` form of one array of rows: `np.frombuffer(base64.b64decode(data),
    dtype).reshape(shape)`. Arrays of weights have the same fields; they are `float32`, with NaN in
    unknown rows."""

    data: str = Field(description="base64 of the little-endian array, C order")
    shape: Shape
    dtype: Literal["int16", "uint8", "int32"]
    start: Start
    missing: int = Field(description="number of unknown rows; they are filled with -1", ge=0)


class RoutedExpertWeightsArray(BaseModel):
    """The `object` form of the weights beside an array of rows."""

    data: str = Field(description="base64 of the little-endian array, C order")
    shape: Shape
    dtype: Literal["float32"]
    start: Start
    missing: int = Field(description="number of rows with unknown weights; they are NaN", ge=0)


class RoutedExpertsStepsArray(BaseModel):
    """The engine's steps beside an array of rows."""

    data: str = Field(description="base64 of the little-endian array")
    shape: Annotated[list[int], Field(description="[rows]", min_length=1, max_length=1)]
    dtype: Literal["uint32"]
    start: Start
    missing: int = Field(description="number of rows whose step is unknown: 4294967295", ge=0)


class RoutedExpertsReference(BaseModel):
    """Where an array is, for requests with `routed_experts_delivery: reference`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "6b00c9412669a53fbafc6309dc1dfb9f40c6a1e3",
                "url": "routed_experts/rows/6b00c9412669a53fbafc6309dc1dfb9f40c6a1e3",
                "part": "generated",
                "choice": 0,
                "shape": [2, 5, 4],
                "dtype": "int16",
                "start": 2,
                "missing": 0,
                "bytes": 80,
                "expires": 1795213633,
            }
        }
    )

    id: str
    url: str = Field(
        description="relative to `/v1`: `GET` returns the little-endian array [layers, rows, experts per token]. "
        "Absolute where the store is a bucket: signed until `expires`; the object is a `.npy` file, 128 bytes of "
        "header before the array"
    )
    uri: str | None = Field(
        default=None,
        description="bucket and key of the object (`s3://…`), for clients with keys of their own",
    )
    part: Literal["prompt", "generated", "joined"] = Field(
        description="which rows the array has; `joined` in that layout"
    )
    choice: int | None = Field(
        default=None, description="index of the choice; a prompt's array has none"
    )
    shape: Shape
    dtype: Literal["int16", "uint8", "int32", "float32"]
    start: Start
    missing: int = Field(description="number of unknown rows", ge=0)
    bytes: int = Field(description="size of the array", ge=0)
    expires: int = Field(description="Unix time in seconds after which the array is gone")
    path: str | None = Field(
        default=None,
        description="the array's `.npy` file, for clients on the same machine; needs `--routed-experts-store-paths`",
    )


class RoutedExpertsHistogram(BaseModel):
    """How often each expert was chosen."""

    counts: list[list[int]] = Field(description="[layers][experts]")
    rows: int = Field(description="number of rows, including missing ones", ge=0)
    missing: int = Field(
        description="rows with at least one unknown id; unknown ids are not counted", ge=0
    )


class ProfileArray(BaseModel):
    """`np.frombuffer(base64.b64decode(data), dtype).reshape(shape)`."""

    data: str = Field(description="base64 of the little-endian array, C order")
    shape: list[int] = Field(description="[layers, experts]", min_length=2, max_length=2)
    dtype: Literal["int64", "float64"]


class ExpertProfile(BaseModel):
    """The response of `GET /v1/routed_experts/profile`: how often each expert was chosen since the
    engines started. No number falls while they run."""

    counts: ProfileArray = Field(description="how often each expert was chosen (`int64`)")
    weights: ProfileArray | None = Field(
        default=None,
        description="sums of the weights (`float64`), where the server captures weights",
    )
    tokens: int = Field(description="tokens of all forward passes", ge=0)
    since: float = Field(
        description="Unix time in seconds at which the first engine began to count"
    )


class CaptureInfo(BaseModel):
    """Details of the capture."""

    runner: Literal["v1", "v2"]
    device: str
    kv_slots: int = Field(description="capacity of the host cache in rows: one per KV slot")
    host_cache_bytes: int = Field(
        description="maximum size; memory is reserved as rows are written"
    )
    device_bytes: int = Field(description="memory of the capture on each worker's device")
    pinned_bytes: int = Field(description="pinned host memory of the capture in each worker")


class RoutedExpertsInfo(BaseModel):
    """The response of `GET /v1/routed_experts`. Constant while the server runs."""

    model: str
    num_layers: int
    top_k: int
    num_experts: int
    layer_ids: list[int] = Field(
        description="decoder layer (absolute index) of each of the L layers"
    )
    num_hidden_layers: int = Field(
        default=0,
        description="decoder layers of the model, dense ones too, without those of multi-token prediction",
    )
    model_dtype: str = Field(
        default="",
        description="type of the model's activations, by PyTorch's name: a trainer of another type picks other experts",
    )
    dtype: Literal["int16"] = "int16"
    sorted_by_weight: bool = Field(
        default=False,
        description="whether a token's experts surely come with the largest weight first; if not, they may come so",
    )
    weights: bool = Field(
        default=False, description="whether requests may ask for the routers' weights"
    )
    weights_scale: list[float] = Field(
        default_factory=list,
        description="for each of the L layers, what the output of its experts is multiplied by, besides the weights",
    )
    weights_on_input: bool = Field(
        default=False,
        description="whether weights multiply the input of experts instead of their output",
    )
    input: bool = Field(
        default=False,
        description="whether requests may say which experts their tokens take (`routed_experts_replay` and others)",
    )
    defaults: dict[str, Any] = Field(
        default_factory=dict,
        description="values of request fields that a request leaves out (`--routed-experts-default`)",
    )
    groups: list[int] = Field(
        default_factory=lambda: [1, 1, 1],
        description="of routers that first choose groups of experts: groups, how many are chosen, and how many of "
        "its best experts a group's score sums up",
    )
    version: str = Field(description="version of routed-experts-server")
    vllm_version: str
    capture: CaptureInfo
