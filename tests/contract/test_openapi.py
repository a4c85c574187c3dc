"""`openapi.yaml` says what the server serves: no less, no more, and its examples are true.

vLLM's own fields differ from version to version. The file is made with the one that has a CPU build; on another one
these tests look at what the file would be there.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import orjson
import pytest
import yaml
from fastapi import FastAPI
from fastapi.routing import APIRoute

from routed_experts.capture.engine.versions import SUPPORTED_VLLM
from routed_experts.protocol.codec import decode
from routed_experts.protocol.models import RoutedExpertsInfo, RoutingFields, parse_options
from routed_experts.server.cli import serve
from routed_experts.server.http import examples
from routed_experts.server.http.request import RoutedChatRequest, RoutedCompletionRequest, RoutedGenerateRequest
from routed_experts.server.http.routes import generate_router, router
from routed_experts.server.openapi import spec as spec_file
from routed_experts.server.vllm_api import VLLM_VERSION

FILE = Path(__file__).parents[2] / "openapi.yaml"
PAGE = Path(__file__).parents[2] / "docs/http.md"
GENERATING = {
    "/v1/completions": RoutedCompletionRequest,
    "/v1/chat/completions": RoutedChatRequest,
    "/inference/v1/generate": RoutedGenerateRequest,
}


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
        args = serve.parse(["model", "--enable-scale-out"])
        app: FastAPI = build_app(args, ("generate",))
    return app.openapi()


def operations(spec: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in spec["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def check_array(array: dict[str, Any], start: int) -> np.ndarray:
    """Decodes an array of an example; its ids must be possible for the tiny model."""
    rows = decode(array)  # type: ignore[arg-type]
    assert rows.shape[1:] == (examples.INFO_RESPONSE["num_layers"], examples.INFO_RESPONSE["top_k"])
    assert (array["start"], array["missing"]) == (start, 0)
    ordered = np.sort(rows, axis=2)
    assert (ordered[:, :, 1:] > ordered[:, :, :-1]).all()
    assert ordered.min() >= 0
    assert ordered.max() < examples.INFO_RESPONSE["num_experts"]
    return rows


def content(spec: dict[str, Any], path: str, code: str = "200", kind: str = "application/json") -> dict[str, Any]:
    method = "get" if path == "/v1/routed_experts" else "post"
    found: dict[str, Any] = spec["paths"][path][method]["responses"][code]["content"][kind]
    return found


def ours(spec: dict[str, Any]) -> dict[str, Any]:
    """What in a description is the same whatever vLLM's models are: our schemas, and our fields of vLLM's."""
    schemas = spec["components"]["schemas"]
    whole = {name: schema for name, schema in schemas.items() if name.startswith(("RoutedExperts", "Capture"))}
    fields = {
        (name, field): described
        for name, schema in schemas.items()
        for field, described in schema.get("properties", {}).items()
        if "routed_experts" in field
    }
    return {"schemas": whole, "fields": fields, "paths": list(spec["paths"]), "info": spec["info"]}


def test_what_is_ours_in_the_file_is_so_on_every_vllm(spec: dict[str, Any]) -> None:
    made, written = ours(spec), ours(yaml.safe_load(FILE.read_text(encoding="utf-8")))
    assert made == written
    assert {name for name, _ in made["fields"]} >= {"RoutedCompletionRequest", "RoutedChatRequest", "RoutedChatChoice"}


@pytest.mark.skipif(VLLM_VERSION.split("+")[0] != SUPPORTED_VLLM[-1], reason="the file is made with another vLLM")
def test_the_files_are_what_the_routes_say(tmp_path: Path) -> None:
    assert spec_file.main(["--check", str(FILE), str(PAGE)]) == 0
    made = [tmp_path / "made.yaml", tmp_path / "made.md"]
    assert spec_file.main([str(file) for file in made]) == 0
    assert [file.read_text(encoding="utf-8") for file in made] == [
        file.read_text(encoding="utf-8") for file in (FILE, PAGE)
    ]


def test_the_page_has_our_fields_and_every_example(spec: dict[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in RoutingFields.model_fields)
    shown = [orjson.loads(block.split("```")[0]) for block in page.split("```json\n")[1:]]
    examples = [
        body["example"]
        for _, _, operation in operations(spec)
        for part in (operation.get("requestBody", {}), *operation["responses"].values())
        for body in part.get("content", {}).values()
        if "example" in body
    ]
    assert shown == [example for example in examples if not isinstance(example, str)]
    assert len(shown) > 5
    assert all(example.strip() in page for example in examples if isinstance(example, str))


@pytest.mark.parametrize("exists", [True, False])
def test_a_stale_file_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], exists: bool) -> None:
    stale = tmp_path / "openapi.yaml"
    if exists:
        stale.write_text(FILE.read_text(encoding="utf-8").replace("start", "begin"), encoding="utf-8")
    assert spec_file.main(["--check", str(stale)]) == 1
    assert "run `make spec`" in capsys.readouterr().err


def test_our_routes_are_in_the_file_and_nothing_else(spec: dict[str, Any], served: dict[str, Any]) -> None:
    """They have taken the place of vLLM's in its application, and say the same there."""
    routes = [route for route in (*router.routes, *generate_router.routes) if isinstance(route, APIRoute)]
    found = {(path, method): operation for path, method, operation in operations(spec)}
    assert found.keys() == {(route.path, method.lower()) for route in routes for method in route.methods}
    assert len(found) == 4
    assert all(served["paths"][path][method] == operation for (path, method), operation in found.items())


