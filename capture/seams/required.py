"""What the capture needs of vLLM and would not miss by itself: names that it overrides, replaces or
reads by a string.

Python does not say that a method overrides nothing and is never called, nor that an attribute which
is read with a default has another name now. So each process looks at its start whether its names
are there (`missing`). A test finds them in the code, and compares them with this list
(`tests/contract/test_seams.py`).
"""

import inspect
import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import vllm


class Name(NamedTuple):
    """A name in vLLM."""

    # `module:Class.attribute`, or `module:name`; several if it moved, the newest first
    places: tuple[str, ...]
    since: str = ""  # the first version that has it; every supported one if empty
    until: str = ""  # the first version that has it no more

    @property
    def short(self) -> str:
        return self.places[0].partition(":")[2]

    def is_due(self, version: str) -> bool:
        """Whether that version should have it."""
        return _numbers(self.since) <= _numbers(version) and (
            not self.until or _numbers(version) < _numbers(self.until)
        )

    def is_there(self) -> bool:
        return any(map(_is_there, self.places))


def _of(owner: str, *names: str, since: str = "", until: str = "") -> tuple[Name, ...]:
    """The attributes `names` of the class or module `owner`."""
    separator = "." if ":" in owner else ":"
    return tuple(Name((f"{owner}{separator}{name}",), since, until) for name in names)


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_KV_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOADING = f"{_KV_CONNECTORS}.offloading.scheduler"
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_PROCESSOR = "vllm.v1.engine.output_processor"
_ENTRY = "vllm.entrypoints"

