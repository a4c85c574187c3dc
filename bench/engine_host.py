"""One engine in a process of its own, driven over standard input and output: a JSON line for each run.

Its load is that of a rollout: requests of one prompt length that decode together, every output read as it comes.
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
from routed_experts.server.outputs.row_buffer import RowBuffer, RowBuffers, opt_in

VARIANTS = ("off", "vllm", "ours")


def make_engine(args: argparse.Namespace) -> AsyncLLM:
    """The engine of a variant; all else is equal between them."""
    options: dict[str, Any] = json.loads(args.engine)
    if args.variant == "vllm":
        os.environ["VLLM_PLUGINS"] = ""  # with ours, the argument means our capture
        options["enable_return_routed_experts"] = True
    elif args.variant == "ours":
        options |= {"worker_cls": WORKERS[args.device], "scheduler_cls": SCHEDULER}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))


class Load:
    """Runs requests on an engine and times their tokens."""

    def __init__(self, engine: AsyncLLM, variant: str, num_layers: int) -> None:
        """`num_layers`: of a row."""
        self._engine = engine
        self._num_layers = num_layers
        self._variant = variant
        self._vocab = engine.vllm_config.model_config.get_vocab_size()
        self._random = random.Random(1)
        self._next_id = 0
        if variant == "ours":
            RowBuffers.install(engine.output_processor)

    async def request(self, prompt_len: int, new_tokens: int, routing: bool, seed: int | None = None) -> list[float]:
        """Arrival times of the tokens of one request, in seconds; checks that its rows came if it asked for them.

        Args:
            seed: decides its prompt; else it is one that never came before.
        """
        self._next_id += 1
        dice = self._random if seed is None else random.Random(seed)
        prompt = tokens_input([dice.randrange(self._vocab) for _ in range(prompt_len)])
        params = SamplingParams(
            max_tokens=new_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        if routing and self._variant == "ours":
            opt_in(params, prompt_start=0, weights=False)
        times: list[float] = []
        rows = 0
        async for output in self._engine.generate(prompt, params, str(self._next_id)):
            now = time.perf_counter()
            times += [now] * len(output.outputs[0].token_ids)
            carried = output.outputs[0].routed_experts
            if isinstance(carried, RowBuffer):
                taken = carried.take(rows, prompt_len + len(times) - 1)
                rows += sum(len(part) for part in taken if part.shape[1] == self._num_layers)
            elif carried is not None:
                rows += len(carried)
        expected = (
            prompt_len + new_tokens - 1 if self._variant == "vllm" or (routing and self._variant == "ours") else 0
        )
        if rows != expected:
            raise RuntimeError(f"{self._variant}: {rows} rows of {expected} came back")
        return times

    async def batch(
        self, size: int, prompt_len: int, new_tokens: int, routing: bool, long: int, again: bool
    ) -> dict[str, float]:
        """`size` requests at once, and with `long` one more with a prompt of that length among them; with `again`, the
        prompts of the batch before.

        Returns the output tokens per second, and of the `size` requests the mean time to the first token, the mean time
        per token and the inter-token latency: with `long`, that of the tokens which waited while the long request was
        served.
        """
        began = time.perf_counter()
        seeds = range(size) if again else [None] * size
        tasks = [asyncio.create_task(self.request(prompt_len, new_tokens, routing, seed)) for seed in seeds]
        sent, answered = -np.inf, np.inf
        if long:
            await asyncio.sleep(1.0)
            sent = time.perf_counter()
            await self.request(long, 8, routing)
            answered = time.perf_counter()
        times = [np.array(await task) for task in tasks]
        seconds = max(float(t[-1]) for t in times) - began
        gaps = np.concatenate([np.diff(t)[(t[1:] > sent) & (t[:-1] < answered)] for t in times])
        decode = [float(t[-1] - t[0]) / (len(t) - 1) for t in times]
        return {
            "tokens_per_s": size * new_tokens / seconds,
            "tpot_ms": 1e3 * float(np.mean(decode)),
            "itl_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
            "itl_max_ms": 1e3 * float(gaps.max()),
            "first_token_ms": 1e3 * float(np.mean([t[0] for t in times]) - began),
        }


async def serve(args: argparse.Namespace, answers: Any) -> None:
    engine = make_engine(args)
    info = (await engine.collective_rpc("routed_experts_info"))[0] if args.variant == "ours" else {}
    load = Load(engine, args.variant, info.get("num_layers", 0))
    freeze_gc_heap()  # as vLLM's server does: otherwise a full collection stops all requests for half a second
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
