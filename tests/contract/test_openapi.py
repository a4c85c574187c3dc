"""`openapi.yaml` says what the server serves: no less, no more, and its examples are true.

vLLM's own fields differ from version to version. The file is made with the one that has a CPU
build; on another one these tests look at what the file would be there.
"""

import copy
import re
from typing import Any

import jsonschema
import numpy as np
import orjson
import pytest
import yaml
from fastapi import FastAPI
from fastapi.routing import APIRoute

from routed_experts.capture.engine.versions import INSTALLED_VLLM
from routed_experts.protocol.codec import decode
from routed_experts.protocol.models import (
    NEEDS,
    RoutedExpertsInfo,
    RoutedExpertsReference,
    RoutingFields,
    parse_options,
)
from routed_experts.server.cli import serve
from routed_experts.server.http.requests.request import (
    RoutedChatRequest,
    RoutedCompletionRequest,
    RoutedGenerateRequest,
)
from routed_experts.server.http.routes.routes import generate_router, router
from routed_experts.server.vllm_api import VLLM_VERSION
from tests import openapi as spec_file
from tests.documentation import ROOT

FILE, PAGE = ROOT / "openapi.yaml", ROOT / "docs/http.md"
# By endpoint: its request, and where the rows of its example begin.
GENERATING: dict[str, tuple[Any, int]] = {
    "/v1/completions": (RoutedCompletionRequest, 0),
    "/v1/chat/completions": (RoutedChatRequest, 19),
    "/inference/v1/generate": (RoutedGenerateRequest, 0),
}
JSON = "application/json"


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(spec_file.render(spec_file.describe()))
    return made


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    """What vLLM's whole application says of itself, with our plugin attached by vLLM."""
    from vllm.entrypoints.launchers.app import build_app

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "")
        serve.allow_plugin()
        app: FastAPI = build_app(serve.parse(["model", "--enable-scale-out"]), ("generate",))
    return app.openapi()


def operations(spec: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (path, method): operation
        for path, item in spec["paths"].items()
        for method, operation in item.items()
    }


@pytest.mark.skipif(
    VLLM_VERSION.split("+")[0] != INSTALLED_VLLM, reason="the file is made with another vLLM"
)
def test_the_file_is_what_the_routes_say() -> None:
    assert spec_file.main(["--check", str(FILE)]) == 0


