"""What `/metrics` says of the requests that were sent."""

import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from tests.e2e.harness import ASK, Server, prompt_of, wait_until_idle

pytestmark = pytest.mark.e2e

COUNTERS = ("rows_captured_total", "rows_returned_total", "rows_missing_total", "sent_bytes_total")


def counters(server: Server) -> dict[str, float]:
    return {name: server.metric(f"routed_experts_{name}") for name in COUNTERS}


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, condition()
        time.sleep(0.1)


def text_bytes(*bodies: dict[str, Any]) -> int:
    """Of all arrays in answers, as JSON."""
    arrays = [body["prompt_routed_experts"] for body in bodies if "prompt_routed_experts" in body]
    arrays += [choice["routed_experts"] for body in bodies for choice in body["choices"] if "routed_experts" in choice]
    return sum(len(orjson.dumps(array)) for array in arrays)


def test_every_row_is_counted_once(server: Server) -> None:
    wait_until_idle(server)
    before = counters(server)
    body: dict[str, Any] = {**ASK, "max_tokens": 7, "ignore_eos": True}
    whole = server.complete(**body, prompt=prompt_of(30, seed=9000))
    chunks = server.stream(**body, prompt=prompt_of(45, seed=9001))
    server.complete(prompt=prompt_of(20, seed=9002), max_tokens=3, ignore_eos=True)  # captured, not returned
    returned = (30 + 6) + (45 + 6)
    wait_for(lambda: counters(server)["rows_returned_total"] >= before["rows_returned_total"] + returned)
    wait_until_idle(server)
    after = counters(server)
    grown = {name: after[name] - before[name] for name in COUNTERS}
    assert grown["rows_returned_total"] == returned
    assert grown["rows_missing_total"] == 0
    assert grown["sent_bytes_total"] == text_bytes(whole, *chunks)
    # With asynchronous scheduling a step may have begun when the one before it turned out to be a request's last.
    assert returned + 22 <= grown["rows_captured_total"] <= returned + 22 + 3
    assert server.metric("routed_experts_host_cache_bytes") <= server.info()["capture"]["host_cache_bytes"]
    assert server.metric("routed_experts_host_cache_bytes") > 0
    assert server.metric("routed_experts_copy_wait_seconds_total") >= 0
    layers = server.info()["num_layers"]
    assert layers <= server.metric("routed_experts_expert_load_ratio") <= layers * server.info()["num_experts"]


def test_a_running_request_is_seen(server: Server) -> None:
    body = {"model": "tiny", **ASK, "prompt": prompt_of(40, seed=9010), "max_tokens": 400, "ignore_eos": True}
    seen = False
    for _ in range(10):  # it may have ended by the time that this process asks
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
        ):
            next(response.iter_lines())
            seen = server.metric("routed_experts_requests_tracked") == 1
        wait_until_idle(server)
        if seen:
            return
    raise AssertionError("no running request was seen")


def test_what_the_rows_mean_does_not_change(server: Server) -> None:
    before = server.info()
    server.complete(**ASK, prompt=prompt_of(30, seed=9020), max_tokens=3)
    assert server.info() == before
