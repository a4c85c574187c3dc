"""vLLM's traces (`--otlp-traces-endpoint`), and the requests that they are of."""

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.util._once import Once

from routed_experts.protocol.fetch import fetch
from tests.contract.served import rows_of, serving
from tests.e2e.harness import ASK, COMPLETIONS

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


class Collector:
    """Takes spans as OpenTelemetry's exporters send them over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Which vLLM sends its spans to. Its provider is the process's, and is taken back."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setenv(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, "http/protobuf")
    monkeypatch.setenv(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, "")  # which vLLM sets
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def test_a_trace_leads_to_the_rows_of_its_request(
    tiny_model: Path, tmp_path: Path, collector: Collector
) -> None:
    """The span is in the caller's trace, and its request's id begins with the response's `id`."""
    store = ("--routed-experts-store", str(tmp_path / "store"))
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, **ASK}
    headers = {"X-Request-Id": "of-mine", "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    with (
        serving(tiny_model, "--otlp-traces-endpoint", collector.url, *store) as server,
        server.client() as client,
    ):
        body["routed_experts_delivery"] = "reference"
        answer = client.post(COMPLETIONS, json=body, headers=headers).json()
        array = fetch(answer["choices"][0]["routed_experts"], base_url=f"{server.url}/v1")
        assert os.environ[OTEL_EXPORTER_OTLP_TRACES_ENDPOINT] == collector.url
        provider = trace.get_tracer_provider()
        assert isinstance(provider, TracerProvider)
        provider.force_flush()
    (span,) = [span for span in collector.spans if span.trace_id.hex() == TRACE_ID]
    of_span = {attribute.key: attribute.value for attribute in span.attributes}
    assert answer["id"] == "cmpl-of-mine"
    assert of_span["gen_ai.request.id"].string_value.startswith(answer["id"])
    assert of_span["gen_ai.usage.completion_tokens"].int_value == 4
    tokens = [5, 6, 7, *answer["choices"][0]["token_ids"]]
    assert np.array_equal(array.swapaxes(0, 1), rows_of(tokens[:-1])[3:])
