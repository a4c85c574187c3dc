"""An engine whose requests lose KV, which is computed again by routers that choose otherwise.

    python -m tests.e2e.recomputed MODEL MODE

Prints what was found, as JSON: how many tokens of a request's KV have other experts in the end than
its rows say, and by how much log-probabilities differ from those of transformers with these rows.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from routed_experts.capture.wire.rows import INPUT_KEY, RECOMPUTE_KEY
from tests.e2e.harness import NGRAM, prompt_of
from tests.e2e.noisy_routers import choose_again, make_stage_ready
from tests.e2e.rows_of_kv import RowsOfKV
from tests.e2e.steered import Program, Reference, program
from tests.e2e.steered_in_motion import NEW_TOKENS, counters, inputs_of, off

BLOCK = 64
LENGTHS = (150, 120, 200, 90, 180, 60)

_FEW_BLOCKS: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 10,
    "max_model_len": 512,
    "disable_log_stats": False,
    "additional_config": {INPUT_KEY: True, RECOMPUTE_KEY: True},
}

_TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
_PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}
_NO_FLAG: dict[str, Any] = {"additional_config": {INPUT_KEY: True}}

WITHOUT_FLAG: dict[str, dict[str, Any]] = {
    "without the flag": _NO_FLAG,
    "tensor parallel, without the flag": {**_TENSOR, **_NO_FLAG},
    "pipeline parallel, without the flag": {**_PIPELINE, **_NO_FLAG},
}

MODES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "drafts": {"speculative_config": NGRAM},
    "tensor parallel": _TENSOR,
    "pipeline parallel": _PIPELINE,
    **WITHOUT_FLAG,
}


def figures_of(running: Program, reference: Reference) -> dict[str, Any]:
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    prompts[:2] = [[40, 41, 42, 43] * 30, [50, 51, 52] * 40]  # for drafts to find
    inputs = inputs_of(running, prompts)
    running.llm.collective_rpc(make_stage_ready)
    running.llm.collective_rpc(choose_again)
    kv = RowsOfKV(running)
    answers = running.run(prompts, inputs, max_tokens=NEW_TOKENS)
    forced = list(zip(prompts, inputs, answers, strict=True))[1::3]
    return {
        "computed again": kv.num_again,
        "given": kv.num_given,
        "changed": kv.num_changed(answers),
        "rows as given": all(
            np.array_equal(answer.rows[: len(prompt)], said.rows)
            for prompt, said, answer in forced
            if said is not None
        ),
        "banned": sum(int((answer.rows == 0).sum()) for answer in answers[2::3]),
        "off": max(
            off(prompt, answer, reference) for prompt, answer in zip(prompts, answers, strict=True)
        ),
        **counters(running),
    }


def main(model: str, mode: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with program(Path(model), **{**_FEW_BLOCKS, **MODES[mode]}) as running:
        reference = Reference(Path(model), running.layer_ids)
        result = figures_of(running, reference)
        print("FOUND " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
