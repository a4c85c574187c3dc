"""Requests made from `openapi.yaml`: no 500, no answer that is not JSON, nothing that hangs.

500 in every run, always the same; `BAD_INPUT_REQUESTS=10000` sends others, and more.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.contract.served import serving
from tests.e2e.harness import prompt_of

COUNT = int(os.environ.get("BAD_INPUT_REQUESTS", "0"))
pytestmark = pytest.mark.timeout(max(600, COUNT))
SETTINGS = settings(
    max_examples=COUNT or 500,
    deadline=None,
    database=None,
    derandomize=not COUNT,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
LIMIT_S = 120
SPEC: dict[str, Any] = yaml.safe_load((Path(__file__).resolve().parents[2] / "openapi.yaml").read_text())
SCHEMAS: dict[str, Any] = SPEC["components"]["schemas"]
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": prompt_of(30, 1), "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": prompt_of(30, 1), "sampling_params": {"max_tokens": 3}},
}
# The model that does arithmetic gives no log probabilities, which beam search takes too. Grammars are compiled by other
# projects, for as long as they like. The others decide how much is generated.
LEFT_OUT = {
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "use_beam_search",
    "structured_outputs",
    "response_format",
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
}

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def values(schema: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """What a schema allows, roughly, and at times anything."""
    if not isinstance(schema, dict) or depth > 4:
        return JUNK
    if "$ref" in schema:
        return values(SCHEMAS[schema["$ref"].rsplit("/", 1)[1]], depth + 1)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return st.one_of(*(values(each, depth + 1) for each in schema[several]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(-2, 40) | st.integers()
        case "number":
            return st.floats(-2, 3) | st.floats()
        case "string":
            return st.text(max_size=8)
        case "null":
            return st.none()
        case "array":
            return st.lists(values(schema.get("items"), depth + 1), max_size=3)
        case "object":
            properties = {name: values(each, depth + 1) for name, each in schema.get("properties", {}).items()}
            return st.fixed_dictionaries({}, optional=properties)
    return JUNK


def fields_of(path: str) -> dict[str, Any]:
    content = SPEC["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties: dict[str, Any] = SCHEMAS[content["$ref"].rsplit("/", 1)[1]]["properties"]
    return {name: schema for name, schema in properties.items() if name not in LEFT_OUT}


def is_ours(name: str) -> bool:
    return "routed_experts" in name


@st.composite
def requests(draw: Any) -> tuple[str, dict[str, Any]]:
    """An endpoint, and a body that is valid but for some fields, half of which are ours."""
    path = draw(st.sampled_from(sorted(VALID)))
    fields = fields_of(path)
    body = {"model": "tiny", **VALID[path]}
    if draw(st.booleans()):
        body["return_routed_experts"] = True
    names = st.sampled_from(sorted(filter(is_ours, fields))) | st.sampled_from(sorted(fields))
    for name in draw(st.lists(names, max_size=4)):
        body[name] = draw(values(fields[name]) | JUNK)
    return path, body


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    content = orjson.dumps(body, default=str, option=orjson.OPT_NON_STR_KEYS) if serialisable(body) else b"{"
    return client.post(path, content=content, headers={"Content-Type": "application/json"}, timeout=LIMIT_S)


def serialisable(body: dict[str, Any]) -> bool:
    try:
        orjson.dumps(body)
    except TypeError:  # an integer of more than 64 bits, or a lone surrogate
        return False
    return True


@pytest.fixture(scope="module")
def client(tiny_model: Path) -> Iterator[httpx.Client]:
    with serving(tiny_model, "--enable-scale-out") as server, server.client() as opened:
        before = server.state_left()  # of other tests' servers in this process
        yield opened
        deadline = time.monotonic() + LIMIT_S
        while server.state_left() != before:  # feeds are counted once a second
            assert time.monotonic() < deadline, server.state_left()
            time.sleep(0.1)


@SETTINGS
@given(requests())
def test_no_request_is_the_servers_fault(client: httpx.Client, asked: tuple[str, dict[str, Any]]) -> None:
    path, body = asked
    response = post(client, path, body)
    if response.status_code >= 500:
        plain = {name: value for name, value in body.items() if not is_ours(name)}
        assume(post(client, path, plain).status_code < 500)  # else it is vLLM's, whatever is asked of ours
    assert response.status_code < 500, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [line for line in response.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        for event in events[:-1]:
            orjson.loads(event.removeprefix("data: "))
    elif response.headers["content-type"].startswith("application/json"):
        assert isinstance(orjson.loads(response.content), dict)
    if response.status_code == 400:
        assert response.json()["error"]["message"]
