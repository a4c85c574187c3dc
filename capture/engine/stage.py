"""What a worker is among its ranks, and how rows travel from one pipeline stage to the next."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from routed_experts.capture.capturer import Capturer, RowShape
from routed_experts.capture.engine.binding import has_parts
from routed_experts.capture.engine.config import EXTERNAL_LAUNCHER

_ROWS = "routed_experts"


def gather_stages(own: RowShape) -> list[RowShape]:
    """The row shapes of all pipeline stages, in order."""
    group = get_pp_group()
    shapes: list[Any] = [own] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(shapes, own, group=group.cpu_group)
    return shapes


def is_output_rank(parallel: ParallelConfig) -> bool:
    """Whether vLLM takes the model's output from this worker: the first rank of the last pipeline stage.

    With an external launcher (torchrun) every rank has a scheduler of its own, which takes the output of its worker.
    """
    has_scheduler = parallel.distributed_executor_backend == EXTERNAL_LAUNCHER
    return bool(get_pp_group().is_last_rank and (get_tp_group().is_first_rank or has_scheduler))


def join_parts(ids: torch.Tensor) -> None:
    """Gives each tensor-parallel rank what the others have put into `ids` ([layers, n, K]), where its own are -1.

    All ranks of a group must call it; enqueued on the current stream. What nobody wrote stays -1.
    """
    whole = ids.contiguous()
    torch.distributed.all_reduce(whole, torch.distributed.ReduceOp.MAX, get_tp_group().device_group)
    ids.copy_(whole)


class PipelineStage:
    """Makes the rows of this pipeline stage whole, sends them to the next one with the hidden states, and takes those
    that come.

    Attributes:
        upstream: [n, layers, K] int32 of the step that was run last; None on the first stage.
    """

    def __init__(self, runner: GPUModelRunner, capturer: Capturer) -> None:
        self._capturer = capturer
        self._execute: Callable[..., Any] = runner.execute_model
        self._has_parts = has_parts(runner.get_model().modules())
        self.upstream: torch.Tensor | None = None
        if get_pp_group().world_size > 1 or self._has_parts:
            # Both model runners'. Between receiving hidden states, running the stage and sending its own, vLLM's worker
            # leaves no other room for the rows. Until a connector can add to the tensors that go to the next stage.
            runner.execute_model = self._execute_model

    def _execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        received = None if intermediate_tensors is None else _Received(intermediate_tensors)
        output = self._execute(scheduler_output, received, *args, **kwargs)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if self._has_parts and num_tokens and not kwargs.get("dummy_run"):
            join_parts(self._capturer.cache.ids[:, :num_tokens])
        self.upstream = None if received is None else received.rows
        if not isinstance(output, IntermediateTensors):
            return output
        rows = self._capturer.downstream(num_tokens, self.upstream)
        return IntermediateTensors({**output.tensors, _ROWS: rows})


class _Received(IntermediateTensors):
    """The tensors of the stage before without the rows, which the model runner does not know.

    They are looked at when the runner does, and not earlier: vLLM waits for the transfer there, so that it overlaps
    with the preparation of the step's inputs.
    """

    def __init__(self, received: IntermediateTensors) -> None:
        self._received = received

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._received.tensors.items() if name != _ROWS}

    @property
    def rows(self) -> torch.Tensor | None:
        """[n, layers, K] int32 of the stages before."""
        return self._received.tensors.get(_ROWS)
