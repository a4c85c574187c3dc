"""An engine with requests that come and go together, of which some say which experts they take.

    python -m tests.e2e.steered_in_motion MODEL MODE

Prints what was found, as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from routed_experts.protocol.routing_input import RoutingInput
from tests.e2e.harness import NGRAM, prompt_of
from tests.e2e.steered import INPUT, Answered, Program, Reference, program

NEW_TOKENS = 60

_FEW_BLOCKS: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "num_gpu_blocks_override": 10,
    "block_size": 64,
    "disable_log_stats": False,
}

MODES: dict[str, dict[str, Any]] = {
    "chunks of 16 tokens": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "preemption": _FEW_BLOCKS,
    "preemption, replay on recomputation": {
        **_FEW_BLOCKS,
        "additional_config": {**INPUT, "enable_routed_experts_replay_on_recompute": True},
    },
    "drafts": {"speculative_config": NGRAM, "disable_log_stats": False},
    "asynchronous scheduling": {"async_scheduling": True},
    "compiled": {"enforce_eager": False},
    "tensor parallel": {"tensor_parallel_size": 2},
}


def inputs_of(running: Program, prompts: list[list[int]]) -> list[RoutingInput | None]:
    """A third of the requests say nothing, a third give rows, a third have a bias."""
    bias = running.zero_bias()
    bias[:, 0] = -np.inf
    bias[-1, 3] = np.inf
    inputs: list[RoutingInput | None] = []
    for index, prompt in enumerate(prompts):
        rows = running.random_rows(len(prompt), seed=index)
        inputs.append((None, RoutingInput(rows=rows), RoutingInput(bias=bias))[index % 3])
    return inputs


def figures_of(running: Program, reference: Reference) -> dict[str, Any]:
    lengths = (150, 120, 200, 90, 180, 60)
    prompts = [prompt_of(length, seed=length) for length in lengths]
    prompts[:2] = [[40, 41, 42, 43] * 30, [50, 51, 52] * 40]  # for drafts to find
    inputs = inputs_of(running, prompts)
    answers = running.run(prompts, inputs, max_tokens=NEW_TOKENS)
    forced = list(zip(prompts, inputs, answers, strict=True))[1::3]
    return {
        "rows as given": all(
            np.array_equal(answer.rows[: len(prompt)], said.rows)
            for prompt, said, answer in forced
            if said is not None
        ),
        "banned": sum(int((answer.rows == 0).sum()) for answer in answers[2::3]),
        "always": all(bool((answer.rows[:, -1] == 3).any(1).all()) for answer in answers[2::3]),
        "off": max(
            off(prompt, answer, reference)
            for prompt, said, answer in zip(prompts, inputs, answers, strict=True)
            if said is None or said.bias is None
        ),
        **counters(running),
    }


def off(prompt: list[int], answer: Answered, reference: Reference) -> float:
    """By how much log-probabilities of prompt and answer differ from those of transformers with the
    experts that were captured."""
    tokens = [*prompt, *answer.tokens]
    unknown_last = np.full((1, *answer.rows.shape[1:]), -1)
    expected = reference.logprobs(tokens, np.concatenate([answer.rows, unknown_last]))
    actual = np.concatenate([answer.prompt_logprobs, answer.logprobs])
    return float(np.abs(actual - expected).max())


def counters(running: Program) -> dict[str, int]:
    names = ("vllm:num_preemptions", "vllm:spec_decode_num_accepted_tokens")
    try:
        metrics = running.llm.get_metrics()
    except AssertionError:  # without statistics
        return {}
    return {metric.name: metric.value for metric in metrics if metric.name in names}


def main(model: str, mode: str) -> None:
    has_process = mode in ("asynchronous scheduling", "tensor parallel")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(has_process))
    if mode == "asynchronous scheduling":
        import tests.e2e.async_on_cpu  # noqa: F401
    torch.manual_seed(0)
    with program(Path(model), **MODES[mode]) as running:
        result = figures_of(running, Reference(Path(model), running.layer_ids))
        config = running.llm.llm_engine.vllm_config
        result["asynchronous"] = config.scheduler_config.async_scheduling
        print("FOUND " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
