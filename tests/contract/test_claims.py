"""Files that browsers send to a server for its page: what they say of themselves costs other
requests nothing."""

import gc
import json
import os
import select
import socket
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from fastapi import FastAPI

from routed_experts.server.page import MAX_BYTES, READ_PATH, reading
from routed_experts.server.page.reading import Reading
from routed_experts.server.page.routes import page_router
from tests.contract.served import serving
from tests.contract.test_stored_arrays import running
from tests.e2e.harness import ONE_PROCESS, SMALL_KV, Server, wait_until
from tests.e2e.harness import serving as serving_processes
from tests.server.test_saved import CLAIM

AT_ONCE = 40
HEALTH_S = 1.0
MEMORY_BYTES = 100 << 20


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model) as server:
        yield server


def post(server: Server, text: str) -> httpx.Response:
    with server.client() as client:
        return client.post(READ_PATH, json=[["f", text]])


def slowest_health(server: Server, running: list["Future[httpx.Response]"]) -> float:
    """In seconds, while others run."""
    slowest = 0.0
    with server.client() as client:
        while not all(each.done() for each in running):
            begin = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - begin)
            time.sleep(0.02)
    return slowest


def at_once(server: Server, text: str) -> tuple[list[httpx.Response], float]:
    body = json.dumps([["f", text]])
    with server.client() as client, ThreadPoolExecutor(AT_ONCE) as threads:
        running = [threads.submit(client.post, READ_PATH, content=body) for _ in range(AT_ONCE)]
        slowest = slowest_health(server, running)
        return [each.result() for each in running], slowest


