"""How rows travel between pipeline stages, with vLLM's own tensors and no second process."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors

from routed_experts.capture.capturer import Capturer, RowShape
from routed_experts.capture.engine import stage
from routed_experts.capture.engine.stage import PipelineStage

N, HIDDEN, K = 3, 8, 4


class Runner:
    """A model runner of one stage, as far as it handles what came from the stage before.

    Attributes:
        seen: what happened, in order.
    """

    def __init__(self, version: int, is_last: bool) -> None:
        self.version = version
        self.is_last = is_last
        self.seen: list[str] = []
        self.intermediate_tensors = IntermediateTensors({"hidden_states": torch.zeros(8, HIDDEN)})

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Module()

    def execute_model(self, scheduler_output: Any, received: IntermediateTensors | None = None) -> Any:
        self.seen.append("inputs prepared")
        if received is not None:
            if self.version == 1:
                GPUModelRunner.sync_and_gather_intermediate_tensors(self, N, received, True)
            else:
                for name, tensor in self.intermediate_tensors.tensors.items():
                    tensor[:N].copy_(received.tensors[name][:N])
        self.seen.append("forward pass")
        return None if self.is_last else IntermediateTensors({"hidden_states": torch.ones(N, HIDDEN)})


@pytest.fixture
def two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "get_pp_group", lambda: SimpleNamespace(world_size=2))


def capturer(index: int) -> Capturer:
    """Of a stage with one MoE layer, whose ids are all `index + 1`."""
    made = Capturer(
        RowShape((0, 1), 16, K), [1, 1], index, max_tokens=8, max_steps_in_flight=1, device=torch.device("cpu")
    )
    made.cache.ids.fill_(index + 1)
    return made


STEP = SimpleNamespace(total_num_scheduled_tokens=N)


@pytest.mark.usefixtures("two_stages")
@pytest.mark.parametrize("version", [1, 2])
def test_rows_go_with_the_hidden_states(version: int) -> None:
    """They are sent as memory of their own, and taken where the runner waits for the transfer, not before."""
    first_runner, last_runner = Runner(version, is_last=False), Runner(version, is_last=True)
    first_capturer, last_capturer = capturer(0), capturer(1)
    PipelineStage(first_runner, first_capturer)
    last = PipelineStage(last_runner, last_capturer)

    sent = first_runner.execute_model(STEP).tensors
    first_capturer.cache.ids.fill_(-1)  # the next step begins while this one's rows are being sent
    transfer = SimpleNamespace(wait=lambda: last_runner.seen.append("transfer waited for"))
    received = AsyncIntermediateTensors(dict(sent), comm_handles=[transfer])

    assert last_runner.execute_model(STEP, received) is None
    assert last_runner.seen == ["inputs prepared", "transfer waited for", "forward pass"]
    assert (last_runner.intermediate_tensors.tensors["hidden_states"][:N] == 1).all()
    step = last_capturer.submit(torch.arange(N), np.array([0, N]), last.upstream).result()
    assert np.unique(step.rows[:, 0]).tolist() == [1]
    assert np.unique(step.rows[:, 1]).tolist() == [2]


@pytest.mark.usefixtures("two_stages")
def test_rows_of_another_step_are_not_taken() -> None:
    runner = Runner(1, is_last=True)
    last_capturer = capturer(1)
    last = PipelineStage(runner, last_capturer)
    hidden = torch.ones(N, HIDDEN)
    runner.execute_model(STEP, IntermediateTensors({"hidden_states": hidden, "routed_experts": torch.zeros(N, 1, K)}))
    assert last.upstream is not None
    runner.execute_model(STEP, IntermediateTensors({"hidden_states": hidden}))
    with pytest.raises(ValueError, match="did not come with the step"):
        last_capturer.submit(torch.arange(N), np.array([0, N]), last.upstream)


def test_a_single_stage_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "get_pp_group", lambda: SimpleNamespace(world_size=1))
    runner = Runner(1, is_last=True)
    PipelineStage(runner, capturer(0))
    assert "execute_model" not in vars(runner)


@pytest.mark.parametrize("runner", [GPUModelRunner, GPUModelRunnerV2])
def test_what_is_replaced_is_what_the_worker_calls(runner: type) -> None:
    assert list(inspect.signature(runner.execute_model).parameters)[1:3] == ["scheduler_output", "intermediate_tensors"]
