"""What a long answer takes of the API process: how long it holds the event loop, CPU of both ends, peak memory.

No engine: the rows are made up, and everything from the engine's outputs on is real, over sockets. Times that the loop
is held are CPU times of its thread, which other work on the machine does not lengthen; how late a timer fires is not.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from tqdm import tqdm

from bench.http_server import free_port
from bench.http_table import commit_and_device, described
from routed_experts.protocol import codec
from routed_experts.protocol.models import RoutingOptions, parse_options
from routed_experts.server.http.encoding import Encoder
from routed_experts.server.http.references import Delivery, ReferenceMaker, has_left
from routed_experts.server.http.response import MSGPACK, CollectedRows, RoutedResponse, respond
from routed_experts.server.http.streaming import SSERewriter
from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput

L, K, EXPERTS = 48, 8, 128
SHORT_GAP_S = 0.02
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "base64": ({}, "application/json"),
    "list": ({"routed_experts_format": "list"}, "application/json"),
    "MessagePack": ({}, MSGPACK),
    "MessagePack list": ({"routed_experts_format": "list"}, MSGPACK),
    "at the end": ({"routed_experts_stream": "at_end"}, "application/json"),
    "reference": ({"routed_experts_delivery": "reference"}, "application/json"),
    "histogram": ({"return_routed_experts": False, "routed_experts_histogram": True}, "application/json"),
}


# ---- the server ----


@dataclass
class Held:
    """How long others had to wait, in milliseconds, and for what."""

    held: float = 0.0  # CPU time of the longest step of any task
    late: float = 0.0  # by how much a timer fired too late, at most

    def timed(self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **kwargs: Any) -> asyncio.Task:
        """A task for `coro`, every step of which is timed: what a loop makes its tasks with."""

        async def run() -> Any:
            return await _Steps(coro, self)

        return asyncio.Task(run(), loop=loop, **kwargs)

    async def watch_timer(self) -> None:
        while True:
            due = time.monotonic() + 0.001
            await asyncio.sleep(0.001)
            self.late = max(self.late, 1e3 * (time.monotonic() - due))


class _Steps:
    def __init__(self, coro: Coroutine[Any, Any, Any], held: Held) -> None:
        self._coro, self._held = coro, held

    def __await__(self) -> Generator[Any, Any, Any]:
        failure: BaseException | None = None
        while True:
            began = time.thread_time()
            try:
                waits_for = self._coro.send(None) if failure is None else self._coro.throw(failure)
            except StopIteration as stop:
                return stop.value
            finally:
                self._held.held = max(self._held.held, 1e3 * (time.thread_time() - began))
            failure = None
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 it is the coroutine's
                failure = error


class _Choice(BaseModel):
    index: int = 0
    text: str = "a"
    finish_reason: str = "length"
    routed_experts: None = None


class _Completion(BaseModel):
    id: str = "cmpl-1"
    choices: list[_Choice] = [_Choice()]
    kv_transfer_params: None = None


class Edge:
    """Routes that answer with rows as vLLM's do, to what an engine would have sent."""

    def __init__(self, num_rows: int, folder: Path) -> None:
        self._store = ArrayStore(folder)
        self.held = Held()
        self._rows = np.random.default_rng(0).integers(0, EXPERTS, (num_rows, L, K), dtype=np.int16)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.state.args = SimpleNamespace()
        app.add_api_route("/long", self.long, methods=["POST"])
        app.add_api_route("/short", self.short, methods=["POST"])
        app.add_api_route("/figures", self.figures, methods=["POST"])
        return app

    async def long(self, request: Request) -> Response:
        """An answer of all rows."""
        body = await request.json()
        options = parse_options({"return_routed_experts": True, **body["fields"]})
        assert options is not None
        if body["stream"]:
            return await respond(self._stream(options, self._long_outputs(body["generated"]), request), request)
        collected = CollectedRows(options, (L, K))
        async for output in collected.collect_from(self._long_outputs(body["generated"], at_once=True)):
            final = output
        assert final.outputs
        answer = RoutedResponse(
            _Completion(), collected, encoder_of(options), False, self._references(options, request)
        )
        return await respond(answer, request)

    async def short(self, request: Request) -> Response:
        """A stream of so many tokens, slowly."""
        options = parse_options({"return_routed_experts": True})
        assert options is not None
        outputs = self._short_outputs((await request.json())["tokens"])
        return await respond(self._stream(options, outputs, request), request)

    async def figures(self) -> dict[str, float]:
        """Those since this was last asked for: see `Held`; CPU seconds, and the most bytes of memory at once."""
        peak = _peak_bytes()
        figures = {**asdict(self.held), "cpu": time.process_time(), "peak": peak, "rss": _forget_peak()}
        self.held.held = self.held.late = 0.0
        return figures

    async def _long_outputs(self, generated: int, at_once: bool = False) -> AsyncIterator[RequestOutput]:
        """The prompt's rows in one piece, and `generated` that come one by one; one output for all or one a token."""
        buffer, prompt_len = RowBuffer(), len(self._rows) - generated
        prompt = list(range(prompt_len))  # one for all outputs, as vLLM has it: else the garbage collector visits each
        buffer.push(0, self._rows[:prompt_len])  # the engine's message, which vLLM does not copy either
        if not at_once:
            yield output_of(prompt, buffer, 1)
        for token, row in enumerate(self._rows[prompt_len:], 1):
            buffer.push(prompt_len + token - 1, row[np.newaxis].copy())
            if not at_once:
                yield output_of(prompt, buffer, 1, "length" if token == generated else None)
            await asyncio.sleep(0)
        if at_once:
            yield output_of(prompt, buffer, generated + 1, "length")

    async def _short_outputs(self, tokens: int) -> AsyncIterator[RequestOutput]:
        buffer = RowBuffer()
        buffer.push(0, self._rows[:16].copy())
        prompt = list(range(16))
        for token in range(tokens):
            yield output_of(prompt, buffer, 1, "length" if token == tokens - 1 else None)
            buffer.push(16 + token, self._rows[token : token + 1].copy())
            await asyncio.sleep(SHORT_GAP_S)

    def _stream(
        self, options: RoutingOptions, outputs: AsyncIterator[RequestOutput], request: Request
    ) -> AsyncIterator[str]:
        aligner = SSERewriter(options, encoder_of(options), 1, str, delivery=self._references(options, request))
        return aligner.rewrite(_chunks(aligner.watch(outputs)))

    def _references(self, options: RoutingOptions, request: Request) -> Delivery:
        return ReferenceMaker(self._store, partial(has_left, request)) if options.by_reference else Delivery()


