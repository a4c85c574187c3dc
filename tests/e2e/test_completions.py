"""One server with a real engine, asynchronous scheduling and a KV cache too small for its load: every row of every
answer against a Hugging Face forward pass.

A test of another situation on it is a call of `one` and of `check`. What needs no real model is in `tests/contract`,
where no server has to be started.
"""

import json
import os
import socket
import time
from importlib.metadata import version
from typing import Any

import httpx
import numpy as np
import orjson
import psutil
import pytest
import torch
import vllm
from hypothesis import HealthCheck, Phase, given, settings

from routed_experts.protocol.codec import decode
from routed_experts.protocol.fetch import fetch
from routed_experts.protocol.models import RoutedExpertsInfo
from tests.contract.hostile import Hostile, check_response
from tests.e2e.changes import Running
from tests.e2e.harness import (
    ASK,
    CHAT,
    COMPLETIONS,
    ON_GPU,
    Oracle,
    Server,
    answers_of,
    answers_of_stream,
    check,
    check_held_back,
    one,
    prompt_of,
    rows_of,
    same,
    vllm_fails,
    wait_until,
    wait_until_idle,
)
from tests.e2e.torture import REQUESTS, Torture

pytestmark = pytest.mark.e2e

USER: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me something about experts."}]}
FULL: dict[str, Any] = {**ASK, "ignore_eos": True}


def test_a_mix_of_everything(server: Server, oracle: Oracle) -> None:
    """Starts in a prompt, one new token, stop strings, echo, grammars, clients that leave, hits on prefixes and on
    generated tokens, preemption and so on: each of `SITUATIONS` must occur."""
    assert Torture(server, oracle, "async", REQUESTS).run() == []


def test_experts_are_in_the_routers_order(server: Server, oracle: Oracle) -> None:
    """By falling score with vLLM's router for CUDA; the one for CPUs takes an unsorted top-k."""
    answer = one(server, prompt=prompt_of(99, seed=3), max_tokens=60, ignore_eos=True)
    scores = oracle.logits([*answer.prompt, *answer.tokens[:-1]])
    clear = np.diff(np.sort(scores, axis=2), axis=2).min(axis=2) > 1e-4  # no two so near that rounding decides
    assert clear.mean() > 0.9
    expected = torch.from_numpy(scores).topk(4, sorted=ON_GPU).indices.numpy()
    assert np.array_equal(rows_of(answer)[clear], expected[clear])


def test_same_answer_with_and_without_routing(server: Server) -> None:
    for ask, path, body in (
        (server.complete, COMPLETIONS, {"prompt": prompt_of(70, seed=6), "logprobs": 3}),
        (server.chat, CHAT, {**USER, "logprobs": True, "top_logprobs": 2}),
    ):
        body |= {"max_tokens": 12, "return_token_ids": True}
        ask(**body)  # so that both hit the same prefix
        plain, routed = ask(**body), ask(**body, return_routed_experts=True)
        assert b"routed_experts" not in orjson.dumps([plain, server.stream(path, **body)])
        streamed = answers_of_stream(server.stream(path, **body, return_routed_experts=True))
        same(*answers_of(routed), *streamed)
        referred = ask(**body, return_routed_experts=True, routed_experts_delivery="reference")
        for answer in (plain, routed, referred):
            del answer["id"], answer["created"]
        for inline, reference in zip(arrays_of(routed), arrays_of(referred), strict=True):
            assert np.array_equal(fetch(reference, base_url=f"{server.url}/v1"), decode(inline).swapaxes(0, 1))
        assert plain == routed == referred


def arrays_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Takes the arrays, or the references to them, off an answer."""
    return [answer.pop("prompt_routed_experts"), answer["choices"][0].pop("routed_experts")]


def test_the_next_turn_of_a_chat_asks_for_what_is_new(server: Server, oracle: Oracle) -> None:
    first = one(server, path=CHAT, **USER, max_tokens=12, ignore_eos=True)
    messages = [*USER["messages"], {"role": "assistant", "content": first.text}, {"role": "user", "content": "More."}]
    start = len(first.prompt) + len(first.tokens) - 1
    second = one(server, start, path=CHAT, messages=messages, max_tokens=6, ignore_eos=True)
    assert second.prompt[:start] == [*first.prompt, *first.tokens[:-1]]
    assert len(second.prompt_rows) == len(second.prompt) - start
    check(first, oracle)
    check(second, oracle)


# ---- text that is held back ----


TOOL_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("asked", [{"structured_outputs": {"choice": [TOOL_CALL]}}, {"tool_choice": "required"}])
def test_tool_call_that_the_parser_holds_back(server: Server, oracle: Oracle, asked: dict[str, Any]) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    body = {**USER, "max_tokens": 120, "tools": [{"type": "function", "function": function}], **asked}
    if vllm_fails(server, CHAT, body):
        pytest.skip(f"vLLM {vllm.__version__} fails a required tool call with this tokenizer")
    chunks = check_held_back(server, oracle, body)
    if "structured_outputs" in asked:
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        arguments = [call["function"].get("arguments") for delta in deltas for call in delta.get("tool_calls") or []]
        assert json.loads("".join(filter(None, arguments))) == {"city": "Rome"}


# ---- clients that leave ----


def test_engine_aborts(server: Server, oracle: Oracle) -> None:
    """What came before is exact. On a busy machine both may have ended before vLLM's own endpoint takes them."""
    for seed in range(300, 310, 2):
        both = [Running(server, seed), Running(server, seed + 1)]
        for running in both:
            running.wait_for(10)
        aborted = server.post("/abort_requests", {})["aborted"]
        answers = [running.answer() for running in both]
        for answer in answers:
            check(answer, oracle)
        if aborted:
            assert "abort" in {answer.finish_reason for answer in answers}
            return
    pytest.skip("/abort_requests met no request")


