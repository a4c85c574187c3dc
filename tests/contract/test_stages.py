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

from routed_experts.capture.worker import stage
from routed_experts.capture.worker.capturer import Capturer, RowShape
from routed_experts.capture.worker.stage import PipelineStage

N, HIDDEN, K = 3, 8, 4
STEP = SimpleNamespace(total_num_scheduled_tokens=N)


class Stage:
    """A model runner of one stage, as far as it handles what came from the stage before, and a
    capturer of its one MoE layer, whose ids are all its index + 1."""

    def __init__(self, index: int, version: int = 1) -> None:
        self.version, self.is_last = version, index == 1
        self.seen: list[str] = []  # what happened, in order
        self.intermediate_tensors = IntermediateTensors({"hidden_states": torch.zeros(8, HIDDEN)})
        self.capturer = Capturer(
            RowShape((0, 1), 16, K),
            stage_layers=[1, 1],
            stage=index,
            max_tokens=8,
            max_steps_in_flight=1,
            device=torch.device("cpu"),
        )
        self.capturer.cache.ids.fill_(index + 1)
        self.stage = PipelineStage(self, self.capturer)

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Module()

    def execute_model(
        self, scheduler_output: Any, received: IntermediateTensors | None = None
    ) -> Any:
        self.seen.append("inputs prepared")
        if received is not None and self.version == 1:
            GPUModelRunner.sync_and_gather_intermediate_tensors(self, N, received, True)
        elif received is not None:
            for name, tensor in self.intermediate_tensors.tensors.items():
                tensor[:N].copy_(received.tensors[name][:N])
        self.seen.append("forward pass")
        return (
            None if self.is_last else IntermediateTensors({"hidden_states": torch.ones(N, HIDDEN)})
        )

    def submit(self) -> Any:
        return self.capturer.pipeline.submit(torch.arange(N), np.array([0, N]), self.stage.upstream)


@pytest.fixture(autouse=True)
def world_size(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    group = SimpleNamespace(world_size=getattr(request, "param", 2))
    monkeypatch.setattr(stage, "get_pp_group", lambda: group)


@pytest.mark.parametrize("version", [1, 2])
def test_rows_go_with_the_hidden_states(version: int) -> None:
    """They are sent as memory of their own, and taken where the runner waits for the transfer, not
    before."""
    first, last = Stage(0, version), Stage(1, version)
    sent = first.execute_model(STEP).tensors
    first.capturer.cache.ids.fill_(-1)  # the next step begins while this one's rows are being sent
    transfer = SimpleNamespace(wait=lambda: last.seen.append("transfer waited for"))
    assert (
        last.execute_model(STEP, AsyncIntermediateTensors(dict(sent), comm_handles=[transfer]))
        is None
    )
    assert last.seen == ["inputs prepared", "transfer waited for", "forward pass"]
    assert (last.intermediate_tensors.tensors["hidden_states"][:N] == 1).all()
    rows = last.submit()().rows
    assert [np.unique(rows[:, layer]).tolist() for layer in (0, 1)] == [[1], [2]]


def test_rows_of_another_step_are_not_taken() -> None:
    last, hidden = Stage(1), torch.ones(N, HIDDEN)
    last.execute_model(
        STEP, IntermediateTensors({"hidden_states": hidden, "routed_experts": torch.zeros(N, 1, K)})
    )
    assert last.stage.upstream is not None
    last.execute_model(STEP, IntermediateTensors({"hidden_states": hidden}))
    with pytest.raises(ValueError, match="did not come with the step"):
        last.submit()


@pytest.mark.parametrize("world_size", [1], indirect=True)
def test_a_single_stage_is_left_alone(world_size: None) -> None:
    assert "execute_model" not in vars(Stage(0))


@pytest.mark.parametrize("runner", [GPUModelRunner, GPUModelRunnerV2])
def test_what_is_replaced_is_what_the_worker_calls(runner: type) -> None:
    assert list(inspect.signature(runner.execute_model).parameters)[1:3] == [
        "scheduler_output",
        "intermediate_tensors",
    ]
