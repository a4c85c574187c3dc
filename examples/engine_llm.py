"""Routing of prompts, chats and the turns of a conversation, from an engine that this program
builds.

python examples/engine_llm.py Qwen/Qwen3-30B-A3B
"""

import json
import sys
from typing import Any

import numpy as np
from vllm import LLM, RequestOutput, SamplingParams

Answer = tuple[list[int], np.ndarray]
"""The tokens of a sequence, and the experts of those that were asked for, up to the last but
one."""


def answers_of(outputs: list[RequestOutput]) -> list[Answer]:
    return [
        ([*(output.prompt_token_ids or ()), *choice.token_ids], choice.routed_experts)
        for output in outputs
        for choice in output.outputs
    ]


def main(model: str, **options: Any) -> list[Answer]:
    llm = LLM(model, enable_return_routed_experts=True, **options)
    sampled = SamplingParams(n=2, max_tokens=12, temperature=1.0)
    answers = answers_of(llm.generate(["Which experts?", "Why these, and no others?"], sampled))
    chats: list[Any] = [
        [{"role": "user", "content": "Which experts?"}],
        [{"role": "user", "content": "Why?"}],
    ]
    answers += answers_of(llm.chat(chats, sampled, use_tqdm=False))

    # The next turn of a conversation: its rows begin where those of the turn before end.
    tokens, rows = answers[0]
    turn: Any = {"prompt_token_ids": [*tokens, *answers[2][0]]}
    params = SamplingParams(max_tokens=12, routed_experts_prompt_start=len(rows))
    answers += answers_of(llm.generate(turn, params, use_tqdm=False))
    for tokens, rows in answers:
        print(len(tokens), "tokens,", rows.shape, rows.dtype)
    return answers


if __name__ == "__main__":
    answers = main(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
