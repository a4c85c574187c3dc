"""Files that browsers send to a server for its page: what they say of themselves costs other
requests nothing."""

import errno
import json
import os
import resource
import select
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from fastapi import FastAPI

from routed_experts.server.page import MAX_BYTES, READ_PATH, reader_process, reading
from routed_experts.server.page.reading import Reading
from routed_experts.server.page.routes import page_router
from tests.contract.served import serving
from tests.contract.test_stored_arrays import running
from tests.e2e.harness import ONE_PROCESS, SMALL_KV, Server, wait_until
from tests.e2e.harness import serving as serving_processes
from tests.server.test_saved import CLAIM

AT_ONCE = 40
FEW = 10
HEALTH_S = 1.0
LEFT_S = reading.STALLED_S / 2
"""Then a server lets go of what it keeps for clients that do nothing: who left is known at once."""
MEMORY_BYTES = 100 << 20


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model) as server:
        yield server


def post(server: Server, text: str) -> httpx.Response:
    with server.client() as client:
        return client.post(READ_PATH, json=[["f", text]])


def slowest_health(
    server: Server, running: list["Future[httpx.Response]"], clock: Callable[[], float]
) -> float:
    """In seconds, while others run."""
    slowest = 0.0
    with server.client() as client:
        while not all(request.done() for request in running):
            begin = clock()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, clock() - begin)
            time.sleep(0.02)
    return slowest


def at_once(
    server: Server, *texts: str, clock: Callable[[], float] = time.monotonic
) -> tuple[list[httpx.Response], float]:
    """The answers to bodies that are sent at the same time, and the slowest `/health` meanwhile."""
    bodies = [json.dumps([["f", text]]) for text in texts]
    with server.client() as client, ThreadPoolExecutor(len(bodies)) as threads:
        running = [threads.submit(client.post, READ_PATH, content=body) for body in bodies]
        slowest = slowest_health(server, running, clock)
        return [request.result() for request in running], slowest