def lines_of(value: Any, num_bytes: int) -> str:
    line = f"{json.dumps(value)}\n"
    return line * (num_bytes // len(line))


def test_forty_bodies_that_claim_long_responses(server: Server) -> None:
    """Each of 50 lines says that it has a million tokens."""
    process = psutil.Process()
    text = lines_of({"choices": [CLAIM]}, 8_000)
    post(server, text[:1000])
    gc.collect()
    before = process.memory_info().rss
    responses, slowest = at_once(server, text)
    assert {response.status_code for response in responses} == {200}
    assert {response.text.count("\n") for response in responses} == {text.count("\n")}
    del responses
    gc.collect()
    assert slowest < 3 * HEALTH_S, "forty clients share this process, and other tests the cores"
    assert process.memory_info().rss < before + MEMORY_BYTES


def test_bodies_that_wait_have_a_limit_together(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told to come again, and what waited counts no longer."""
    text = lines_of({"choices": [CLAIM]}, 82_000)
    monkeypatch.setattr(reading, "MAX_WAITING_BYTES", 200_000)
    responses, _ = at_once(server, text)
    refused = [response for response in responses if response.status_code != 200]
    assert 0 < len(refused) < AT_ONCE
    for response in refused:
        assert (response.status_code, response.headers["Retry-After"]) == (503, "60")
        assert response.json()["error"]["message"] == reading.BUSY
    assert post(server, text).status_code == 200


def test_a_client_that_takes_nothing_loses_its_turn(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "STALLED_S", 1.0)
    rows = {"data": b64encode(bytes(12 << 20)).decode(), "shape": [1 << 20, 3, 4], "dtype": "uint8"}
    choice = {**CLAIM, "routed_experts": {**rows, "start": 0, "missing": 0}}
    large = [
        ["f", json.dumps({"choices": [choice], "routed_experts_info": {"layer_ids": [0, 1, 2]}})]
    ]
    with server.client() as client, client.stream("POST", READ_PATH, json=large) as stalled:
        assert stalled.status_code == 200
        assert post(server, json.dumps({"choices": [CLAIM]})).status_code == 200


def test_a_request_waits_for_its_turn_no_longer_than_a_minute(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "WAIT_S", 0.1)
    monkeypatch.setattr(reading, "read_saved", lambda _: time.sleep(1) or iter(()))
    statuses = [response.status_code for response in at_once(server, "")[0]]
    assert sorted(set(statuses)) == [200, 503]


# ---- who leaves ----


@pytest.fixture
def page() -> Iterator[tuple[uvicorn.Server, Reading]]:
    """The page's routes behind real sockets, and what they read."""
    app = FastAPI()
    app.include_router(page_router)
    with running(app) as server:
        yield server, Reading.of(app.state)


@pytest.mark.parametrize("limit", ["STALLED_S", "LONGEST_BODY_S"])
def test_a_client_that_sends_too_slowly_loses_its_place(
    page: tuple[uvicorn.Server, Reading], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """One that sends nothing more, and one that sends a byte now and then."""
    server, files_read = page
    monkeypatch.setattr(reading, limit, 0.3)
    sock = begin_upload(server, b"[" + b" " * 1000, num_bytes=5000)
    sock.settimeout(10)
    answer = b""
    while not answer:
        if limit == "LONGEST_BODY_S":
            sock.sendall(b" ")
        readable, _, _ = select.select([sock], [], [], 0.05)
        answer = sock.recv(1000) if readable else b""
    assert answer.startswith(b"HTTP/1.1 408 ")
    wait_until(lambda: files_read.num_bytes == 0, "the body is kept", 5)
    sock.close()


def begin_upload(server: uvicorn.Server, content: bytes, num_bytes: int) -> socket.socket:
    """The connection of a client that has sent a part of `num_bytes`, or all."""
    sock = socket.create_connection(server.servers[0].sockets[0].getsockname())
    head = f"POST {READ_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes}\r\n\r\n"
    sock.sendall(head.encode() + content)
    return sock


def upload(server: uvicorn.Server, files: list[list[str]]) -> socket.socket:
    """The connection of a client that has sent files."""
    body = json.dumps(files).encode()
    return begin_upload(server, body, len(body))


def test_clients_that_leave_before_their_answer_leave_nothing(
    page: tuple[uvicorn.Server, Reading],
) -> None:
    """Neither the one that has its turn and takes nothing, nor the one that waits for it."""
    server, files_read = page
    choice = {"index": 0, "text": "", "routed_experts": array(1000)}
    line = json.dumps({"choices": [choice]})
    reads_nothing = upload(server, [["f", f"{line}\n" * 20_000]])
    wait_until(lambda: files_read.thread.borrowed_tokens, "the first has no turn", 30)
    first_bytes = files_read.num_bytes
    waits = upload(server, [["f", "x" * (4 << 20)]])
    wait_until(
        lambda: files_read.num_bytes > first_bytes + (4 << 20), "the second is not there", 30
    )
    waits.close()
    wait_until(lambda: files_read.num_bytes == first_bytes, "the body of who left is kept", 5)
    reads_nothing.close()
    wait_until(lambda: files_read.num_bytes == 0, "the body of who left is kept", 5)
    assert not files_read.turn.locked()
    assert files_read.thread.borrowed_tokens == 0


def test_a_thread_reads_no_further_line_for_a_client_that_left() -> None:
    def lines() -> Iterator[bytes]:
        yield b"first"
        client.has_left = True
        yield b"second"
        pytest.fail("a third line was read")

    async def receive() -> Any:
        raise AssertionError("nothing is received")

    client = reading.Client(receive)
    assert reading.some_of(lines(), client) == b"firstsecond"


def test_no_full_collection_runs_while_files_are_read() -> None:
    """Each would hold all other threads for as long as it takes to visit what was parsed."""

    def lines() -> Iterator[bytes]:
        parsed = json.loads(f"[{'[],' * 300_000}[]]")
        yield b"line"
        del parsed

    async def receive() -> Any:
        raise AssertionError("nothing is received")

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal full_collections
        full_collections += phase == "start" and info["generation"] == 2

    full_collections = 0
    before = gc.get_threshold()
    gc.freeze()  # what is there would make the number grow by less than a quarter
    gc.callbacks.append(count)
    try:
        assert reading.some_of(lines(), reading.Client(receive)) == b"line"
    finally:
        gc.callbacks.remove(count)
        gc.unfreeze()
    assert full_collections == 0
    assert gc.get_threshold() == before


# ---- everything that a body can say ----


def array(num_rows: int, start: int = 0) -> dict[str, Any]:
    data = b64encode(bytes(num_rows)).decode()
    return {"data": data, "shape": [num_rows, 1, 1], "dtype": "uint8", "start": start, "missing": 0}


def many_choices(count: int, **body: Any) -> str:
    return json.dumps(
        {"choices": [{"index": index, "finish_reason": "stop"} for index in range(count)], **body}
    )


def stream_of(count: int, chunk: Any, *last: str) -> str:
    return f"data: {json.dumps(chunk)}\n\n" * count + "".join(
        f"data: {text}\n\n" for text in (*last, "[DONE]")
    )


def put_aside(fields: str) -> str:
    """As LiteLLM does with fields that it does not know."""
    return f'{{"provider_specific_fields": {fields}}}'


def enveloped(body: str) -> str:
    """As in a batch's output."""
    return f'{{"custom_id": "1", "response": {{"body": {body}}}}}'


def logprobs(count: int) -> str:
    return f'{{"logprobs": {{"content": [{"{}," * count}{{}}]}}}}'


def cells(count: int) -> str:
    return f'{{"rows": 1, "missing": 0, "counts": [{"[1]," * count}[1]]}}'


EMPTY_PIECE = {"choices": [{"index": 0}], "prompt_routed_experts": array(0)}
MODEL = {"layer_ids": [*range(4096)], "weights_scale": [1.0] * 4096}
REAL = {**CLAIM, "finish_reason": None, "routed_experts": [[[1, 2, 3, 4]] * 60] * 100}
KINDS: dict[str, Callable[[int], str]] = {
    "long responses": lambda size: lines_of({"choices": [CLAIM]}, size),
    "long responses with texts": lambda size: lines_of(
        {"choices": [{**CLAIM, "logprobs": {"tokens": ["a"]}}]}, size
    ),
    "rows of a prompt for many choices": lambda size: many_choices(
        size // 80, prompt_routed_experts=array(size // 4)
    ),
    "ids of a prompt for many choices": lambda size: many_choices(
        size // 80, prompt_token_ids=[1] * (size // 8), prompt_routed_experts=array(0, size // 8)
    ),
    "empty pieces of a prompt for many choices": lambda size: stream_of(
        size // 400, EMPTY_PIECE, many_choices(size // 160)
    ),
    "a large model before small responses": lambda size: (
        f"{json.dumps(MODEL)}\n{lines_of({'choices': [CLAIM]}, size)}"
    ),
    "empty lists": lambda size: "[]" * (size // 2),
    "a list of empty lists": lambda size: f"[{'[],' * (size // 3)}[]]",
    "nested lists": lambda size: f"[{('[' * 400 + ']' * 400 + ',') * (size // 801)}[]]",
    "empty choices": lambda size: f'{{"choices": [{"{}," * (size // 3)}{{}}]}}',
    "empty log-probabilities": lambda size: (
        f'{{"choices": [{{"finish_reason": "stop", "logprobs": {{"content": [{"{}," * (size // 3)}{{}}]}}}}]}}'
    ),
    "facts about models": lambda size: lines_of({"layer_ids": []}, size),
    "empty chunks": lambda size: stream_of(size // 12, {}),
    "pieces of an event": lambda size: f'data: ["{"a" * (size // 2)}\n' + "id:\n" * (size // 8),
    "choices put aside": lambda size: put_aside(many_choices(size // 40)),
    "choices in two envelopes": lambda size: enveloped(enveloped(many_choices(size // 40))),
    "log-probabilities put aside": lambda size: (
        f'{{"choices": [{put_aside(logprobs(size // 3))}]}}'
    ),
    "cells of histograms": lambda size: (
        f'{{"choices": [{{"routed_experts_histogram": {cells(size // 4)}}}]}}'
    ),
    "lines of a stream": lambda size: "data:1\n" * (size // 7),
    "lines without an event": lambda size: "id:\n" * (size // 4),
    "empty lines": lambda size: "\n" * size,
    "real rows as lists": lambda size: lines_of({"choices": [REAL]}, size),
}


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(3600)
def test_forty_large_bodies_of_any_kind_at_once(tiny_model: Path, tmp_path: Path) -> None:
    """A process with an engine. What stays in memory is held against what one small body of each
    kind leaves.

    A large body holds the interpreter for as long as it takes to parse its largest JSON value, as
    in every other route.
    """
    size = int(os.environ.get("HOSTILE_BYTES", str(MAX_BYTES // 4)))
    flags = (*SMALL_KV, *ONE_PROCESS, "--max-model-len", "512")
    with serving_processes(tiny_model, tmp_path / "log", *flags) as server:
        process = psutil.Process(server.process.pid)
        for text_of in KINDS.values():
            assert post(server, text_of(size // 20)).status_code == 200
        before = process.memory_info().rss
        responses, slowest = at_once(server, lines_of({"choices": [CLAIM]}, 82_000))
        assert {response.status_code for response in responses} == {200}
        assert slowest < HEALTH_S
        health = {}
        for name, text_of in KINDS.items():
            responses, health[name] = at_once(server, text_of(size))
            assert {response.status_code for response in responses} <= {200, 400, 503}, name
            del responses
            print(
                f"{name}: health {health[name]:.2f} s, memory {process.memory_info().rss >> 20} MiB",
                flush=True,
            )
        server.complete(prompt="Hello", max_tokens=3)
        assert process.memory_info().rss < before + MEMORY_BYTES
        assert max(health.values()) < 10 * HEALTH_S, health
