"""Requests to the tiny model and their real responses. A test sends the requests again."""

from typing import Any

import msgspec

from routed_experts.protocol.version import VERSION
from routed_experts.server.vllm_api import VLLM_VERSION


def _array(data: str, rows: int, start: int) -> dict[str, Any]:
    return {"data": data, "shape": [rows, 5, 4], "dtype": "int16", "start": start, "missing": 0}


def _events(head: dict[str, Any], prompt_rows: dict[str, Any], *choices: dict[str, Any]) -> str:
    """A stream with one chunk for each of `choices`; the first chunk has the prompt's rows."""
    chunks = [{**head, "choices": [{"index": 0, **choice}]} for choice in choices]
    chunks[0]["prompt_routed_experts"] = prompt_rows
    return "".join(f"data: {msgspec.json.encode(chunk).decode()}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


_COMPLETION_HEAD: dict[str, Any] = {
    "id": "cmpl-8a159554dd3e4df7",
    "object": "text_completion",
    "created": 1795216497,
    "model": "tiny-moe",
}
_COMPLETION_PROMPT_ROWS = _array(
    "DwAIAAsADQAFAAoADAABAAQACAAFAAcADwAHAAsAAwALAAQACQAFAA0ADwAHAAQACgAMAAUAAQAFAAgABAANAAsADwAHAAgAAQALAAQADgA=", 2, 0
)
_COMPLETION_ROWS = _array(
    "BwANAAgADwAFAAoADAAGAAUABAADAAYACwAPAAcACQAEAA8ADgAKAAwABwAKAA8ABgAMAAUACgACAAcABQAMAAcADwAJAAUADwAKAA0ACwA=", 2, 2
)
_COMPLETION_ROW_2 = _array("BwANAAgADwAFAAoADAAGAAUABAADAAYACwAPAAcACQAEAA8ADgAKAA==", 1, 2)
_COMPLETION_ROW_3 = _array("DAAHAAoADwAGAAwABQAKAAIABwAFAAwABwAPAAkABQAPAAoADQALAA==", 1, 3)
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

_CHAT_ROWS = _array(
    "BAAPAA0ACwAEAAEABQAOAAkABwALAAgADAAOAAIADQADAAcAAQAKAAQADwANAAsABAABAA4ACAAJAAcACAALAAIADgAMAA0AAQADAAcADgA=",
    2,
    21,
)

COMPLETION_REQUEST: dict[str, Any] = {
    "model": "tiny-moe",
    "prompt": "Hi",
    "max_tokens": 3,
    "temperature": 0,
    "return_routed_experts": True,
}
COMPLETION_RESPONSE: dict[str, Any] = {
    **_COMPLETION_HEAD,
    "choices": [{"index": 0, "text": "!`s", "finish_reason": "length", "routed_experts": _COMPLETION_ROWS}],
    "usage": {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3},
    "prompt_routed_experts": _COMPLETION_PROMPT_ROWS,
}
COMPLETION_STREAM = _events(
    _COMPLETION_HEAD,
    _COMPLETION_PROMPT_ROWS,
    {"text": "!", "finish_reason": None},
    {"text": "`", "finish_reason": None, "routed_experts": _COMPLETION_ROW_2},
    {"text": "s", "finish_reason": "length", "routed_experts": _COMPLETION_ROW_3},
)

CHAT_REQUEST: dict[str, Any] = {
    "model": "tiny-moe",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 3,
    "temperature": 0,
    "return_routed_experts": True,
    "routed_experts_prompt_start": 19,
}
CHAT_RESPONSE: dict[str, Any] = {
    **_CHAT_HEAD,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "yyy"},
            "finish_reason": "length",
            "routed_experts": _CHAT_ROWS,
        }
    ],
    "usage": {"prompt_tokens": 21, "total_tokens": 24, "completion_tokens": 3},
    "prompt_routed_experts": _CHAT_PROMPT_ROWS,
}
CHAT_STREAM = _events(
    {**_CHAT_HEAD, "object": "chat.completion.chunk"},
    _CHAT_PROMPT_ROWS,
    {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
    {"delta": {"content": "y"}, "finish_reason": None},
    {"delta": {"content": "yy"}, "finish_reason": "length", "routed_experts": _CHAT_ROWS},
)

INFO_RESPONSE: dict[str, Any] = {
    "model": "tiny-moe",
    "num_layers": 5,
    "top_k": 4,
    "num_experts": 16,
    "layer_ids": [1, 2, 3, 4, 5],
    "dtype": "int16",
    "weights": False,
    "weights_scale": [1.0, 1.0, 1.0, 1.0, 1.0],
    "weights_on_input": False,
    "version": VERSION,
    "vllm_version": VLLM_VERSION,
    "capture": {
        "runner": "v1",
        "device": "cpu",
        "kv_slots": 2720,
        "host_cache_bytes": 108800,
        "device_bytes": 163840,
        "pinned_bytes": 0,
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
        "message": "This server does not capture routed experts.",
        "type": "NotFoundError",
        "param": None,
        "code": 404,
    }
}
TEXTS_REQUEST: dict[str, Any] = {"token_ids": [39, 72]}
TEXTS_RESPONSE: dict[str, Any] = {"texts": ["H", "i"]}
TEXTS_ERROR: dict[str, Any] = {
    "error": {
        "message": "token_ids: 4000000000 is not a token of the model (parameter=token_ids)",
        "type": "BadRequestError",
        "param": "token_ids",
        "code": 400,
    }
}
GENERATE_REQUEST: dict[str, Any] = {
    "model": "tiny-moe",
    "token_ids": [39, 72],
    "sampling_params": {"max_tokens": 3, "temperature": 0},
    "return_routed_experts": True,
    "routed_experts_format": "object",
}
GENERATE_RESPONSE: dict[str, Any] = {
    "request_id": "generate-tokens-8a159554dd3e4df7",
    "model": "tiny-moe",
    "created": 1795216497,
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "token_ids": [0, 63, 82],
            "routed_experts": _COMPLETION_ROWS,
        }
    ],
    "usage": {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3},
    "output_mode": "tokens",
    "prompt_routed_experts": _COMPLETION_PROMPT_ROWS,
}
GENERATE_STREAM = _events(
    {"request_id": "generate-tokens-8a159554dd3e4df7", "output_mode": "tokens"},
    _COMPLETION_PROMPT_ROWS,
    {"finish_reason": None, "token_ids": [0]},
    {"finish_reason": None, "token_ids": [63], "routed_experts": _COMPLETION_ROW_2},
    {"finish_reason": "length", "token_ids": [82], "routed_experts": _COMPLETION_ROW_3},
)
