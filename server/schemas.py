"""What the answers look like, for the API description only: nothing is made from these models while serving."""

from typing import Any

import orjson
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from routed_experts.protocol.models import RoutedExpertsArray
from routed_experts.server.vllm_api import (
    VLLM_VERSION,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    CompletionResponse,
    CompletionResponseChoice,
    ErrorResponse,
)

Ids = list[list[list[int]]]
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
_PROMPT = (
    "The prompt's rows from `routed_experts_prompt_start` on, once for all choices. Absent without "
    "`return_routed_experts` and with `routed_experts_layout: joined`."
)


class RoutedCompletionChoice(CompletionResponseChoice):
    """vLLM's choice of a completion, with its rows."""

    routed_experts: Rows | SkipJsonSchema[None] = _rows_field(_GENERATED)


class RoutedCompletionResponse(CompletionResponse):
    """vLLM's completion, with the routing that was asked for."""

    choices: list[RoutedCompletionChoice]
    prompt_routed_experts: Rows | list[Rows] | SkipJsonSchema[None] = _rows_field(
        _PROMPT + " For a list of prompts, a list of arrays in its order."
    )


class RoutedChatChoice(ChatCompletionResponseChoice):
    """vLLM's choice of a chat completion, with its rows."""

    routed_experts: Rows | SkipJsonSchema[None] = _rows_field(_GENERATED)


class RoutedChatResponse(ChatCompletionResponse):
    """vLLM's chat completion, with the routing that was asked for."""

    choices: list[RoutedChatChoice]
    prompt_routed_experts: Rows | SkipJsonSchema[None] = _rows_field(_PROMPT)


# The examples are answers of the tiny model that `routed-experts serve` makes by itself; fields that are null there
# are left out for the reader.


def _array(data: str, rows: int, start: int) -> dict[str, Any]:
    return {"data": data, "shape": [rows, 5, 4], "dtype": "int16", "start": start, "missing": 0}


def _events(*chunks: dict[str, Any]) -> str:
    """`chunks` as server-sent events."""
    return "".join(f"data: {orjson.dumps(chunk).decode()}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


_COMPLETION_HEAD: dict[str, Any] = {
    "id": "cmpl-8a159554dd3e4df7",
    "object": "text_completion",
    "created": 1795216497,
    "model": "tiny-moe",
}
_COMPLETION_PROMPT_ROWS = _array(
    "DwAIAAsADQAFAAoADAABAAQACAAFAAcADwAHAAsAAwALAAQACQAFAA0ADwAHAAQACgAMAAUAAQAFAAgABAANAAsADwAHAAgAAQALAAQADgA=", 2, 0
)
_CHAT_HEAD: dict[str, Any] = {
    "id": "chatcmpl-84e50f569b126746",
    "object": "chat.completion",
    "created": 1795216497,
    "model": "tiny-moe",
}
_CHAT_PROMPT_ROWS = _array(
    "DwAEAAYACwAPAAQABQAOAA4ABwAJAAsADQACAA4ADAAHAAMADgABAAQADwAKAAEAAQAGAAoABQAJAAcADgALAA0AAgAOAAwAAwAHAAoACAA=",
    2,
    19,
)

COMPLETION_REQUEST: dict[str, Any] = {
    "model": "tiny-moe",
    "prompt": "Hi",
    "max_tokens": 3,
    "temperature": 0,
    "return_routed_experts": True,
}
COMPLETION_ANSWER: dict[str, Any] = {
    **_COMPLETION_HEAD,
    "choices": [
        {
            "index": 0,
            "text": "!`s",
            "finish_reason": "length",
            "routed_experts": _array(
                "BwANAAgADwAFAAoADAAGAAUABAADAAYACwAPAAcACQAEAA8ADgAKAAwABwAKAA8ABgAMAAUACgACAAcABQAMAAcADwAJAAUADwAKAA0ACwA=",
                2,
                2,
            ),
        }
    ],
    "usage": {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3},
    "prompt_routed_experts": _COMPLETION_PROMPT_ROWS,
}
COMPLETION_STREAM = _events(
    {
        **_COMPLETION_HEAD,
        "choices": [{"index": 0, "text": "!", "finish_reason": None}],
        "prompt_routed_experts": _COMPLETION_PROMPT_ROWS,
    },
    {
        **_COMPLETION_HEAD,
        "choices": [
            {
                "index": 0,
                "text": "`",
                "finish_reason": None,
                "routed_experts": _array("BwANAAgADwAFAAoADAAGAAUABAADAAYACwAPAAcACQAEAA8ADgAKAA==", 1, 2),
            }
        ],
    },
    {
        **_COMPLETION_HEAD,
        "choices": [
            {
                "index": 0,
                "text": "s",
                "finish_reason": "length",
                "routed_experts": _array("DAAHAAoADwAGAAwABQAKAAIABwAFAAwABwAPAAkABQAPAAoADQALAA==", 1, 3),
            }
        ],
    },
)

CHAT_REQUEST: dict[str, Any] = {
    "model": "tiny-moe",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 3,
    "temperature": 0,
    "return_routed_experts": True,
    "routed_experts_prompt_start": 19,
}
CHAT_ANSWER: dict[str, Any] = {
    **_CHAT_HEAD,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "yyy"},
            "finish_reason": "length",
            "routed_experts": _array(
                "BAAPAA0ACwAEAAEABQAOAAkABwALAAgADAAOAAIADQADAAcAAQAKAAQADwANAAsABAABAA4ACAAJAAcACAALAAIADgAMAA0AAQADAAcADgA=",
                2,
                21,
            ),
        }
    ],
    "usage": {"prompt_tokens": 21, "total_tokens": 24, "completion_tokens": 3},
    "prompt_routed_experts": _CHAT_PROMPT_ROWS,
}
CHAT_STREAM = _events(
    {
        **_CHAT_HEAD,
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        "prompt_routed_experts": _CHAT_PROMPT_ROWS,
    },
    {
        **_CHAT_HEAD,
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"content": "y"}, "finish_reason": None}],
    },
    {
        **_CHAT_HEAD,
        "object": "chat.completion.chunk",
        "choices": [
            {
                "index": 0,
                "delta": {"content": "yy"},
                "finish_reason": "length",
                "routed_experts": _array(
                    "BAAPAA0ACwAEAAEABQAOAAkABwALAAgADAAOAAIADQADAAcAAQAKAAQADwANAAsABAABAA4ACAAJAAcACAALAAIADgAMAA0AAQADAAcADgA=",
                    2,
                    21,
                ),
            }
        ],
    },
)

