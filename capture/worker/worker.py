"""The worker classes given to vLLM as `worker_cls`, one for each device."""

from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from routed_experts.capture.engine.config import check_engine_config, full_attention_group
from routed_experts.capture.engine.versions import check_vllm_has
from routed_experts.capture.seams.engine import HAS_AUX_OUTPUTS
from routed_experts.capture.seams.required import WORKER
from routed_experts.capture.wire.rows import captures_weights, takes_input
from routed_experts.capture.wire.vllm_rows import sends_bare_rows
from routed_experts.capture.worker.binding import bind, storing_after_forward
from routed_experts.capture.worker.capturer import Capturer, RowShape
from routed_experts.capture.worker.moe_layers import find_moe_layers, has_parts, returns_sorted
from routed_experts.capture.worker.profile import ExpertProfile
from routed_experts.capture.worker.reloading import pack_when_reloaded
from routed_experts.capture.worker.router_input.family import Family
from routed_experts.capture.worker.router_input.filling import (
    NoRouterInput,
    RouterInput,
    RouterInputOfTables,
)
from routed_experts.capture.worker.router_input.refusals import check_input_layers
from routed_experts.capture.worker.router_input.rewriting import common_groups, families_of
from routed_experts.capture.worker.router_input.running import Model, RunningInputs
from routed_experts.capture.worker.router_input.tables import Tables
from routed_experts.capture.worker.stage import gather_stages, join_cache
from routed_experts.capture.worker.v1 import V1Adapter
from routed_experts.capture.worker.weights import check_weights

if TYPE_CHECKING or current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker
else:
    CPUWorker = Worker  # its module loads libraries of the CPU build

_SLEEP_TAG = "routed_experts"
"""Tag of our device memory in vLLM's sleep-mode allocator. Not "weights" or "kv_cache", which can
wake up alone."""

# Layers write to a real buffer on every rank, so that all ranks capture the same CUDA graphs. vLLM
# takes the output of one rank.


