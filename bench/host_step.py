"""What one step costs the host, without an engine: launching the capture, receiving its rows, handing them out."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.engine import EngineCoreOutput

from routed_experts.capture.capturer import Capturer, RowShape
from routed_experts.capture.envelope import SingleRows, pack
from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.pipeline import StepRows

_SIZES = (1, 64, 256, 8192)


def host_step_table(
    device: str, num_layers: int = 48, top_k: int = 8, num_experts: int = 128, repeats: int = 50
) -> str:
    """Markdown: median microseconds of the host's time in each part of a step of some number of tokens."""
    shape = RowShape(tuple(range(num_layers)), num_experts, top_k)
    capturer = Capturer(shape, [num_layers], 0, max(_SIZES), 2, torch.device(device))
    cache = HostCache(num_blocks=1024, block_size=16)
    rows = [
        "| tokens in the step | launch | receive | hand out, a request for each token |",
        "| --- | --- | --- | --- |",
    ]
    for n in _SIZES:
        slots = torch.arange(n, dtype=torch.int64, device=device)
        offsets = np.arange(n + 1, dtype=np.int64)
        step = capturer.submit(slots, offsets).result()

        parts = (
            partial(_launch, capturer, slots, offsets),
            partial(cache.write, step.slots, step.rows),
            partial(_hand_out, step),
        )
        rows.append("| " + " | ".join([str(n), *(f"{_microseconds(part, repeats):.0f} µs" for part in parts)]) + " |")
    return "\n".join(rows)


def _launch(capturer: Capturer, slots: torch.Tensor, offsets: NDArray[np.int64]) -> None:
    capturer.reset_rows(len(slots))
    capturer.submit(slots, offsets)


def _hand_out(step: StepRows) -> None:
    """Each row to a request of its own."""
    count = len(step.rows)
    outputs = [EngineCoreOutput("", [0]) for _ in range(count)]
    pack(outputs, [SingleRows(outputs, [7] * count, step.rows, [*range(count)])])


def _microseconds(part: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        part()
        times.append(1e6 * (time.perf_counter() - began))
    return median(times)
