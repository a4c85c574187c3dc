"""Response models for the API description. The server does not build responses from them."""

import json
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from routed_experts.protocol.models import (
    RoutedExpertsArray,
    RoutedExpertsHistogram,
    RoutedExpertsReference,
    RoutedExpertsStepsArray,
    RoutedExpertWeightsArray,
)
from routed_experts.protocol.version import VERSION
from routed_experts.server.http.routes.texts import TokenIds
from routed_experts.server.http.vllm_http import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
    ErrorResponse,
    GenerateTokensChoice,
    GenerateTokensResponse,
    GenerateTokensStreamChoice,
    GenerateTokensStreamResponse,
)
from routed_experts.server.vllm_api import VLLM_VERSION

Responses = dict[int | str, dict[str, Any]]
"""By status, as FastAPI takes them."""


class Operation(TypedDict, total=False):
    """Arguments of FastAPI's decorators that describe a route."""

    responses: Responses
    openapi_extra: dict[str, Any]
    """What FastAPI does not know of the operation, as OpenAPI has it."""


Ids = list[list[list[int]]]
Histogram = RoutedExpertsHistogram
Rows = RoutedExpertsArray | RoutedExpertsReference | str | Ids
"""One array in any form of `routed_experts_format` (`object`; `npy` and `raw`; `list`), or a
reference to it."""
Weights = RoutedExpertWeightsArray | RoutedExpertsReference | str | list[list[list[float | None]]]
Steps = RoutedExpertsStepsArray


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)  # the server omits the field instead of sending null


def _rows_field(description: str) -> Any:
    return Field(default=None, description=description, json_schema_extra=_without_default)


_GENERATED = (
    "The generated rows of the choice, starting after the prompt; with `routed_experts_layout: joined`, its own prompt "
    "rows come before them. Absent without `return_routed_experts`."
)
_PROMPT = (
    "The prompt rows from `routed_experts_prompt_start` on, once for all choices, as one of them computed them. Absent "
    "without `return_routed_experts` and with `routed_experts_layout: joined`."
)
_WEIGHTS = (
    "The router's weights of the ids in `{}`, float32, in the same form, shape and pieces; NaN (null in lists) where "
    "they are unknown. Absent without `return_routed_expert_weights`."
)
_PROMPT_WEIGHTS = _WEIGHTS.format("prompt_routed_experts")
_STEPS = (
    "The engine's step that computed each row of `{}`, in the same pieces. Absent without "
    "`routed_experts_steps`."
)
_PROMPT_STEPS = _STEPS.format("prompt_routed_experts")
_PROMPT_HISTOGRAM = (
    "Counts of the prompt rows, once for all choices. Absent without `routed_experts_histogram`."
)


class _Choice(BaseModel):
    routed_experts: Rows | SkipJsonSchema[None] = _rows_field(_GENERATED)
    routed_expert_weights: Weights | SkipJsonSchema[None] = _rows_field(
        _WEIGHTS.format("routed_experts")
    )
    routed_experts_steps: Steps | SkipJsonSchema[None] = _rows_field(
        _STEPS.format("routed_experts")
    )
    routed_experts_histogram: Histogram | SkipJsonSchema[None] = _rows_field(
        "Counts of the generated rows of the choice. Absent without `routed_experts_histogram`."
    )


class _Response(BaseModel):
    prompt_routed_experts: Rows | SkipJsonSchema[None] = _rows_field(_PROMPT)
    prompt_routed_expert_weights: Weights | SkipJsonSchema[None] = _rows_field(_PROMPT_WEIGHTS)
    prompt_routed_experts_steps: Steps | SkipJsonSchema[None] = _rows_field(_PROMPT_STEPS)
    prompt_routed_experts_histogram: Histogram | SkipJsonSchema[None] = _rows_field(
        _PROMPT_HISTOGRAM
    )


class RoutedCompletionChoice(_Choice, CompletionResponseChoice):
    """vLLM's choice of a completion, with its rows."""


class RoutedCompletionResponse(CompletionResponse):
    """vLLM's completion, with routing."""

    choices: list[RoutedCompletionChoice]
    # Lists come first: a reader that tries the types in turn takes a list of arrays for nested lists.
    prompt_routed_experts: list[Rows] | Rows | SkipJsonSchema[None] = _rows_field(
        _PROMPT + " For a list of prompts, a list of arrays in the same order."
    )
    prompt_routed_expert_weights: list[Weights] | Weights | SkipJsonSchema[None] = _rows_field(
        _PROMPT_WEIGHTS + " For a list of prompts, a list of arrays in the same order."
    )
    prompt_routed_experts_steps: list[Steps] | Steps | SkipJsonSchema[None] = _rows_field(
        _PROMPT_STEPS + " For a list of prompts, a list of arrays in the same order."
    )
    prompt_routed_experts_histogram: Histogram | list[Histogram] | SkipJsonSchema[None] = (
        _rows_field(_PROMPT_HISTOGRAM + " For a list of prompts, a list in the same order.")
    )