INFO_ANSWER: dict[str, Any] = {
    "model": "tiny-moe",
    "num_layers": 5,
    "top_k": 4,
    "num_experts": 16,
    "layer_ids": [1, 2, 3, 4, 5],
    "dtype": "int16",
    "vllm_version": VLLM_VERSION,
    "capture": {
        "runner": "v1",
        "device": "cpu",
        "kv_slots": 2720,
        "host_cache_bytes": 108800,
        "device_bytes": 163840,
        "pinned_bytes": 0,
        "tracked_requests": 0,
        "open_feeds": 0,
    },
}
FIELD_ERROR: dict[str, Any] = {
    "error": {
        "message": "routed_experts_prompt_start is 28, but the prompt has 21 tokens "
        "(parameter=routed_experts_prompt_start)",
        "type": "BadRequestError",
        "param": "routed_experts_prompt_start",
        "code": 400,
    }
}
NO_CAPTURE_ERROR: dict[str, Any] = {
    "error": {
        "message": "This server does not capture routed experts. (parameter=return_routed_experts)",
        "type": "BadRequestError",
        "param": "return_routed_experts",
        "code": 400,
    }
}

_STREAM = """\
With `stream: true`: server-sent events, each a JSON object, then `data: [DONE]`. With `return_routed_experts: true`

- the first chunk of a prompt has its rows as `prompt_routed_experts` at the top level, once for all its choices;
- `choices[0].routed_experts` has the rows that became known with the chunk's tokens: after the chunk that brings a
  choice to its g-th token, all rows before position P + g - 1 have been sent. A chunk with nothing new has no field;
- concatenated, the arrays are equal to those of the same request without `stream`.

An error after the first byte is one event with `error`, then `[DONE]`."""

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
        "text/event-stream": {"schema": {"type": "string", "description": _STREAM}, "example": stream},
    }
    ok: dict[str, Any] = {"model": model, "description": "The completion, whole or as a stream.", "content": content}
    return {200: ok, **error_responses(*_ERRORS, example=FIELD_ERROR)}


def info_responses() -> dict[int | str, dict[str, Any]]:
    """The answers of the route that describes the arrays, for FastAPI's `responses`."""
    ok = {"description": "What the arrays mean.", "content": {"application/json": {"example": INFO_ANSWER}}}
    return {200: ok, **error_responses(400, 500, example=NO_CAPTURE_ERROR)}


def request_example(example: dict[str, Any]) -> dict[str, Any]:
    """An example of a route's request, for FastAPI's `openapi_extra`."""
    return {"requestBody": {"content": {"application/json": {"example": example}}}}
