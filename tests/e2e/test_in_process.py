"""A program's own engine, built with vLLM's argument: every row against a Hugging Face forward pass."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from tests.e2e.harness import OPTIONS, Oracle, prompt_of

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    made = LLM(str(tiny_model), max_num_batched_tokens=64, enable_return_routed_experts=True, **OPTIONS)
    yield made
    made.llm_engine.engine_core.shutdown()


def test_every_row_of_chunked_prompts_choices_and_prefix_hits(llm: LLM, oracle: Oracle) -> None:
    first = [prompt_of(length, seed=length) for length in (1, 63, 64, 65, 200)]
    second = [prompt[: len(prompt) // 2] + prompt_of(40, seed=7) for prompt in first]  # hits half of each
    params = SamplingParams(n=2, max_tokens=24, temperature=1.0, ignore_eos=True)
    for prompts in (first, first, second):
        for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False):
            assert output.prompt_token_ids is not None
            for choice in output.outputs:
                tokens = [*output.prompt_token_ids, *choice.token_ids][:-1]
                dense, routed = choice.routed_experts[:, :1], choice.routed_experts[:, 1:]
                assert not dense.any()  # vLLM's array has rows for layers without experts too
                assert oracle.wrong(routed.astype(np.int16), tokens) == []