def lines_of(value: Any, num_bytes: int) -> str:
    line = f"{json.dumps(value)}\n"
    return line * (num_bytes // len(line))


def test_bodies_that_claim_long_responses(server: Server) -> None:
    """Each of 50 lines says that it has a million tokens.

    The clock is the CPU time of this process, in which the server runs: other tests may have the
    processor meanwhile.
    """
    process = psutil.Process()
    text = lines_of({"choices": [CLAIM]}, 8_000)
    post(server, text[:1000])
    before = process.memory_info().rss
    responses, slowest = at_once(server, *[text] * FEW, clock=time.process_time)
    assert {response.status_code for response in responses} == {200}
    assert {response.text.count("\n") for response in responses} == {text.count("\n")}
    del responses
    assert slowest < HEALTH_S
    assert process.memory_info().rss < before + MEMORY_BYTES


def test_bodies_that_wait_have_a_limit_together(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told to come again, and what waited counts no longer."""
    text = lines_of({"choices": [CLAIM]}, 82_000)
    monkeypatch.setattr(reading, "MAX_WAITING_BYTES", 200_000)
    responses, _ = at_once(server, *[text] * FEW)
    refused = [response for response in responses if response.status_code != 200]
    assert 0 < len(refused) < FEW
    for response in refused:
        assert (response.status_code, response.headers["Retry-After"]) == (503, "60")
        assert response.json()["error"]["message"] == reading.BUSY
    assert post(server, text).status_code == 200


def test_a_client_that_takes_nothing_holds_up_nobody(server: Server) -> None:
    rows = {"data": b64encode(bytes(12 << 20)).decode(), "shape": [1 << 20, 3, 4], "dtype": "uint8"}
    choice = {**CLAIM, "routed_experts": {**rows, "start": 0, "missing": 0}}
    large = [
        ["f", json.dumps({"choices": [choice], "routed_experts_info": {"layer_ids": [0, 1, 2]}})]
    ]
    with server.client() as client, client.stream("POST", READ_PATH, json=large) as stalled:
        assert stalled.status_code == 200
        begin = time.monotonic()
        assert post(server, json.dumps({"choices": [CLAIM]})).status_code == 200
        assert time.monotonic() - begin < reading.STALLED_S / 2


def test_a_request_waits_for_its_turn_no_longer_than_a_minute(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "WAIT_S", 0.1)
    statuses = [response.status_code for response in at_once(server, *[""] * FEW)[0]]
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
    wait_until(lambda: files_read.num_bytes == 0, "the body is kept", LEFT_S)
    sock.close()


def url_of(server: uvicorn.Server) -> str:
    host, port = server.servers[0].sockets[0].getsockname()
    return f"http://{host}:{port}{READ_PATH}"


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
    """Neither the one that has its turn, nor the one that waits for it."""
    server, files_read = page
    choice = {"index": 0, "text": "", "routed_experts": array(1000)}
    line = json.dumps({"choices": [choice]})
    has_turn = upload(server, [["f", f"{line}\n" * 20_000]])
    reader_in_turn().suspend()
    first_bytes = files_read.num_bytes
    waits = upload(server, [["f", "x" * (4 << 20)]])
    wait_until(
        lambda: files_read.num_bytes > first_bytes + (4 << 20), "the second is not there", 30
    )
    waits.close()
    wait_until(lambda: files_read.num_bytes == first_bytes, "the body of who left is kept", LEFT_S)
    has_turn.close()
    wait_until(lambda: files_read.num_bytes == 0, "the body of who left is kept", LEFT_S)
    wait_until(lambda: not files_read.turn.locked(), "the turn of who left is kept", LEFT_S)
    wait_until(lambda: not readers_of(psutil.Process()), "the reader of who left is kept", LEFT_S)


def test_an_answer_counts_until_it_is_taken(
    page: tuple[uvicorn.Server, Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client never takes it, another leaves."""
    server, files_read = page
    monkeypatch.setattr(reading, "STALLED_S", 1.0)
    text = lines_of({"choices": [{**CLAIM, "routed_experts": array(60_000)}]}, 20 << 20)
    takes_nothing = upload(server, [["f", text]])
    leaves = upload(server, [["f", text]])
    wait_until(lambda: files_read.num_bytes > 40 << 20, "the bodies are not there", 30)
    leaves.close()
    wait_until(lambda: files_read.num_bytes == 0, "the answer is kept", 30)
    takes_nothing.close()


# ---- the process that reads ----


def readers_of(process: psutil.Process) -> list[psutil.Process]:
    return [
        child
        for child in process.children()
        if child.status() != psutil.STATUS_ZOMBIE and reader_process.__name__ in child.cmdline()
    ]


def reader_in_turn() -> psutil.Process:
    wait_until(lambda: len(readers_of(psutil.Process())) == 1, "no process reads", 30)
    (child,) = readers_of(psutil.Process())
    return child


def cpu_seconds(whose: int) -> float:
    usage = resource.getrusage(whose)
    return usage.ru_utime + usage.ru_stime


def test_a_large_value_is_parsed_in_another_process(page: tuple[uvicorn.Server, Reading]) -> None:
    """In this one, no other thread would run meanwhile."""
    server, _ = page
    body = json.dumps([["f", lines_of({"choices": [REAL]}, 6 << 20)]]).encode()
    before = cpu_seconds(resource.RUSAGE_SELF)
    of_children_before = cpu_seconds(resource.RUSAGE_CHILDREN)
    response = httpx.post(url_of(server), content=body, timeout=120)
    assert response.status_code == 200
    assert response.text.count("\n") > 10
    of_children = cpu_seconds(resource.RUSAGE_CHILDREN) - of_children_before
    assert cpu_seconds(resource.RUSAGE_SELF) - before < of_children / 2


def test_the_process_starts_without_the_server_s_packages() -> None:
    program = f"import sys, {reader_process.__name__}; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-P", "-c", program], text=True).split()
    assert not {"vllm", "torch", "fastapi", "anyio", "pydantic"} & set(modules)


def run_reader(text: str, before: str = "") -> tuple[int, str]:
    """The exit status and the answer of a process that reads a file of `text`, after a line of
    Python."""
    program = f"from {reader_process.__name__} import *; reader = sys.modules[main.__module__]"
    with TemporaryFile() as answer:
        process = subprocess.run(
            [sys.executable, "-c", f"{program}\n{before}\nmain()", str(answer.fileno())],
            input=json.dumps([["f", text]]).encode(),
            stdout=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[answer.fileno()],
            check=False,
        )
        answer.seek(0)
        return process.returncode, answer.read().decode()


def test_a_body_that_takes_too_much_memory_is_refused_in_words() -> None:
    """Before the first line of its answer, and after it."""
    limit = "reader.MEMORY_BYTES = 1 << 28"
    refused = (reader_process.REFUSED, reader_process.TOO_MUCH_MEMORY)
    assert run_reader("1" * (100 << 20), limit) == refused
    small = json.dumps({"choices": [CLAIM]})
    assert run_reader(f"{small}\n[{'1.5,' * 2_500_000}1]", limit) == refused


def test_a_body_that_takes_too_long_is_refused_in_words() -> None:
    """Reading never ends here, however fast the machine is."""
    endless = "import itertools; reader.read_saved = lambda body: itertools.repeat('')"
    answer = run_reader("", f"reader.CPU_S = 1; {endless}")
    assert answer == (reader_process.REFUSED, reader_process.TOO_LONG)


