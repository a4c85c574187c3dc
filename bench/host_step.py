"""What one step costs the host, without an engine: launching the capture, receiving its rows, handing them out."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput

from routed_experts.capture.capturer import Capturer, RowShape
from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.message import pack
from routed_experts.capture.pipeline import StepRows
from routed_experts.capture.split import RequestRows, StepPart, take_rows

_SIZES = (1, 64, 256, 8192)


def host_step_table(device: str, num_layers: int = 48, top_k: int = 8, num_experts: int = 128) -> str:
    """Markdown: median microseconds of the host's time in each part of a step of some number of tokens."""
    shape = RowShape(tuple(range(num_layers)), num_experts, top_k)
    capturer = Capturer(shape, [num_layers], 0, max(_SIZES), 2, torch.device(device))
    cache = HostCache(num_blocks=1024, block_size=16, num_layers=num_layers, top_k=top_k)
    rows = [
        "| tokens in the step | launch | receive | hand out, a request for each token |",
        "| --- | --- | --- | --- |",
    ]
    for n in _SIZES:
        slots = torch.arange(n, dtype=torch.int64, device=device)
        offsets = np.arange(n + 1, dtype=np.int64)
        step = capturer.submit(slots, offsets).result()

        def launch(slots: torch.Tensor = slots, offsets: np.ndarray = offsets) -> None:
            capturer.submit(slots, offsets)

        def receive(step: StepRows = step) -> None:
            cache.write(step.slots, step.rows)

        def hand_out(step: StepRows = step, n: int = n) -> None:
            parts = (StepPart(7, step.rows[i : i + 1]) for i in range(n))
            pack([EngineCoreOutput("", [0], routed_experts=take_rows(RequestRows(7), p, 8, cache)) for p in parts])

        cells = [str(n), *(f"{_microseconds(part):.0f} µs" for part in (launch, receive, hand_out))]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _microseconds(part: Callable[[], None], repeats: int = 50) -> float:
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        part()
        times.append(1e6 * (time.perf_counter() - began))
    return median(times)
