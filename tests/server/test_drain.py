"""What is answered while the server stops."""

import asyncio

import pytest

from routed_experts.server.http.drain import _in_event_loop, _only_reads


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


def test_only_the_thread_of_the_event_loop_must_not_wait_for_requests() -> None:
    async def in_both_threads() -> tuple[bool, bool]:
        return _in_event_loop(), await asyncio.to_thread(_in_event_loop)

    assert asyncio.run(in_both_threads()) == (True, False)