def test_an_answer_of_too_many_bytes_is_refused_in_words() -> None:
    text = lines_of({"choices": [CLAIM]}, 8000)
    answer = run_reader(text, "reader.MAX_ANSWER_BYTES = 1000")
    assert answer == (reader_process.REFUSED, reader_process.TOO_LARGE_ANSWER)


def test_the_process_ends_when_the_server_is_killed() -> None:
    """The pipe that nobody reads any more is what it sees of that."""
    body = json.dumps([["f", lines_of({"choices": [REAL]}, 20 << 20)]]).encode()
    with TemporaryFile() as file, TemporaryFile() as answer:
        file.write(body)
        file.seek(0)
        process = subprocess.Popen(
            [*reading.COMMAND, str(answer.fileno())],
            stdin=file,
            stdout=subprocess.PIPE,
            pass_fds=[answer.fileno()],
        )
    threads = psutil.Process(process.pid).num_threads
    wait_until(lambda: threads() > 1, "nothing watches the pipe", 30)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 1


def test_the_system_kills_the_process_before_the_server(
    page: tuple[uvicorn.Server, Reading],
) -> None:
    server, _ = page
    sock = upload(server, [["f", lines_of({"choices": [REAL]}, 12 << 20)]])
    child = reader_in_turn()
    wait_until(
        lambda: Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n",
        "it has the score of the server",
        10,
    )
    sock.close()


def test_a_client_hears_that_the_process_was_killed(page: tuple[uvicorn.Server, Reading]) -> None:
    server, _ = page
    text = lines_of({"choices": [{**CLAIM, "routed_experts": array(60_000)}]}, 20 << 20)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(httpx.post, url_of(server), json=[["f", text]], timeout=60)
        reader_in_turn().kill()
    assert answer.result().status_code == 500
    assert answer.result().json()["error"]["message"] == reading.FAILED


def test_the_process_finds_modules_where_the_server_does(
    page: tuple[uvicorn.Server, Reading], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what one of them prints is not a part of the answer."""
    server, _ = page
    mark = tmp_path / "imported"
    program = f"print('x' * 100_000)\nopen({str(mark)!r}, 'w')"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    response = httpx.post(url_of(server), json=[["f", json.dumps({"choices": [CLAIM]})]])
    assert response.status_code == 200
    assert json.loads(response.text)["name"].startswith("f")
    assert mark.exists()


def test_without_free_descriptors_a_client_is_told_to_come_again(
    page: tuple[uvicorn.Server, Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = page

    def no_more(_: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", no_more)
    response = httpx.post(url_of(server), json=[["f", "x" * (4 << 20)]])
    assert (response.status_code, response.json()["error"]["message"]) == (503, reading.BUSY)


def test_a_process_that_cannot_start_is_an_answer(
    page: tuple[uvicorn.Server, Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, files_read = page
    monkeypatch.setattr(reading, "COMMAND", ["/nowhere/python"])
    response = httpx.post(url_of(server), json=[])
    assert response.status_code == 503
    assert "(No such file or directory)" in response.json()["error"]["message"]
    monkeypatch.setattr(reading, "COMMAND", ["false"])
    response = httpx.post(url_of(server), json=[])
    assert response.status_code == 500
    assert response.json()["error"]["message"] == reading.FAILED
    wait_until(lambda: files_read.num_bytes == 0, "the body is kept", LEFT_S)


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
    """A process with an engine, and bodies of two kinds each time."""
    size = int(os.environ.get("HOSTILE_BYTES", str(MAX_BYTES // 4)))
    flags = (*SMALL_KV, *ONE_PROCESS, "--max-model-len", "512")
    names = [*KINDS]
    with serving_processes(tiny_model, tmp_path / "log", *flags) as server:
        process = psutil.Process(server.process.pid)
        assert post(server, "{}").status_code == 200
        server.complete(prompt="Hello", max_tokens=3)
        before = process.memory_info().rss
        for pair in zip(names[::2], names[1::2], strict=True):
            texts = [KINDS[name](size) for name in pair]
            many, slowest_of_many = at_once(server, *texts * (AT_ONCE // 2))
            assert {response.status_code for response in many} <= {200, 400, 503}, pair
            # Of many, all of one kind may have waited in vain.
            two, slowest_of_two = at_once(server, *texts)
            assert {response.status_code for response in two} <= {200, 400}, pair
            del many, two
            slowest = max(slowest_of_many, slowest_of_two)
            memory = process.memory_info().rss
            print(f"{pair}: health {slowest:.2f} s, memory {memory >> 20} MiB", flush=True)
            assert slowest < HEALTH_S, pair
        server.complete(prompt="Hello", max_tokens=3)
        assert process.memory_info().rss < before + MEMORY_BYTES
        assert not readers_of(process)
