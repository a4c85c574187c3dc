"""Routing fields in a request's body that nobody reads, at their place or on their route: vLLM would
drop them in silence."""

from collections.abc import Iterator
from typing import Any

from routed_experts.protocol.models import FIELDS, PREFIXES

_OF_ANSWERS = ("routed_experts", "routed_expert_weights")
_LONGEST_PLACE = 100
_INNER_REQUEST = "chat_request"  # of a request to derender, with what that had
_LONGEST_KNOWN = 8  # parts of a path that is known
_CONVERSATIONS = ("messages", "input")
"""Of their items and of the parts of their contents, only the names of fields are looked at, and
nothing below: there are texts, and what tools are called with."""
_USERS_OWN = {"metadata", "tools", "functions"}
_TOKENS = {"prompt", "prompt_token_ids", "prompt_embeds", "token_ids"}
_OF_GENERATE = {"features", "content_parts"}
"""Of the top level. Names below these are a user's own: texts, data, tools."""
_WITH_SCHEMAS = (
    ("response_format",),
    ("structured_outputs",),
    ("sampling_params", "structured_outputs"),
    ("text",),
    ("output_config",),
)
_SCHEMAS = {"schema", "json_schema", "json"}
"""At any depth below those, as structural tags have them. Their names are a user's own."""
_SCHEMA_WITH_NAME = ("response_format", "json_schema")
"""Is no schema, but has one."""

_DEPTH_OF_ROWS = 3  # of objects, as far as vLLM's own nesting goes


def unread_fields(body: Any) -> Iterator[str]:
    """Names of the routing fields in the body of a request to a route that reads none, those of
    responses included."""
    if isinstance(body, dict):
        yield from (name for name in body if name.startswith(PREFIXES))
    yield from (name for _, name in misplaced_fields(body))
    yield from _rows(body, _DEPTH_OF_ROWS)


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
        names_above = _names(path)
        if _is_users_own(names_above, part, body):
            walks.append(iter(()))
            continue
        names = value if isinstance(value, dict) else ()
        for name in names:
            if _is_ours(name, names_above):
                yield "".join(path).removeprefix(".")[:_LONGEST_PLACE], name
        walks.append(_containers(value))


def _is_ours(name: str, names_above: tuple[str, ...]) -> bool:
    """Whether a name below the top is a routing field. In a conversation, only those that this
    server reads are."""
    if name in FIELDS:
        return True
    if names_above and names_above[0] in _CONVERSATIONS:
        return False
    return name.startswith(PREFIXES) and name not in _OF_ANSWERS


def _names(path: list[str]) -> tuple[str, ...]:
    """The first names on a path, without the indices of lists."""
    names = tuple(part[1:] for part in path[:_LONGEST_KNOWN] if part.startswith("."))
    return names[1:] if names[0:1] == (_INNER_REQUEST,) else names


def _is_users_own(names: tuple[str, ...], part: str, body: Any) -> bool:
    """Whether what is at these names below the top of `body` is content, and no part of the
    request's form."""
    if names and names[0] in _CONVERSATIONS:
        return names[1:] not in ((), ("content",))
    if len(names) == 1:
        return names[0] in _contents_of(body)
    return part[1:] in _SCHEMAS and _may_have_schemas(names)


def _contents_of(body: Any) -> set[str]:
    """The names at the top of `body` that hold content. Its kind is known by its prompt."""
    if "token_ids" in body:  # a body for /inference/v1/generate
        return _USERS_OWN | _TOKENS | _OF_GENERATE
    if "prompt" in body:
        return _USERS_OWN | _TOKENS
    return _USERS_OWN | _TOKENS | {"documents"}  # of a chat, or to rank


def _may_have_schemas(names: tuple[str, ...]) -> bool:
    if names == _SCHEMA_WITH_NAME:
        return False
    return any(names[: len(root)] == root for root in _WITH_SCHEMAS)


def _containers(value: Any) -> Iterator[tuple[str, Any]]:
    """The lists and objects in a list or object, each behind its part of a path."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            if type(item) in (dict, list):
                yield f"[{index}]", item
    elif isinstance(value, dict):
        for name, item in value.items():
            if type(item) in (dict, list):
                yield f".{name}", item


def _rows(value: Any, depth: int) -> Iterator[str]:
    """Names of rows in a response that is sent back to vLLM."""
    if isinstance(value, list):
        for item in value:
            if type(item) in (dict, list):  # of millions of token ids, none is asked
                yield from _rows(item, depth)
    elif isinstance(value, dict) and depth:
        for name, item in value.items():
            if name in _OF_ANSWERS and item is not None:  # vLLM's answers have null without routing
                yield name
            yield from _rows(item, depth - 1)
