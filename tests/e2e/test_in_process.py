"""A program's own engine, built with vLLM's argument: every row against a Hugging Face forward
pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.e2e.harness import NGRAM, OPTIONS, Oracle, prompt_of

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

pytestmark = pytest.mark.e2e


class OwnWorker(Worker):
    """Counts its steps, as the scheduler does."""

    steps = 0

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().execute_model(*args, **kwargs)


class Extension:
    steps: int

    def how_many(self) -> int:
        return self.steps


class OwnScheduler(Scheduler):
    steps = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        OwnScheduler.steps += 1
        return super().schedule(*args, **kwargs)


OWN = {
    "worker_cls": "OwnWorker",
    "worker_extension_cls": "Extension",
    "scheduler_cls": "OwnScheduler",
}


@contextmanager
def program(model: Path, **options: Any) -> Iterator[LLM]:
    made = LLM(
        str(model),
        max_num_batched_tokens=64,
        enable_return_routed_experts=True,
        **OPTIONS,
        **options,
    )
    yield made
    made.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def check(output: RequestOutput, oracle: Oracle) -> None:
    for choice in output.outputs:
        tokens = [*(output.prompt_token_ids or ()), *choice.token_ids][:-1]
        dense, routed = choice.routed_experts[:, :1], choice.routed_experts[:, 1:]
        assert not dense.any()  # vLLM's array has rows for layers without experts too
        assert oracle.wrong(routed.astype(np.int16), tokens) == []


def test_every_row_of_chunked_prompts_choices_and_prefix_hits(
    tiny_model: Path, oracle: Oracle
) -> None:
    """With classes of the program's own, which the capture is mixed into."""
    first = [prompt_of(length, seed=length) for length in (1, 63, 64, 65, 200)]
    # hits half of each
    second = [prompt[: len(prompt) // 2] + prompt_of(40, seed=7) for prompt in first]
    params = SamplingParams(n=2, max_tokens=24, temperature=1.0, ignore_eos=True)
    own = {name: f"{__name__}.{value}" for name, value in OWN.items()}
    with program(tiny_model, async_scheduling=False, **own) as llm:
        for prompts in (first, first, second):
            for output in llm.generate(
                [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False
            ):
                assert len(output.outputs) == 2
                check(output, oracle)
        assert llm.collective_rpc("how_many")[0] >= 3 * 24
    assert OwnScheduler.steps >= 3 * 24


def test_a_runner_that_runs_fewer_drafts_than_were_scheduled(
    tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's does with drafts that were found on the GPU: it takes what is no draft out of a
    copy of the step."""
    run, dropped = GPUModelRunner.execute_model, 0

    def run_fewer(runner: GPUModelRunner, step: SchedulerOutput, *more: Any, **options: Any) -> Any:
        nonlocal dropped
        counts, drafts = dict(step.num_scheduled_tokens), dict(step.scheduled_spec_decode_tokens)
        for index, (req_id, tokens) in enumerate(step.scheduled_spec_decode_tokens.items()):
            remaining = tokens[: (len(tokens) + index) % 3]
            counts[req_id] -= len(tokens) - len(remaining)
            drafts[req_id] = remaining
            if not remaining:
                del drafts[req_id]
        dropped += (total := sum(step.num_scheduled_tokens.values())) - sum(counts.values())
        assert total == step.total_num_scheduled_tokens
        fewer = replace(
            step,
            num_scheduled_tokens=counts,
            scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=sum(counts.values()),
        )
        return run(runner, fewer, *more, **options)

    monkeypatch.setattr(GPUModelRunner, "execute_model", run_fewer)
    prompts: list[Any] = [
        {"prompt_token_ids": prompt_of(3, seed) * 6 + prompt_of(seed, seed)} for seed in range(1, 7)
    ]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with program(tiny_model, speculative_config=NGRAM) as llm:
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        except TypeError as error:
            if "Cannot inspect kernel parameters" not in str(error):
                raise
            pytest.skip("this vLLM checks drafts with a Triton kernel, on CPUs too")  # 0.30
    for output in outputs:
        check(output, oracle)
    assert dropped > 50
