"""What the capture costs the scheduler's thread, which every request waits for: vLLM's real scheduler, and no model.

A model's steps are played: tokens and rows are there when they are asked for, after a pause as long as a forward pass.
"""

import gc
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
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

from bench.shapes import QWEN3_30B_A3B
from routed_experts.capture.engine.transport import attach
from routed_experts.capture.message import OPT_IN_ARG, OptIn, request_of_prompt
from routed_experts.capture.pipeline import StepRows

BLOCK = 16
CHUNK = 8192
NUM_BLOCKS = 6000
RUNNING = 256
LONG = 32_768


class Steps:
    """A scheduler, and the model behind it.

    Args:
        captures: whether the scheduler is ours, or vLLM's own.
        num_layers, top_k: of the model.
        forward_s: seconds that a forward pass takes.
    """

    def __init__(self, captures: bool, num_layers: int = 48, top_k: int = 8, forward_s: float = 0.0) -> None:
        config = _config(captures)
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        kv = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
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
        self._captures = captures
        self._rows = np.random.default_rng(0).integers(0, 128, (CHUNK, num_layers, top_k)).astype(np.int16)
        self._forward_s = forward_s
        self._added = 0

    def add(self, prompt: list[int], max_tokens: int, asks: bool) -> str:
        """Adds a request that asks for its routing or not; gives its id."""
        self._added += 1
        opt_in = OptIn(0, self._added.to_bytes(16, "little"), shared=False)
        params = SamplingParams(max_tokens=max_tokens, extra_args={OPT_IN_ARG: opt_in.encode()} if asks else None)
        request = Request(str(self._added), prompt, params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request.request_id

    def step(self, clock: Callable[[], float]) -> tuple[float, set[str]]:
        """One step: seconds of the scheduler's thread, and the ids of the requests whose prompts' rows were sent."""
        began = clock()
        scheduled = self.scheduler.schedule()
        seconds = clock() - began
        output = self._run(scheduled)
        time.sleep(self._forward_s)
        began = clock()
        messages = self.scheduler.update_from_output(scheduled, output)
        seconds += clock() - began
        ids = (request_of_prompt(output.request_id) for _, message in messages.items() for output in message.outputs)
        return seconds, {request_id for request_id in ids if request_id is not None}

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids = list(step.num_scheduled_tokens)
        sampled, slots = [], []
        for request_id, count in step.num_scheduled_tokens.items():
            start, request = starts[request_id], self.scheduler.requests[request_id]
            sampled.append([7] if start + count >= request.num_tokens else [])
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            positions = np.arange(start, start + count)
            slots.append(np.array(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK)
        output = ModelRunnerOutput(ids, {request_id: index for index, request_id in enumerate(ids)}, sampled)
        if ids and self._captures:
            offsets = np.cumsum([0, *step.num_scheduled_tokens.values()], dtype=np.int64)
            attach(output, StepRows(self._rows[: offsets[-1]].copy(), np.concatenate(slots), offsets))
        return output


def _config(captures: bool) -> VllmConfig:
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    ours = {"scheduler_cls": "routed_experts.capture.engine.scheduler.make_scheduler"}
    return EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=LONG + 1024,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=RUNNING,
        async_scheduling=False,
        **(ours if captures else {}),
    ).create_engine_config()


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


VARIANTS = [("vLLM's own", False, False), ("captured, not asked for", True, False), ("returned", True, True)]


def queue_table(waiting: tuple[int, ...] = (0, 5_000, 20_000), steps: int = 200) -> str:
    """Markdown: median CPU time of the scheduler's thread in a step of 256 requests, with others in the queue."""
    lines = ["| scheduler | " + " | ".join(f"{count:,} waiting" for count in waiting) + " |"]
    lines.append("| --- " * (len(waiting) + 1) + "|")
    for name, captures, asks in VARIANTS:
        made, cells, added = Steps(captures), [], 0
        for index in range(RUNNING):
            made.add(_prompt(BLOCK, index), 10_000, asks)
        for count in waiting:
            for _ in range(count - added):
                made.add([1, 2, 3], 8, asks)
            added = count
            gc.collect()
            gc.freeze()  # as vLLM's engine does with what is there at its start
            seconds = [made.step(time.thread_time)[0] for _ in range(steps)]
            cells.append(f"{1e6 * median(seconds):.0f} µs")
        gc.unfreeze()
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def long_prompt_table(length: int = LONG, repeats: int = 20, forward_s: float = 0.01, num_running: int = 64) -> str:
    """Markdown: time that the scheduler's thread takes in steps of 64 requests, while a long prompt that is all in the
    prefix cache has its first token and its rows are read; and how many steps later they are sent."""
    lines = ["| scheduler | median step | longest step | rows sent after |", "| --- | --- | --- | --- |"]
    for name, captures, asks in VARIANTS:
        made = Steps(captures, forward_s=forward_s)
        for index in range(num_running):
            made.add(_prompt(BLOCK, index), 10_000, asks)
        prompt = _prompt(length, 1000)
        made.add(prompt, 1, asks=False)
        for _ in range(-(-length // CHUNK) + 3):
            made.step(time.perf_counter)
        seconds, waits = [], []
        for _ in range(repeats):
            request_id = made.add(prompt, 1, asks)
            for later in range(12):
                taken, sent = made.step(time.perf_counter)
                seconds.append(taken)
                if request_id in sent:
                    waits.append(later)
        sent_after = f"{median(waits):.0f} steps, at most {max(waits)}" if waits else ""
        lines.append(f"| {name} | {1e3 * median(seconds):.2f} ms | {1e3 * max(seconds):.2f} ms | {sent_after} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(queue_table())
    print()
    print(long_prompt_table())
