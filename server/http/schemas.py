"""What the answers look like, for the API description only: nothing is made from these models while serving."""

from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from routed_experts.protocol.models import RoutedExpertsArray, RoutedExpertsHistogram
from routed_experts.server.http import examples
from routed_experts.server.http.vllm_http import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    CompletionResponse,
    CompletionResponseChoice,
    ErrorResponse,
    GenerateTokensChoice,
    GenerateTokensResponse,
)

Ids = list[list[list[int]]]
Histogram = RoutedExpertsHistogram
Rows = RoutedExpertsArray | str | Ids
"""One array in any of the forms of `routed_experts_format`: `object`; `npy` and `raw`; `list`."""


def _absent_unless_asked_for(schema: dict[str, Any]) -> None:
    """The server leaves the field out, where a default of null would say that it is there."""
    schema.pop("default", None)


def _rows_field(description: str) -> Any:
    return Field(default=None, description=description, json_schema_extra=_absent_unless_asked_for)


_GENERATED = (
    "The choice's generated rows, from the prompt's end on; with `routed_experts_layout: joined`, its prompt rows "
    "before them. Absent without `return_routed_experts`."
)
_HISTOGRAM = "The counts of the choice's generated rows. Absent without `routed_experts_histogram`."
_PROMPT_HISTOGRAM = "The counts of the prompt's rows, once for all choices. Absent without `routed_experts_histogram`."
_PROMPT = (
    "The prompt's rows from `routed_experts_prompt_start` on, once for all choices. Absent without "
    "`return_routed_experts` and with `routed_experts_layout: joined`."
)


class RoutedCompletionChoice(CompletionResponseChoice):
    """vLLM's choice of a completion, with its rows."""

    routed_experts: Rows | SkipJsonSchema[None] = _rows_field(_GENERATED)
    routed_experts_histogram: Histogram | SkipJsonSchema[None] = _rows_field(_HISTOGRAM)


class RoutedCompletionResponse(CompletionResponse):
    """vLLM's completion, with the routing that was asked for."""

    choices: list[RoutedCompletionChoice]
    prompt_routed_experts: Rows | list[Rows] | SkipJsonSchema[None] = _rows_field(
        _PROMPT + " For a list of prompts, a list of arrays in its order."
    )
    prompt_routed_experts_histogram: Histogram | list[Histogram] | SkipJsonSchema[None] = _rows_field(
        _PROMPT_HISTOGRAM + " For a list of prompts, a list in its order."
    )


class RoutedChatChoice(ChatCompletionResponseChoice):
    """vLLM's choice of a chat completion, with its rows."""

    routed_experts: Rows | SkipJsonSchema[None] = _rows_field(_GENERATED)
    routed_experts_histogram: Histogram | SkipJsonSchema[None] = _rows_field(_HISTOGRAM)


class RoutedChatResponse(ChatCompletionResponse):
    """vLLM's chat completion, with the routing that was asked for."""

    choices: list[RoutedChatChoice]
    prompt_routed_experts: Rows | SkipJsonSchema[None] = _rows_field(_PROMPT)
    prompt_routed_experts_histogram: Histogram | SkipJsonSchema[None] = _rows_field(_PROMPT_HISTOGRAM)


class RoutedGenerateChoice(GenerateTokensChoice):
    """vLLM's choice of a token-in, token-out answer, with its rows."""

    routed_experts: Rows | None = Field(
        default=None,
        description=_GENERATED + " Where neither a form nor a layout was asked for, as vLLM's own capture gives them: "
        "base64 of a .npy file with prompt and generated rows, `uint8` up to 256 experts, else `uint16`.",
    )
    routed_experts_histogram: Histogram | SkipJsonSchema[None] = _rows_field(_HISTOGRAM)


class RoutedGenerateResponse(GenerateTokensResponse):
    """vLLM's token-in, token-out answer, with the routing that was asked for."""

    choices: list[RoutedGenerateChoice]
    prompt_routed_experts: Rows | SkipJsonSchema[None] = _rows_field(_PROMPT)
    prompt_routed_experts_histogram: Histogram | SkipJsonSchema[None] = _rows_field(_PROMPT_HISTOGRAM)


