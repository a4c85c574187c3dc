"""One server with a real engine, asynchronous scheduling and a KV cache too small for its load: every row of every
answer against a Hugging Face forward pass.

A test of another situation on it is a call of `one` and of `check`. What needs no real model is in `tests/contract`,
where no server has to be started.
"""

import json
import os
import socket
import threading
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

from routed_experts.capture.message import SMALL_ARRAY_BYTES
from routed_experts.protocol.models import RoutedExpertsInfo
from tests.conftest import BLOCK_SIZE, CHUNK
from tests.e2e.changes import post
from tests.e2e.harness import (
    ASK,
    ON_GPU,
    Answer,
    Oracle,
    Server,
    answer_of,
    answers_of,
    answers_of_stream,
    at_once,
    cached_tokens,
    check,
    check_held_back,
    decode,
    one,
    prompt_of,
    read_events,
    same,
    wait_until,
    wait_until_idle,
)
from tests.e2e.hostile import check_alive, send
from tests.e2e.torture import REQUESTS, Torture

pytestmark = pytest.mark.e2e

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me something about experts."}]}
LIMIT_S = 240


def test_a_mix_of_everything(server: Server, oracle: Oracle) -> None:
    report = Torture(server, oracle, "async", REQUESTS, seed=1).run()
    print(report.table())
    assert report.problems() == []


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_prompt_lengths(server: Server, oracle: Oracle, length: int) -> None:
    """Around one token, block boundaries and prefill chunks; the second request hits the first one's prefix."""
    check(one(server, prompt=prompt_of(length, seed=length), max_tokens=9, ignore_eos=True), oracle)


def test_one_new_token(server: Server, oracle: Oracle) -> None:
    answer = one(server, prompt=prompt_of(40, seed=1), max_tokens=1)
    assert answer.rows.shape == (0, 5, 4)
    check(answer, oracle)


def test_experts_are_in_the_routers_order(server: Server, oracle: Oracle) -> None:
    """By falling score with vLLM's router for CUDA; the one for CPUs takes an unsorted top-k."""
    answer = one(server, prompt=prompt_of(99, seed=3), max_tokens=60, ignore_eos=True)
    scores = oracle.logits([*answer.prompt, *answer.tokens[:-1]])
    ordered = np.sort(scores, axis=2)
    clear = (ordered[:, :, 1:] - ordered[:, :, :-1]).min(axis=2) > 1e-4  # no two so near that rounding decides
    assert clear.mean() > 0.9
    rows = np.concatenate([answer.prompt_rows, answer.rows])
    expected = torch.from_numpy(scores).topk(4, sorted=ON_GPU).indices.numpy()
    assert np.array_equal(rows[clear], expected[clear])


def test_prompt_start(server: Server, oracle: Oracle) -> None:
    """In the middle of a block, at P - 1 and at P (where other servers have crashed)."""
    for start in (1, BLOCK_SIZE + 3, 98, 99):
        answer = one(server, start=start, prompt=prompt_of(99, seed=2), max_tokens=5, ignore_eos=True)
        assert len(answer.prompt_rows) == 99 - start
        check(answer, oracle)


def test_ends_by_stop_string(server: Server, oracle: Oracle) -> None:
    free = one(server, prompt=prompt_of(20, seed=5), max_tokens=24, ignore_eos=True)
    for stop, count in (
        ({"stop": [free.text[8:10]]}, free.text.index(free.text[8:10]) + 2),
        ({"stop_token_ids": [free.tokens[5]]}, free.tokens.index(free.tokens[5]) + 1),
        ({"logit_bias": {"258": 100}, "min_tokens": 3, "ignore_eos": False}, 4),
    ):
        answer = one(server, **{"prompt": prompt_of(20, seed=5), "max_tokens": 24, "ignore_eos": True, **stop})
        assert (answer.finish_reason, len(answer.tokens)) == ("stop", count)
        check(answer, oracle)


def test_structured_output(server: Server, oracle: Oracle) -> None:
    answer = one(server, prompt=prompt_of(10, seed=12), max_tokens=8, structured_outputs={"choice": ["yes", "no"]})
    assert answer.text in ("yes", "no")
    check(answer, oracle)


