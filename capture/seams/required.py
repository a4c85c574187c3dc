"""What the capture needs of every version of vLLM. Says precisely what an unknown version lacks."""

from importlib import import_module
from typing import Any

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter"

REQUIRED = (
    *(f"{_SCHEDULER}.{name}" for name in ("add_request", "finish_requests", "has_requests", "update_from_output")),
    *(f"{_SCHEDULER}.{name}" for name in ("set_pause_state", "reset_prefix_cache", "_connector_finished")),
    *(f"{_SCHEDULER}.{name}" for name in ("_free_request", "_preempt_request", "_update_after_schedule")),
    *(f"{_WORKER}.{name}" for name in ("load_model", "initialize_from_config", "compile_or_warm_up_model")),
    *(f"{_WORKER}.{name}" for name in ("execute_model", "sample_tokens", "_maybe_get_memory_pool_context")),
    *(f"{_ROUTER}.{name}" for name in ("set_capture_fn", "_compute_routing", "select_experts")),
    "vllm.model_executor.layers.fused_moe.layer:MoERunner",
    "vllm.v1.core.sched.output:SchedulerOutput.kv_cache_block_copies",
    "vllm.v1.engine:EngineCoreOutput.routed_experts",
    "vllm.v1.engine.output_processor:OutputProcessor.add_request",
    "vllm.v1.engine.output_processor:RequestState._new_completion_output",
    "vllm.config.parallel:ParallelConfig._api_process_count",
    "vllm.config.parallel:ParallelConfig._api_process_rank",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "vllm.sampling_params:SamplingParams.extra_args",
    "vllm.plugins:load_endpoint_plugins",
)
"""`module:Class.attribute`; what is extended, replaced or read, in all supported versions."""


def missing() -> list[str]:
    """The names in `REQUIRED` that the installed vLLM does not have, as `Class.attribute`."""
    return [name.partition(":")[2] for name in REQUIRED if not _is_there(name)]


def _is_there(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        owner: Any = import_module(module)
    except Exception:  # noqa: BLE001 another version's modules may fail to load in any way
        return False
    for part in path.split("."):
        if part in getattr(owner, "__dataclass_fields__", ()):
            return True
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True