class HandedRows(BaseModel):
    """The prompt's rows, beside what the KV connector says of its KV. With `return_routed_experts` the prefill leg's
    answer has them, and the decode leg's request must bring them; whoever relays `kv_transfer_params` as it is need not
    know of them. They are taken with `do_remote_prefill` only. Rows of more than 64 MiB are left out, and missing."""

    data: str = Field(description="Base64, standard alphabet, of the little-endian array in C order.")
    dtype: Literal["uint8", "int16"]
    shape: tuple[int, int, int] = Field(
        description="[n, L, K], rows of positions 0 to n - 1, n at most P; -1 is not known."
    )
    until: float | SkipJsonSchema[None] = Field(
        default=None,
        description="Until when the request is to come to the decode instance, in seconds since 1970, as the prefill "
        "instance may give the KV up afterwards. Of one that comes later the decode instance computes the prompt.",
    )


# The examples are answers of the tiny model that `routed-experts serve` makes by itself; fields that are null there
# are left out for the reader.


_STREAM = """\
With `stream: true`: server-sent events, each a JSON object, then `data: [DONE]`. With `return_routed_experts: true`

- the first chunk of a prompt has its rows as `prompt_routed_experts` at the top level, once for all its choices;
- no line holds more than 64 KiB of routing: rows that need more come in pieces, each a complete array, on chunks of the
  same choice without text, directly before the chunk that has the last piece;
- `choices[0].routed_experts` has the rows that became known with the chunk's tokens: after the chunk that brings a
  choice to its g-th token, all rows before position P + g - 1 have been sent. A chunk with nothing new has no field;
- concatenated, the arrays are equal to those of the same request without `stream`;
- histograms come once, with the chunk that has `finish_reason`.

An error after the first byte is one event with `error`, then `[DONE]`."""

_MSGPACK = """\
With `Accept: application/msgpack`, and not for streams: the same object in MessagePack, in which `data` of arrays and
the forms `npy` and `raw` are binary instead of base64 text. Errors stay JSON."""

_ERRORS = {
    400: "Something in the request cannot be accepted; `param` names the field.",
    404: "The model does not exist.",
    422: "Something that the request refers to, such as an image, cannot be used.",
    500: "The server failed.",
    501: "The model does not support this endpoint.",
}


def error_responses(*codes: int, example: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for FastAPI's `responses`; `example` is of the first one."""
    responses: dict[int | str, dict[str, Any]] = {
        code: {"model": ErrorResponse, "description": _ERRORS[code]} for code in codes
    }
    responses[codes[0]]["content"] = {"application/json": {"example": example}}
    return responses


def generate_responses(model: type[BaseModel], answer: dict[str, Any], stream: str) -> dict[int | str, dict[str, Any]]:
    """The answers of a generating route, for FastAPI's `responses`."""
    content = {
        "application/json": {"example": answer},
        "application/msgpack": {"schema": {"type": "string", "format": "binary", "description": _MSGPACK}},
        "text/event-stream": {"schema": {"type": "string", "description": _STREAM}, "example": stream},
    }
    ok: dict[str, Any] = {"model": model, "description": "The completion, whole or as a stream.", "content": content}
    return {200: ok, **error_responses(*_ERRORS, example=examples.FIELD_ERROR)}


def info_responses() -> dict[int | str, dict[str, Any]]:
    """The answers of the route that describes the arrays, for FastAPI's `responses`."""
    ok = {"description": "What the arrays mean.", "content": {"application/json": {"example": examples.INFO_ANSWER}}}
    errors = error_responses(404, example=examples.NO_CAPTURE_ERROR)
    errors[404]["description"] = "The server does not capture routed experts."
    return {200: ok, **errors}


def request_example(example: dict[str, Any]) -> dict[str, Any]:
    """An example of a route's request, for FastAPI's `openapi_extra`."""
    return {"requestBody": {"content": {"application/json": {"example": example}}}}
