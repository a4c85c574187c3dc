"""vLLM's own capture and this one, behind the same argument, on the same requests: the same arrays,
bit for bit.

Each in a process of its own, as one excludes the other.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.harness import FULL_PRECISION, OPTIONS, prompt_of, run_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SIZES = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 64}


def generate(model: str, out: str) -> None:
    """What runs in each process: all prompts at once, and again with a start, when their prefixes
    are cached."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, enable_return_routed_experts=True, **{**OPTIONS, **SIZES})
    answers = []
    for start in (0, 1):
        # vLLM's own ended the engine until 0.30 where a start left nothing of a prompt.
        lengths = (1 + start, 15, 16, 17, 64, 65, 300)
        prompts: list[Any] = [{"prompt_token_ids": prompt_of(length, length)} for length in lengths]
        params = SamplingParams(n=2, max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
        params.routed_experts_prompt_start = start
        for output in llm.generate(prompts, params, use_tqdm=False):
            answers += [
                (list(choice.token_ids), choice.routed_experts) for choice in output.outputs
            ]
    Path(out).write_bytes(
        pickle.dumps((llm.llm_engine.vllm_config.parallel_config.worker_cls, answers))
    )


def test_the_same_arrays(tiny_model: Path, tmp_path: Path) -> None:
    results = []
    for plugins in ("", "routed_experts"):
        out = tmp_path / f"answers{plugins}"
        env = {**FULL_PRECISION, "VLLM_PLUGINS": plugins}
        run_program("tests.gpu.test_side_by_side", str(tiny_model), str(out), env=env)
        results.append(pickle.loads(out.read_bytes()))
    (vllms_worker, vllms), (our_worker, ours) = results
    assert ("routed_experts" in vllms_worker, "routed_experts" in our_worker) == (False, True)
    assert len(vllms) == len(ours) == 28
    for (their_tokens, theirs), (tokens, rows) in zip(vllms, ours, strict=True):
        assert tokens == their_tokens
        assert (rows.dtype, rows.shape, rows.strides) == (
            theirs.dtype,
            theirs.shape,
            theirs.strides,
        )
        assert np.array_equal(rows, theirs)


if __name__ == "__main__":
    generate(*sys.argv[1:])