class RoutedChatChoice(_Choice, ChatCompletionResponseChoice):
    """vLLM's choice of a chat completion, with its rows."""


class RoutedChatResponse(_Response, ChatCompletionResponse):
    """vLLM's chat completion, with routing."""

    choices: list[RoutedChatChoice]


class RoutedGenerateChoice(_Choice, GenerateTokensChoice):
    """vLLM's choice of a token-in, token-out response, with its rows."""

    routed_experts: Rows | None = Field(
        default=None,
        description=_GENERATED
        + " Without `routed_experts_format` and `routed_experts_layout`, it has the form of "
        "vLLM's own capture: base64 of a .npy file with prompt and generated rows, `uint8` up to 256 experts, else "
        "`uint16`.",
    )


class RoutedGenerateResponse(_Response, GenerateTokensResponse):
    """vLLM's token-in, token-out response, with routing."""

    choices: list[RoutedGenerateChoice]
    output_mode: Literal["tokens", "text"] = "tokens"  # vLLM has a model for each


class RoutedCompletionChunkChoice(_Choice, CompletionResponseStreamChoice):
    """vLLM's choice in a chunk of a completion, with the rows that became known with its tokens."""


class RoutedCompletionChunk(_Response, CompletionStreamResponse):
    """vLLM's chunk of a streamed completion, with routing."""

    choices: list[RoutedCompletionChunkChoice]


class RoutedChatChunkChoice(_Choice, ChatCompletionResponseStreamChoice):
    """vLLM's choice in a chunk of a chat completion, with the rows that became known with its
    tokens."""


class RoutedChatChunk(_Response, ChatCompletionStreamResponse):
    """vLLM's chunk of a streamed chat completion, with routing."""

    choices: list[RoutedChatChunkChoice]


class RoutedGenerateChunkChoice(_Choice, GenerateTokensStreamChoice):
    """vLLM's choice in a chunk of a token-in, token-out response, with the rows that became known
    with its tokens."""

    routed_experts: Rows | SkipJsonSchema[None] = _rows_field(_GENERATED)


class RoutedGenerateChunk(_Response, GenerateTokensStreamResponse):
    """vLLM's chunk of a streamed token-in, token-out response, with routing."""

    choices: list[RoutedGenerateChunkChoice]
    output_mode: Literal["tokens", "text"] = "tokens"  # vLLM has a model for each


CHUNKS = {
    "/v1/completions": RoutedCompletionChunk,
    "/v1/chat/completions": RoutedChatChunk,
    "/inference/v1/generate": RoutedGenerateChunk,
}
"""By endpoint, what each event of its stream is, but the last, `[DONE]`, and one with an error."""


class PrefillRows(BaseModel):
    """The prompt rows in `kv_transfer_params`, for prefill and decode on separate instances. With
    `return_routed_experts`, the prefill response contains them and the decode request must contain
    them; a proxy relays `kv_transfer_params` unchanged. Used only with `do_remote_prefill`. Rows of
    more than 64 MiB are omitted."""

    data: str = Field(
        description="Base64 (standard alphabet) of the little-endian array in C order."
    )
    dtype: Literal["uint8", "int16"]
    shape: tuple[int, int, int] = Field(
        description="[n, L, K]: rows of positions 0 to n - 1, n at most P. -1 means unknown."
    )
    until: float | SkipJsonSchema[None] = Field(
        default=None,
        description="Unix time by which the decode instance must have pulled the KV. Afterwards the prefill instance "
        "may free the KV, and the decode instance computes the prompt.",
    )


# Requests to the tiny model and its real responses. Fields with null are left out.
_EXAMPLES = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))

_STREAM = """\
With `stream: true`: server-sent events, each a JSON object of `x-event-schema`, then `data: [DONE]`. With
`return_routed_experts: true`:

- The first chunk of a prompt has the prompt rows as `prompt_routed_experts` at the top level, once for all choices.
- `choices[0].routed_experts` has the rows that became known with the chunk's tokens: after the chunk with the g-th
  token of a choice, all rows before position P + g - 1 have been sent. A chunk without new rows omits the field.
- No line has more than 64 KiB of routing. More rows are split into several complete arrays: chunks of the same choice
  without text carry all but the last, directly before the chunk that carries the last.
- Concatenated, the arrays equal those of the same request without `stream`.
- Histograms are sent once, in the chunk that has `finish_reason`.
- With `routed_experts_stream: at_end`, all rows of a choice come with the chunk that has its `finish_reason`, the
  prompt's with the first such chunk; with `routed_experts_delivery: reference`, so do references.

An error after the first byte is sent as one event with `error`, then `[DONE]`."""

_MSGPACK = """\
With `Accept: application/msgpack`, except for streams: the same object in MessagePack. `data` of arrays, and the forms
`npy` and `raw`, are binary instead of base64 text. Errors remain JSON."""

