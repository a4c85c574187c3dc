"""The request and response fields of the HTTP contract, as pydantic models."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt, ValidationError

from routed_experts.protocol.codec import Format, WireDtype

Layout = Literal["split", "joined"]


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
    routed_experts_start_len: StrictInt | None = Field(
        default=None, ge=0, description="Another name for `routed_experts_prompt_start`, as SGLang has it."
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


@dataclass(frozen=True)
class RoutingOptions:
    """A request's opt-in, checked.

    Attributes:
        prompt_start_param: which of its two names the client gave the prompt start.
    """

    prompt_start: int = 0
    prompt_start_param: str = "routed_experts_prompt_start"
    format: Format = "object"
    dtype: WireDtype = "int16"
    layout: Layout = "split"


_OPT_IN = "return_routed_experts"
_OTHERS = tuple(name for name in RoutingFields.model_fields if name != _OPT_IN)


def parse_options(body: dict[str, Any]) -> RoutingOptions | None:
    """The routing options in the JSON object `body` of a request; None if it does not ask for routing.

    Raises:
        FieldError: a wrong type or value, or a field without the opt-in. A gateway that strips the opt-in would
            otherwise lose the routing without a word.
    """
    given = {name: body[name] for name in RoutingFields.model_fields if name in body}
    if not given:
        return None
    for name, value in given.items():
        if value is None:
            raise FieldError(name, f"{name} must not be null; leave it out for its default")
    try:
        fields = RoutingFields.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise FieldError(name, f"{name}: {first['msg']}") from None
    if not fields.return_routed_experts:
        for name in _OTHERS:
            if name in given:
                raise FieldError(name, f"{name} needs {_OPT_IN}: true in the same request")
        return None
    start = fields.routed_experts_prompt_start
    if fields.routed_experts_start_len is not None:
        if "routed_experts_prompt_start" in given and start != fields.routed_experts_start_len:
            raise FieldError(
                "routed_experts_start_len",
                "routed_experts_start_len and routed_experts_prompt_start are two names for one value and differ",
            )
        start = fields.routed_experts_start_len
    alias = fields.routed_experts_start_len is not None and "routed_experts_prompt_start" not in given
    return RoutingOptions(
        prompt_start=start,
        prompt_start_param="routed_experts_start_len" if alias else "routed_experts_prompt_start",
        format=fields.routed_experts_format,
        dtype=fields.routed_experts_dtype,
        layout=fields.routed_experts_layout,
    )


class RoutedExpertsArray(BaseModel):
    """The `object` form of one array of rows."""

    data: str = Field(description="base64 (standard alphabet) of the little-endian array, C order")
    shape: list[int] = Field(description="[rows, MoE layers, experts per token]", min_length=3, max_length=3)
    dtype: Literal["int16", "uint8", "int32"]
    start: int = Field(description="absolute position of the first row", ge=0)
    missing: int = Field(description="rows that the server cannot know; they are filled with -1", ge=0)


class CaptureInfo(BaseModel):
    """Where and how the routing is captured."""

    runner: Literal["v1", "v2"]
    device: str
    kv_slots: int = Field(description="rows that the host cache can hold: one per KV slot")
    host_cache_bytes: int = Field(description="upper bound; the operating system reserves it as it is written")
    device_bytes: int = Field(description="memory on each worker's device that the capture takes")
    pinned_bytes: int = Field(description="pinned host memory that each worker's capture takes")
    tracked_requests: int = Field(description="requests with the opt-in that the engine holds state for")
    open_feeds: int = Field(description="streamed choices that this API process holds rows for")


class RoutedExpertsInfo(BaseModel):
    """What the arrays mean for the served model: the answer of `GET /v1/routed_experts`."""

    model: str
    num_layers: int
    top_k: int
    num_experts: int
    layer_ids: list[int] = Field(description="absolute decoder-layer index of each of the L layers in a row")
    dtype: Literal["int16"] = "int16"
    vllm_version: str
    capture: CaptureInfo