SCHEDULER: tuple[Name, ...] = (
    *_of(
        _SCHEDULER,
        "add_request",
        "finish_requests",
        "has_requests",
        "update_from_output",
        "set_pause_state",
    ),
    *_of(_SCHEDULER, "reset_prefix_cache", "_connector_finished"),
    *_of(_SCHEDULER, "_free_request", "_preempt_request", "_update_after_schedule"),
    *_of(_SCHEDULER, "_get_local_prefix_cache_hit"),
    *_of("vllm.v1.core.sched.output:SchedulerOutput", "kv_cache_block_copies"),
    *_of(
        "vllm.v1.core.sched.output:SchedulerOutput", "aux_output_connector_metadata", since="0.31.0"
    ),
    *_of("vllm.v1.engine:EngineCoreOutput", "routed_experts", "stop_reason", "kv_transfer_params"),
    *_of(
        f"{_KV_CONNECTORS}.base:KVConnectorBase_V1",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
    ),
    # A KV connector needs vLLM 0.32.
    *_of(
        f"{_KV_CONNECTORS}.multi_connector:MultiConnector",
        "_connectors",
        "_requests_to_connector",
        since="0.32.0",
    ),
    *_of(f"{_KV_CONNECTORS}.multi_connector:MultiKVConnectorMetadata", "metadata", since="0.32.0"),
    *_of(
        "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager",
        "lookup",
        "prepare_load",
        since="0.32.0",
    ),
    *_of(
        "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager",
        "prepare_store",
        "reset_cache",
        since="0.32.0",
    ),
    *_of(
        f"{_OFFLOADING}:OffloadingConnectorScheduler",
        "_current_batch_allocated_block_ids",
        since="0.32.0",
    ),
    *_of("vllm.v1.kv_cache_interface:KVCacheSpec", "prefix_replay_tokens", since="0.31.0"),
    *_of("vllm.config:SpeculativeConfig", "enable_adaptive_verification"),
    *_of("vllm.config.multimodal:MultiModalConfig", "mm_encoder_only"),
    # Routing as an input needs vLLM 0.32.
    *_of("vllm.v1.serial_utils:MsgpackDecoder", "decode", since="0.32.0"),
    *_of("vllm.v1.engine.core", "MsgpackDecoder", since="0.32.0"),
    *_of("vllm.envs", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", until="0.33.0"),
)
"""Of the engine core."""

_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_ROUTER = f"{_FUSED_MOE}.router.base_router:BaseRouter"
_EXPERTS = f"{_FUSED_MOE}.routed_experts:RoutedExperts"

WORKER: tuple[Name, ...] = (
    *_of(_WORKER, "load_model", "initialize_from_config", "compile_or_warm_up_model", "wake_up"),
    *_of(_WORKER, "execute_model", "sample_tokens", "_maybe_get_memory_pool_context"),
    *_of("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "execute_model", "_model_forward"),
    *_of("vllm.v1.outputs:AsyncModelRunnerOutput", "get_output"),
    *_of("vllm.v1.outputs:AsyncModelRunnerOutput", "get_kv_connector_output", since="0.33.0"),
    *_of("vllm.v1.outputs:ModelRunnerOutput", "aux_output_connector_output", since="0.31.0"),
    *_of("vllm.sequence:IntermediateTensors", "tensors"),
    *_of(f"{_FUSED_MOE}.layer", "MoERunner"),
    *_of(f"{_FUSED_MOE}.router.zero_expert_router", "ZeroExpertRouter"),
    *_of(_ROUTER, "set_capture_fn", "_compute_routing", "select_experts"),
    # Routing as an input needs vLLM 0.32.
    *_of(
        f"{_FUSED_MOE}.router.fused_topk_bias_router:FusedTopKBiasRouter",
        *("scoring_func", "e_score_correction_bias", "_hash_indices_table", "bias_vl"),
        since="0.32.0",
    ),
    *_of(
        f"{_FUSED_MOE}.router.grouped_topk_router:GroupedTopKRouter",
        *("num_expert_group", "topk_group"),
        since="0.32.0",
    ),
    *_of(
        f"{_FUSED_MOE}.router.cpu_router:CPURouter",
        *("use_grouped_topk", "custom_routing_function"),
        since="0.32.0",
    ),
    *_of(f"{_FUSED_MOE}.layer:MoERunner", "do_naive_dispatch_combine", since="0.32.0"),
    *_of(_EXPERTS, "forward_modular", "forward_monolithic"),
    *_of(
        f"{_FUSED_MOE}.expert_substitution:SubstitutedRoutedExperts",
        "expert_substitution",
        since="0.33.0",
    ),
    *_of(f"{_FUSED_MOE}.layer:MoERunner", "routed_scaling_factor"),
    *_of(f"{_FUSED_MOE}.modular_kernel:FusedMoEKernel", "impl"),
    *_of(f"{_FUSED_MOE}.modular_kernel:FusedMoEKernelMonolithicImpl", "fused_experts"),
    *_of(f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase", "moe_kernel"),
    *_of(
        f"{_FUSED_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        "process_weights_after_loading",
    ),
    *_of(f"{_FUSED_MOE}.router.grouped_topk_router:GroupedTopKRouter", "num_fused_shared_experts"),
    *_of(f"{_FUSED_MOE}.routed_experts_capturer", "RoutedExpertsSink", since="0.32.0"),
    *_of("vllm.model_executor.models.interfaces:SupportsMultiModal", "_tower_model_names"),
)
"""Of workers."""

API: tuple[Name, ...] = (
    *_of(f"{_PROCESSOR}:OutputProcessor", "add_request", "process_outputs", "abort_requests"),
    *_of(f"{_PROCESSOR}:OutputProcessor", "propagate_error"),
    *_of(f"{_PROCESSOR}:RequestState", "_new_completion_output"),
    *_of(f"{_PROCESSOR}:RequestOutputCollector", "get", "get_nowait"),
    *_of("vllm.v1.engine.input_processor:InputProcessor", "assign_request_id"),
    *_of("vllm.v1.engine.async_llm:AsyncLLM", "shutdown"),
    *_of(f"{_ENTRY}.generate.beam_search.offline:BeamSearchOfflineMixin", "beam_search"),
    *_of(f"{_ENTRY}.generate.beam_search.online:BeamSearchOnlineMixin", "beam_search"),
    *_of("vllm.v1.engine.utils", "zmq_socket_ctx"),
    *_of("vllm.v1.engine.core_client:MPClient", "core_engines"),
    *_of("vllm.config.parallel:ParallelConfig", "_api_process_count", "_api_process_rank"),
    *_of("vllm.engine.arg_utils:EngineArgs", "create_engine_config"),
    *_of("vllm.sampling_params:SamplingParams", "extra_args"),
    *_of("vllm.plugins", "load_endpoint_plugins"),
)
"""Of API processes, and of programs with an engine."""

_COMPLETION = f"{_ENTRY}.openai.completion.serving:OpenAIServingCompletion"
_CHAT = f"{_ENTRY}.openai.chat_completion.serving:OpenAIServingChat"
_GENERATE = f"{_ENTRY}.scale_out.token_in_token_out"
_TOKENS = f"{_GENERATE}.serving:ServingTokens"

_ARGUMENTS = ("common", "launchers", "openai")
_FLAGS = tuple(
    Name(tuple(f"{_ENTRY}.{folder}.cli_args:FrontendArgs.{flag}" for folder in _ARGUMENTS), since)
    for flag, since in (
        ("api_key", ""),
        ("tokens_only", ""),
        ("enable_scale_out", "0.30.0"),
        ("sse_keep_alive_interval", "0.29.0"),
    )
)

HTTP: tuple[Name, ...] = (
    *_of(
        _COMPLETION, "create_completion", "render_completion_request", "completion_stream_generator"
    ),
    *_of(_COMPLETION, "request_output_to_completion_response", "beam_search"),
    *_of(
        _CHAT, "create_chat_completion", "render_chat_request", "chat_completion_stream_generator"
    ),
    *_of(_CHAT, "chat_completion_full_generator", "beam_search"),
    *_of(_TOKENS, "serve_tokens", "serve_tokens_stream_generator", "serve_tokens_full_generator"),
    *_of(f"{_ENTRY}.openai.completion.protocol:CompletionRequest", "to_sampling_params"),
    *_of(f"{_ENTRY}.openai.chat_completion.protocol:ChatCompletionRequest", "to_sampling_params"),
    *_of(f"{_GENERATE}.protocol:GenerateRequest", "is_sampling_param_provided"),
    # Substitutes stand in for these on older versions (`server/http/seams.py`).
    *_of("vllm.plugins.endpoint_plugins.interface", "attach_endpoint_plugins", since="0.29.0"),
    *_of(f"{_ENTRY}.serve.utils.sse_keep_alive", "with_sse_keep_alive", since="0.30.0"),
    *_of("vllm.logger", "configure_logging_from_args", since="0.31.0"),
    *_of("vllm.exceptions", "RetryableRequestError", since="0.32.0"),
    *_of(f"{_GENERATE}.protocol", "GenerateTokensResponse", "GenerateTokensChoice", since="0.32.0"),
    *_of(f"{_ENTRY}.launchers.launcher:NoSignalServer", "_accept", "_accept_tasks", since="0.32.0"),
    *_FLAGS,
    *_of("vllm.sampling_params:SamplingParams", "trace_decode_token_ids", since="0.29.0"),
)
"""Of HTTP servers."""

REQUIRED: tuple[Name, ...] = (*SCHEDULER, *WORKER, *API)
"""Without what servers need only."""


def missing(names: Iterable[Name] = REQUIRED) -> list[str]:
    """The names that the installed vLLM should have, as far as is known, and has not."""
    return [name.short for name in names if name.is_due(vllm.__version__) and not name.is_there()]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _is_there(place: str) -> bool:
    module, _, path = place.partition(":")
    try:
        owner: Any = import_module(module)
    except Exception:  # noqa: BLE001 another version's modules may fail to load in any way
        return False
    for part in path.split("."):
        if part in getattr(owner, "__dataclass_fields__", ()):
            return True
        if not hasattr(owner, part):
            return inspect.isclass(owner) and any(
                map(re.compile(rf"\bself\.{part}\b").search, _sources(owner))
            )
        owner = getattr(owner, part)
    return True


def _sources(cls: type) -> Iterable[str]:
    """The source of vLLM's classes in a class's order of resolution: attributes of instances stand
    nowhere else."""
    return (_source(base) for base in cls.__mro__ if base.__module__.startswith("vllm."))


@cache
def _source(cls: type) -> str:
    """Read once: Python parses the whole module for it, which takes 0.1 s for the scheduler's."""
    return inspect.getsource(cls)
