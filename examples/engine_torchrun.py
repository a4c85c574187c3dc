"""Routing under torchrun: each process has an engine of its own, and together they are one
tensor-parallel model.

    torchrun --nproc-per-node 2 examples/engine_torchrun.py Qwen/Qwen3-30B-A3B

Every process gets the same answers, with all rows.
"""

import json
import os
import sys
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as vLLM asks of such engines

Answer = tuple[list[int], np.ndarray]
"""The tokens of a sequence, and the experts of all but the last."""


def main(model: str, **options: Any) -> list[Answer]:
    llm = LLM(
        model,
        enable_return_routed_experts=True,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        seed=1,  # all processes must draw the same tokens
        **options,
    )
    sampled = SamplingParams(n=2, max_tokens=12, temperature=1.0)
    answers = []
    for output in llm.generate(["Which experts?", "Why these?"], sampled, use_tqdm=False):
        for choice in output.outputs:
            answers.append(
                ([*(output.prompt_token_ids or ()), *choice.token_ids], choice.routed_experts)
            )
            print(
                "process",
                os.environ["RANK"],
                len(answers[-1][0]),
                "tokens,",
                choice.routed_experts.shape,
            )
    return answers


if __name__ == "__main__":
    answers = main(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
