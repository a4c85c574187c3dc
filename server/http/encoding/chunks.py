"""Chunks of vLLM's streams as text: fields are put into them without parsing them.

That is right because vLLM's own models make them: the first choice's fields begin behind
`"choices":[{`, of which `index` is the first. A client's text cannot contain that, because JSON
escapes quotes.
"""

from typing import Any

import msgspec

DATA = "data: "
_FIRST_FIELD = len(DATA) + 1
FIRST_CHOICE = '"choices":[{'
_NO_CHOICE = -1 + len(FIRST_CHOICE)  # where `str.find` gives -1
_INDEX = '"index":'
UNFINISHED = '"finish_reason":null'
"""In each chunk of a choice but the last."""
_LAST_LINE_FIELDS = {
    "usage",
    "metrics",
    "system_fingerprint",
    "prompt_token_ids",
    "prompt_text",
    "mm_placeholders",
    "kv_transfer_params",
}
"""Fields that only the last of several lines has."""


class Chunk:
    """A server-sent event with one choice, or with none: usage, an error, the end."""

    __slots__ = ("choice_begin", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        # index of the choice's first field; `_NO_CHOICE` without a choice
        self.choice_begin = text.find(FIRST_CHOICE) + len(FIRST_CHOICE)

    @property
    def head(self) -> str:
        """The first field of its choice, the index, up to the comma. Nothing else in front of the
        fields of a choice is its own; usage, for one, is another in each chunk."""
        return self.text[self.choice_begin : self.text.index(",", self.choice_begin)]

    @property
    def index(self) -> int:
        """Of its choice, counted over all prompts; -1 without one."""
        begin = self.choice_begin
        if begin == _NO_CHOICE:
            return -1
        return int(self.text[begin + len(_INDEX) : self.text.index(",", begin)])

    def with_fields(self, of_choice: str, at_top: str = "") -> str:
        """The event with more fields, each with a comma behind it, at the top level and in its
        choice."""
        text = self.text
        begin = self.choice_begin
        if not at_top:
            return f"{text[:begin]}{of_choice}{text[begin:]}"
        return f"{text[:_FIRST_FIELD]}{at_top}{text[_FIRST_FIELD:begin]}{of_choice}{text[begin:]}"

    def without_tokens(self) -> "Chunk":
        """A chunk of the same choice that says nothing."""
        body = msgspec.json.decode(self.text[len(DATA) :])
        choice = body["choices"][0]
        empty = {name: _empty(name, value) for name, value in choice.items()}
        fields = {**body, "choices": [_without_last_line_fields(empty)]}
        json = msgspec.json.encode(_without_last_line_fields(fields)).decode()
        return Chunk(f"{DATA}{json}\n\n")


def _empty(name: str, value: Any) -> Any:
    """What stands for a field of a choice."""
    match name:
        case "index":
            return value
        case "text":
            return ""
        case "delta":
            return {}
        case _:
            return [] if isinstance(value, list) else None


def _without_last_line_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _LAST_LINE_FIELDS}
