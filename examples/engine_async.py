"""Routing from an `AsyncLLM`, in the three ways in which it hands out what it generates.

python examples/engine_async.py Qwen/Qwen3-30B-A3B
"""

import asyncio
import json
import sys
from typing import Any

import numpy as np
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

Answer = tuple[list[int], np.ndarray]
"""The tokens of a sequence, and the experts of all but the last."""


async def whole(engine: AsyncLLM, prompt: str, kind: RequestOutputKind) -> Answer:
    """The last output has it all, with `FINAL_ONLY`, which gives no other, and with
    `CUMULATIVE`."""
    params = SamplingParams(max_tokens=30, output_kind=kind)
    *_, output = [
        output async for output in engine.generate(prompt, params, f"{kind.name} {prompt}")
    ]
    (choice,) = output.outputs
    return [*(output.prompt_token_ids or ()), *choice.token_ids], choice.routed_experts


async def in_pieces(engine: AsyncLLM, prompt: str, pause_s: float) -> Answer:
    """Each output has the rows that its tokens made known; one that waited for a slow reader has
    those of several."""
    params = SamplingParams(max_tokens=30, output_kind=RequestOutputKind.DELTA)
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    async for output in engine.generate(prompt, params, f"DELTA {pause_s} {prompt}"):
        (choice,) = output.outputs
        tokens += (
            choice.token_ids if tokens else [*(output.prompt_token_ids or ()), *choice.token_ids]
        )
        rows.append(choice.routed_experts)
        await asyncio.sleep(pause_s)
    return tokens, np.concatenate(rows)


async def main(model: str, **options: Any) -> list[Answer]:
    args = AsyncEngineArgs(model, enable_return_routed_experts=True, **options)
    engine = AsyncLLM.from_engine_args(args)
    answers = await asyncio.gather(
        whole(engine, "Which experts?", RequestOutputKind.FINAL_ONLY),
        whole(engine, "Which experts?", RequestOutputKind.CUMULATIVE),
        in_pieces(engine, "Which experts?", pause_s=0),
        in_pieces(engine, "Which experts, slowly?", pause_s=0.1),
    )
    for tokens, rows in answers:
        print(len(tokens), "tokens,", rows.shape, rows.dtype)
    engine.shutdown()
    return answers


if __name__ == "__main__":
    answers = asyncio.run(
        main(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
    )
