"""What a stranger can reach, and what of a request can reach a log."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.cli import serve
from routed_experts.server.http.answers.response import CollectedRows
from routed_experts.server.http.answers.streaming import SSERewriter
from routed_experts.server.http.requests.request import require_key
from routed_experts.server.http.routes.texts import TEXTS_PATH
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import RequestOutput
from tests.contract.served import build_app, serving
from tests.server.known import encoder_of
from tests.server.test_response import choice, output

KEY = "a-key"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [40], "sampling_params": {"max_tokens": 2}},
    "/invocations": {"prompt": "a", "max_tokens": 2},
}
OPEN = {"/", "/routed_experts", "/routed_experts/{name}"}
"""Routes of ours that need no key: the files of the page."""


def test_nobody_gets_rows_without_the_key(tiny_model: Path) -> None:
    """vLLM leaves /invocations, SageMaker's, open."""
    with (
        serving(tiny_model, "--api-key", KEY, "--enable-scale-out") as locked,
        locked.client() as client,
    ):
        for path, body in BODIES.items():
            request = {"model": "tiny", "return_routed_experts": True, **body}
            for header in ({}, {"Authorization": "Bearer another"}, {"Authorization": KEY}):
                assert client.post(path, json=request, headers=header).status_code == 401
                assert client.get("/v1/routed_experts", headers=header).status_code == 401
                texts = client.post(TEXTS_PATH, json={"token_ids": [1]}, headers=header)
                assert texts.status_code == 401
            opened = client.post(path, json=request, headers={"Authorization": f"Bearer {KEY}"})
            assert opened.status_code == 200
            assert b"routed_experts" in opened.content
        plain = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        refused = client.post("/invocations", json=plain)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, 401)
        assert client.post("/invocations", content=b"{").status_code == 401, (
            "the key comes before the body"
        )


def test_which_routes_of_ours_need_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's middleware guards what is below /v1. Other routes of ours check the key themselves."""
    monkeypatch.setenv("VLLM_PLUGINS", "")
    serve.allow_plugin()
    app = build_app(serve.parse(["model", "--enable-scale-out"]), ("generate",))
    ours = [
        route
        for route in app.routes
        if isinstance(route, APIRoute) and route.endpoint.__module__.startswith("routed_experts")
    ]
    assert {route.path for route in ours} >= {*BODIES, *OPEN, "/v1/routed_experts"}
    for route in ours:
        checks = require_key in [dependency.dependency for dependency in route.dependencies]
        assert checks or route.path.startswith("/v1/") or route.path in OPEN, route.path
    start = TestClient(app).get("/", follow_redirects=False)
    assert (start.status_code, start.headers["location"]) == (307, "routed_experts")


def test_a_requests_id_cannot_write_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Clients choose it, in the body, and it is in what is said of rows that were lost."""

    def lossy() -> RequestOutput:
        made = output(3, choice(5, RowBuffer()))
        made.request_id = "r\nINFO 01-01 00:00:00 [server.py:1] everything is fine\r\x1b[2J"
        return made

    async def outputs() -> AsyncIterator[RequestOutput]:
        yield lossy()

    async def stream() -> None:
        aligner = SSERewriter(RoutingOptions(), encoder_of(RoutingOptions(), num_experts=9), 1, str)
        async for _ in aligner.watch(outputs()):
            pass

    CollectedRows(RoutingOptions(), (2, 3)).collect(lossy())
    asyncio.run(stream())
    lines = [
        record.getMessage() for record in caplog.records if "did not arrive" in record.getMessage()
    ]
    assert len(lines) == 2
    assert not [line for line in lines if set("\n\r\x1b") & set(line)]
