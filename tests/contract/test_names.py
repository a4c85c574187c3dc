"""Names of fields: those of ours never pass in silence, and those that are not ours mean what they
mean to vLLM."""

import ast
import itertools
import json
import re
import resource
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import httpx
import pytest
from fastapi import FastAPI, Request, UploadFile, WebSocket
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from vllm.entrypoints.launchers.app import build_app
from vllm.envs import disable_envs_cache
from vllm.exceptions import VLLMValidationError

from routed_experts.protocol.models import PREFIXES
from routed_experts.server.cli import serve
from routed_experts.server.http.misplaced import misplaced_fields
from routed_experts.server.http.unsupported_routes import refuse_on_other_routes
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


def names_read() -> set[str]:
    """Every name by which our code may read something of a vLLM request: attributes, and texts that
    can be names."""
    names: set[str] = set()
    for path in [
        path
        for room in ("http", "outputs", "inprocess")
        for path in ROOT.glob(f"server/{room}/*.py")
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


@pytest.mark.parametrize("value", [{"temperature": 0}, [7], "x", 7, True], ids=str)
def test_no_name_of_a_clients_is_read_as_ours(api: Server, stock: Server, value: Any) -> None:
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
            more = dict.fromkeys(some, value)
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


def inside(value: Any, *names: str) -> dict[str, Any]:
    """An object that has `value` in objects of these names, the first outermost."""
    for name in reversed(names):
        value = {name: value}
    return dict(value)


OPTION = {"options": {"routed_experts_delivery": "reference"}}
NESTED: list[tuple[str, dict[str, Any]]] = [
    ("vllm_xargs.return_routed_experts", inside(True, "vllm_xargs", "return_routed_experts")),
    ("extra_args.return_routed_experts", inside(True, "extra_args", "return_routed_experts")),
    (
        "stream_options.routed_experts_stream",
        inside("at_end", "stream_options", "routed_experts_stream"),
    ),
    (
        "chat_template_kwargs.return_routed_experts",
        inside(False, "chat_template_kwargs", "return_routed_experts"),
    ),
    (
        "sampling_params.extra_args.return_routed_experts",
        inside(True, "sampling_params", "extra_args", "return_routed_experts"),
    ),
    (
        "sampling_params.vllm_xargs.return_routed_expert",
        inside(True, "sampling_params", "vllm_xargs", "return_routed_expert"),
    ),
    ("requests[1].options.routed_experts_delivery", {"requests": [{}, OPTION]}),
    ("vllm_xargs.routed_experts.opt_in", inside("forged", "vllm_xargs", "routed_experts.opt_in")),
]


@pytest.mark.parametrize(
    ("param", "fields"), NESTED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_fields_of_ours_anywhere_in_a_body_are_refused(
    api: Server, param: str, fields: dict[str, Any]
) -> None:
    """vLLM takes such objects, and nobody would read the fields."""
    for path, body in ENDPOINTS:
        message = refused(api, path, param, **{**body, **fields})
        assert "is not a routing field" in message or "belongs at the top level" in message
    with api.client() as client:
        answer = client.post("/tokenize", json={"prompt": "a", **fields})
    assert answer.status_code == 400
    assert NAMED in answer.text


def test_a_field_of_ours_in_a_message_is_refused_and_rows_beside_it_are_not(api: Server) -> None:
    """Clients keep the rows of an answer beside its message, and send both."""
    message = {"role": "user", "content": "a"}
    batch = [[message], [{**message, "return_routed_experts": True}]]
    refused(
        api,
        CHAT,
        "messages[0].return_routed_experts",
        messages=[{**message, "return_routed_experts": True}],
    )
    refused(api, "/v1/chat/completions/batch", "return_routed_experts", messages=batch)
    with_rows = {**message, "routed_experts": {"data": "", "shape": [0, 8, 4]}}
    assert post(api, CHAT, messages=[with_rows], max_tokens=1).status_code == 200


def test_names_in_what_is_a_users_own_are_not_ours(api: Server) -> None:
    """In schemas, in tools and what they are called with, in texts and in data."""
    schema = {"type": "object", "properties": {"return_routed_experts": {"type": "boolean"}}}
    tool = {"type": "function", "function": {"name": "ask", "parameters": schema}}
    call = {"name": "ask", "arguments": '{"return_routed_experts": true}'}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "return_routed_experts"}],
        },
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "routed_experts_x"},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {
        "messages": messages,
        "tools": [tool],
        "response_format": form,
        "metadata": {"routed_experts_run": "7"},
    }
    assert [*misplaced_fields(body)] == []
    assert [
        *misplaced_fields(
            {"text": {"format": {"schema": schema}}, "structured_outputs": {"json": schema}}
        )
    ] == []
    assert (
        post(
            api, CHAT, messages=[messages[0]], tools=[tool], tool_choice="none", max_tokens=1
        ).status_code
        == 200
    )


