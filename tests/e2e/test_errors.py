"""What is refused over HTTP: in OpenAI's form, with the field's name, and before a stream begins."""

import re
from importlib.metadata import version
from typing import Any

import httpx
import pytest

from routed_experts.capture.message import OPT_IN_ARG, OptIn
from routed_experts.protocol.models import RoutedExpertsInfo, RoutingFields
from tests.e2e.harness import Server

pytestmark = pytest.mark.e2e

OPT_IN = {"return_routed_experts": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
}
BAD: list[tuple[str, Any]] = [
    ("routed_experts_histogram", "true"),
    ("routed_experts_histogram", None),
    *(("return_routed_experts", value) for value in (None, 1, "true", [])),
    *(("routed_experts_prompt_start", value) for value in (None, -1, "1", 1.0, 1.5, True)),
    *(("routed_experts_start_len", value) for value in (None, -1, "1", 1.5, False)),
    *(("routed_experts_format", value) for value in (None, "", "NPY", 1)),
    *(("routed_experts_dtype", value) for value in (None, "int8", "uint16", 16)),
    *(("routed_experts_layout", value) for value in (None, "both", 0)),
    *(("routed_experts_layers", value) for value in (None, "dense", 1)),
]
VALID: dict[str, Any] = {
    "routed_experts_prompt_start": 0,
    "routed_experts_start_len": 1,
    "routed_experts_format": "npy",
    "routed_experts_dtype": "auto",
    "routed_experts_layout": "joined",
    "routed_experts_layers": "all",
}
either_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
both = pytest.mark.parametrize("path", BODIES)


@pytest.fixture(scope="module")
def client(server: Server) -> httpx.Client:
    return server.client()


def post(client: httpx.Client, path: str, stream: bool = False, **fields: Any) -> httpx.Response:
    return client.post(path, json={"model": "tiny", "max_tokens": 2, "stream": stream, **BODIES[path], **fields})


def refused(response: httpx.Response, param: str | None, code: int = 400) -> str:
    """The message of an error in OpenAI's form, whose HTTP status, code and field are as expected."""
    assert response.status_code == code, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    return str(error["message"])


@both
@either_way
@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_values(client: httpx.Client, path: str, stream: bool, field: str, value: Any) -> None:
    message = refused(post(client, path, stream, **{**OPT_IN, field: value}), field)
    assert field in message


def test_every_field_is_tried() -> None:
    assert {field for field, _ in BAD} == set(RoutingFields.model_fields)
    assert {"return_routed_experts", "routed_experts_histogram", *VALID} == set(RoutingFields.model_fields)


@both
@either_way
@pytest.mark.parametrize("opt_in", [{}, {"return_routed_experts": False}], ids=["absent", "false"])
@pytest.mark.parametrize("field", VALID)
def test_fields_without_the_opt_in(
    client: httpx.Client, path: str, stream: bool, opt_in: dict[str, Any], field: str
) -> None:
    message = refused(post(client, path, stream, **{field: VALID[field]}, **opt_in), field)
    assert "return_routed_experts: true" in message


@both
def test_two_names_that_differ(client: httpx.Client, path: str) -> None:
    response = post(client, path, **OPT_IN, routed_experts_prompt_start=1, routed_experts_start_len=2)
    refused(response, "routed_experts_start_len")


@both
@either_way
def test_prompt_start_behind_the_prompt(client: httpx.Client, path: str, stream: bool) -> None:
    prompt_tokens = post(client, path).json()["usage"]["prompt_tokens"]
    response = post(client, path, stream, **OPT_IN, routed_experts_prompt_start=prompt_tokens + 1)
    message = refused(response, "routed_experts_prompt_start")
    assert f"the prompt has {prompt_tokens} tokens" in message
    assert post(client, path, stream, **OPT_IN, routed_experts_prompt_start=prompt_tokens).status_code == 200


def test_prompt_start_behind_one_of_several_prompts(client: httpx.Client) -> None:
    response = post(client, "/v1/completions", **OPT_IN, prompt=["abcdef", "ab"], routed_experts_start_len=3)
    assert "the prompt has 2 tokens" in refused(response, "routed_experts_start_len")


