"""Moves rows between pipeline stages and tensor-parallel ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from routed_experts.capture.engine.config import EXTERNAL_LAUNCHER
from routed_experts.capture.worker.capturer import Capturer, RowShape
from routed_experts.capture.worker.device_cache import DeviceCache
from routed_experts.capture.worker.moe_layers import has_parts
from routed_experts.protocol.codec import UNKNOWN

_ROWS = "routed_experts"
"""Name of our tensor among those that go to the next stage."""


def gather_stages(own: RowShape) -> list[RowShape]:
    """The shapes of all pipeline stages, in order; `own` is this worker's. All ranks must call
    it."""
    group = get_pp_group()
    shapes: list[Any] = [own] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(shapes, own, group=group.cpu_group)
    return shapes


def is_output_rank(parallel: ParallelConfig) -> bool:
    """Whether vLLM takes the model's output from this worker: the first rank of the last pipeline
    stage. With an external launcher (torchrun), every rank has its own scheduler, which takes its
    worker's output."""
    has_scheduler = parallel.distributed_executor_backend == EXTERNAL_LAUNCHER
    return bool(get_pp_group().is_last_rank and (get_tp_group().is_first_rank or has_scheduler))


def join_cache(cache: DeviceCache, num_tokens: int) -> None:
    """Merges the first rows of all tensor-parallel ranks' device caches: each rank fills its -1
    from the others.

    All ranks of a group must call it; enqueued on the current stream. Ids that no rank wrote stay
    -1. The bits of their weights are added, with 0 from every rank but the one that has them: a
    maximum would prefer another rank's -1 to the bits of a negative number.
    """
    group = get_tp_group().device_group
    planes = cache.planes[:, :, :num_tokens]  # [1 or 2, L, n, K]
    ids = planes[0]
    if cache.weights is not None:  # as long as -1 says which ids are this rank's
        bits = torch.where(ids >= 0, planes[1], 0)
        torch.distributed.all_reduce(bits, torch.distributed.ReduceOp.SUM, group)
    whole = ids.contiguous()
    torch.distributed.all_reduce(whole, torch.distributed.ReduceOp.MAX, group)
    ids.copy_(whole)
    if cache.weights is not None:
        planes[1].copy_(torch.where(ids >= 0, bits, UNKNOWN))


class PipelineStage:
    """Completes this pipeline stage's rows, and sends them on with those of stages before and the
    hidden states."""

    def __init__(self, runner: GPUModelRunner, capturer: Capturer) -> None:
        self._capturer = capturer
        self._execute: Callable[..., Any] = runner.execute_model
        self._has_parts = has_parts(runner.get_model().modules())
        # [n, layers, K] int32, of the last step; None on the first stage
        self.upstream: torch.Tensor | None = None
        if get_pp_group().world_size > 1 or self._has_parts:
            # For both model runners. vLLM's worker has no other place between receiving and sending
            # hidden states. Needed until a connector can add tensors to those that go to the next
            # stage.
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
            join_cache(self._capturer.cache, num_tokens)
        self.upstream = None if received is None else received.rows
        if not isinstance(output, IntermediateTensors):
            return output
        rows = self._capturer.downstream(num_tokens, self.upstream)
        return IntermediateTensors({**output.tensors, _ROWS: rows})


class _Received(IntermediateTensors):
    """The previous stage's tensors without the rows, which the model runner does not know. Reads
    them only when the runner does: vLLM waits for the transfer there, which overlaps with preparing
    the step's inputs."""

    def __init__(self, received: IntermediateTensors) -> None:
        self._received = received

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._received.tensors.items() if name != _ROWS}

    @property
    def rows(self) -> torch.Tensor | None:
        """[n, layers, K] int32 of the stages before."""
        return self._received.tensors.get(_ROWS)
