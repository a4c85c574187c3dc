"""What is answered while the server stops."""

import pytest

from routed_experts.server.http.drain import _only_reads


@pytest.mark.parametrize(
    ("method", "path", "root_path", "reads"),
    [
        ("GET", "/metrics", "", True),
        ("GET", "/health", "", False),
        ("GET", "/health", "/llm", False),
        ("GET", "/llm/health", "/llm", False),
        ("GET", "/llm/metrics", "/llm", True),
        ("POST", "/v1/completions", "", False),
    ],
)
def test_health_is_refused_wherever_the_server_is_mounted(method: str, path: str, root_path: str, reads: bool) -> None:
    scope = {"type": "http", "method": method, "path": path, "root_path": root_path}
    assert _only_reads(scope) is reads
