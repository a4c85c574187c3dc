"""What a stranger can reach, and what of a request can reach a log."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.encoding import Encoder
from routed_experts.server.http.response import CollectedRows
from routed_experts.server.http.streaming import SSERewriter
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import RequestOutput
from tests.contract.served import serving
from tests.e2e.harness import Server
from tests.server.test_response import choice, output

KEY = "a-key"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [40], "sampling_params": {"max_tokens": 2}},
}


@pytest.fixture(scope="module")
def locked(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--api-key", KEY, "--enable-scale-out") as server:
        yield server


@pytest.mark.parametrize("path", BODIES)  # vLLM leaves /invocations, SageMaker's, open: it stands behind a gateway
@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer another"}, {"Authorization": KEY}])
def test_nobody_gets_rows_without_the_key(locked: Server, path: str, header: dict[str, str]) -> None:
    body = {"model": "tiny", "return_routed_experts": True, **BODIES[path]}
    with locked.client() as client:
        assert client.post(path, json=body, headers=header).status_code == 401
        opened = client.post(path, json=body, headers={"Authorization": f"Bearer {KEY}"})
        assert client.get("/v1/routed_experts", headers=header).status_code == 401
    assert opened.status_code == 200
    assert b"routed_experts" in opened.content


FORGED = "r\nINFO 01-01 00:00:00 [server.py:1] everything is fine\r\x1b[2J"


def test_a_requests_id_cannot_write_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Clients choose it, in the body, and it is in what is said of rows that were lost."""
    lossy = output(3, choice(5, RowBuffer()))
    lossy.request_id = FORGED
    CollectedRows(RoutingOptions(), (2, 3)).collect(lossy)

    async def stream() -> None:
        async def outputs() -> AsyncIterator[RequestOutput]:
            yield output_again

        output_again = output(3, choice(5, RowBuffer()))
        output_again.request_id = FORGED
        aligner = SSERewriter(RoutingOptions(), Encoder("object", "int16", (2, 3), 9), 1, str)
        async for _ in aligner.watch(outputs()):
            pass

    asyncio.run(stream())
    lines = [record.getMessage() for record in caplog.records if "did not arrive" in record.getMessage()]
    assert len(lines) == 2
    assert not [line for line in lines if set("\n\r\x1b") & set(line)]
