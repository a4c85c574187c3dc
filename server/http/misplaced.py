"""Routing fields in a request's body that stand where nobody reads them: vLLM would drop them in
silence."""

from collections.abc import Iterator
from typing import Any

from routed_experts.capture.wire.prefill_rows import TRANSFER_PARAMS
from routed_experts.protocol.models import PREFIXES, RoutingFields

_FIELDS = RoutingFields.model_fields
_OF_ANSWERS = ("routed_experts", "routed_expert_weights")
_LONGEST_PLACE = 100
_CONVERSATIONS = (".messages", ".input")
"""Of their items, only the names of fields are looked at, and nothing below: clients keep rows
beside messages."""
_USERS_OWN = {
    *("content", "system", "documents", "metadata"),
    *("prompt", "prompt_token_ids", "prompt_embeds", "token_ids", "features", "content_parts"),
    *("tools", "functions", "tool_calls", "function_call", "arguments"),
    *("schema", "json_schema", "json", "guided_json"),
    *(TRANSFER_PARAMS, "ec_transfer_params"),
}
"""Below these, names are a user's own: texts, data, tools and what they are called with, JSON
schemas. Parameters of KV transfers have rows, under a name like those of fields."""


def misplaced_fields(body: Any) -> Iterator[tuple[str, str]]:
    """The place of each routing field below the top level of `body`, such as
    `sampling_params.extra_args`, and its name.

    Without recursion, because a body may be as deep as its bytes are many.
    """
    path: list[str] = []
    walks = [_containers(body)]  # of the body, and of each container on the path
    while walks:
        part, value = next(walks[-1], ("", None))
        if value is None:
            walks.pop()
            del path[-1:]
            continue
        path.append(part)
        is_message = path[0] in _CONVERSATIONS
        names = value if isinstance(value, dict) else ()
        for name in names:
            if name in _FIELDS or (
                not is_message and name.startswith(PREFIXES) and name not in _OF_ANSWERS
            ):
                yield "".join(path).removeprefix(".")[:_LONGEST_PLACE], name
        ends_here = is_message and isinstance(value, dict)
        walks.append(iter(()) if ends_here else _containers(value))


def _containers(value: Any) -> Iterator[tuple[str, Any]]:
    """The lists and objects in a list or object, each behind its part of a path."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            if type(item) in (dict, list):
                yield f"[{index}]", item
    elif isinstance(value, dict):
        for name, item in value.items():
            if type(item) in (dict, list) and name not in _USERS_OWN:
                yield f".{name}", item