class WorkerCapture(Worker):
    """Adds the capture to vLLM's workers, or to a program's own."""

    _capturer: Capturer
    _profile: ExpertProfile
    _router_input: RouterInput
    _v1: V1Adapter | None = None
    _kv_slots = 0

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        check_engine_config(self.vllm_config)
        check_vllm_has(WORKER)
        super().load_model(load_dummy_weights=load_dummy_weights)
        layers = find_moe_layers(self.model_runner.get_model())
        with_weights = captures_weights(self.vllm_config)
        if with_weights:
            check_weights(layers, is_eager=self.model_config.enforce_eager)
        families: list[Family] | None = None
        own_shape = layers.shape
        if not takes_input(self.vllm_config):  # rows that requests send have any order
            is_sorted = returns_sorted(layers.runners, torch.device(self.device))
            own_shape = replace(own_shape, sorted_by_weight=is_sorted)
        else:
            check_input_layers(layers)
            families = families_of(layers.runners, layers.shape.top_k)
            own_shape = replace(own_shape, groups=common_groups(families))
        stages = gather_stages(own_shape)
        parallel = self.vllm_config.parallel_config
        shape = RowShape.of_stages(stages)
        device = torch.device(self.device)
        # not in the pool below: it keeps its counts while the engine sleeps
        self._profile = ExpertProfile(len(shape.layer_ids), shape.num_experts, with_weights, device)
        # Allocated here, so that memory profiling counts the buffers and CUDA graphs are captured
        # with them. The pool frees its memory while the engine sleeps, at any level, and restores
        # it at the same addresses with the first wake-up. Its contents are lost, but no step reads
        # what another step wrote.
        with self._maybe_get_memory_pool_context(_SLEEP_TAG):
            self._capturer = Capturer(
                shape=shape,
                stage_layers=[len(stage.layer_ids) for stage in stages],
                stage=get_pp_group().rank_in_group,
                max_tokens=self.model_runner.max_num_tokens,
                max_steps_in_flight=self.vllm_config.max_concurrent_batches,
                device=device,
                with_weights=with_weights,
                tells_layer_ids=sends_bare_rows(self.vllm_config),
                profile=self._profile,
            )
        self._router_input = NoRouterInput()
        if families is not None:
            self._router_input = self._make_router_input(families, stages)
        bind(
            layers,
            self._capturer,
            parallel.data_parallel_rank,
            parallel.data_parallel_size,
            self._router_input.rewrite_behind,
        )
        if has_parts(layers.runners):
            # So that memory profiling also counts what NCCL allocates for its first call.
            join_cache(self._capturer.cache, 1)

    def _make_router_input(
        self, families: list[Family], stages: list[RowShape]
    ) -> RouterInputOfTables:
        shape = self._capturer.shape
        stage_before = stages[: get_pp_group().rank_in_group]
        first_layer = sum(len(stage.layer_ids) for stage in stage_before)
        tables = Tables(
            len(families),
            max_tokens=self.model_runner.max_num_tokens,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            max_requests=self.scheduler_config.max_num_seqs,
            max_steps_in_flight=self.vllm_config.max_concurrent_batches,
            device=torch.device(self.device),
        )
        model = Model(len(shape.layer_ids), shape.top_k, shape.num_experts, shape.groups)
        own_layers = slice(first_layer, first_layer + len(families))
        return RouterInputOfTables(RunningInputs(model, own_layers), tables, families)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        group = full_attention_group(kv_cache_config)
        self._kv_slots = (
            kv_cache_config.num_blocks
            * kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        )
        if self.use_v2_model_runner and HAS_AUX_OUTPUTS:
            # its runner needs Triton, which has no CPU build
            from routed_experts.capture.worker.v2 import V2Adapter

            self.model_runner.aux_output_connector = V2Adapter(
                self.model_runner, self._capturer, self._router_input, group
            )
        else:
            self._v1 = V1Adapter(
                self.model_runner,
                self._capturer,
                self._router_input,
                group,
                self.use_v2_model_runner,
            )
        self._router_input.fill_before_forward(self.model_runner, self.use_v2_model_runner)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        with storing_after_forward(self.model_runner.get_model(), self._capturer):
            return super().compile_or_warm_up_model()

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        # On all ranks: each tensor-parallel rank sends a part of a pipeline stage's output to the
        # next stage.
        self._capturer.cache.reset_rows(scheduler_output.total_num_scheduled_tokens)
        self._router_input.begin_step(scheduler_output)
        output = super().execute_model(scheduler_output)
        if self._v1 is not None:
            self._v1.post_forward(scheduler_output)
        return output

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        output = super().sample_tokens(grammar_output)
        return output if self._v1 is None else self._v1.post_sample(output)

    def wake_up(self, tags: list[str] | None = None) -> None:
        # Until vLLM 0.30, memory wakes up only where its tag is named.
        super().wake_up(None if tags is None else [*tags, _SLEEP_TAG])

    def routed_experts_info(self) -> dict[str, Any]:
        """The row shape of this worker and the memory of the capture; called over vLLM's collective
        RPC."""
        shape = self._capturer.shape
        return {
            "num_layers": len(shape.layer_ids),
            "top_k": shape.top_k,
            "num_experts": shape.num_experts,
            "layer_ids": list(shape.layer_ids),
            "sorted_by_weight": shape.sorted_by_weight,
            "weights": self._capturer.cache.weights is not None,
            "weights_scale": list(shape.weights_scale),
            "weights_on_input": shape.weights_on_input,
            "runner": "v2" if self.use_v2_model_runner else "v1",
            "device": torch.device(self.device).type,
            "kv_slots": self._kv_slots,
            "input": takes_input(self.vllm_config),
            "groups": list(astuple(shape.groups)),
            "device_bytes": self._capturer.pipeline.device_bytes + self._router_input.device_bytes,
            "pinned_bytes": self._capturer.pipeline.pinned_bytes + self._router_input.pinned_bytes,
        }

    def routed_experts_profile(self) -> dict[str, Any]:
        """What `ExpertProfile.read` returns; zeros on ranks that do not give the model's output."""
        return self._profile.read()


class CudaCaptureWorker(WorkerCapture, Worker):
    """`worker_cls` on CUDA."""


class CpuCaptureWorker(WorkerCapture, CPUWorker):
    """`worker_cls` on CPU."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        pack_when_reloaded(self.model_runner.get_model())