def test_same_answer_with_and_without_routing(server: Server) -> None:
    for ask, path, body in (
        (server.complete, PATH, {"prompt": prompt_of(70, seed=6), "logprobs": 3}),
        (server.chat, CHAT, {**USER, "logprobs": True, "top_logprobs": 2}),
    ):
        body |= {"max_tokens": 12, "return_token_ids": True}
        ask(**body)  # so that both hit the same prefix
        plain, routed = ask(**body), ask(**body, return_routed_experts=True)
        assert b"routed_experts" not in orjson.dumps([plain, server.stream(path, **body)])
        streamed = answers_of_stream(server.stream(path, **body, return_routed_experts=True))
        same(*answers_of(routed), *streamed)
        del routed["prompt_routed_experts"], routed["choices"][0]["routed_experts"]
        for answer in (plain, routed):
            del answer["id"], answer["created"]
        assert plain == routed


# ---- prefixes ----


def test_hits_on_a_prefix_that_was_written_without_routing(server: Server, oracle: Oracle) -> None:
    prompt = prompt_of(4 * BLOCK_SIZE + 5, seed=7)
    server.complete(prompt=prompt, max_tokens=2)
    answer = server.complete(**ASK, prompt=prompt, max_tokens=6, ignore_eos=True)
    assert cached_tokens(answer) == 4 * BLOCK_SIZE
    check(*answers_of(answer), oracle)


def test_hits_on_generated_tokens(server: Server, oracle: Oracle) -> None:
    first = one(server, prompt=prompt_of(30, seed=8), max_tokens=50, ignore_eos=True)
    turn = [*first.prompt, *first.tokens, *prompt_of(9, seed=9)]
    second = one(server, prompt=turn, max_tokens=5, ignore_eos=True)
    check(second, oracle)
    assert np.array_equal(second.prompt_rows[: 30 + 49], np.concatenate([first.prompt_rows, first.rows]))


def test_the_next_turn_of_a_chat_asks_for_what_is_new(server: Server, oracle: Oracle) -> None:
    first = one(server, path=CHAT, **USER, max_tokens=12, ignore_eos=True)
    messages = [*USER["messages"], {"role": "assistant", "content": first.text}, {"role": "user", "content": "More."}]
    start = len(first.prompt) + len(first.tokens) - 1
    second = one(server, start, path=CHAT, messages=messages, max_tokens=6, ignore_eos=True)
    assert second.prompt[:start] == [*first.prompt, *first.tokens[:-1]]
    assert len(second.prompt_rows) == len(second.prompt) - start
    for answer in (first, second):
        check(answer, oracle)


def test_eviction_and_recomputation(server: Server, oracle: Oracle) -> None:
    """The blocks of the first answer are overwritten by others before it is asked for again."""
    body = {"prompt": prompt_of(200, seed=200), "max_tokens": 6, "ignore_eos": True}
    first = one(server, **body)
    check(first, oracle)
    for seed in range(201, 206):
        server.complete(prompt=prompt_of(250, seed=seed), max_tokens=1)
    again = server.complete(**ASK, **body)
    assert cached_tokens(again) == 0
    same(*answers_of(again), first)


