"""Renders the API description as Markdown: `docs/http.md`."""

import json
import re
from collections.abc import Iterator
from typing import Any

_HEAD = """\
# HTTP reference

`make spec` generates this page and [`openapi.yaml`](../openapi.yaml), which has a request and a response of every
endpoint. `/docs` of a running server has vLLM's own fields and other endpoints.
"""
_PARTS = ("RoutedExpertsArray", "RoutedExpertsReference", "RoutedExpertsHistogram", "RoutedExpertsInfo")
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
        (name for name in fields if "routed_expert" in name), key=lambda name: name != "return_routed_experts"
    )
    yield from _fields({name: fields[name] for name in names})
    for name in _PARTS:
        yield f"\n## {name}\n"
        yield schemas[name]["description"] + "\n"
        yield from _fields(schemas[name]["properties"])
        if (example := schemas[name].get("example")) is not None:
            yield _block(example)
    seen: dict[str, str] = {}
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            endpoint = f"`{method.upper()} {path}`"
            yield f"\n## {endpoint}\n"
            yield operation["description"].strip()
            if not seen:
                yield "\nExample request:"
                yield from _examples(operation["requestBody"]["content"])
            yield from _responses(operation["responses"], seen, endpoint)


def _responses(responses: dict[str, Any], seen: dict[str, str], endpoint: str) -> Iterator[str]:
    """Each response once. `seen` maps texts to the endpoint that shows them; later endpoints refer to it.

    Those of the first endpoint have examples.
    """
    repeated: dict[str, list[str]] = {}
    for status, response in responses.items():
        content = response.get("content", {})
        kinds = {media: body.get("schema", {}).get("description") for media, body in content.items()}
        first = seen.setdefault(f"{status}: {response['description']} {kinds}", endpoint)
        if first != endpoint:
            repeated.setdefault(first, []).append(status)
            continue
        yield f"\n**{status}**: {response['description'].strip()}"
        if endpoint == next(iter(seen.values())):
            yield from _examples(content)
    for first, statuses in repeated.items():
        yield f"\n**{', '.join(statuses)}**: as for {first}."


def _fields(fields: dict[str, Any]) -> Iterator[str]:
    for name, field in fields.items():
        default = f", default `{json.dumps(field['default'])}`" if "default" in field else ""
        description = f": {field['description']}" if "description" in field else ""
        yield f"- `{name}` ({_type(field)}{default}){description}"


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


def _examples(content: dict[str, Any]) -> Iterator[str]:
    """What is said of each type of a request or response, and its example."""
    for media, body in content.items():
        schema = body.get("schema", {})
        if "description" in schema:
            yield f"\n`{media}`: {schema['description'].strip()}"
        example = body.get("example", schema.get("example"))
        if example is not None:
            yield _block(example)


def _block(example: Any) -> str:
    text = example if isinstance(example, str) else _json(example)
    return f"\n```{'text' if isinstance(example, str) else 'json'}\n{text.strip()}\n```"


def _json(value: Any) -> str:
    """Indented, with each list of numbers on one line."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return re.sub(r"\[\s+(-?\d+(?:,\s+-?\d+)*)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
