"""Which path a request asks for: the same for this server as for a proxy before it, and in
redirects."""

import asyncio
import json
import re
from itertools import product
from typing import Any
from urllib.parse import quote, unquote, urljoin

import pytest
from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import Message

from routed_experts.server.cli import serve
from tests.contract.served import build_app

HOSTS = [
    "server.example.org",
    "evil.example.org",
    "evil.example.org:1",
    "a@evil.example.org",
    "",
    "\\evil",
    "//evil",
]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "")
        serve.allow_plugin()
        return build_app(serve.parse(["model", "--enable-scale-out"]), ("generate",))


def answer_to(
    app: FastAPI, target: str, host: str = "server.example.org", root_path: str = ""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a GET, whose target reaches the application as
    uvicorn passes it on."""
    path, _, query = target.partition("?")
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
    }
    scope |= {
        "scheme": "http",
        "path": root_path + unquote(path),
        "raw_path": (root_path + path).encode(),
    }
    scope |= {
        "query_string": query.encode(),
        "root_path": root_path,
        "headers": [(b"host", host.encode())],
    }
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {}}
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent)


def paths_of(app: FastAPI) -> set[str]:
    """Those of all routes, with a name in place of each parameter."""
    return {
        re.sub(r"{.*?}", "name", route.path) for route in app.routes if isinstance(route, Route)
    }


def test_redirects_stay_on_the_server(app: FastAPI) -> None:
    """Of every route but `/`, and vLLM's of metrics, which takes slashes; whatever a client calls
    the host."""
    paths = paths_of(app) - {"/", "/metrics"}
    assert {"/routed_experts", "/invocations", "/v1/completions"} <= paths
    for path, host in product(paths, HOSTS):
        status, headers, _ = answer_to(app, f"{path}/?a=b%20c", host)
        assert status == 307, path
        assert (
            urljoin(f"https://proxy{path}/", headers["location"]) == f"https://proxy{path}?a=b%20c"
        )


@pytest.mark.parametrize("prefix", ["", "/below", "/two/levels"])
@pytest.mark.parametrize("root_path", ["", "/below"])
@pytest.mark.parametrize(
    ("target", "redirected_to"),
    [
        ("/routed_experts/", "/routed_experts"),
        ("/routed_experts/page.js/", "/routed_experts/page.js"),
        ("/v1/completions/", "/v1/completions"),
        ("/", "/routed_experts"),
    ],
)
def test_redirects_behind_a_proxy(
    app: FastAPI, prefix: str, root_path: str, target: str, redirected_to: str
) -> None:
    """One that ends TLS and puts the server below a path, which it strips; the server may know of
    it or not."""
    status, headers, _ = answer_to(app, target, "evil.example.org", root_path)
    assert status == 307
    assert (
        urljoin(f"https://proxy{prefix}{target}", headers["location"])
        == f"https://proxy{prefix}{redirected_to}"
    )


def test_a_route_with_a_slash_at_its_end(app: FastAPI) -> None:
    """Of another plugin. The slash is added to the last part, whatever that looks like."""
    app.router.add_route("/other/{name}/", lambda request: None)
    for name in ("plain", "a:b", "a b", "ä", "\\evil", "a?b", "a%b"):
        target = f"/other/{quote(name, safe='')}"
        status, headers, _ = answer_to(app, target)
        assert status == 307
        assert (
            unquote(urljoin(f"https://proxy{target}", headers["location"]))
            == f"https://proxy/other/{name}/"
        )


@pytest.mark.parametrize(
    "up", ["..", ".", "%2e%2e", ".%2E", "..%2f..", "..%5c..", "..\\.", "..;", "..;a=b"]
)
@pytest.mark.parametrize("slash", ["/", "//", "%2f", "%2F", "\\", "%5C"])
@pytest.mark.parametrize("root_path", ["", "/below"])
def test_a_path_with_dot_segments_is_no_route(
    app: FastAPI, slash: str, up: str, root_path: str
) -> None:
    """A proxy that normalises what it matches, and passes on what the client sent, has published
    another path."""
    for inner in ("/metrics", "/metricsX", "/tokenize", "/v1/models"):
        for target in (
            f"{inner}{slash}{up}{slash}v1/models",
            f"{inner}{slash}{up}",
            f"{inner}{slash}{up}?a=b",
        ):
            status, headers, body = answer_to(app, target, root_path=root_path)
            assert (status, headers["content-type"]) == (404, "application/json"), target
            error = json.loads(body)["error"]
            assert (error["code"], error["type"]) == (404, "NotFoundError")
            assert "segments" in error["message"]


@pytest.mark.parametrize("target", ["/metrics", "/metrics/", "/metrics?a=/../b", "/health?.."])
def test_other_paths_are_what_they_were(app: FastAPI, target: str) -> None:
    app.state.engine_client = None  # which vLLM's /health then does without
    assert answer_to(app, target)[0] == 200


@pytest.mark.parametrize(
    "target", ["/v1/models/a..b", "/...", "/routed_experts/.js", "/v1/..a/b", "/a/.../b", "/x"]
)
def test_dots_in_names_are_no_segments(app: FastAPI, target: str) -> None:
    assert "segments" not in answer_to(app, target)[2].decode()


@pytest.mark.parametrize("target", ["/x", "/v1/x", "/routed_experts/a/b"])
def test_a_path_without_a_route_gets_an_error_as_others_do(app: FastAPI, target: str) -> None:
    status, _, body = answer_to(app, target)
    assert status == 404
    assert json.loads(body)["error"] == {
        "message": "Not Found",
        "type": "Not Found",
        "param": None,
        "code": 404,
    }