_ERRORS = {
    400: "The request is invalid; `param` names the field.",
    404: "The model does not exist.",
    413: "The arrays of routing as an input are too long for JSON: send MessagePack, or the arrays by reference.",
    422: "Something that the request refers to, such as an image, cannot be processed.",
    500: "Internal server error.",
    501: "The model does not support this endpoint.",
    503: "The server stops, or running requests have all the memory for routing as an input: try again after "
    "`Retry-After` seconds.",
    507: "The store of arrays that responses refer to is full, and the response is too large without it.",
}
_NO_CAPTURE = "The server does not capture routed experts."
_PART_ERRORS = {
    400: "`layers` or `tokens` is invalid.",
    404: "There never was such an array.",
    410: "The array has expired or was deleted.",
    503: "The bucket that has the array does not answer, or not as it should.",
}


_KEYLESS: Responses = {
    401: {
        "description": "The server has a key, and the request does not.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"error": {"type": "string"}},
                    "required": ["error"],
                },
                "example": {"error": "Unauthorized"},
            }
        },
    }
}
"""vLLM's answer, which does not have the form of other errors."""


def _route(
    name: str, ok: dict[str, Any], errors: dict[int, str], request: dict[str, Any] | None = None
) -> Operation:
    """Describes a route with the examples of `name`. Of errors, only the first has one."""
    responses: Responses = {
        code: {"model": ErrorResponse, "description": text} for code, text in errors.items()
    }
    responses[next(iter(errors))]["content"] = {
        "application/json": {"example": _EXAMPLES[name]["error"]}
    }
    operation: Operation = {"responses": {200: ok, **responses, **_KEYLESS}}
    if "request" in _EXAMPLES[name]:
        content = {"application/json": {**(request or {}), "example": _EXAMPLES[name]["request"]}}
        operation["openapi_extra"] = {
            "requestBody": ({"required": True} if request else {}) | {"content": content}
        }
    return operation


def _generating(model: type[BaseModel], name: str) -> Operation:
    """As `_route`, for a route that generates."""
    events = (
        f"data: {msgspec.json.encode(chunk).decode()}\n\n" for chunk in _EXAMPLES[name]["stream"]
    )
    content = {
        "application/json": {"example": _EXAMPLES[name]["response"]},
        "application/msgpack": {
            "schema": {"type": "string", "format": "binary", "description": _MSGPACK}
        },
        "text/event-stream": {
            "schema": {"type": "string", "description": _STREAM},
            "example": "".join(events) + "data: [DONE]\n\n",
        },
    }
    ok = {
        "model": model,
        "description": "The completion, whole or as a stream.",
        "content": content,
    }
    return _route(name, ok, _ERRORS)


def _part_errors(*codes: int) -> Responses:
    return _KEYLESS | {
        code: {"model": ErrorResponse, "description": _PART_ERRORS[code]} for code in codes
    }


def _range(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": {"type": "string"}}


_INFO = _EXAMPLES["info"]["response"] | {"version": VERSION, "vllm_version": VLLM_VERSION}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_ARRAY = (
    "The array, or the part that is asked for: little-endian, C order, [layers, rows, experts per token]. "
    "`X-Routed-Experts-Shape` has its shape, such as `12,8192,8`, `X-Routed-Experts-Dtype` its dtype. Takes `Range` "
    "with one range, and `HEAD`."
)

COMPLETION = _generating(RoutedCompletionResponse, "completion")
CHAT = _generating(RoutedChatResponse, "chat")
GENERATE = _generating(RoutedGenerateResponse, "generate")
INFO = _route(
    "info",
    {
        "description": "The dimensions of the arrays.",
        "content": {"application/json": {"example": _INFO}},
    },
    {404: _NO_CAPTURE},
)
PROFILE = _route(
    "profile",
    {
        "description": "How often each expert was chosen.",
        "content": {"application/json": {"example": _EXAMPLES["profile"]["response"]}},
    },
    {404: _NO_CAPTURE},
)
TEXTS = _route(
    "texts",
    {"content": {"application/json": {"example": _EXAMPLES["texts"]["response"]}}},
    {400: _ERRORS[400], 404: _NO_CAPTURE, 501: "The server has no tokenizer."},
    {"schema": TokenIds.model_json_schema()},
)
_ARRAY_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
DELETION: Operation = {
    "responses": {
        204: {"description": "The array is deleted."},
        **_part_errors(404, 410, 503),
    },
    "openapi_extra": {"parameters": [_ARRAY_ID]},
}
ROWS: Operation = {
    "responses": {
        200: {"description": _ARRAY, "content": _BYTES},
        206: {"description": "The bytes that `Range` asks for.", "content": _BYTES},
        **_part_errors(*_PART_ERRORS),
        416: {"model": ErrorResponse, "description": "The `Range` begins behind the end."},
    },
    "openapi_extra": {
        "parameters": [
            _ARRAY_ID,
            _range("layers", "layers to return, `FIRST:END`; all if left out"),
            _range(
                "tokens",
                "rows to return, `FIRST:END`, counted from 0 in this array; all if left out",
            ),
        ]
    },
}