def test_fields_of_the_file_and_of_vllms_application(spec: dict[str, Any], served: dict[str, Any]) -> None:
    """Names only: where vLLM has two models of one name, the references of the two descriptions differ."""
    names = [name for name in spec["components"]["schemas"] if name.startswith(("Routed", "Capture", "Error"))]
    assert len(names) == 15
    for name in names:
        here, there = spec["components"]["schemas"][name], served["components"]["schemas"][name]
        assert set(here["properties"]) == set(there["properties"]), name
        assert here.get("required") == there.get("required"), name


@pytest.mark.parametrize(("path", "model"), GENERATING.items())
def test_every_field_of_a_request_is_in_the_file(spec: dict[str, Any], path: str, model: Any) -> None:
    properties = spec["components"]["schemas"][model.__name__]["properties"]
    assert set(properties) == set(model.model_fields)
    for name, field in RoutingFields.model_fields.items():
        assert properties[name]["description"] == field.description
    example = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    model.model_validate(example)
    assert parse_options(example) is not None


def test_every_reference_is_defined_and_every_definition_used(spec: dict[str, Any]) -> None:
    named = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(spec))
    assert set(named) == set(spec["components"]["schemas"])


def test_rows_are_described_as_absent_and_not_null(spec: dict[str, Any]) -> None:
    for name, field in [
        ("RoutedCompletionResponse", "prompt_routed_experts"),
        ("RoutedCompletionChoice", "routed_experts"),
        ("RoutedChatResponse", "prompt_routed_experts"),
        ("RoutedChatChoice", "routed_experts"),
    ]:
        schema = spec["components"]["schemas"][name]
        described = schema["properties"][field]
        assert "default" not in described
        assert field not in schema.get("required", [])
        assert {"type": "null"} not in described["anyOf"]
        assert {"$ref": "#/components/schemas/RoutedExpertsArray"} in described["anyOf"]


def test_every_example_of_json_is_valid(spec: dict[str, Any]) -> None:
    described = [
        body.get("content", {}).get("application/json", {})
        for _, _, operation in operations(spec)
        for body in (operation.get("requestBody", {}), *operation["responses"].values())
    ]
    examples = [(each["schema"], each["example"]) for each in described if "example" in each]
    for schema, example in examples:
        jsonschema.Draft202012Validator({**schema, "components": spec["components"]}).validate(example)
    assert len(examples) == 3 + 4 + 4  # requests, answers, errors
    info = content(spec, "/v1/routed_experts")["example"]
    assert RoutedExpertsInfo.model_validate(info).model_dump() == info
    assert len(info["layer_ids"]) == info["num_layers"]


@pytest.mark.parametrize(("path", "start"), zip(GENERATING, (0, 19, 0), strict=True))
def test_example_answers_have_all_their_rows(spec: dict[str, Any], path: str, start: int) -> None:
    answer = content(spec, path)["example"]
    prompt_tokens, tokens = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
    prompt_rows = check_array(answer["prompt_routed_experts"], start)
    rows = check_array(answer["choices"][0]["routed_experts"], prompt_tokens)
    assert len(prompt_rows) == prompt_tokens - start
    assert len(rows) == tokens - 1


@pytest.mark.parametrize("path", GENERATING)
def test_example_streams_are_the_same_answers(spec: dict[str, Any], path: str) -> None:
    """And errors are vLLM's, not FastAPI's."""
    responses = spec["paths"][path]["post"]["responses"]
    assert {"200", "400", "404", "500", "501"} <= set(responses)
    for code, response in responses.items():
        if code != "200":
            assert response["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}
    events = content(spec, path, kind="text/event-stream")["example"].split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [orjson.loads(event.removeprefix("data: ")) for event in events[:-2]]
    answer = content(spec, path)["example"]
    prompts = [chunk.get("prompt_routed_experts") for chunk in chunks]
    assert prompts == [answer["prompt_routed_experts"], *([None] * (len(chunks) - 1))]
    arrays = [chunk["choices"][0]["routed_experts"] for chunk in chunks if "routed_experts" in chunk["choices"][0]]
    rows = [check_array(array, array["start"]) for array in arrays]
    whole = answer["choices"][0]["routed_experts"]
    assert arrays[0]["start"] == whole["start"]
    assert np.array_equal(np.concatenate(rows), check_array(whole, whole["start"]))
