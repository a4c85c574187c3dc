"""The request fields that say which experts a request's tokens take, as pydantic models.

They are read apart from the other routing fields, before anything else sees them: an array may
have megabytes, which no log and no error is to repeat.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    InstanceOf,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)
from pydantic.json_schema import SkipJsonSchema

from routed_experts.protocol.models import (
    ACTIVATE,
    BIAS,
    DEACTIVATE,
    INPUT_FIELDS,
    REPLAY,
    FieldError,
)

_MOST_PAIRS = 1 << 17
"""More than any model has experts in all its layers."""
_MOST_ARRAYS = 1 << 10


Data = StrictStr | SkipJsonSchema[InstanceOf[memoryview]]
"""Base64, or bytes of a MessagePack body."""
Size = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
Position = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]


class ReplayedArray(BaseModel):
    """Rows for tokens of the prompt, in the `object` form of responses. Its other keys are not
    read."""

    data: Data = Field(description="base64 of the little-endian array, C order")
    shape: list[Size] = Field(
        description="[rows, layers, experts per token]", min_length=3, max_length=3
    )
    dtype: Literal["int16", "uint8", "int32", "uint16"]
    start: Position = Field(default=0, description="position in the prompt of the first row")


class ReplayedReference(BaseModel):
    """Rows that the server has stored: a reference as it came in a response. Its other keys are
    not read."""

    id: StrictStr = Field(max_length=64)
    start: Position = Field(
        description="position in the prompt of the first row; a reference says it"
    )


class BiasArray(BaseModel):
    """A bias for every expert."""

    data: Data = Field(description="base64 of the little-endian array, C order")
    shape: list[Size] = Field(description="[layers, experts]", min_length=2, max_length=2)
    dtype: Literal["float32"]


Expert = tuple[StrictInt, StrictInt]
"""A decoder layer, and an expert of it."""
Number = Annotated[float, Field(strict=True)]
ExpertBias = tuple[StrictInt, StrictInt, Number]
"""A decoder layer, an expert of it, and its bias."""
Replayed = ReplayedArray | ReplayedReference
Experts = Annotated[list[Expert], Field(max_length=_MOST_PAIRS)]
ExpertBiases = Annotated[list[ExpertBias], Field(max_length=_MOST_PAIRS)]

_EXPERTS: TypeAdapter[list[Expert]] = TypeAdapter(Experts)
_BIASES: TypeAdapter[list[ExpertBias]] = TypeAdapter(ExpertBiases)

_PAIRS = "[[decoder layer, expert], …]"
_FORMS = {
    f"{REPLAY}.shape": "[rows, layers, experts per token]",
    ACTIVATE: _PAIRS,
    DEACTIVATE: _PAIRS,
    BIAS: "[[decoder layer, expert, value], …], or an array of float32 [layers, experts]",
}
"""What errors say of a field's form."""


class InputFields(BaseModel):
    """The fields of a request, for the API description. `parse_input` reads them."""

    routed_experts_replay: Replayed | list[Replayed] | None = Field(
        default=None,
        description="The experts of the prompt's tokens: an array as responses have them, a reference to a stored "
        "one, or a list of both without overlap. Where a layer of a row has a -1, and where there is no row, the "
        "router chooses. The weights of the experts are the model's own. The server needs "
        "`--enable-routed-experts-input`, as for the following fields.",
    )
    routed_experts_activate: Experts | None = Field(
        default=None,
        description="[[decoder layer, expert], …]: these are chosen for every token of the request.",
    )
    routed_experts_deactivate: Experts | None = Field(
        default=None,
        description="[[decoder layer, expert], …]: these are chosen for no token of the request.",
    )
    routed_experts_bias: BiasArray | ExpertBiases | None = Field(
        default=None,
        description="Added to the router's logits for every token of the request: [[decoder layer, expert, value], …], "
        "or an array of float32 [layers, experts]. In an array, -inf stands for never, inf for always.",
    )