KV = {"do_remote_decode": True, "routed_experts": {"data": "", "shape": [0, 8, 4]}}
OWN: list[dict[str, Any]] = [
    {"messages": [], "documents": [ASKS]},
    {"token_ids": [1], "features": ASKS},
    {"kv_transfer_params": KV},
    {"chat_request": {"tools": [ASKS]}},
    {"messages": [{"content": [{"type": "tool_use", "input": ASKS}]}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": ASKS}}},
    {"response_format": {"format": {"elements": [{"json_schema": ASKS}]}}},
    {"sampling_params": {"structured_outputs": {"json": ASKS}}},
]
LOST: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: ASKS}) for name in ("kv_transfer_params", "ec_transfer_params")),
    *((name, {name: ASKS}) for name in ("system", "arguments", "json", "schema", "content")),
    ("documents[0]", {"prompt": "a", "documents": [ASKS]}),
    ("features", {"prompt": "a", "features": ASKS}),
    ("vllm_xargs.kv_transfer_params", inside(ASKS, "vllm_xargs", "kv_transfer_params")),
    (
        "sampling_params.extra_args.metadata",
        inside(ASKS, "sampling_params", "extra_args", "metadata"),
    ),
    ("response_format.json_schema", inside(ASKS, "response_format", "json_schema")),
    ("messages[0].content[0]", {"messages": [{"content": [{"type": "text", **ASKS}]}]}),
]


@pytest.mark.parametrize("body", OWN, ids=str)
def test_a_users_own_names_pass_where_the_request_has_a_place_for_them(
    body: dict[str, Any],
) -> None:
    assert [*misplaced_fields(body)] == []


@pytest.mark.parametrize(("path", "body"), LOST, ids=[path for path, _ in LOST])
def test_the_same_names_elsewhere_hide_no_field_of_ours(path: str, body: dict[str, Any]) -> None:
    assert (path, "return_routed_experts") in [*misplaced_fields(body)]


def test_deep_bodies_are_walked_to_their_end() -> None:
    deep: dict[str, Any] = {"return_routed_experts": True}
    for _ in range(5_000):
        deep = {"a": [deep]}
    ((path, name),) = misplaced_fields(deep)
    assert (len(path), name) == (100, "return_routed_experts")


def test_long_names_do_not_come_back(api: Server) -> None:
    name = f"routed_experts_{'x' * 48_000}"
    bodies: list[dict[str, Any]] = [
        {name: 1},
        {"sampling_params": {name: 1}},
        {"vllm_xargs": {name: 1}},
    ]
    bodies += [{"y" * 48_000: {"return_routed_experts": True}}]
    for path, body in (*ENDPOINTS, ("/tokenize", {"prompt": "a"})):
        for fields in bodies:
            answer = post(api, path, **{**body, **fields})
            assert answer.status_code == 400
            assert len(answer.text) < 1200, answer.text


# ---- routes that are not ours ----


IN_JSON: list[dict[str, Any]] = [ASKS, {"routed_experts_x": 1}, {"extra_body": ASKS}]
IN_FORMS = [
    {"return_routed_experts": "true"},
    {"routed_experts_x": "1"},
    {"extra_body[return_routed_experts]": "true"},
]


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


def bodies_with_our_fields() -> list[dict[str, Any]]:
    """As arguments of a client's request: JSON, and forms of both kinds."""
    in_json = [{"model": "tiny", **fields} for fields in IN_JSON]
    forms = [{"model": "tiny", **fields} for fields in IN_FORMS]
    in_parts = [{name: (None, value) for name, value in form.items()} for form in forms]
    return [
        *({"json": body} for body in in_json),
        *({"data": form} for form in forms),
        *({"files": form} for form in in_parts),
    ]


def test_no_route_takes_our_fields_in_silence(api: Server) -> None:
    """Also those that read no body."""
    routes = [(method, path) for method, path in routes_of_vllm() if path not in OURS]
    for path in ("/generative_scoring", "/v1/completions/derender", "/sleep"):
        assert ("POST", path) in routes
    silent = []
    with api.client() as client:
        for (method, path), body in itertools.product(routes, bodies_with_our_fields()):
            response = client.request(method, re.sub(r"{\w+}", "x", path), **body)
            if response.status_code != 400 or NAMED not in response.text:
                silent.append((method, path, body, response.status_code, response.text))
    assert silent == []


