"""One engine in a process of its own, driven over standard input and output: a JSON line for each
run.

Its load is that of a rollout: requests of one prompt length that decode together, every output read
as it comes.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from typing import Any

import numpy as np
from vllm import AsyncEngineArgs, SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine.async_llm import AsyncLLM

from routed_experts.capture import SCHEDULER, WORKERS
from routed_experts.capture.wire.rows import INPUT_KEY, RECOMPUTE_KEY, without_steps
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.protocol.routing_input import routing_args
from routed_experts.server.outputs.processor import RowBuffers, opt_in
from routed_experts.server.outputs.row_buffer import RowBuffer

VARIANTS = ("off", "vllm", "ours", "input", "recompute")
"""Without a capture; vLLM's; ours; ours, with requests that may say which experts they take; and with
tokens that take their experts again when their KV is computed again."""

OURS = ("ours", "input", "recompute")


def make_engine(args: argparse.Namespace) -> AsyncLLM:
    """The engine of a variant; all else is equal between them."""
    options: dict[str, Any] = json.loads(args.engine)
    if args.variant == "vllm":
        os.environ["VLLM_PLUGINS"] = ""  # with ours, the argument means our capture
        options["enable_return_routed_experts"] = True
    elif args.variant in OURS:
        options |= {"worker_cls": WORKERS[args.device], "scheduler_cls": SCHEDULER}
    if args.variant == "input":
        options["additional_config"] = {INPUT_KEY: True}
    elif args.variant == "recompute":
        options["additional_config"] = {INPUT_KEY: True, RECOMPUTE_KEY: True}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))


def steering_of(info: dict[str, Any]) -> dict[str, Any]:
    """Two experts of each layer never, one always."""
    bias = np.zeros((info["num_layers"], info["num_experts"]), np.float32)
    bias[:, [5, 77]] = -np.inf
    bias[:, 9] = np.inf
    return routing_args(bias=bias)


class Load:
    """Runs requests on an engine and times their tokens."""

    def __init__(self, engine: AsyncLLM, variant: str, info: dict[str, Any]) -> None:
        """`info`: what the worker says of its rows; {} without our capture."""
        self._engine = engine
        self._num_layers = info.get("num_layers", 0)
        self._steering = steering_of(info) if variant == "input" else {}
        self._num_to_steer = 0
        self._asks_for_steps = False
        self._variant = variant
        self._vocab = engine.vllm_config.model_config.get_vocab_size()
        self._random = random.Random(1)
        self._next_id = 0
        self._num_recomputed = 0  # as the engine said last
        if variant in OURS:
            RowBuffers.install(engine.output_processor).on_stats = self._take_stats

    def _take_stats(self, stats: EngineStats) -> None:
        self._num_recomputed = stats.rows_recomputed

    def prompt(self, length: int, seed: int | None = None) -> list[int]:
        """One that `seed` decides, or one that never came before."""
        dice = self._random if seed is None else random.Random(seed)
        return [dice.randrange(self._vocab) for _ in range(length)]

    async def request(
        self, prompt: list[int], new_tokens: int, routing: bool, start: int = 0
    ) -> tuple[list[float], list[int]]:
        """Arrival times of the tokens of one request, in seconds, and the tokens. Checks that its
        rows from position `start` on came, if it asked for them."""
        self._next_id += 1
        asks = self._variant == "vllm" or (routing and self._variant in OURS)
        params = self._params(new_tokens, asks, start)
        times: list[float] = []
        tokens: list[int] = []
        num_rows = 0
        async for output in self._engine.generate(tokens_input(prompt), params, str(self._next_id)):
            now = time.perf_counter()
            tokens += output.outputs[0].token_ids
            times += [now] * (len(tokens) - len(times))
            end = len(prompt) + len(tokens) - 1
            num_rows += self._num_rows(output.outputs[0].routed_experts, start + num_rows, end)
        expected = len(prompt) + new_tokens - 1 - start if asks else 0
        if num_rows != expected:
            raise RuntimeError(f"{self._variant}: {num_rows} rows of {expected} came back")
        return times, tokens

    def _params(self, new_tokens: int, asks: bool, start: int) -> SamplingParams:
        """Of the next request, which `asks` for rows from position `start` on, or for none."""
        params = SamplingParams(
            max_tokens=new_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        if self._num_to_steer:
            self._num_to_steer -= 1
            params.extra_args = dict(self._steering)
        if asks and self._variant in OURS:
            opt_in(params, prompt_start=start, weights=False, steps=self._asks_for_steps)
        elif asks:
            params.routed_experts_prompt_start = start
        return params

    def _num_rows(self, carried: Any, first: int, end: int) -> int:
        """How many rows came with an output: of a buffer of ours, those from position `first` to
        `end`, which are taken."""
        if isinstance(carried, RowBuffer):
            taken = carried.take(first, end)
            if self._asks_for_steps:
                taken = [*map(without_steps, taken)]
            return sum(len(part) for part in taken if part.shape[1] == self._num_layers)
        return 0 if carried is None else len(carried)

    async def conversation(
        self,
        prompt_len: int,
        new_tokens: int,
        routing: bool,
        turns: int,
        new_rows: bool,
        seed: int | None,
    ) -> list[float]:
        """Turns, whose prompts are all tokens so far and `prompt_len` more. With `new_rows`, each
        asks for rows that the turns before did not bring."""
        known: list[int] = []
        times: list[float] = []
        for _ in range(turns):
            start = max(len(known) - 1, 0) if new_rows else 0
            prompt = known + self.prompt(prompt_len, seed)
            arrived, tokens = await self.request(prompt, new_tokens, routing, start)
            known, times = prompt + tokens, times + arrived
        return times

    async def batch(
        self,
        size: int,
        prompt_len: int,
        new_tokens: int,
        routing: bool,
        long: int,
        again: bool,
        turns: int,
        new_rows: bool,
        steered: int = 0,
        steps: bool = False,
    ) -> dict[str, float]:
        """`size` requests or conversations at once, and with `long` one request more with a prompt
        of that length among them; with `again`, the prompts of the batch before. The first
        `steered` requests say which experts are chosen never and always. `steps`: whether those
        that ask for rows ask for their steps too.

        Returns the output tokens per second, and of the `size` requests the mean time to the first
        token, the mean time per token and the inter-token latency: with `long`, that of the tokens
        which waited while the long request was served. Also how many tokens were computed again
        with the experts that they had.
        """
        self._num_to_steer = steered
        self._asks_for_steps = steps
        num_recomputed = self._num_recomputed
        began = time.perf_counter()
        seeds = range(size) if again else [None] * size
        sizes = (prompt_len, new_tokens, routing, turns, new_rows)
        tasks = [asyncio.create_task(self.conversation(*sizes, seed)) for seed in seeds]
        sent, answered = -np.inf, np.inf
        if long:
            await asyncio.sleep(1.0)
            sent = time.perf_counter()
            await self.request(self.prompt(long), 8, routing)
            answered = time.perf_counter()
        times = [np.array(await task) for task in tasks]
        seconds = max(float(t[-1]) for t in times) - began
        gaps = np.concatenate([np.diff(t)[(t[1:] > sent) & (t[:-1] < answered)] for t in times])
        decode = [float(t[-1] - t[0]) / (len(t) - 1) for t in times]
        return {
            "tokens_per_s": size * turns * new_tokens / seconds,
            "tpot_ms": 1e3 * float(np.mean(decode)),
            "itl_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
            "itl_max_ms": 1e3 * float(gaps.max()),
            "first_token_ms": 1e3 * float(np.mean([t[0] for t in times]) - began),
            "recomputed": self._num_recomputed - num_recomputed,
        }


async def serve(args: argparse.Namespace, answers: Any) -> None:
    engine = make_engine(args)
    info = (await engine.collective_rpc("routed_experts_info"))[0] if args.variant in OURS else {}
    load = Load(engine, args.variant, info)
    # as vLLM's server does: otherwise a full collection stops all requests for half a second
    freeze_gc_heap()
    print(json.dumps({"ready": True, "info": info}), file=answers, flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await load.batch(**json.loads(line))), file=answers, flush=True)
    engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--engine", required=True, help="engine arguments, as JSON")
    parser.add_argument("--device", choices=sorted(WORKERS), required=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log, not among the answers
    asyncio.run(serve(parser.parse_args(), answers))


if __name__ == "__main__":
    main()