@dataclass(frozen=True, eq=False)
class FieldsOfInput:
    """What a request says of its routing, as its fields have it: arrays are not decoded yet."""

    replay: tuple[Replayed, ...] = ()
    activate: tuple[Expert, ...] = ()
    deactivate: tuple[Expert, ...] = ()
    bias: BiasArray | tuple[ExpertBias, ...] = ()
    body_bytes: int = 0
    """Of the request's body, which stays in memory until the request ends."""

    @property
    def has_bias(self) -> bool:
        """Whether it says something of all tokens."""
        return bool(self.activate or self.deactivate or self.bias)

    @property
    def says_nothing(self) -> bool:
        return not (self.replay or self.has_bias)

    def with_defaults(self, default: "FieldsOfInput", said: Collection[str]) -> "FieldsOfInput":
        """With the server's default of each field whose name is not among `said`."""
        return replace(
            self,
            activate=self.activate if ACTIVATE in said else default.activate,
            deactivate=self.deactivate if DEACTIVATE in said else default.deactivate,
            bias=self.bias if BIAS in said else default.bias,
        )

    @property
    def text_bytes(self) -> int:
        """Of the base64 of its arrays."""
        arrays = (*self.replay, self.bias)
        data = [item.data for item in arrays if isinstance(item, ReplayedArray | BiasArray)]
        return sum(len(text) for text in data if isinstance(text, str))

    @property
    def first_field(self) -> str:
        """The name of a field that the request has, for errors about all of them."""
        names = {
            REPLAY: self.replay,
            ACTIVATE: self.activate,
            DEACTIVATE: self.deactivate,
            BIAS: self.bias,
        }
        return next(name for name, value in names.items() if value)


def take_input(body: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields out of the JSON object `body` of a request."""
    return {name: body.pop(name) for name in INPUT_FIELDS if name in body}


def parse_input(fields: Mapping[str, Any]) -> FieldsOfInput:
    """Reads the fields of a request, or of the server's defaults.

    Raises:
        FieldError: a value that no model allows. The message does not repeat it.
    """
    for name, value in fields.items():
        if value is None:
            raise FieldError(name, f"{name} must not be null: leave it out")
    return FieldsOfInput(
        replay=_replay(fields.get(REPLAY, [])),
        activate=_checked(ACTIVATE, _EXPERTS, fields.get(ACTIVATE, [])),
        deactivate=_checked(DEACTIVATE, _EXPERTS, fields.get(DEACTIVATE, [])),
        bias=_bias(fields.get(BIAS, [])),
    )


def _replay(value: Any) -> tuple[Replayed, ...]:
    arrays = value if isinstance(value, list) else [value]
    if len(arrays) > _MOST_ARRAYS:
        raise FieldError(REPLAY, f"{REPLAY} must have at most {_MOST_ARRAYS} arrays")
    return tuple(_replayed(array) for array in arrays)


def _replayed(value: Any) -> Replayed:
    if not isinstance(value, dict):
        raise FieldError(
            REPLAY, f"{REPLAY} must be an array in the object form, a reference, or a list of them"
        )
    if "data" not in value and "id" not in value:
        raise FieldError(REPLAY, f"{REPLAY} must have data, as an array, or id, as a reference")
    model = ReplayedArray if "data" in value else ReplayedReference
    parsed: Replayed = _checked(REPLAY, TypeAdapter(model), value)
    return parsed


def _bias(value: Any) -> BiasArray | tuple[ExpertBias, ...]:
    if isinstance(value, dict):
        array: BiasArray = _checked(BIAS, TypeAdapter(BiasArray), value)
        return array
    triples: tuple[ExpertBias, ...] = _checked(BIAS, _BIASES, value)
    return triples


def _checked(name: str, adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        parsed = adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_context=False, include_url=False)[0]
        place = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
        )
        form = _FORMS.get(name) or _FORMS.get(f"{name}{place}")
        hint = f" (the form is {form})" if form else ""
        raise FieldError(name, f"{name}{place}: {first['msg']}{hint}") from None
    return tuple(parsed) if isinstance(parsed, list) else parsed