AUDIO = "/v1/audio/transcriptions"
AUDIO_FILE = {"file": ("speech.wav", b"RIFF" * 500_000)}


@pytest.fixture(scope="module")
def audio() -> TestClient:
    """vLLM's own routes for audio, whose requests are forms. Behind them there is no model."""
    args = serve.parse(["model"])
    with patch("vllm.plugins.load_endpoint_plugins", lambda _: []):
        app = build_app(args, ("generate", "transcription"))
    app.state.openai_serving_transcription = None
    app.state.openai_serving_translation = None
    refuse_on_other_routes(app)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("path", [AUDIO, "/v1/audio/translations"])
@pytest.mark.parametrize(
    "name",
    [
        "return_routed_experts",
        "routed_experts_x",
        "vllm_xargs[return_routed_experts]",  # as OpenAI's client writes what is nested
        "messages[0][return_routed_experts]",
        "vllm_xargs[metadata][return_routed_experts]",
        "metadata[return_routed_experts",
    ],
)
def test_fields_in_a_form_are_refused(audio: TestClient, path: str, name: str) -> None:
    field = name.rpartition("[")[2].removesuffix("]")
    forms = (
        {"data": {"model": "tiny", name: "true"}, "files": AUDIO_FILE},
        {"files": {**AUDIO_FILE, name: (None, "true")}},  # behind the file
        {"files": {**AUDIO_FILE, name: ("true.txt", b"true")}},  # as a file
        {"data": {"model": "tiny", name: ""}},  # without a file: a form of another kind
    )
    for form in forms:
        response = audio.post(path, **form)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert NAMED in response.text


@pytest.mark.parametrize(
    "name",
    [
        "metadata[routed_experts_run]",
        "metadata[of][return_routed_experts]",
        "tools[][routed_experts_x]",
    ],
)
def test_names_in_what_is_a_users_own_are_not_ours_in_a_form(audio: TestClient, name: str) -> None:
    """As in a JSON body. No model answers here."""
    whole = audio.post(AUDIO, data={"model": "tiny", name: "7"}, files=AUDIO_FILE)
    url_encoded = audio.post(AUDIO, data={"model": "tiny", name: "7"})
    assert (whole.status_code, url_encoded.status_code) == (501, 400)
    assert NAMED not in whole.text + url_encoded.text


def test_a_field_whose_name_is_in_the_forms_charset_is_refused(audio: TestClient) -> None:
    form = (
        '--B\r\nContent-Disposition: form-data; name="return+AF8-routed_experts"\r\n\r\n'
        "true\r\n--B--\r\n"
    )
    content_type = "multipart/form-data; boundary=B; charset=utf-7"
    response = audio.post(AUDIO, content=form, headers={"content-type": content_type})
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "return_routed_experts",
    )


def test_other_forms_are_vllms_matter(audio: TestClient) -> None:
    """Whatever a file or a text holds, and forms that nobody can read."""
    text = json.dumps(ASKS)
    answers = [
        audio.post(AUDIO, data={"prompt": text}, files={"file": ("a.json", text)}),
        audio.post(AUDIO, data={"prompt": text}),
        audio.post(AUDIO, content=text, headers={"content-type": "multipart/form-data"}),
        audio.post(
            AUDIO,
            content=b"--x\r\nno header\r\n",
            headers={"content-type": "multipart/form-data; boundary=x"},
        ),
        audio.post(
            AUDIO,
            content=text,
            headers={"content-type": f"multipart/form-data; boundary={'x' * 999}"},
        ),
    ]
    assert [answer.status_code for answer in answers] == [501, 400, 400, 400, 400]
    assert not any(NAMED in answer.text for answer in answers)


def multipart(names: Iterable[str]) -> bytes:
    head = '--B\r\nContent-Disposition: form-data; name="{}"\r\n\r\n\r\n'
    return "".join(map(head.format, names)).encode() + b"--B--\r\n"


MULTIPART = "multipart/form-data; boundary=B"
URL_ENCODED = "application/x-www-form-urlencoded"
MANY_FIELDS = [*["a"] * 100_000, "routed_experts_x"]
LONG_NAMES = [*["%41" * 1000] * 1000, "routed_experts_x"]


