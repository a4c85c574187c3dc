"""Model Runner V1: CPU always, and CUDA for the models that vLLM keeps on it; V2 too, until vLLM
0.31.

These runners call no auxiliary output connector, so the worker calls this adapter around its steps.
"""

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from routed_experts.capture.seams.engine import v2_batch
from routed_experts.capture.wire.transport import attach
from routed_experts.capture.worker.capturer import Capturer
from routed_experts.capture.worker.pipeline import PendingStep
from routed_experts.capture.worker.router_input.filling import RouterInput
from routed_experts.capture.worker.stage import PipelineStage, is_output_rank


class V1Adapter:
    """Takes each step's rows after its forward pass and puts them on its output."""

    def __init__(
        self,
        runner: GPUModelRunner,
        capturer: Capturer,
        router_input: RouterInput,
        kv_group: int,
        runner_is_v2: bool,
    ) -> None:
        self._runner = runner
        self._runner_is_v2 = runner_is_v2
        self._capturer = capturer
        self._router_input = router_input
        self._kv_group = kv_group
        self._stage = PipelineStage(runner, capturer)
        self._sends = is_output_rank(runner.parallel_config)
        self._pending: PendingStep | None = None

    def post_forward(self, scheduler_output: SchedulerOutput) -> None:
        """Called directly after the forward pass was launched."""
        if not self._sends or scheduler_output.total_num_scheduled_tokens == 0:
            return
        if self._runner_is_v2:
            slots, offsets = v2_batch(self._runner, self._kv_group)
        else:
            batch = self._runner.input_batch
            slots = batch.block_table[self._kv_group].slot_mapping.gpu
            # The runner's own: of drafts that the GPU has found, it may run fewer than the
            # scheduler has counted.
            offsets = self._runner.query_start_loc.np[: batch.num_reqs + 1].astype(np.int64)
        told = self._router_input.take_told()
        self._pending = self._capturer.pipeline.submit(slots, offsets, self._stage.upstream, told)

    def post_sample(
        self, output: ModelRunnerOutput | AsyncModelRunnerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """`output` with its step's rows. All empty steps share one output object, which is not
        changed."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return OutputWithRows(output, pending)
        attach(output, pending())
        return output


class OutputWithRows(AsyncModelRunnerOutput):
    """The output of a step that is not on the host yet, as its rows are not."""

    def __init__(self, output: AsyncModelRunnerOutput, pending: PendingStep) -> None:
        self._output = output
        self._pending = pending

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        attach(output, self._pending())
        return output

    # Abstract since vLLM 0.33. Called to keep a KV connector's results of a step whose output
    # failed.
    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        kv: KVConnectorOutput | None = self._output.get_kv_connector_output()
        return kv
