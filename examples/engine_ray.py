"""Routing from an engine in a Ray actor, as most training frameworks have it.

    python examples/engine_ray.py Qwen/Qwen3-30B-A3B

Needs Ray. Give the actor GPUs with `@ray.remote(num_gpus=1)`.
"""

import json
import sys
from typing import Any

import numpy as np
import ray

Answer = tuple[list[int], np.ndarray]
"""The tokens of a sequence, and the experts of all but the last."""


@ray.remote
class Rollout:
    def __init__(self, model: str, **options: Any) -> None:
        from vllm import LLM

        self.llm = LLM(model, enable_return_routed_experts=True, **options)

    def generate(self, prompts: list[str]) -> list[Answer]:
        from vllm import SamplingParams

        outputs = self.llm.generate(
            prompts, SamplingParams(n=2, max_tokens=12, temperature=1.0), use_tqdm=False
        )
        return [
            ([*(output.prompt_token_ids or ()), *choice.token_ids], choice.routed_experts)
            for output in outputs
            for choice in output.outputs
        ]


def main(model: str, **options: Any) -> list[Answer]:
    ray.init()
    rollout = Rollout.remote(model, **options)
    answers: list[Answer] = ray.get(rollout.generate.remote(["Which experts?", "Why these?"]))
    for tokens, rows in answers:
        print(len(tokens), "tokens,", rows.shape, rows.dtype)
    ray.shutdown()
    return answers


if __name__ == "__main__":
    answers = main(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
