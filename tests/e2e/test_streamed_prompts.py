"""Prompts that are streamed in, with data parallelism: as whole ones, or refused, and then nothing is
left of them in any engine. `tests/contract/test_streamed_prompts.py` is about one engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.harness import (
    ON_GPU,
    ONE_PROCESS,
    OURS,
    SMALL_KV,
    Server,
    at_once,
    prompt_of,
    serving,
    wait_until,
)
from tests.e2e.streamed_prompts import PATH, StreamsPrompts

pytestmark = [pytest.mark.e2e, pytest.mark.release]

DATA_PARALLEL = OURS if ON_GPU else "tests.e2e.data_parallel_on_cpu"
MIDDLEWARE = f"{StreamsPrompts.__module__}.{StreamsPrompts.__name__}"
FLAGS = (
    *(*SMALL_KV, *ONE_PROCESS, "--max-model-len", "512", "--api-server-count", "1"),
    *("--enable-routed-experts-input", "--middleware", MIDDLEWARE, "--data-parallel-size", "2"),
)
FIRST, SECOND, THIRD = prompt_of(40, 1), prompt_of(30, 2), prompt_of(50, 3)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("streamed") / "log"
    with serving(tiny_model, log, *FLAGS, module=DATA_PARALLEL) as running:
        yield running


def stream_in(server: Server, name: str, *chunks: dict[str, Any]) -> dict[str, Any]:
    first, *others = chunks
    answer: dict[str, Any] = server.post(PATH, {"chunks": [{"id": name, **first}, *others]})
    return answer


def held(server: Server) -> dict[str, Any]:
    """What is there of requests, in the API process and in the engines."""
    with server.client() as client:
        of_process: dict[str, Any] = client.get(PATH).json()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {**of_process, **{name: server.metric(f"vllm:{name}") for name in gauges}}


def wait_until_nothing_is_held(server: Server) -> None:
    wait_until(
        lambda: not any(held(server).values()), lambda: f"is left: {held(server)}", limit_s=60
    )


def rows_for(server: Server, num_tokens: int) -> list[Any]:
    info = server.info()
    shape = (num_tokens, info["num_layers"], 1)
    return np.broadcast_to(np.arange(info["top_k"]), (*shape[:2], info["top_k"])).tolist()


def test_as_a_whole_prompt(server: Server) -> None:
    whole = server.complete(
        prompt=[*FIRST, *SECOND], max_tokens=8, ignore_eos=True, return_token_ids=True
    )
    streamed = stream_in(server, "whole", {"prompt": FIRST}, {"prompt": SECOND, "max_tokens": 8})
    assert streamed["error"] is None
    assert streamed["generated"][1] == whole["choices"][0]["token_ids"]
    wait_until_nothing_is_held(server)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_chunk_that_is_refused_ends_its_prompt(server: Server, before: int) -> None:
    """At once, and in the engine that has it. Chunks behind it go nowhere."""
    chunks: list[dict[str, Any]] = [{"prompt": FIRST}, {"prompt": SECOND}][:before]
    refused = {"prompt": THIRD, "rows": rows_for(server, len(THIRD))}
    answer = stream_in(server, f"refused {before}", *chunks, refused, {"prompt": FIRST})
    assert "a prompt that is streamed in" in answer["error"]
    assert [len(tokens) for tokens in answer["generated"]] == [1] * before + [0]
    wait_until_nothing_is_held(server)
    assert server.errors() == []


def test_the_profile_is_of_all_engines(server: Server) -> None:
    """Each engine counts its own tokens; requests that come together go to both."""
    before = server.profile()
    lengths = (20, 21, 22, 23)
    bodies = [
        {"prompt": prompt_of(n, 100 + n), "max_tokens": 5, "ignore_eos": True} for n in lengths
    ]
    at_once(server, bodies)
    after = server.profile()
    num_tokens = sum(n + 4 for n in lengths)
    assert after["tokens"] - before["tokens"] == num_tokens
    chosen = after["counts"] - before["counts"]
    assert (chosen.sum(axis=1) == num_tokens * server.info()["top_k"]).all()