def encoder_of(options: RoutingOptions) -> Encoder:
    return Encoder(options.format, "int16", (L, K), EXPERTS, has_weights=options.weights)


def output_of(prompt: list[int], buffer: RowBuffer | None, tokens: int, finish: str | None = None) -> RequestOutput:
    choice = CompletionOutput(0, "a", [1] * tokens, None, None, routed_experts=buffer, finish_reason=finish)  # type: ignore[arg-type]
    return RequestOutput("r", None, prompt, None, [choice], finished=finish is not None)


async def _chunks(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[str]:
    async for output in outputs:
        finish = json.dumps(output.outputs[0].finish_reason)
        yield f'data: {{"id":"1","choices":[{{"index":0,"text":"a","finish_reason":{finish},"logprobs":null}}]}}\n\n'
    yield "data: [DONE]\n\n"


def serve(port: int, num_rows: int, folder: Path) -> None:
    """The server's process."""

    async def run() -> None:
        edge = Edge(num_rows, folder)
        config = uvicorn.Config(edge.app(), host="127.0.0.1", port=port, log_level="error")
        asyncio.get_running_loop().set_task_factory(edge.held.timed)
        gc.collect()
        gc.freeze()  # as vLLM does
        timer = asyncio.create_task(edge.held.watch_timer())
        await uvicorn.Server(config).serve()
        timer.cancel()

    with asyncio.Runner(loop_factory=_new_loop()) as runner:
        runner.run(run())


def _new_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop  # vLLM's

    return uvloop.new_event_loop


def _peak_bytes() -> int:
    return _status("VmHWM")


def _forget_peak() -> int:
    """Lets the peak begin again; returns the memory in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":")]
    return int(line.split()[1]) << 10


# ---- the clients ----


def ask(port: int, path: str, body: dict[str, Any], accept: str = "*/*") -> bytes:
    """The whole body of an answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", "Accept": accept})
    content = connection.getresponse().read()
    connection.close()
    return content


def figures(port: int) -> dict[str, float]:
    """What the server measured since this was last called."""
    read: dict[str, float] = json.loads(ask(port, "/figures", {}))
    return read


@contextmanager
def background(count: int, target: Callable[..., None], *args: Any) -> Iterator[None]:
    """`count` processes run `target` and are waited for."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=args) for _ in range(count)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.join()


def short_streams(port: int, count: int, seconds: float) -> None:
    """Reads that many streams at once."""

    async def read() -> None:
        body = json.dumps({"tokens": int(seconds / SHORT_GAP_S)}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /short HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        while await reader.read(1 << 16):
            pass
        writer.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(read() for _ in range(count)))

    asyncio.run(all_of_them())


def long_answers(port: int, count: int, body: dict[str, Any], accept: str) -> None:
    """Reads that many long answers at once, in one process, and does not look at them."""

    async def read() -> None:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /long HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        size = 0
        while data := await reader.read(1 << 20):
            size += len(data)
        assert size > (500 if "routed_experts_delivery" in body["fields"] else 4096), "no answer"

    async def all_of_them() -> None:
        await asyncio.gather(*(read() for _ in range(count)))

    asyncio.run(all_of_them())


def stalls(port: int, num_rows: int, num_answers: int, num_streams: int, seconds: float) -> list[str]:
    """How long the event loop was held while long answers of each form were produced beside short streams."""
    lines = ["| answers | held ms, at most | a timer late ms, at most | seconds |", "| --- | --- | --- | --- |"]
    for fields, accept in FORMS.values():  # what the first of a form imports and makes is none of its own
        ask(port, "/long", {"fields": fields, "stream": False, "generated": 1}, accept)
    figures(port)
    with background(1, short_streams, port, num_streams, seconds):
        pass
    alone = figures(port)
    lines.append(f"| none | {alone['held']:.1f} | {alone['late']:.1f} | {seconds:.1f} |")
    for stream in (False, True):
        kind = "streamed" if stream else "unstreamed"
        for name, (fields, accept) in tqdm(FORMS.items(), desc=f"many answers, {kind}", unit=" forms", disable=None):
            if stream and accept == MSGPACK:
                continue  # streams are text
            if name == "at the end" and not stream:
                continue
            began = time.monotonic()
            body = {"fields": fields, "stream": stream, "generated": num_rows // (32 if stream else 2)}
            with background(1, short_streams, port, num_streams, seconds):
                long_answers(port, num_answers, body, accept)
                took = time.monotonic() - began
            seen = figures(port)
            lines.append(f"| {name}, {kind} | {seen['held']:.1f} | {seen['late']:.1f} | {took:.1f} |")
    return lines


def both_ends(port: int, num_rows: int, repeats: int) -> list[str]:
    """CPU of one unstreamed answer in the server, and in a client that has the rows as an array afterwards."""
    raw = num_rows * L * K * 2
    lines = ["| answer | MB | server CPU ms | client CPU ms | both | server's peak memory to raw rows |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name in ("base64", "MessagePack"):
        fields, accept = FORMS[name]
        runs = []
        for _ in tqdm(range(repeats + 1), desc=f"one answer, {name}", unit=" runs", disable=None):
            before = figures(port)
            began = time.process_time()
            content = ask(port, "/long", {"fields": fields, "stream": False, "generated": 1}, accept)
            answer = msgspec.msgpack.decode(content) if accept == MSGPACK else json.loads(content)
            arrays = [answer["prompt_routed_experts"], answer["choices"][0]["routed_experts"]]
            rows = [codec.decode(array) for array in arrays]
            client = time.process_time() - began
            after = figures(port)
            assert sum(map(len, rows)) == num_rows
            peak = 1 + (after["peak"] - before["rss"]) / raw  # the rows were there before
            runs.append((1e3 * (after["cpu"] - before["cpu"]), 1e3 * client, peak))
        server, client, _ = (median(column) for column in zip(*runs[1:], strict=True))
        peak = max(run[2] for run in runs)
        size = len(content) / 1e6
        lines.append(f"| {name} | {size:.1f} | {server:.0f} | {client:.0f} | {server + client:.0f} | {peak:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--answers", type=int, default=16, help="at once")
    parser.add_argument("--streams", type=int, default=64, help="short ones beside them")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a short one lasts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=0, help="a free one, if 0")
    args = parser.parse_args()
    args.port = args.port or free_port()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    serving = (args.port, args.rows, folder)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=serving, daemon=True)
    server.start()
    try:
        _wait(args.port)
        about = commit_and_device("cpu", None)
        print(f"{args.rows} rows of {L} x {K}. {described(about)}.\n")
        print(*both_ends(args.port, args.rows, args.repeats), "", sep="\n", flush=True)
        print(*stalls(args.port, args.rows, args.answers, args.streams, args.seconds), sep="\n")
    finally:
        server.terminate()
        server.join()
        shutil.rmtree(folder)


def _wait(port: int) -> None:
    for _ in range(1200):
        try:
            figures(port)
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
