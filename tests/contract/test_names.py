"""Names of fields: those of ours never pass in silence, and those that are not ours mean what they
mean to vLLM."""

import ast
import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.testclient import TestClient
from starlette.responses import JSONResponse
from starlette.routing import Route
from vllm.entrypoints.launchers.app import build_app
from vllm.envs import disable_envs_cache
from vllm.exceptions import VLLMValidationError

from routed_experts.protocol.models import INPUT_FIELDS, PREFIXES
from routed_experts.server.cli import serve
from routed_experts.server.http.routes.unsupported_routes import refuse_on_other_routes
from routed_experts.server.http.vllm_http import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
)
from tests.contract.served import serving, vllms
from tests.contract.test_api import ASKS, CHAT, COMPLETIONS, ENDPOINTS, GENERATE, post, refused
from tests.documentation import ROOT
from tests.e2e.harness import Server

OURS = {COMPLETIONS, CHAT, GENERATE, "/invocations"}
NAMED = "/v1/completions, /v1/chat/completions or, with --enable-scale-out, /inference/v1/generate"


@pytest.fixture(scope="module")
def api(tiny_model: Path) -> Iterator[Server]:
    """With all routes that vLLM can have."""
    with pytest.MonkeyPatch.context() as environment:
        for variable in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            environment.setenv(variable, "1")
        disable_envs_cache()
        with serving(tiny_model, "--enable-scale-out") as server:
            yield server
    disable_envs_cache()


