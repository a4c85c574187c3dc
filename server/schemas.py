"""What the answers look like, for the API description only: nothing is made from these models while serving."""

from typing import Any

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from protocol.models import RoutedExpertsArray
from server.vllm_api import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    CompletionResponse,
    CompletionResponseChoice,
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
