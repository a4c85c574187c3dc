"""CPU time that a request in MessagePack with rows for its prompt takes on its way to the engine: of
the event loop, in which all streams wait meanwhile, of the whole API process, and of the engine's
thread for messages. The rows are those of 32,768 tokens, 48 layers and 8 experts.

    python -m bench.given_rows
"""

import argparse
import asyncio
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from starlette.concurrency import run_in_threadpool
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from bench.http import given_rows
from bench.http_answers import Routing
from bench.http_table import commit_and_device, described
from routed_experts.capture.scheduler.input_decoder import InputDecoder
from routed_experts.protocol.input_fields import parse_input, take_input
from routed_experts.protocol.models import REPLAY
from routed_experts.protocol.routing_input import INPUT_ARG, RoutingInput
from routed_experts.server.http.input_memory import InputMemory
from routed_experts.server.http.requests.request import unpacked
from routed_experts.server.http.requests.routing_input import InputReader
from routed_experts.server.outputs.held_input import HeldInput, put_input

ROUTING = Routing(layers=48, top_k=8, num_experts=128)
NUM_TOKENS = 32_768
PART_BYTES = 1 << 16


class Timer:
    """CPU milliseconds of this thread, and of the process, since it was made."""

    def __init__(self) -> None:
        self._thread = time.thread_time()
        self._process = time.process_time()

    def read(self) -> tuple[float, float]:
        thread_s = time.thread_time() - self._thread
        process_s = time.process_time() - self._process
        return 1e3 * thread_s, 1e3 * process_s


def parts_of_body() -> list[bytes]:
    """A request's body, as it comes from a socket."""
    fields = {"prompt": [7] * NUM_TOKENS, REPLAY: given_rows(NUM_TOKENS, ROUTING)}
    body = msgspec.msgpack.encode(fields)
    return [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)]


def reader() -> InputReader:
    """For a server of this routing."""
    info = SimpleNamespace(
        num_layers=ROUTING.layers,
        top_k=ROUTING.top_k,
        num_experts=ROUTING.num_experts,
        groups=[1, 1, 1],
        layer_ids=list(range(ROUTING.layers)),
    )
    shape = (ROUTING.layers, ROUTING.top_k)
    captured: Any = SimpleNamespace(info=info, shape=shape, num_experts=ROUTING.num_experts)
    return InputReader(captured, None, InputMemory(1 << 40))


async def message_of(parts: list[bytes]) -> Any:
    """The frames of the message to the engine."""
    body = unpacked(await run_in_threadpool(b"".join, parts))
    fields = parse_input(take_input(body))
    encoded = await reader().encode(fields, [NUM_TOKENS], 1, ExitStack())
    params = SamplingParams(extra_args={INPUT_ARG: HeldInput(encoded)})
    request = EngineCoreRequest(
        "request", body["prompt"], None, params, None, 0.0, None, None, None
    )
    put_input(request)
    return MsgpackEncoder().encode(request)


def decoded(frames: Any) -> None:
    """What the engine's thread for messages does with them."""
    received = InputDecoder(EngineCoreRequest).decode(frames)
    said = RoutingInput.decode(received.sampling_params.extra_args[INPUT_ARG])
    assert said.end == NUM_TOKENS


async def measure(repeats: int) -> None:
    parts = parts_of_body()
    rows: list[tuple[float, ...]] = []
    for _ in range(repeats + 1):
        timer = Timer()
        frames = await message_of(parts)
        of_loop, of_process = timer.read()
        timer = Timer()
        decoded(frames)
        rows.append((of_loop, of_process, timer.read()[0], len(frames[0])))
    loop_ms, process_ms, engine_ms, num_bytes = np.median(rows[1:], axis=0)  # not the first
    print("| event loop ms | API process ms | engine's thread ms | bytes of the message |")
    print("| --- | --- | --- | --- |")
    print(f"| {loop_ms:.1f} | {process_ms:.1f} | {engine_ms:.1f} | {num_bytes:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--commit", default=None, help="what is measured, where git does not say")
    args = parser.parse_args()
    print(f"{described(commit_and_device('cpu', args.commit))}\n")
    asyncio.run(measure(args.repeats))


if __name__ == "__main__":
    main()
