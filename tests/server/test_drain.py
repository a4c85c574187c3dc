"""What is answered while the server stops."""

import asyncio

from routed_experts.server.http.drain import _in_event_loop, _only_reads


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


def test_only_the_thread_of_the_event_loop_must_not_wait_for_requests() -> None:
    async def in_both_threads() -> tuple[bool, bool]:
        return _in_event_loop(), await asyncio.to_thread(_in_event_loop)

    assert asyncio.run(in_both_threads()) == (True, False)