def test_hit_on_the_blocks_of_a_running_request(server: Server, oracle: Oracle) -> None:
    for seed in range(3200, 3210):
        prompt = prompt_of(140, seed=seed)
        body = {"model": "tiny", "temperature": 0, **ASK, "prompt": prompt, "max_tokens": 350, "ignore_eos": True}
        with server.client() as client, client.stream("POST", PATH, json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            first = next(lines)
            other = server.complete(**ASK, prompt=[*prompt[:130], *prompt_of(20, seed=seed)], max_tokens=2)
            still_running = server.metric("routed_experts_requests_tracked") > 0
            chunks = list(read_events(iter([first, *lines])))
        assert cached_tokens(other) == 128
        for answer in (*answers_of(other), *answers_of_stream(chunks)):
            check(answer, oracle)
        if still_running:
            return
    raise AssertionError("the first request always ended before the second one")


# ---- several answers ----


def test_a_list_of_prompts_with_several_choices(server: Server, oracle: Oracle) -> None:
    """The rows of one prompt do not fit a common message."""
    prompts = [prompt_of(length, seed=length) for length in (3, 470, 33)]
    assert np.prod([len(prompts[1]), 5, 4]) * 2 > SMALL_ARRAY_BYTES
    body = {"prompt": prompts, "max_tokens": 20, "n": 2, "temperature": 1.0}
    for answers in (
        answers_of(server.complete(**ASK, **body)),
        answers_of_stream(server.stream(**ASK, **body), per_prompt=2),
    ):
        assert len(answers) == 6
        for index, answer in enumerate(answers):
            answer.prompt = prompts[index // 2]  # vLLM streams prompt_token_ids with some of the choices only
            check(answer, oracle)


def test_text_prompt_and_echo(server: Server, oracle: Oracle) -> None:
    response = server.complete(**ASK, prompt="Hello", max_tokens=4, echo=True, ignore_eos=True, logprobs=1)
    check(*answers_of(response), oracle)
    only_prompt = server.complete(prompt="Hello", max_tokens=0, echo=True, return_routed_experts=True)
    assert only_prompt["choices"][0]["routed_experts"]["shape"] == [0, 5, 4]
    assert only_prompt["prompt_routed_experts"]["shape"] == [5, 5, 4]
    (streamed,) = server.stream(prompt="Hello", max_tokens=0, echo=True, return_routed_experts=True)
    assert streamed["prompt_routed_experts"] == only_prompt["prompt_routed_experts"]
    assert "routed_experts" not in streamed["choices"][0]


def test_tool_call_that_the_parser_holds_back(server: Server, oracle: Oracle) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    body = {**USER, "max_tokens": 120, "tools": [{"type": "function", "function": function}]}
    chunks = check_held_back(server, oracle, {**body, "structured_outputs": {"choice": [text]}})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    arguments = [call["function"].get("arguments") for delta in deltas for call in delta.get("tool_calls") or []]
    assert json.loads("".join(part for part in arguments if part)) == {"city": "Rome"}
    check_held_back(server, oracle, {**body, "tool_choice": "required"})


# ---- clients that are slow, and that leave ----


def leave(server: Server, after_chunks: int, **body: Any) -> Answer:
    """What came until a client went away in mid-stream."""
    payload = {"model": "tiny", "temperature": 0, **ASK, **body, "stream": True}
    chunks: list[dict[str, Any]] = []
    with server.client() as client, client.stream("POST", PATH, json=payload) as response:
        for line in filter(None, response.iter_lines()):
            chunks.append(json.loads(line.removeprefix("data: ")))
            if len(chunks) == after_chunks:
                break
    wait_until_idle(server)
    return answer_of(chunks)


@pytest.mark.parametrize("after", [1, 20])
def test_client_leaves_in_mid_stream(server: Server, oracle: Oracle, after: int) -> None:
    prompt = prompt_of(70, seed=280 + after)
    received = leave(server, after, prompt=prompt, max_tokens=300, ignore_eos=True)
    check(received, oracle)
    later = server.complete(**ASK, prompt=[*prompt, *received.tokens], max_tokens=3, ignore_eos=True)
    assert cached_tokens(later) >= 64
    check(*answers_of(later), oracle)


def test_slow_reader(server: Server, oracle: Oracle) -> None:
    prompt, n = prompt_of(90, seed=340), 3
    body = {"model": "tiny", **ASK, "prompt": prompt, "max_tokens": 110, "ignore_eos": True, "temperature": 1, "n": n}
    payload = json.dumps({**body, "stream": True, "logprobs": 20}).encode()  # which makes chunks large
    head = f"POST {PATH} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    ended = server.metric("vllm:request_success_total")
    url = httpx.URL(server.url)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # and, by the segments' size, the server's too
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        sock.connect((url.host, url.port))
        sock.sendall(head.encode() + payload)
        wait_until(lambda: server.metric("vllm:request_success_total") >= ended + n, "the engine is not done")
        received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    chunks = list(read_events(line for line in received.decode().splitlines() if line.startswith("data: ")))
    assert any(len(choice["token_ids"]) > 5 for chunk in chunks for choice in chunk["choices"])
    for answer in answers_of_stream(chunks, per_prompt=n):
        answer.prompt = prompt
        check(answer, oracle)


def test_engine_aborts(server: Server, oracle: Oracle) -> None:
    bodies = [
        {**ASK, "prompt": prompt_of(50 + 5 * i, seed=300 + i), "max_tokens": 300, "ignore_eos": True, "stream": i % 2}
        for i in range(8)
    ]
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend(at_once(server, bodies)))
    thread.start()
    while thread.is_alive():
        post(server, "/abort_requests", {})
        time.sleep(0.1)
    thread.join()
    reasons = []
    for got in answers:
        chunks = got if isinstance(got, list) else [got]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        reasons.append(choices[-1]["finish_reason"] if choices else "abort")
        if any(choice["token_ids"] for choice in choices):
            check(answer_of(got), oracle)
        else:
            arrays = [holder[name] for holder in (*chunks, *choices) for name in holder if "routed_experts" in name]
            assert all(array["shape"][0] == 0 for array in arrays)
    assert len(reasons) == 8
    assert "abort" in reasons
    wait_until_idle(server)


def test_clients_that_vanish_leave_nothing(server: Server) -> None:
    """At every stage, of a real engine: before the first byte, in the prompt's rows, in mid-stream."""
    api = psutil.Process(server.process.pid)
    processes = [api, *api.children(recursive=True)]

    def vanish(count: int) -> tuple[int, int]:
        for index in range(count):
            body = {
                "model": "tiny",
                "prompt": prompt_of(index % 50 + 1, index),
                "max_tokens": 30,
                "stream": index % 4 > 0,
            }
            content = orjson.dumps({**body, "ignore_eos": True, "return_routed_experts": True})
            with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as sock:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
                sock.settimeout(LIMIT_S)
                for _ in range(index % 3):
                    sock.recv(4000)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "requests are left")
        wait_until_idle(server)
        return api.num_fds(), api.num_threads()

    files, threads = vanish(30)
    # What is lost with a client is lost in every round; what allocators and caches take at first, in the first ones.
    grown = []
    for _ in range(6):
        memory = sum(process.memory_info().rss for process in processes)
        files_after, threads_after = vanish(60)
        grown.append(sum(process.memory_info().rss for process in processes) - memory)
        assert files_after <= files + 5
        assert threads_after <= threads + 2
        if grown[-1] < 4 << 20:
            break
    assert grown[-1] < 4 << 20, f"MiB more after 60 clients, in each round: {[size >> 20 for size in grown]}"


