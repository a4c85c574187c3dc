"""Renders the API description as Markdown: `docs/http.md`."""

import json
import re
from collections.abc import Iterator
from typing import Any

_HEAD = """\
# HTTP reference

`make spec` generates this page and [`openapi.yaml`](../openapi.yaml) from the routes. For vLLM's own fields and other
endpoints, see vLLM's documentation, or `/docs` of a running server.
"""
_PARTS = ("RoutedExpertsArray", "RoutedExpertsHistogram", "RoutedExpertsInfo")
_FIELDS_OF = "RoutedCompletionRequest"
"""Every endpoint has the same routing fields."""


def render(spec: dict[str, Any]) -> str:
    """The page in Markdown."""
    return "\n".join(_lines(spec)) + "\n"


def _lines(spec: dict[str, Any]) -> Iterator[str]:
    schemas = spec["components"]["schemas"]
    yield _HEAD
    yield spec["info"]["description"].strip()
    yield "\n## Request fields\n"
    yield "In addition to vLLM's own:\n"
    fields = schemas[_FIELDS_OF]["properties"]
    names = sorted(
        (name for name in fields if "routed_experts" in name), key=lambda name: name != "return_routed_experts"
    )
    yield from _table({name: fields[name] for name in names})
    for name in _PARTS:
        yield f"\n## {name}\n"
        yield schemas[name]["description"] + "\n"
        yield from _table(schemas[name]["properties"])
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            yield f"\n## `{method.upper()} {path}`\n"
            yield operation["description"].strip()
            yield from _examples("Example request", operation.get("requestBody", {}).get("content", {}))
            for status, response in operation["responses"].items():
                yield f"\n**{status}**: {response['description'].strip()}"
                yield from _examples("", response.get("content", {}))


def _table(fields: dict[str, Any]) -> Iterator[str]:
    yield "| field | type | default | |"
    yield "| --- | --- | --- | --- |"
    for name, field in fields.items():
        default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        yield f"| `{name}` | {_type(field)} | {default} | {field.get('description', '').replace('|', chr(92) + '|')} |"


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    return str(field["type"])


def _examples(title: str, content: dict[str, Any]) -> Iterator[str]:
    for media, body in content.items():
        schema = body.get("schema", {})
        if "description" in schema:
            yield f"\n`{media}`: {schema['description'].strip()}"
        example = body.get("example", schema.get("example"))
        if example is None:
            continue
        if title:
            yield f"\n{title}:"
        text = example if isinstance(example, str) else _json(example)
        yield f"\n```{'text' if isinstance(example, str) else 'json'}\n{text.strip()}\n```"


def _json(value: Any) -> str:
    """Indented, with each list of numbers on one line."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return re.sub(r"\[\s+(-?\d+(?:,\s+-?\d+)*)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