@pytest.mark.parametrize(
    ("content_type", "content", "message"),
    [
        (MULTIPART, multipart(MANY_FIELDS), "more than 2000 fields"),
        (URL_ENCODED, "=&".join(MANY_FIELDS).encode(), "more than 2000 fields"),
        (MULTIPART, multipart(LONG_NAMES), "names of the form's fields take more than 256 KiB"),
        (URL_ENCODED, "=&".join(LONG_NAMES).encode(), "fields take more than 256 KiB"),
    ],
    ids=["parts", "pairs", "names of parts", "names in pairs"],
)
def test_a_form_is_read_up_to_a_limit(
    api: Server, content_type: str, content: bytes, message: str
) -> None:
    """Each name takes a microsecond of an API process, or several."""
    with api.client() as client:
        headers = {"content-type": content_type}
        response = client.post("/tokenize", content=content, headers=headers)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content_type", "content"),
    [
        (MULTIPART, multipart(["a"] * 1000)),
        (URL_ENCODED, b"a=%31&" * 1000),
        (URL_ENCODED, b"text=" + b"%41" * 1_000_000),
    ],
    ids=["parts", "pairs", "a long value"],
)
def test_a_form_as_large_as_any_that_is_read_passes(content_type: str, content: bytes) -> None:
    app = FastAPI()

    @app.post("/form")
    async def form(request: Request) -> int:
        return len(await request.body())

    refuse_on_other_routes(app)
    with TestClient(app) as client:
        headers = {"content-type": content_type}
        assert client.post("/form", content=content, headers=headers).json() == len(content)


def test_a_large_form_is_not_held_in_memory() -> None:
    """Nobody has declared that the route reads one."""
    app = FastAPI()

    @app.post("/form")
    async def form(request: Request) -> int:
        return sum([len(chunk) async for chunk in request.stream()])

    refuse_on_other_routes(app)

    async def pieces() -> AsyncIterator[bytes]:
        yield multipart(["file"]).removesuffix(b"\r\n--B--\r\n")
        for _ in range(500):
            yield bytes(1 << 16)
        yield b"\r\n--B--\r\n"

    async def send() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            headers = {"content-type": MULTIPART}
            response = await client.post("/form", content=pieces(), headers=headers)
            length: int = response.json()
            return length

    tracemalloc.start()
    try:
        assert anyio.run(send) > 500 << 16
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def large_form(num_bytes: int) -> bytes:
    return multipart(["file"]).removesuffix(b"\r\n--B--\r\n") + bytes(num_bytes)


