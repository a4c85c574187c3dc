"""What a field of a response, or of a chunk of a stream, may be.

A response is a dict or an object of the OpenAI client. Imports numpy and msgspec.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert
from numpy.typing import NDArray

from routed_experts.protocol.codec import (
    UNKNOWN_STEP,
    Steps,
    count_missing,
    decode,
    decode_steps,
    decode_weights,
)
from routed_experts.protocol.routing import RoutingError

LARGEST = (1 << 31) - 1
"""Of indices, token ids and positions, none of which are larger in a real response."""

Index = Annotated[int, Meta(ge=0, le=LARGEST)]
Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Number = Annotated[
    float, Meta(ge=float(np.finfo(np.float32).min), le=float(np.finfo(np.float32).max))
]
TokenIds = tuple[Index, ...]

T = TypeVar("T")
Fields = TypeVar("Fields", "Choice", "Answer")


class TokenLogprob(Struct):
    """Of a token of a chat, or of `/inference/v1/generate`."""

    logprob: Number | None = None
    token: str | None = None


class Logprobs(Struct):
    """In one of two forms: `content`, or the others, of a completion."""

    content: list[TokenLogprob] | None = None
    token_logprobs: list[Number | None] | None = None
    tokens: list[str | None] | None = None

    @property
    def numbers(self) -> list[float | None]:
        if self.content is not None:
            return [token.logprob for token in self.content]
        return self.token_logprobs or []

    @property
    def texts(self) -> list[str | None]:
        if self.content is not None:
            return [token.token for token in self.content]
        return self.tokens or []


class Choice(Struct):
    """What a chunk has of one choice. An array is in one of the formats of `codec`."""

    index: Index | None = None  # None: 0
    prompt_token_ids: TokenIds | None = None
    token_ids: TokenIds | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    routed_experts: Any = None
    routed_expert_weights: Any = None
    routed_experts_steps: Any = None
    provider_specific_fields: Any = None


class Answer(Struct):
    """What a chunk has; a response that is not streamed is one chunk.

    With a list of prompts, their arrays are a list.
    """

    choices: list[Choice] = []
    prompt_token_ids: TokenIds | None = None
    prompt_routed_experts: Any = None
    prompt_routed_expert_weights: Any = None
    prompt_routed_experts_steps: Any = None
    error: Any = None
    provider_specific_fields: Any = None


def read_answer(json: Any) -> Answer:
    """The fields of a response, of a chunk, or of a line of a batch's output file.

    Raises:
        RoutingError: it is an error of the server, or a field has another form than the server's.
    """
    body = without_envelope(json)
    # before the other fields, which may be null then
    _refuse(body.get("error") if isinstance(body, Mapping) else getattr(body, "error", None))
    answer = _with_put_aside(read_fields(body, Answer))
    _refuse(answer.error)
    answer.choices = list(map(_with_put_aside, answer.choices))
    return answer


def _refuse(error: Any) -> None:
    if error is not None:
        message = error.get("message") if isinstance(error, Mapping) else error
        raise RoutingError(f"the server answered with an error: {message}")


def read_fields(json: Any, kind: type[T]) -> T:
    """`json` as a Struct; a field that is none of it may have any value.

    Raises:
        RoutingError: a field has another form than in the Struct.
    """
    try:
        return convert(json, kind, from_attributes=True)
    except ValidationError as error:
        raise RoutingError(f"not what the server sends: {error}") from error


def without_envelope(json: Any) -> Any:
    """The response in a line of a batch's output file, `{"custom_id", "response": {"body"},
    "error"}`; else `json`."""
    response = json.get("response") if isinstance(json, Mapping) and "custom_id" in json else None
    return response.get("body") if isinstance(response, Mapping) else json


def _with_put_aside(fields: Fields) -> Fields:
    """With those that LiteLLM put aside, as OpenAI does not have them."""
    if fields.provider_specific_fields is not None:
        aside = read_fields(fields.provider_specific_fields, type(fields))
        for name in fields.__struct_fields__:
            if getattr(fields, name) is None:
                setattr(fields, name, getattr(aside, name))
    return fields


# ---- arrays ----


def arrays_of_prompts(json: Any) -> list[Any]:
    """The arrays of a field: it has one, or for a list of prompts a list of them."""
    depth = 0
    inner = json
    while isinstance(inner, list) and inner:
        depth += 1
        inner = inner[0]
    is_one = depth in (0, 3)  # an array as nested lists has three levels
    return [json] if is_one else json


@dataclass(frozen=True)
class RowsArray:
    """An array of rows, decoded.

    Attributes:
        rows: [n, L, K] ids, in their type on the wire.
        weights: [n, L, K], if there are any.
        steps: [n], likewise.
        start: position of the first row; None in the forms without positions.
    """

    rows: NDArray[np.integer[Any]]
    weights: NDArray[np.float32] | None
    start: int | None
    steps: Steps | None = None


class _Place(Struct):
    """What an array in the form `object` says besides what `decode` reads."""

    start: Index
    missing: Count


def read_array(
    json: Any,
    weights_json: Any,
    dtype: str,
    shape: Mapping[str, int | None],
    steps_json: Any = None,
) -> RowsArray:
    """The array in `json`, with its weights and steps, which may be None.

    Args:
        dtype: of an array in the form `raw`.
        shape: `num_layers` and `top_k` of an array in the form `raw`, if they are known.

    Raises:
        ValueError: it is not an array of expert ids, or its weights or steps are not of these ids.
    """
    rows = decode(json, dtype=dtype, **shape)
    start = _start_of(json, rows)
    steps = None if steps_json is None else _steps_of(steps_json, rows, start)
    if weights_json is None:
        return RowsArray(rows, None, start, steps)
    weights = decode_weights(weights_json, **shape)
    are_both_empty = len(weights) + len(rows) == 0  # an empty list has no shape
    if weights.shape != rows.shape and not are_both_empty:
        raise RoutingError(f"weights of shape {weights.shape} beside ids of {rows.shape}")
    if isinstance(weights_json, Mapping):
        place = read_fields(weights_json, _Place)
        if place.start != start or place.missing != count_missing(weights):
            raise RoutingError("weights that are not of the ids beside them")
    return RowsArray(rows, weights, start, steps)


def _steps_of(json: Any, rows: NDArray[Any], start: int | None) -> Steps:
    steps = decode_steps(json)
    place = read_fields(json, _Place)
    is_unknown = steps == UNKNOWN_STEP
    if (
        len(steps) != len(rows)
        or start not in (None, place.start)
        or place.missing != np.count_nonzero(is_unknown)
    ):
        raise RoutingError("steps that are not of the ids beside them")
    return steps


def _start_of(json: Any, rows: NDArray[Any]) -> int | None:
    if not isinstance(json, Mapping):
        return None
    place = read_fields(json, _Place)
    missing = count_missing(rows)
    if place.missing != missing:
        raise RoutingError(f"{missing} rows are not known, said to be {place.missing}")
    if place.start + len(rows) > LARGEST:
        raise RoutingError(f"its first row is at {place.start}")
    return place.start
