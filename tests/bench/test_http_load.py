"""The load generator against a real server whose timing is known, and the clock that CPU time is read from."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from bench import http_load
from bench.http_answers import Expected, Routing
from bench.http_load import Clients
from bench.http_server import Server, cpu_seconds
from bench.shapes import TOKEN_CHARS, token_text

ROUTING = Routing(2, 2, 8)
GAP_S = 0.05
MADE: dict[int, list[float]] = {}
"""When the server made each token of the request whose prompt begins with that id, on the clock of all processes."""
app = FastAPI()


@app.post("/v1/completions")
async def complete(request: Request) -> StreamingResponse:
    """Words, GAP_S apart or more."""
    body: dict[str, Any] = await request.json()
    made = MADE[body["prompt"][0]] = []

    async def events() -> AsyncIterator[str]:
        for index in range(body["max_tokens"]):
            await asyncio.sleep(GAP_S)
            made.append(time.perf_counter())
            yield f'data: {{"choices":[{{"index":0,"text":"{token_text(index)}"}}]}}\n\n'
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@contextmanager
def serving() -> Iterator[Any]:
    config = uvicorn.Config(app, port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    (socket,) = server.servers[0].sockets
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        yield Server(process, socket.getsockname()[1], None, 1)  # type: ignore[arg-type]
    finally:
        process.kill()
        process.wait()
        server.should_exit = True
        thread.join(10)


def test_times_and_counts() -> None:
    requests = [http_load.Request(0.0, "stream", [i], True, Expected(1, 5, 1, "none")) for i in range(6)]
    requests.append(http_load.Request(0.5, "long", [6], True, Expected(1, 2, 1, "none"), apart=True))
    clients = Clients(2)
    try:
        with serving() as server:
            for _ in range(2):  # the processes serve one run after another
                load = clients.run(server, requests, ROUTING, TOKEN_CHARS)
    finally:
        clients.stop()
    assert [result.answer.fault for result in load.results] == [""] * 7
    began = min(result.sent for result in load.results)
    for index, result in enumerate(load.results):
        (times,) = result.answer.tokens
        late = [came - made for came, made in zip(times, MADE[index], strict=True)]
        assert min(late) >= 0
        assert sorted(late)[len(late) // 2] < 1.0  # milliseconds, on a machine that is not busy
        assert times[0] - result.sent >= GAP_S
        assert result.sent - began >= (0.5 if result.role == "long" else 0)
    assert 0 < load.busy < 1
    assert 0 <= load.api_cpu < 1  # that process sleeps


def test_clients_stop_in_the_middle_of_a_run() -> None:
    clients = Clients(1)
    with serving() as server:
        request = http_load.Request(0.0, "stream", [7], True, Expected(1, 2000, 1, "none"))

        def run() -> None:
            with suppress(EOFError):
                clients.run(server, [request], ROUTING, TOKEN_CHARS)

        thread = Thread(target=run)
        thread.start()
        while not MADE.get(7):
            time.sleep(0.01)
        began = time.monotonic()
        clients.stop()
        thread.join(10)
        assert time.monotonic() - began < 10


def test_cpu_seconds_are_those_of_the_process() -> None:
    script = "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time(), flush=True)\ninput()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = float(process.stdout.readline())
    assert cpu_seconds(process.pid) == pytest.approx(said, abs=0.05)
    process.communicate("\n")
