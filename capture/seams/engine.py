"""Schedulers, model runners and MoE layers of older versions of vLLM."""

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.model_executor.layers.fused_moe import routed_experts_capturer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request

HAS_AUX_OUTPUTS = "aux_output_connector_metadata" in {
    field.name for field in fields(SchedulerOutput)
}
"""Whether schedulers and model runners call an auxiliary output connector."""

HAS_SINK = hasattr(routed_experts_capturer, "RoutedExpertsSink")
"""Whether monolithic kernels are given a sink for their choice: what this project was first written
against."""

_REFUSES_RESETS = "PauseState" in Scheduler.reset_prefix_cache.__code__.co_names

RoutedExpertsSink: Any = getattr(routed_experts_capturer, "RoutedExpertsSink", None)


class _Calling(Scheduler):
    """Until 0.31: calls the hooks where the scheduler of 0.31 does."""

    aux_output_connector: Any

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        tag = self.aux_output_connector.build_connector_meta(scheduler_output, self.requests)
        scheduler_output.aux_output_connector_metadata = tag
        super()._update_after_schedule(scheduler_output)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.aux_output_connector.request_finished(request)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.aux_output_connector.request_finished(request)
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        is_reset = bool(super().reset_prefix_cache(*args, **kwargs))
        if is_reset:
            self.aux_output_connector.reset()
        return is_reset


class _Resetting(Scheduler):
    """0.31 refuses to reset running requests where there is an auxiliary output connector. Ours
    allows it: it keeps rows by KV slot."""

    aux_output_connector: Any

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        hooks = self.aux_output_connector
        self.aux_output_connector = None  # so that it is not refused
        try:
            if reset_running_requests:
                for request in self.running:
                    hooks.request_finished(request)
            is_reset = bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        finally:
            self.aux_output_connector = hooks
        if is_reset:
            hooks.reset()
        return is_reset


HookedScheduler: type[Scheduler] = Scheduler
"""vLLM's scheduler, or what makes an older one call `aux_output_connector`."""

if not HAS_AUX_OUTPUTS:
    HookedScheduler = _Calling
elif _REFUSES_RESETS:
    HookedScheduler = _Resetting


def v2_batch(runner: Any, kv_group: int) -> tuple[Any, NDArray[np.int64]]:
    """Until 0.31, on the V2 model runner, which calls no hooks: a step's slots, and where each
    request's begin."""
    batch = runner.execute_model_state.input_batch
    offsets = batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int64)
    return runner.block_tables.slot_mappings[kv_group], offsets


def replays_prefixes(spec: KVCacheSpec) -> bool:
    """Whether a prefix hit runs its last tokens again."""
    return bool(getattr(spec, "prefix_replay_tokens", 0))


def can_report_choice(experts: Any) -> bool:
    """Whether a monolithic kernel reports which experts it chose."""
    return HAS_SINK and bool(experts.supports_routing_replay_capture())
