"""Turns of a conversation in a program's own engine: each asks for the rows that its history lacks.
Needs vLLM."""

from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from routed_experts.protocol.batch import join_turns, shared_prefix
from routed_experts.protocol.collect import Routing


def turn(
    llm: LLM, prompt: Sequence[int], history: Routing | None = None, **options: Any
) -> Routing:
    """The rows of a prompt (token ids) and its response, with those of `history` where the prompt
    begins like it."""
    known = history and shared_prefix(history, prompt, media=())  # text alone
    start = known.end if known else 0
    params = SamplingParams(**options, routed_experts_prompt_start=start)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params)
    (choice,) = output.outputs
    ids = {"prompt_token_ids": tuple(prompt), "token_ids": tuple(choice.token_ids)}
    new = Routing(choice.routed_experts, start=start, prompt_len=len(prompt), media=(), **ids)
    return join_turns([known, new]) if known else new
