"""Model Runner V2 (CUDA): vLLM calls the adapter as the runner's auxiliary output connector."""

from typing import Any

import numpy as np
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from routed_experts.capture.seams.aux_output import AuxOutputHooks
from routed_experts.capture.wire.transport import StepRows, as_connector_output
from routed_experts.capture.worker.capturer import Capturer
from routed_experts.capture.worker.pipeline import PendingStep
from routed_experts.capture.worker.router_input.filling import RouterInput
from routed_experts.capture.worker.stage import PipelineStage, is_output_rank


class V2Adapter(AuxOutputHooks):
    """In vLLM's `model_runner.aux_output_connector`. Takes each step's rows after sampling."""

    def __init__(
        self,
        runner: GPUModelRunner,
        capturer: Capturer,
        router_input: RouterInput,
        kv_group: int,
    ) -> None:
        self._runner = runner
        self._capturer = capturer
        self._router_input = router_input
        self._kv_group = kv_group
        self._stage = PipelineStage(runner, capturer)
        self._sends = is_output_rank(runner.parallel_config)

    def begin_step(self, metadata: Any, *more: Any, **options: Any) -> None:
        """Called before the forward pass. Nothing to prepare: the device cache is always written
        from row 0."""

    def prepare_output(
        self, input_batch: InputBatch, *more: Any, **options: Any
    ) -> "V2Pending | None":
        """Called after sampling was launched, on the main stream."""
        if not self._sends:
            return None
        offsets = input_batch.query_start_loc_np[: input_batch.num_reqs + 1].astype(np.int64)
        slots = self._runner.block_tables.slot_mappings[self._kv_group]
        told = self._router_input.take_told()
        pending = self._capturer.pipeline.submit(slots, offsets, self._stage.upstream, told)
        return V2Pending(pending)

    def close(self, *more: Any, **options: Any) -> None:
        """Called when the worker shuts down. The buffers go with the capturer."""


class V2Pending(AuxOutputHooks):
    """The rows of an output that is not materialised yet."""

    def __init__(self, pending: PendingStep) -> None:
        self._pending = pending

    def enqueue_cpu_copy(self, *args: Any, **options: Any) -> None:
        """Called on the runner's copy stream. Nothing to do: rows are copied on a stream of their
        own."""

    def process_output(self, *more: Any, **options: Any) -> dict[str, StepRows]:
        """Called when the step's output is materialised."""
        return as_connector_output(self._pending())