def test_clients_that_vanish_leave_nothing(server: Server) -> None:
    """At every stage, of a real engine: before the first byte, in the prompt's rows, in mid-stream."""
    api, port = psutil.Process(server.process.pid), httpx.URL(server.url).port
    processes = [api, *api.children(recursive=True)]

    def vanish(count: int) -> None:
        for index in range(count):
            body = {"model": "tiny", "prompt": prompt_of(index % 50 + 1, index), "max_tokens": 30, **FULL}
            content = orjson.dumps({**body, "stream": index % 4 > 0})
            with socket.create_connection(("127.0.0.1", port), timeout=240) as sock:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
                for _ in range(index % 3):
                    sock.recv(4000)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "requests are left")
        wait_until_idle(server)

    vanish(30)
    files, threads = api.num_fds(), api.num_threads()
    # What is lost with a client is lost in every round; what allocators and caches take at first, in the first ones.
    grown: list[int] = []
    while not grown or (grown[-1] >= 4 << 20 and len(grown) < 6):
        memory = sum(process.memory_info().rss for process in processes)
        vanish(60)
        grown.append(sum(process.memory_info().rss for process in processes) - memory)
        # What the last ones had may still be on its way out.
        wait_until(lambda: api.num_fds() <= files + 5, lambda: f"{api.num_fds()} files, not {files}")
        wait_until(lambda: api.num_threads() <= threads + 2, lambda: f"{api.num_threads()} threads, not {threads}")
    assert grown[-1] < 4 << 20, f"MiB more after 60 clients, in each round: {[size >> 20 for size in grown]}"


# ---- what is beside the answers ----


def test_every_row_is_counted_once(server: Server) -> None:
    names = ("rows_captured_total", "rows_returned_total", "rows_missing_total", "sent_bytes_total")

    def counters() -> dict[str, float]:
        return {name: server.metric(f"routed_experts_{name}") for name in names}

    wait_until_idle(server)
    before = counters()
    answers = [
        server.complete(**FULL, max_tokens=7, prompt=prompt_of(30, seed=9000)),
        *server.stream(**FULL, max_tokens=7, prompt=prompt_of(45, seed=9001)),
    ]
    server.complete(prompt=prompt_of(20, seed=9002), max_tokens=3, ignore_eos=True)  # captured, not returned
    returned = (30 + 6) + (45 + 6)
    wait_until(lambda: counters()["rows_returned_total"] >= before["rows_returned_total"] + returned, counters)
    wait_until_idle(server)
    grown = {name: count - before[name] for name, count in counters().items()}
    holders = [holder for answer in answers for holder in (answer, *answer["choices"])]
    arrays = [holder[name] for holder in holders for name in holder if "routed_experts" in name]
    assert grown["rows_returned_total"] == returned
    assert grown["rows_missing_total"] == 0
    assert grown["sent_bytes_total"] == sum(len(orjson.dumps(array)) for array in arrays)
    # With asynchronous scheduling a step may have begun when the one before it turned out to be a request's last.
    assert returned + 22 <= grown["rows_captured_total"] <= returned + 22 + 3
    info = server.info()
    assert 0 < server.metric("routed_experts_host_cache_bytes") <= info["capture"]["host_cache_bytes"]
    assert server.metric("routed_experts_copy_wait_seconds_total") >= 0
    layers = info["num_layers"]
    assert layers <= server.metric("routed_experts_expert_load_ratio") <= layers * info["num_experts"]


def test_what_the_rows_mean(server: Server) -> None:
    body = server.info()
    info = RoutedExpertsInfo.model_validate(body)
    assert set(body) == set(RoutedExpertsInfo.model_fields)
    assert (info.model, info.num_layers, info.top_k, info.num_experts) == ("tiny", 5, 4, 16)
    assert (info.layer_ids, info.num_hidden_layers) == ([1, 2, 3, 4, 5], 6)  # layer 0 is dense
    ours = version("routed-experts-server")
    assert (info.dtype, info.version, info.vllm_version) == ("int16", ours, vllm.__version__)
    if not ON_GPU:
        assert (info.capture.runner, info.capture.device) == ("v1", "cpu")
    assert info.capture.kv_slots > 0
    assert info.capture.host_cache_bytes == info.capture.kv_slots * 5 * 4 * (2 + 4)  # with weights
    assert f"] routed-experts-server {ours}, vLLM {vllm.__version__}\n" in server.log.read_text()


@settings(
    max_examples=int(os.environ.get("BAD_INPUT_REQUESTS", "0")) or 40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(Hostile((5, 4)).requests())
def test_any_values_in_any_fields(server: Server, asked: tuple[str, dict[str, Any]]) -> None:
    """A few: `tests/contract/test_bad_input.py` has many, without a model."""
    path, body = asked
    content = json.dumps(body)  # with NaN, integers of any size and lone surrogates
    with server.client() as client:
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    try:
        check_response(response)
    except (AssertionError, KeyError, ValueError) as error:
        if not vllm_fails(server, path, body):
            raise AssertionError(f"after {path} {content}") from error


def test_rows_are_exact_after_such_requests(server: Server, oracle: Oracle) -> None:
    check(one(server, prompt=prompt_of(40, time.monotonic_ns()), max_tokens=5, ignore_eos=True), oracle)