@both
def test_beam_search(client: httpx.Client, path: str) -> None:
    """Unstreamed: vLLM streams no beam search."""
    response = post(client, path, **OPT_IN, use_beam_search=True, n=2)
    assert "beam search" in refused(response, "return_routed_experts")


@both
def test_an_error_in_a_routing_field_comes_before_others(client: httpx.Client, path: str) -> None:
    """Checked before vLLM's model of the body is, which would call the field by another name."""
    response = post(client, path, **OPT_IN, routed_experts_format="x", max_tokens="many")
    refused(response, "routed_experts_format")


@both
@pytest.mark.parametrize("content", ["", '{"model": "tiny"', "[1, 2]", '"text"', "null", b"\xff\xfe"])
def test_bodies_that_are_not_json_objects_stay_vllms(client: httpx.Client, path: str, content: Any) -> None:
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == 400
    assert "routed_experts" not in response.text


@both
def test_other_errors_stay_vllms(client: httpx.Client, path: str) -> None:
    refused(post(client, path, **OPT_IN, model="other"), "model", code=404)
    assert post(client, path, **OPT_IN, temperature=-1).status_code == 400
    assert client.get(path).status_code == 405
    text = client.post(path, content="{}", headers={"content-type": "text/plain"})
    assert text.status_code == 400


@both
def test_the_server_lives_on(client: httpx.Client, path: str) -> None:
    """After all of the above, an answer is whole and nothing is left behind."""
    answer = post(client, path, **OPT_IN).json()
    assert answer["prompt_routed_experts"]["shape"][0] == answer["usage"]["prompt_tokens"]
    assert answer["choices"][0]["routed_experts"]["shape"][0] == answer["usage"]["completion_tokens"] - 1


FORGED = OptIn(0, bytes(16), shared=False).encode().decode("latin-1")
MESSAGES = [{"role": "user", "content": "abc"}]
DOORS: dict[str, dict[str, Any]] = {
    **BODIES,
    "/v1/responses": {"input": "abc", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES]},
    "/invocations": {"prompt": "abc"},
    "/inference/v1/generate": {"token_ids": [1, 2, 3]},
}


@either_way
@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("value", [0, 7, True, -1, "1", FORGED], ids=repr)
def test_no_client_can_forge_the_opt_in(client: httpx.Client, path: str, value: Any, stream: bool) -> None:
    """The key of our opt-in, set from outside, at every door: no routing comes out, and nothing breaks."""
    args = {OPT_IN_ARG: value}
    body = {"model": "tiny", "max_tokens": 2, "stream": stream, "vllm_xargs": args, **DOORS[path]}
    if path == "/inference/v1/generate":
        body = {**DOORS[path], "stream": stream, "sampling_params": {"max_tokens": 2, "extra_args": args}}
    elif path == "/v1/chat/completions/batch":
        del body["stream"]
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.text.replace('"error":null', "")
    assert not re.search(r'routed_experts": ?[^n]', answer.text)


@both
def test_an_opt_in_beside_a_forged_one(client: httpx.Client, path: str) -> None:
    routed = post(client, path, **OPT_IN, vllm_xargs={OPT_IN_ARG: 1}).json()
    assert routed["prompt_routed_experts"]["start"] == 0


def test_the_log_begins_with_the_versions(server: Server) -> None:
    first, *_ = server.log.read_text().splitlines()
    assert first.endswith(f"routed-experts-server {version('routed-experts-server')}, vLLM 0.32.0")


def test_info(client: httpx.Client) -> None:
    response = client.get("/v1/routed_experts")
    assert response.status_code == 200
    body = response.json()
    info = RoutedExpertsInfo.model_validate(body)
    assert set(body) == set(RoutedExpertsInfo.model_fields)
    assert (info.model, info.num_layers, info.top_k, info.num_experts) == ("tiny", 5, 4, 16)
    assert info.layer_ids == [1, 2, 3, 4, 5]  # layer 0 is dense
    assert (info.dtype, info.version, info.vllm_version) == ("int16", version("routed-experts-server"), "0.32.0")
    assert (info.capture.runner, info.capture.device) == ("v1", "cpu")
    assert info.capture.kv_slots > 0
    assert info.capture.host_cache_bytes == info.capture.kv_slots * 5 * 4 * 2
