"""What is answered while the server stops."""

from routed_experts.server.http.drain import _only_reads


def test_health_is_refused_wherever_the_server_is_mounted() -> None:
    for method, path, root_path, reads in (
        ("GET", "/metrics", "", True),
        ("GET", "/health", "", False),
        ("GET", "/health", "/llm", False),
        ("GET", "/llm/health", "/llm", False),
        ("GET", "/llm/metrics", "/llm", True),
        ("POST", "/v1/completions", "", False),
    ):
        scope = {"type": "http", "method": method, "path": path, "root_path": root_path}
        assert _only_reads(scope) is reads, path