# ---- what is beside the answers ----


def test_every_row_is_counted_once(server: Server) -> None:
    names = ("rows_captured_total", "rows_returned_total", "rows_missing_total", "sent_bytes_total")

    def counters() -> dict[str, float]:
        return {name: server.metric(f"routed_experts_{name}") for name in names}

    wait_until_idle(server)
    before = counters()
    body: dict[str, Any] = {**ASK, "max_tokens": 7, "ignore_eos": True}
    answers = [
        server.complete(**body, prompt=prompt_of(30, seed=9000)),
        *server.stream(**body, prompt=prompt_of(45, seed=9001)),
    ]
    server.complete(prompt=prompt_of(20, seed=9002), max_tokens=3, ignore_eos=True)  # captured, not returned
    returned = (30 + 6) + (45 + 6)
    wait_until(lambda: counters()["rows_returned_total"] >= before["rows_returned_total"] + returned, counters)
    wait_until_idle(server)
    grown = {name: count - before[name] for name, count in counters().items()}
    arrays = [answer["prompt_routed_experts"] for answer in answers if "prompt_routed_experts" in answer]
    arrays += [
        choice["routed_experts"] for answer in answers for choice in answer["choices"] if "routed_experts" in choice
    ]
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
    assert info.layer_ids == [1, 2, 3, 4, 5]  # layer 0 is dense
    assert (info.dtype, info.version, info.vllm_version) == (
        "int16",
        version("routed-experts-server"),
        vllm.__version__,
    )
    if not ON_GPU:
        assert (info.capture.runner, info.capture.device) == ("v1", "cpu")
    assert info.capture.kv_slots > 0
    assert info.capture.host_cache_bytes == info.capture.kv_slots * 5 * 4 * 2
    assert f"] routed-experts-server {info.version}, vLLM {vllm.__version__}\n" in server.log.read_text()


def test_any_values_in_any_fields(server: Server, oracle: Oracle) -> None:
    count = int(os.environ.get("BAD_INPUT_REQUESTS", "0")) or 100
    statuses, wrong = send(server, count=count, number=0)
    assert not wrong
    assert set(statuses) >= {"200", "400"}
    check_alive(server, oracle)
    assert decode(server.complete(prompt="abc", max_tokens=2, **ASK)["prompt_routed_experts"]).shape == (3, 5, 4)
