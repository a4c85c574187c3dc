"""What the capture costs the scheduler's thread, which every request waits for: vLLM's real
scheduler, and no model.

A model's steps are played: tokens and rows are there when they are asked for, after a pause as long
as a forward pass.
"""

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from bench.played_executor import Player
from bench.shapes import QWEN3_30B_A3B
from routed_experts.capture import SCHEDULER
from routed_experts.capture.scheduler.scheduler import SchedulerCapture
from routed_experts.capture.wire.message import OPT_IN_ARG, PROMPT_ROWS, OptIn, RowsOutput

BLOCK = 16
CHUNK = 8192
NUM_BLOCKS = 6000
RUNNING = 256, 1024
LONG = 32_768


@dataclass
class Step:
    """What a step took."""

    seconds: float  # of the scheduler's thread, the forward pass not counted
    cpu_seconds: float  # of them, those that the thread ran
    ours: float  # what the capture took of them, by `clock`
    sent: set[str]  # ids of the requests whose prompts' rows were sent
    num_bytes: int  # of the rows that were sent


class Steps:
    """A scheduler, and the model behind it."""

    def __init__(
        self,
        num_layers: int = 48,
        top_k: int = 8,
        forward_s: float = 0.0,  # that a forward pass takes
        clock: Callable[[], float] = time.perf_counter,  # what the capture's part is measured by
        config: VllmConfig | None = None,  # without our scheduler there is no capture
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        config = config or engine_config(max_num_seqs=max(RUNNING))
        config.cache_config.num_gpu_blocks = self._num_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        kv = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        with set_current_vllm_config(config):
            self.scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                kv_cache_config=kv,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                hash_block_size=BLOCK,
            )
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        self._ours, self._clock = 0.0, clock
        self._is_captured = isinstance(self.scheduler, SchedulerCapture)
        if self._is_captured:
            connector = self.scheduler.aux_output_connector
            for name in ("build_connector_meta", "receive", "take_output", "distribute"):
                setattr(connector, name, self._timed(getattr(connector, name)))
        self._rows = (
            np.random.default_rng(0).integers(0, 128, (CHUNK, num_layers, top_k)).astype(np.int16)
        )
        self._player = Player(self._rows, BLOCK, self._is_captured)
        self._forward_s = forward_s
        self._added = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        asks: bool,
        at_end: bool = False,
        steps: bool = False,
    ) -> str:
        """Adds a request that asks for its routing or not, perhaps at its end only or with steps;
        gives its id."""
        self._added += 1
        assert self._is_captured or not asks
        prompt_id = self._added.to_bytes(16, "little")
        opt_in = OptIn(0, prompt_id, shared=False, final_only=at_end, steps=steps)
        params = SamplingParams(
            max_tokens=max_tokens, extra_args={OPT_IN_ARG: opt_in.encode()} if asks else None
        )
        request = Request(str(self._added), prompt, params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request.request_id

    def step(self) -> Step:
        """Schedules, runs and takes in one step."""
        self._ours = 0.0
        began, cpu_began = time.perf_counter(), time.thread_time()
        scheduled = self.scheduler.schedule()
        seconds, cpu_seconds = time.perf_counter() - began, time.thread_time() - cpu_began
        output = self._run(scheduled)
        time.sleep(self._forward_s)
        began, cpu_began = time.perf_counter(), time.thread_time()
        messages = self.scheduler.update_from_output(scheduled, output)
        seconds += time.perf_counter() - began
        cpu_seconds += time.thread_time() - cpu_began
        outputs = [output for message in messages.values() for output in message.outputs]
        brought = filter(None, map(RowsOutput.of, outputs))
        sent = {brings.request_id for brings in brought if brings.kind == PROMPT_ROWS}
        num_bytes = sum(
            output.routed_experts.nbytes for output in outputs if output.routed_experts is not None
        )
        return Step(seconds, cpu_seconds, self._ours, sent, num_bytes)

    def age(self) -> None:
        """Makes it one that has run for a while: its host cache's memory is there, and its objects
        are no news to the garbage collector. Call after the first step."""
        cache = self.scheduler.aux_output_connector.cache
        for first in range(0, self._num_blocks * BLOCK, CHUNK):
            slots = np.arange(first, min(first + CHUNK, self._num_blocks * BLOCK))
            cache.write(slots, self._rows[: len(slots)])
        gc.collect()
        gc.freeze()  # as vLLM's engine does at its start

    def _timed(self, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            try:
                return part(*args, **kwargs)
            finally:
                self._ours += self._clock() - began

        return call

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._player.play(step)


def engine_config(is_captured: bool = True, **options: Any) -> VllmConfig:
    """For Qwen3-30B-A3B; `options` are vLLM's engine arguments."""
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=LONG + 1024,
        max_num_batched_tokens=CHUNK,
        async_scheduling=False,
        scheduler_cls=SCHEDULER if is_captured else None,
        **options,
    ).create_engine_config()


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


VARIANTS = [("captured, not asked for", False), ("returned", True)]
AT_END = "returned at the end"
WITH_STEPS = "returned with steps"


def step_table(running: int, steps: int = 200) -> str:
    """Markdown: median microseconds of the scheduler's thread in a step of `running` requests."""
    lines = ["| | the whole step | of it the capture |", "| --- " * 3 + "|"]
    for name, asks in [*VARIANTS, (AT_END, True), (WITH_STEPS, True)]:
        made = Steps(
            config=engine_config(max_num_seqs=running), num_blocks=running * 20 + NUM_BLOCKS
        )
        for index in range(running):
            prompt = prompt_of(BLOCK, index)
            made.add(prompt, 10_000, asks, at_end=name == AT_END, steps=name == WITH_STEPS)
        made.step()
        made.age()
        taken = [
            made.step()
            for _ in tqdm(range(steps), desc=f"steps, {name}", unit=" steps", disable=None)
        ]
        whole, ours = (
            1e6 * median(values)
            for values in zip(*((step.seconds, step.ours) for step in taken), strict=True)
        )
        lines.append(f"| {name} | {whole:.0f} µs | {ours:.0f} µs |")
        gc.unfreeze()
    return "\n".join(lines)


def long_prompt_table(
    length: int = LONG, repeats: int = 20, forward_s: float = 0.01, num_running: int = 64
) -> str:
    """Markdown: time that the scheduler's thread takes in steps of 64 requests, while a long prompt
    that is all in the prefix cache has its first token and its rows are read; and how many steps
    later they are sent."""
    head = (
        "",
        "median step",
        "longest step",
        "most CPU time of the capture in a step",
        "rows sent after",
    )
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for name, asks in VARIANTS:
        made = Steps(forward_s=forward_s, clock=time.thread_time)
        for index in range(num_running):
            made.add(prompt_of(BLOCK, index), 10_000, asks)
        prompt = prompt_of(length, 1000)
        made.add(prompt, 1, asks=False)
        made.step()
        made.age()
        for _ in range(-(-length // CHUNK) + 3):
            made.step()
        taken, waits = [], []
        for _ in tqdm(range(repeats), desc=f"long prompts, {name}", unit=" prompts", disable=None):
            request_id = made.add(prompt, 1, asks)
            for later in range(12):
                taken.append(made.step())
                if request_id in taken[-1].sent:
                    waits.append(later)
        seconds = [step.seconds for step in taken]
        figures = [
            f"{1e3 * seconds_of_step:.2f} ms"
            for seconds_of_step in (median(seconds), max(seconds), max(step.ours for step in taken))
        ]
        sent_after = f"{median(waits):.0f} steps, at most {max(waits)}" if waits else ""
        lines.append(f"| {name} | {' | '.join(figures)} | {sent_after} |")
        gc.unfreeze()
    return "\n".join(lines)


def ends_table(running: int, num_tokens: int = 300, later: int = 60) -> str:
    """Markdown: CPU time of the scheduler's thread in the steps after which all requests have ended
    at once, while as many new ones begin."""
    lines = [
        "| | step before | longest step after | bytes sent | steps until all rows are sent |",
        "| --- " * 5 + "|",
    ]
    for name, asks in [("captured, not asked for", False), (AT_END, True)]:
        made = Steps(
            config=engine_config(max_num_seqs=running), forward_s=0.005, num_blocks=running * 30
        )
        for index in range(running):
            made.add(prompt_of(BLOCK, index), num_tokens, asks, at_end=True)
        made.step()
        made.age()
        before = median(made.step().cpu_seconds for _ in range(num_tokens - 2))
        for index in range(running):
            made.add(prompt_of(BLOCK, running + index), 10_000, asks, at_end=True)
        taken, last = [], 0
        for count in range(later):
            taken.append(made.step())
            if len(made.scheduler.aux_output_connector.output_queue):
                last = count + 1
        longest = max(step.cpu_seconds for step in taken)
        num_bytes = sum(step.num_bytes for step in taken)
        lines.append(
            f"| {name} | {1e3 * before:.1f} ms | {1e3 * longest:.1f} ms | {num_bytes / 1e6:.0f} MB | {last} |"
        )
        gc.unfreeze()
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for running in RUNNING:
        print(f"{running:,} requests\n\n{step_table(running)}\n")
    print(f"{RUNNING[1]:,} requests that end in one step\n\n{ends_table(RUNNING[1])}\n")
    print(long_prompt_table())


if __name__ == "__main__":
    main()