def test_a_form_that_no_route_declares_has_a_limit(api: Server) -> None:
    """It would fill the disk."""
    with api.client() as client:
        headers = {"content-type": MULTIPART}
        response = client.post("/tokenize", content=large_form(65 << 20), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (413, 413)
    assert error["message"] == "The form has more than 64 MiB."


def test_a_form_for_which_the_disk_has_no_room_is_an_answer(
    api: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with api.client() as client:
        headers = {"content-type": MULTIPART}
        response = client.post("/tokenize", content=large_form(2 << 20), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, 503)
    assert error["message"] == "The server has no room for a form of so many bytes."


def test_a_form_in_small_pieces_for_which_the_disk_has_no_room_is_an_answer(api: Server) -> None:
    """They wait in a buffer, which is written later."""
    form = large_form(2 << 20)
    pieces = (form[first : first + 1000] for first in range(0, len(form), 1000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with api.client() as client:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 19, before[1]))
        try:
            headers = {"content-type": MULTIPART}
            response = client.post("/tokenize", content=pieces, headers=headers)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert response.status_code == 503
    assert "no room for a form" in response.json()["error"]["message"]


def test_rows_that_derender_would_drop(api: Server) -> None:
    """And what vLLM says where there are none is no row."""
    answer = api._post(GENERATE, {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}})
    answer["choices"][0]["routed_experts"] = None
    for path, body in (
        ("/v1/completions/derender", {"generate_responses": [answer]}),
        ("/v1/chat/completions/derender", {"generate_response": answer}),
    ):
        assert post(api, path, **body).status_code == 200
        answer["choices"][0]["routed_experts"] = "rows"
        refused(api, path, "routed_experts", **body)
        answer["choices"][0]["routed_experts"] = None


def test_what_vllm_itself_renders(api: Server, stock: Server) -> None:
    """vLLM's own field of a name of ours: rendering a prompt puts it into the request that our
    endpoint takes."""
    start = {"routed_experts_prompt_start": 1}
    for path, (_, body) in zip(
        (f"{COMPLETIONS}/render", f"{CHAT}/render"), ENDPOINTS, strict=False
    ):
        # vLLM 0.26, which would drop it
        if "routed_experts_prompt_start" not in CompletionRequest.model_fields:
            refused(api, path, *start, **body, **start)
            continue
        rendered = [post(server, path, **body, **start).json() for server in (api, stock)]
        one, other = (prompts[0] if isinstance(prompts, list) else prompts for prompts in rendered)
        assert one["sampling_params"] == other["sampling_params"]
        assert one["sampling_params"].items() >= start.items()
        refused(api, path, "return_routed_experts", **body, **start, **ASKS)
        answer = api._post(GENERATE, {**one, **ASKS, "routed_experts_layout": "joined"})
        assert answer["choices"][0]["routed_experts"]["start"] == 1


FIELDS = json.dumps({**ASKS, "x": "ü"})


ESCAPES = (("_", r"\u005f"), ('"r', r'"\u0072'), ("_routed", r"\u005Frouted"))
WRITTEN = [
    *map(FIELDS.encode, ("utf-8", "utf-16", "utf-32-le")),
    *(FIELDS.replace(*pair).encode() for pair in ESCAPES),
]


@pytest.mark.parametrize("content", WRITTEN)
def test_however_it_is_written(api: Server, content: bytes) -> None:
    """Encodings, escapes and chunks that the JSON of a server reads."""
    parts = iter([content[:20], content[20:25], content[25:]])
    with api.client() as client:
        for body, kind in (
            (content, "application/json"),
            (content, "text/plain"),
            (parts, "application/json"),
        ):
            response = client.post("/tokenize", content=body, headers={"content-type": kind})
            assert (response.status_code, response.json()["error"]["param"]) == (
                400,
                "return_routed_experts",
            )


@pytest.mark.parametrize("path", sorted(OURS))
def test_json_that_is_too_deep_is_refused(api: Server, path: str) -> None:
    with api.client() as client:
        headers = {"content-type": "application/json"}
        answer = client.post(path, content=b"[" * 100_000, headers=headers)
    assert answer.status_code == 400


def test_what_only_speaks_of_our_fields_passes(api: Server, stock: Server) -> None:
    """In texts, in tools' schemas, behind a null, and in what is no JSON."""
    text = "what does return_routed_experts do? \\u0072outed_experts"
    tool = {
        "name": "a",
        "input_schema": {"type": "object", "properties": {"routed_experts_x": {"type": "string"}}},
    }
    messages = [{"role": "user", "content": text}]
    for path, body in (
        ("/tokenize", {"prompt": text}),
        ("/v1/messages/count_tokens", {"messages": messages, "tools": [tool]}),
    ):
        one, other = (post(server, path, **body) for server in (api, stock))
        assert (one.status_code, one.text) == (other.status_code, other.text)
        assert one.status_code == 200 or "tool_choice" in one.text or "tool choice" in one.text
    for content in (
        b"",
        b"return_routed_experts",
        b'{"return_routed_experts": true',
        b"[" * 100_000 + b"routed_expert",
    ):
        statuses = []
        for server in (api, stock):
            with server.client() as client:
                headers = {"content-type": "application/json"}
                statuses.append(
                    client.post("/tokenize", content=content, headers=headers).status_code
                )
        assert statuses[0] == statuses[1]


def test_what_others_attach(api: Server) -> None:
    """Other plugins' routes and mounted applications; files and sockets are left alone."""
    app = FastAPI()

    @app.put("/theirs/{name}")
    async def theirs(name: str, request: Request) -> JSONResponse:
        return JSONResponse(await request.json())

    @app.post("/file")
    async def file(file: UploadFile) -> str:
        return (await file.read()).decode()

    @app.websocket("/socket")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_json(await websocket.receive_json())
        await websocket.close()

    async def inner(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await request.body())

    app.mount("/mounted", Starlette(routes=[Route("/inner", inner, methods=["POST", "GET"])]))
    for _ in range(2):
        refuse_on_other_routes(app)
    big = {"x": ["a" * 1000] * 3000}
    with TestClient(app) as client:
        for send in (client.put, client.patch), (client.post,):
            path = "/theirs/one" if client.put in send else "/mounted/inner"
            with pytest.raises(
                VLLMValidationError, match="this endpoint does not return routed experts"
            ):
                send[0](path, json=ASKS)
            assert send[0](path, json=big).json() == big
        assert client.get("/mounted/inner").text == ""
        assert client.post("/file", files={"file": json.dumps(ASKS)}).json() == json.dumps(ASKS)
        form = client.post("/mounted/inner", files={"file": b"RIFF" * 500_000})
        assert form.content.count(b"RIFF") == 500_000
        with pytest.raises(VLLMValidationError):
            client.post("/mounted/inner", files={"file": b"RIFF", "routed_experts_x": b"1"})
        with client.websocket_connect("/socket") as opened:
            opened.send_json(ASKS)
            assert opened.receive_json() == ASKS
