"""Refuses, at start, engine configurations that cannot give exact routing.

What only the loaded model shows is refused in the worker: MoE layers and classes of routers by the
tables in `capture/worker/refusals.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from routed_experts.capture.engine.connectors import CONNECTORS, KVSource, num_transfers, used_by
from routed_experts.capture.engine.versions import UnsupportedConfig, check_vllm_version
from routed_experts.capture.seams import engine as seams
from routed_experts.capture.seams.arguments import vllm_captures
from routed_experts.capture.wire.rows import (
    INPUT_FLAG,
    NO_WEIGHTS_FLAG,
    RECOMPUTE_FLAG,
    WEIGHTS_FLAG,
    captures_weights,
    replays_on_recompute,
    takes_input,
)
from routed_experts.capture.wire.vllm_rows import sends_bare_rows


@dataclass(frozen=True)
class Refusal:
    name: str  # short, as in `docs/support.md`
    applies: Callable[[VllmConfig], bool]  # true for a configuration to refuse
    message: str  # the reason, and what to change


EXTERNAL_LAUNCHER = "external_launcher"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "dense model",
        lambda c: not c.model_config.is_moe,
        "The model has no MoE layers, so there is no routing to return: serve an MoE model, or add "
        "--no-enable-return-routed-experts.",
    ),
    Refusal(
        "vLLM's own capture",
        vllm_captures,
        "vLLM's own capture of routed experts is on: remove enable_return_routed_experts from --aux-output-config; "
        "this server captures by itself.",
    ),
    Refusal(
        "encoder-decoder or pooling model",
        lambda c: c.model_config.is_encoder_decoder or c.model_config.runner_type != "generate",
        "Only decoder models that generate text are supported: add --no-enable-return-routed-experts.",
    ),
    Refusal(
        "diffusion model",
        lambda c: c.diffusion_config is not None,
        "Diffusion decoding computes a token's routing many times: add --no-enable-return-routed-experts.",
    ),
    Refusal(
        "unknown KV connector",
        lambda c: c.kv_transfer_config is not None and None in used_by(c.kv_transfer_config),
        "This KV connector was not reviewed, or loads KV without its rows: remove --kv-transfer-config, "
        "or choose --kv-transfer-config with one or several (MultiConnector) of "
        f"{', '.join(CONNECTORS)}, or add --no-enable-return-routed-experts.",
    ),
    Refusal(
        "several KV connectors that transfer KV between instances",
        lambda c: c.kv_transfer_config is not None and num_transfers(c.kv_transfer_config) > 1,
        "Two KV connectors that pull from other instances return the same fields, which ends vLLM's engine: keep one "
        "of them in --kv-transfer-config, or add --no-enable-return-routed-experts.",
    ),
    Refusal(
        "encoder-only instance",
        lambda c: (
            (c.ec_transfer_config is not None and c.ec_transfer_config.is_ec_producer)
            or bool(getattr(c.model_config.multimodal_config, "mm_encoder_only", False))
        ),
        "An instance that only encodes routes no tokens: add --no-enable-return-routed-experts to it.",
    ),
    Refusal(
        "pipeline parallelism under an external launcher",
        lambda c: (
            c.parallel_config.distributed_executor_backend == EXTERNAL_LAUNCHER
            and c.parallel_config.pipeline_parallel_size > 1
        ),
        "Under an external launcher every rank schedules for itself, and only the last pipeline stage knows all rows: "
        "set --pipeline-parallel-size to 1.",
    ),
    Refusal(
        "Ray with compiled graphs",
        lambda c: (
            c.parallel_config.distributed_executor_backend == "ray"
            # vLLM 0.33 has only the newer executor, and no such variable.
            and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
        ),
        "vLLM's older Ray executor bypasses the worker, so a step may return another step's rows: remove "
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 from the environment, or set --distributed-executor-backend to mp.",
    ),
    Refusal(
        "prefill context parallelism",
        lambda c: c.parallel_config.prefill_context_parallel_size > 1,
        "Prefill context parallelism spreads a prompt's tokens over ranks, and each routes its own: set "
        "--prefill-context-parallel-size to 1.",
    ),
    # Rows are whole, slots are not: the output rank's slot mapping has -1 for tokens whose KV is on
    # another rank.
    Refusal(
        "decode context parallelism",
        lambda c: c.parallel_config.decode_context_parallel_size > 1,
        "With decode context parallelism, the rank that returns rows knows the KV slots of its own tokens only: set "
        "--decode-context-parallel-size to 1.",
    ),
    Refusal(
        "microbatches, except dual-batch overlap on the V2 model runner",
        lambda c: (
            # --ubatch-size alone: vLLM keeps the state of one microbatch only.
            c.parallel_config.use_ubatching
            and not (c.parallel_config.enable_dbo and c.use_v2_model_runner)
        ),
        "Rows of steps in microbatches were found to be exact with --enable-dbo on vLLM's V2 model runner only: add it "
        "and set VLLM_USE_V2_MODEL_RUNNER=1 in the environment, or remove --enable-dbo and --ubatch-size.",
    ),
    Refusal(
        "elastic expert parallelism",
        lambda c: c.parallel_config.enable_elastic_ep,
        "Elastic expert parallelism rebuilds the layers that the capture is bound to: remove --enable-elastic-ep.",
    ),
    Refusal(
        "KV-sharing fast prefill",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
        "Fast prefill skips layers for prompt tokens: remove --kv-sharing-fast-prefill.",
    ),
    Refusal(
        "equal request ids",
        lambda _: envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION,
        "Where request ids have no random end, two requests may have one id, which ends the engine: remove "
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION from the environment, or set --no-enable-return-routed-experts.",
    ),
    Refusal(
        "adaptive draft verification",
        lambda c: (
            c.speculative_config is not None and c.speculative_config.enable_adaptive_verification
        ),
        "With adaptive verification, only the GPU knows how many drafts of each request run, so the host cannot assign "
        "rows to requests: set enable_adaptive_verification to false in --speculative-config.",
    ),
)

# Configurations that were not tested on older versions are refused there.
if not seams.HAS_SINK:  # until 0.32
    REFUSALS += (
        Refusal(
            "KV connector on vLLM 0.31 or older",
            lambda c: c.kv_transfer_config is not None,
            "With a KV connector this server needs vLLM 0.32 or later: install it, remove --kv-transfer-config, or add "
            "--no-enable-return-routed-experts.",
        ),
        Refusal(
            "dual-batch overlap on vLLM 0.31 or older",
            lambda c: c.parallel_config.use_ubatching,
            "With microbatches this server needs vLLM 0.32 or later: install it, or remove --enable-dbo and "
            "--ubatch-size.",
        ),
        Refusal(
            "routing as an input on vLLM 0.31 or older",
            takes_input,
            f"{INPUT_FLAG} needs vLLM 0.32 or later: install it, or remove {INPUT_FLAG}.",
        ),
    )


def _takes_kv_of_others(config: VllmConfig) -> bool:
    """Whether KV comes from other instances."""
    return config.kv_transfer_config is not None and any(
        known is None or known.source is not KVSource.OFFLOAD
        for known in used_by(config.kv_transfer_config)
    )


REFUSALS += (
    Refusal(
        "the router's weights with KV of other instances",
        lambda c: captures_weights(c) and _takes_kv_of_others(c),
        "KV of another instance comes with the ids of its tokens' experts, and not with their weights: serve "
        f"without weights ({NO_WEIGHTS_FLAG}), remove --kv-transfer-config, or use OffloadingConnector.",
    ),
    # What cannot be exact where requests say which experts their tokens take.
    Refusal(
        "routing as an input with KV of other instances",
        lambda c: takes_input(c) and _takes_kv_of_others(c),
        "KV of another instance may be that of other experts than a request says: remove "
        f"--kv-transfer-config, use OffloadingConnector, or remove {INPUT_FLAG}.",
    ),
    Refusal(
        "routing as an input with microbatches",
        lambda c: takes_input(c) and c.parallel_config.use_ubatching,
        "In microbatches a router does not know which tokens of a step it sees: remove --enable-dbo and --ubatch-size, "
        f"or remove {INPUT_FLAG}.",
    ),
    Refusal(
        "replay on recomputation without routing as an input",
        lambda c: replays_on_recompute(c) and not takes_input(c),
        f"{RECOMPUTE_FLAG} gives experts to tokens by the tables of {INPUT_FLAG}: add {INPUT_FLAG}, or remove "
        f"{RECOMPUTE_FLAG}.",
    ),
    # Found in vLLM 0.32 where steps in flight are scheduled synchronously.
    Refusal(
        "replay on recomputation with drafts and pipeline parallelism",
        lambda c: (
            replays_on_recompute(c)
            and c.speculative_config is not None
            and c.parallel_config.pipeline_parallel_size > 1
        ),
        "With drafts and several pipeline stages, later steps compute tokens again whose rows were sent, also where no "
        f"KV was lost: set --pipeline-parallel-size to 1, or remove --speculative-config or {RECOMPUTE_FLAG}.",
    ),
)

# What cannot be returned through a front end that is not ours.
REFUSALS += (
    Refusal(
        "the router's weights behind vLLM's front end in Rust",
        lambda c: sends_bare_rows(c) and captures_weights(c),
        f"vLLM's front end in Rust returns no weights: remove {WEIGHTS_FLAG}, or VLLM_USE_RUST_FRONTEND.",
    ),
    Refusal(
        "routing as an input behind vLLM's front end in Rust",
        lambda c: sends_bare_rows(c) and takes_input(c),
        f"vLLM's front end in Rust takes no routing as an input: remove {INPUT_FLAG}, or VLLM_USE_RUST_FRONTEND.",
    ),
    Refusal(
        "KV of other instances behind vLLM's front end in Rust",
        lambda c: sends_bare_rows(c) and _takes_kv_of_others(c),
        "vLLM's front end in Rust does not pass on the rows of another instance's KV: remove --kv-transfer-config, use "
        "OffloadingConnector, or remove VLLM_USE_RUST_FRONTEND.",
    ),
)

BOUNDED_REPLAY = (
    "The model runs some layers only on the last tokens of a prompt (bounded replay), so other tokens have no routing "
    "there: add --no-swa-bounded-replay."
)
"""Not a `Refusal`: the model decides this when it is loaded."""


def check_engine_config(config: VllmConfig) -> None:
    """Raises `UnsupportedConfig` for a configuration that cannot give exact routing."""
    check_vllm_version()
    for refusal in REFUSALS:
        if refusal.applies(config):
            raise UnsupportedConfig(refusal.message)


_FULL_ATTENTION = (FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec)


def _keeps_every_token(group_spec: KVCacheSpec) -> bool:
    if isinstance(group_spec, UniformTypeKVCacheSpecs):
        return all(type(spec) in _FULL_ATTENTION for spec in group_spec.kv_cache_specs.values())
    return type(group_spec) in _FULL_ATTENTION


def full_attention_group(kv_cache_config: KVCacheConfig) -> int:
    """Index of the KV cache group whose blocks hold every token of a sequence.

    Raises `UnsupportedConfig` for models whose groups all drop tokens (sliding windows, states), as
    their hits have no rows, and for those whose hits compute last tokens without others.
    """
    groups = kv_cache_config.kv_cache_groups
    if any(seams.replays_prefixes(group.kv_cache_spec) for group in groups):
        raise UnsupportedConfig(BOUNDED_REPLAY)
    for index, group in enumerate(groups):
        if _keeps_every_token(group.kv_cache_spec):
            return index
    raise UnsupportedConfig(
        "The model has no full-attention layers whose KV cache keeps every token, so rows cannot follow the KV: "
        "add --no-enable-return-routed-experts."
    )