@pytest.fixture(scope="module")
def stock(tiny_model: Path) -> Iterator[Server]:
    """vLLM without this project."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_PLUGINS", "none")
        with serving(tiny_model, "--enable-scale-out", command=vllms) as server:
            yield server


# ---- names that are not ours ----


@cache
def names_read() -> set[str]:
    """Every name by which our code may read something of a vLLM request: attributes, and texts that
    can be names."""
    names: set[str] = set()
    for path in [
        path
        for room in ("http", "outputs", "inprocess")
        for path in ROOT.glob(f"server/{room}/**/*.py")
    ]:
        has_texts = path.name in ("request.py", "serving.py")
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="request" | "chat" | "completion"), attr=name):
                    names.add(name)
                case ast.Constant(value=str(name)) if has_texts and re.fullmatch(
                    r"[a-z_]\w*", name
                ):
                    names.add(name)
    return {name for name in names if not name.startswith(PREFIXES)}


def said(response: httpx.Response) -> Any:
    """An answer without what differs each time."""
    text = re.sub(r'"(id|request_id|created)":("[^"]*"|\d+),?', "", response.text)
    return response.status_code, text.replace('"routed_experts":null,', "").replace(
        ',"routed_experts":null', ""
    )


MODELS = (
    CompletionRequest,
    ChatCompletionRequest,
    GenerateRequest,
    CompletionRequest,
    ChatCompletionRequest,
)


def test_no_name_of_a_clients_is_read_as_ours(api: Server, stock: Server) -> None:
    """A field that vLLM has not is an attribute of its request all the same."""
    names = names_read()
    assert {
        "sampling_params",
        "vllm_xargs",
        "use_beam_search",
        "content_parts",
        "top_k",
        "_routing",
    } <= names
    with api.client() as ours, stock.client() as vllm:
        for model, (path, body) in zip(MODELS, ENDPOINTS, strict=True):
            some = sorted(names - model.model_fields.keys() - {"extra_body"})
            assert len(some) > 20
            request = {"model": "tiny", **body, **({} if path == GENERATE else {"max_tokens": 2})}
            more = {name: {"temperature": 0} for name in some}
            expected = said(vllm.post(path, json=request))
            assert expected[0] == 200
            assert said(ours.post(path, json={**request, **more})) == expected
            without = said(ours.post(path, json={**request, **ASKS}))
            assert said(ours.post(path, json={**request, **ASKS, **more})) == without


# ---- names that are ----


def test_fields_of_ours_in_the_wrong_place(api: Server) -> None:
    """In `sampling_params`, on completions and chats too, where vLLM has none; in a literal
    `extra_body`, as clients send that are not OpenAI's for Python. Other values there are vLLM's
    matter."""
    for path, body in ENDPOINTS:
        for name in ("return_routed_experts", "routed_experts_format"):
            message = refused(
                api, path, f"sampling_params.{name}", **{**body, "sampling_params": {name: True}}
            )
            assert "belongs at the top level" in message
        for fields in (ASKS, {}, {"top_k": 1}):
            assert "OpenAI's Python client" in refused(
                api, path, "extra_body", **body, extra_body=fields
            )
        others: list[dict[str, Any]] = [
            {"sampling_params": value} for value in ({"temperature": 0}, {}, None, 1)
        ]
        for other in [*others, {"extra_body": "x"}] if path != GENERATE else ():
            assert post(api, path, **body, max_tokens=2, **other).status_code == 200


def test_routing_as_an_input_needs_its_flag(api: Server) -> None:
    assert api.info()["input"] is False
    for (path, body), name in itertools.product(ENDPOINTS, INPUT_FIELDS):
        message = refused(api, path, name, **body, **{name: []})
        assert "start it with --enable-routed-experts-input" in message


OF_CLIENTS = ("extra_args", "vllm_xargs", "sampling_params.extra_args")
"""Objects in which clients put more fields for vLLM."""


@pytest.mark.parametrize("place", OF_CLIENTS)
def test_fields_of_ours_in_objects_for_vllm_are_refused(api: Server, place: str) -> None:
    """vLLM takes such objects, and nobody would read the fields."""
    for name in ("return_routed_experts", "return_routed_expert", "routed_experts.opt_in"):
        fields: Any = {name: True}
        for part in reversed(place.split(".")):
            fields = {part: fields}
        for path, body in ENDPOINTS:
            message = refused(api, path, f"{place}.{name}", **{**body, **fields})
            assert "is not a routing field" in message or "belongs at the top level" in message
        answer = post(api, "/tokenize", prompt="a", **fields)
        assert answer.status_code == 400
        assert NAMED in answer.text


def test_names_anywhere_else_are_not_ours(api: Server, stock: Server) -> None:
    """In messages, in what clients keep beside them, in tools, in schemas, in metadata, and in what
    is no JSON."""
    schema = {"type": "object", "properties": {"return_routed_experts": {"type": "boolean"}}}
    rows = {"data": "", "shape": [0, 8, 4]}
    message = {"role": "user", "content": "return_routed_experts", "routed_experts": rows}
    chat = {"messages": [message], "metadata": {"routed_experts_run": "7"}, "max_tokens": 1}
    tool = {"type": "function", "function": {"name": "ask", "parameters": schema}}
    assert post(api, CHAT, **chat, tools=[tool], tool_choice="none").status_code == 200
    said = {"messages": [{"role": "user", "content": "return_routed_experts"}]}
    said["tools"] = [{"name": "a", "input_schema": schema}]
    counted = [post(server, "/v1/messages/count_tokens", **said) for server in (api, stock)]
    assert len({(answer.status_code, answer.text) for answer in counted}) == 1
    for content in (b'{"return_routed_experts": true', b"[" * 100_000 + b"routed_expert"):
        statuses = []
        for server in (api, stock):
            with server.client() as client:
                headers = {"Content-Type": "application/json"}
                answer = client.post("/tokenize", content=content, headers=headers)
                statuses.append(answer.status_code)
        assert statuses[0] == statuses[1]


def test_long_names_do_not_come_back(api: Server) -> None:
    name = f"routed_experts_{'x' * 48_000}"
    bodies: list[dict[str, Any]] = [
        {name: 1},
        {"sampling_params": {name: 1}},
        {"vllm_xargs": {name: 1}},
    ]
    for path, body in (*ENDPOINTS, ("/tokenize", {"prompt": "a"})):
        for fields in bodies:
            answer = post(api, path, **{**body, **fields})
            assert answer.status_code == 400
            assert len(answer.text) < 1200, answer.text


# ---- routes that are not ours ----


WITH_BODIES = {"POST", "PUT", "PATCH"}


def routes_of_vllm() -> list[tuple[str, str]]:
    """Method and path of every route that vLLM has and whose method takes a body."""
    args = serve.parse(["model", "--enable-scale-out"])
    with patch("vllm.plugins.load_endpoint_plugins", lambda _: []):
        app = build_app(args, ("generate",))
    routes = [route for route in app.routes if isinstance(route, Route)]
    return [
        (method, route.path)
        for route in routes
        for method in WITH_BODIES & (route.methods or set())
    ]


def test_no_route_takes_our_fields_in_silence(api: Server) -> None:
    """Also those that read no body."""
    routes = [(method, path) for method, path in routes_of_vllm() if path not in OURS]
    for path in ("/generative_scoring", "/v1/completions/derender", "/sleep"):
        assert ("POST", path) in routes
    silent = []
    fields = [ASKS, {"routed_experts_x": 1}, {"vllm_xargs": ASKS}]
    with api.client() as client:
        for (method, path), more in itertools.product(routes, fields):
            body = {"model": "tiny", **more}
            response = client.request(method, re.sub(r"{\w+}", "x", path), json=body)
            if response.status_code != 400 or NAMED not in response.text:
                silent.append((method, path, body, response.status_code, response.text))
    assert silent == []


def test_what_vllm_itself_renders(api: Server, stock: Server) -> None:
    """vLLM's own field of a name of ours: rendering a prompt puts it into the request that our
    endpoint takes."""
    start = {"routed_experts_prompt_start": 1}
    for path, (_, body) in zip(
        (f"{COMPLETIONS}/render", f"{CHAT}/render"), ENDPOINTS, strict=False
    ):
        rendered = [
            post(server, path, **body, **start, max_tokens=3).json() for server in (api, stock)
        ]
        one, other = (prompts[0] if isinstance(prompts, list) else prompts for prompts in rendered)
        assert one["sampling_params"] == other["sampling_params"]
        assert one["sampling_params"].items() >= start.items()
        refused(api, path, "return_routed_experts", **body, **start, **ASKS)
        answer = api._post(GENERATE, {**one, **ASKS, "routed_experts_layout": "joined"})
        assert answer["choices"][0]["routed_experts"]["start"] == 1


def test_what_others_attach(api: Server) -> None:
    """Other plugins' routes; forms, texts and sockets are left alone."""
    app = FastAPI()

    @app.put("/theirs/{name}")
    async def theirs(name: str, request: Request) -> JSONResponse:
        return JSONResponse(await request.json())

    @app.post("/form")
    async def form(request: Request) -> int:
        return len(await request.body())

    @app.websocket("/socket")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_json(await websocket.receive_json())
        await websocket.close()

    refuse_on_other_routes(app)
    big = {"x": ["a" * 1000] * 3000}
    with TestClient(app) as client:
        with pytest.raises(
            VLLMValidationError, match="this endpoint does not return routed experts"
        ):
            client.put("/theirs/one", json=ASKS)
        assert client.put("/theirs/one", json=big).json() == big
        assert client.post("/form", data={"return_routed_experts": "true"}).json() > 0
        headers = {"Content-Type": "text/plain"}
        assert client.post("/form", content=json.dumps(ASKS), headers=headers).json() > 0
        with client.websocket_connect("/socket") as opened:
            opened.send_json(ASKS)
            assert opened.receive_json() == ASKS


def test_a_body_in_pieces_is_read_whole(api: Server) -> None:
    content = json.dumps(ASKS).encode()
    with api.client() as client:
        pieces = (content[first : first + 7] for first in range(0, len(content), 7))
        headers = {"Content-Type": "application/json"}
        response = client.post("/tokenize", content=pieces, headers=headers)
    assert response.json()["error"]["param"] == "return_routed_experts"