def test_the_page_has_our_fields_and_endpoints(spec: dict[str, Any]) -> None:
    fields = re.findall(
        r'^\| `(\w+)` \| `"?(\w*)"?` \|', PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    defaults = {name: field.default for name, field in RoutingFields.model_fields.items()}
    assert dict(fields) == {name: str(default).lower() for name, default in defaults.items()}
    endpoints = set(re.findall(r"`((?:GET|POST|DELETE) /\S+)`", PAGE.read_text(encoding="utf-8")))
    assert endpoints == {f"{method.upper()} {path}" for path, method in operations(spec)}


def test_the_page_says_which_fields_need_others() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("| field | needs |\n|---|---|\n")[2].partition("\n\n")[0]
    said = set()
    for line in table.splitlines():
        fields, others = (re.findall("`(.+?)`", cell) for cell in line.strip("|").split("|"))
        said |= {f"{field} needs {' or '.join(others)} in the same request" for field in fields}
    assert said == {need.problem for need in NEEDS}


@pytest.mark.release
def test_our_routes_are_in_the_file_and_nothing_else(
    spec: dict[str, Any], served: dict[str, Any]
) -> None:
    """They have taken the place of vLLM's in its application, and say the same there, but for the
    schemas of events, which only the file has."""
    in_file = operations(spec)
    assert in_file.keys() == described_routes()
    rows = in_file["/v1/routed_experts/rows/{id}", "get"]["responses"]
    errors = {"400", "401", "404", "410", "416", "503"}
    assert rows.keys() == {"200", "206", *errors}  # and no 422, which FastAPI adds
    assert "HTTPValidationError" not in spec["components"]["schemas"]
    assert list(rows["200"]["content"]) == ["application/octet-stream"]
    assert len(in_file) == 8
    for (path, method), operation in in_file.items():
        assert served["paths"][path][method] == without_events(operation)
        assert "401" in operation["responses"]


def without_events(operation: dict[str, Any]) -> dict[str, Any]:
    operation = copy.deepcopy(operation)
    for response in operation["responses"].values():
        for content in response.get("content", {}).values():
            content.pop(spec_file.EVENT, None)
    return operation


def described_routes() -> set[tuple[str, str]]:
    """Path and method of each route of ours that is described."""
    ours = [*router.routes, *generate_router.routes]
    routes = [route for route in ours if isinstance(route, APIRoute) and route.include_in_schema]
    return {(route.path, method.lower()) for route in routes for method in route.methods}


@pytest.mark.release
def test_schemas_of_the_file_have_the_fields_of_those_that_are_served(
    spec: dict[str, Any], served: dict[str, Any]
) -> None:
    """Names only: where vLLM has two models of one name, the references of the two descriptions
    differ."""
    in_file = spec["components"]["schemas"]
    ours = [name for name in in_file if name.startswith(("Routed", "Capture", "Error"))]
    names = [name for name in ours if "Chunk" not in name]
    assert len(names) == 18
    for name in names:
        here = in_file[name]
        there = served["components"]["schemas"][name]
        assert set(here["properties"]) == set(there["properties"]), name
        assert here.get("required") == there.get("required"), name


def examples_in(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The bodies of requests and responses that have an example in JSON, and its schema."""
    parts: list[dict[str, Any]] = []
    for operation in operations(spec).values():
        parts += operation["responses"].values()
        if "requestBody" in operation:
            parts.append(operation["requestBody"])
    bodies = [body for part in parts for body in part.get("content", {}).values()]
    return [
        body
        for body in bodies
        if "schema" in body and "example" in body and not isinstance(body["example"], str)
    ]


def test_every_example_of_json_is_valid(spec: dict[str, Any]) -> None:
    examples = examples_in(spec)
    assert len(examples) == 4 + 6 + 6 + 8  # requests, answers, errors, 401
    for body in examples:
        schema = {**body["schema"], "components": spec["components"]}
        jsonschema.Draft202012Validator(schema).validate(body["example"])
    reference = spec["components"]["schemas"]["RoutedExpertsReference"]["example"]
    assert (
        RoutedExpertsReference.model_validate(reference).model_dump(exclude_none=True) == reference
    )
    info = info_of(spec)
    assert RoutedExpertsInfo.model_validate(info).model_dump() == info
    assert len(info["layer_ids"]) == info["num_layers"]


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ("RoutedCompletionResponse", "prompt_routed_experts"),
        ("RoutedCompletionChoice", "routed_experts"),
        ("RoutedChatResponse", "prompt_routed_experts"),
        ("RoutedChatChoice", "routed_experts"),
    ],
)
def test_rows_are_absent_instead_of_null(spec: dict[str, Any], model: str, field: str) -> None:
    schema = spec["components"]["schemas"][model]
    assert "default" not in schema["properties"][field]
    assert field not in schema.get("required", [])
    assert {"type": "null"} not in schema["properties"][field]["anyOf"]


def info_of(spec: dict[str, Any]) -> Any:
    return spec["paths"]["/v1/routed_experts"]["get"]["responses"]["200"]["content"][JSON][
        "example"
    ]


@pytest.mark.parametrize("path", GENERATING)
def test_every_field_of_a_request_is_described(spec: dict[str, Any], path: str) -> None:
    model, _ = GENERATING[path]
    operation = spec["paths"][path]["post"]
    properties = spec["components"]["schemas"][model.__name__]["properties"]
    assert set(properties) == set(model.model_fields)
    for name, field in RoutingFields.model_fields.items():
        assert properties[name]["description"].startswith(field.description)
    request = operation["requestBody"]["content"][JSON]["example"]
    model.model_validate(request)
    assert parse_options(request) is not None
    # Generated clients would send defaults, though what is left out is for the server's flags.
    assert [name for name, field in properties.items() if "default" in field] == []
    text = properties["routed_experts_layout"]["description"]
    assert text.endswith('one array in each choice. Default: `"split"`.')


@pytest.mark.parametrize("path", GENERATING)
def test_errors_of_an_endpoint_are_vllms_not_fastapis(spec: dict[str, Any], path: str) -> None:
    """A missing key is refused before a request has a form."""
    responses = spec["paths"][path]["post"]["responses"]
    errors = {
        status: response for status, response in responses.items() if status not in ("200", "401")
    }
    assert {"400", "404", "500", "501"} <= set(errors)
    for response in errors.values():
        assert response["content"][JSON]["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}


@pytest.mark.parametrize("path", GENERATING)
def test_an_example_has_all_its_rows_and_its_stream_is_the_same_answer(
    spec: dict[str, Any], path: str
) -> None:
    _, start = GENERATING[path]
    content = spec["paths"][path]["post"]["responses"]["200"]["content"]
    answer = content[JSON]["example"]
    of_prompt = answer["prompt_routed_experts"]
    own = answer["choices"][0]["routed_experts"]
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert len(rows_of(spec, of_prompt, start)) == prompt_tokens - start
    rows = rows_of(spec, own, prompt_tokens)
    assert len(rows) == answer["usage"]["completion_tokens"] - 1

    chunks = chunks_of(content["text/event-stream"]["example"])
    prompts = [chunk.get("prompt_routed_experts") for chunk in chunks]
    assert prompts == [of_prompt, *[None] * (len(chunks) - 1)]
    arrays = [chunk["choices"][0].get("routed_experts") for chunk in chunks]
    arrays = [array for array in arrays if array is not None]
    assert arrays[0]["start"] == own["start"]
    streamed = [rows_of(spec, array, array["start"]) for array in arrays]
    assert np.array_equal(np.concatenate(streamed), rows)


@pytest.mark.parametrize("path", GENERATING)
def test_every_event_of_an_example_is_a_chunk_as_described(spec: dict[str, Any], path: str) -> None:
    stream = spec["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    schema = {**stream[spec_file.EVENT], "components": spec["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    chunks = chunks_of(stream["example"])
    assert len(chunks) > 1
    for chunk in chunks:
        validator.validate(chunk)
    (choice,) = chunks[-1]["choices"]
    choice["routed_experts"]["shape"] = "many"
    assert not validator.is_valid(chunks[-1])


def chunks_of(stream: str) -> list[dict[str, Any]]:
    """The chunks of a whole stream."""
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [orjson.loads(event.removeprefix("data: ")) for event in events]


def rows_of(spec: dict[str, Any], array: dict[str, Any], start: int) -> np.ndarray:
    """The rows of an example, whose ids must be possible for the tiny model."""
    rows, info = decode(array), info_of(spec)  # type: ignore[arg-type]
    assert rows.shape[1:] == (info["num_layers"], info["top_k"])
    assert (array["start"], array["missing"]) == (start, 0)
    ordered = np.sort(rows, axis=2)
    assert (np.diff(ordered) > 0).all()
    assert 0 <= ordered.min() <= ordered.max() < info["num_experts"]
    return rows
