"""Writes the API description from the server's routes. A tool of the repository.

python -m tests.openapi FILE          writes the file
python -m tests.openapi --check FILE  fails if it is not up to date
"""

import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI

from routed_experts.capture.wire.prefill_rows import PARAM
from routed_experts.server.http.routes.routes import generate_router, router
from routed_experts.server.http.routes.schemas import CHUNKS, PrefillRows

REFERENCE = "#/components/schemas/{model}"
EVENT = "x-event-schema"
"""In a stream's media type: the schema of an event's JSON, for which OpenAPI 3.1 has no keyword."""

DESCRIPTION = """\
An OpenAI-compatible server that returns, for every token and every MoE layer, the experts that the router chose.
Without routing fields, responses equal vLLM's.

P is the number of prompt tokens (an image counts as all of its tokens), G of generated tokens, L of MoE layers, and K
of experts per token. Row p holds the `[L, K]` logical expert ids of the token at absolute position p: layers in decoder
order, experts in the router's order, which may differ from the order of their scores. The last generated token never
enters the model, so a finished request has P + G - 1 rows: P of the prompt, G - 1 generated. Unknown rows are filled
with -1 and counted in `missing`.
"""


def describe() -> dict[str, Any]:
    """The OpenAPI description of our routes, without vLLM's others."""
    app = FastAPI(
        title="routed-experts-server",
        version=version("routed-experts-server"),
        description=DESCRIPTION.strip(),
    )
    app.include_router(router)
    app.include_router(generate_router)
    spec = app.openapi()
    schemas = spec["components"]["schemas"]
    schemas[PrefillRows.__name__] = PrefillRows.model_json_schema()
    for schema in schemas.values():
        for option in schema.get("properties", {}).get("kv_transfer_params", {}).get("anyOf", ()):
            if option["type"] == "object":
                option["properties"] = {
                    PARAM: {"$ref": REFERENCE.format(model=PrefillRows.__name__)}
                }
    for path, model in CHUNKS.items():
        chunk = model.model_json_schema(ref_template=REFERENCE, mode="serialization")
        schemas |= chunk.pop("$defs") | schemas
        schemas[model.__name__] = chunk
        stream = spec["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        stream[EVENT] = {"$ref": REFERENCE.format(model=model.__name__)}
    _give_each_its_title(schemas)
    for methods in spec["paths"].values():
        for operation in methods.values():
            _say_defaults_in_words(operation.get("requestBody"), schemas, set())
    spec["components"]["schemas"] = dict(sorted(schemas.items()))
    spec["components"]["securitySchemes"] = {
        "api_key": {
            "type": "http",
            "scheme": "bearer",
            "description": "The key of `--api-key`, if the server has one.",
        }
    }
    spec["security"] = [{}, {"api_key": []}]
    return spec


def _give_each_its_title(schemas: dict[str, Any]) -> None:
    """Generators of clients name classes after titles, and leave out what has the title of another:
    such schemas get their own names as titles."""
    counts = Counter(schema.get("title") for schema in schemas.values())
    for name, schema in schemas.items():
        if counts[schema.get("title")] > 1:
            schema["title"] = name.replace("-", "").replace("__", "_")


def _say_defaults_in_words(part: Any, schemas: dict[str, Any], seen: set[str]) -> None:
    """Moves the defaults of a request's fields, which `part` describes, into their descriptions.

    A generated client sends the default of each field that its user leaves out, or requires all such
    fields. But a server takes what is left out from its flags or from the model's configuration, and
    of tools, left out means `auto`, where the schema's default is `none`. `seen` are the references
    that were followed.
    """
    if isinstance(part, list):
        for item in part:
            _say_defaults_in_words(item, schemas, seen)
    if not isinstance(part, dict):
        return
    reference = part.get("$ref")
    if reference is not None and reference not in seen:
        seen.add(reference)
        _say_defaults_in_words(schemas[reference.rpartition("/")[2]], schemas, seen)
    for field in part.get("properties", {}).values():
        default = field.pop("default", None)
        if default is not None:
            text = field.get("description", "").rstrip(".")
            value = f"Default: `{json.dumps(default)}`."
            field["description"] = f"{text}. {value}" if text else value
    for value in part.values():
        _say_defaults_in_words(value, schemas, seen)


class _Dumper(yaml.SafeDumper):
    """Multi-line text as blocks, lists of integers on one line, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar(
            "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
        )

    def represent_items(self, items: list[Any]) -> yaml.SequenceNode:
        is_shape = bool(items) and all(isinstance(item, int) for item in items)
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=is_shape)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_items)


def render(spec: dict[str, Any]) -> str:
    """The text of `openapi.yaml`."""
    head = "# Generated from the routes by `make spec`.\n"
    return head + yaml.dump(spec, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def main(argv: list[str]) -> int:
    """Writes the description into a file, or compares it with the file's."""
    text, file = render(describe()), Path(argv[-1])
    if argv[0] != "--check":
        file.write_text(text, encoding="utf-8")
    elif not file.exists() or file.read_text(encoding="utf-8") != text:
        print(f"{file} is not up to date: run `make spec`.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
