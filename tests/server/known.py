"""Rows that say which position they belong to, on outputs of the engine; and whether other tasks
get their turn."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from routed_experts.capture.wire.envelope import RunRows
from routed_experts.protocol.codec import decode
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.encoding.encoding import Encoder
from routed_experts.server.http.encoding.wire_form import WireForm
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput

L, K = 2, 3


def rows_of(first: int, end: int) -> np.ndarray:
    """Rows [n, L, K], each filled with its position."""
    return np.repeat(np.arange(first, end, dtype=np.int16), L * K).reshape(-1, L, K)


def push_from_message(buffer: RowBuffer, start: int, rows: np.ndarray) -> None:
    """Pushes `rows` [n, ...] as they arrive: beside as many rows of other outputs."""
    others = np.zeros_like(rows)
    buffer.push_from(RunRows(np.stack([others, rows, others])), 1, start)


def buffer_of(*arrays: tuple[int, np.ndarray]) -> RowBuffer:
    buffer = RowBuffer()
    for start, rows in arrays:
        buffer.push(start, rows)
    return buffer


def choice(
    tokens: int, buffer: RowBuffer | None, index: int = 0, finish: str | None = "stop"
) -> CompletionOutput:
    return CompletionOutput(
        index, "", list(range(tokens)), None, None, routed_experts=buffer, finish_reason=finish
    )  # type: ignore[arg-type]


def output(prompt_len: int, *choices: CompletionOutput) -> RequestOutput:
    finished = all(choice.finish_reason is not None for choice in choices)
    return RequestOutput("r", None, list(range(prompt_len)), None, list(choices), finished=finished)


def as_json(value: Any) -> Any:
    """MessagePack as JSON has it: bytes in base64."""
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def positions(array: dict[str, Any]) -> list[int]:
    """The positions that the rows of an array belong to; -1 where a row is not known."""
    rows = decode(array)
    assert rows.shape[1:] == (L, K)
    assert array["missing"] == int((rows[:, 0, 0] == -1).sum())
    return [int(row[0, 0]) for row in rows]


@dataclass
class Turns:
    count: int = 0


@asynccontextmanager
async def another_task() -> AsyncIterator[Turns]:
    """Another task, which takes every turn that it gets while the body runs."""
    turns = Turns()

    async def take() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(take())
    try:
        yield turns
    finally:
        task.cancel()


def encoder_of(
    options: RoutingOptions,
    shape: tuple[int, int] = (L, K),
    num_experts: int = 1 << 15,
    decoder_layers: tuple[list[int], int] | None = None,
) -> Encoder:
    form = WireForm(
        format=options.format,
        dtype=options.dtype,
        ids_shape=shape,
        num_experts=num_experts,
        decoder_layers=decoder_layers,
        has_weights=options.weights,
    )
    return Encoder(form)
