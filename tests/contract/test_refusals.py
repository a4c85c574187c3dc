"""What is refused, on configurations that vLLM itself makes of the tiny model's `config.json`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.config.vllm
from vllm import envs
from vllm.config import ECTransferConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.models.deepseek_v41.decoder_replay_layers import DecoderReplayLayers
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from routed_experts.capture.engine.binding import find_moe_layers
from routed_experts.capture.engine.config import (
    BOUNDED_REPLAY,
    REFUSALS,
    UnsupportedConfig,
    check_engine_config,
    full_attention_group,
)
from routed_experts.capture.engine.kv_transfer.connectors import CONNECTORS, ON_LOAD_VARIABLE, used_by
from routed_experts.server.cli import serve

UNKNOWN_CONNECTOR = "KV connector that is not known"
POLICY = "unknown policy for loads"
OLDER_RAY = "Ray with compiled graphs"


def kv_transfer(connector: str, **about: Any) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": connector, "kv_role": "kv_both", **about}}


def several(*connectors: str) -> dict[str, Any]:
    children = [{"kv_connector": connector, "kv_role": "kv_both"} for connector in connectors]
    return kv_transfer("MultiConnector", kv_connector_extra_config={"connectors": children})


DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_local_experts": None}
DRAFTS = "speculative_config"
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
EXPERT_PARALLEL = {"enable_expert_parallel": True, "data_parallel_size": 2}
NOT_THESE_MICROBATCHES = "microbatches, but for dual-batch overlap on the V2 model runner"
MICROBATCHES = {**EXPERT_PARALLEL, "ubatch_size": 2, "all2all_backend": "deepep_low_latency"}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("dense model", {"config_json": DENSE}),
    ("encoder-decoder or pooling model", {"runner": "pooling"}),  # vLLM has no encoder-decoder model with experts
    ("diffusion model", {"diffusion_config": {"canvas_length": 32}}),
    (UNKNOWN_CONNECTOR, kv_transfer("DecodeBenchConnector")),
    (UNKNOWN_CONNECTOR, several("NixlConnector", "DecodeBenchConnector")),
    ("several KV connectors between instances", several("NixlConnector", "NixlPushConnector")),
    (
        "pipeline parallelism under an external launcher",
        {"distributed_executor_backend": "external_launcher", "pipeline_parallel_size": 2},
    ),
    ("context parallelism", {"decode_context_parallel_size": 2, "tensor_parallel_size": 4}),
    ("context parallelism", {"prefill_context_parallel_size": 2}),
    (NOT_THESE_MICROBATCHES, MICROBATCHES),
    ("KV-sharing fast prefill", {"kv_sharing_fast_prefill": True}),
]

ENCODER = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_producer")
# What vLLM does not make here, whatever is asked for: set on a configuration that it made.
SET_AFTERWARDS: list[tuple[str, dict[str, Any], str, Any]] = [
    # With the package installed, the argument means this capture.
    ("vLLM's own capture", {}, "aux_output_config.enable_return_routed_experts", True),
    # Needs full CUDA graphs.
    ("adaptive draft verification", {"speculative_config": NGRAM}, f"{DRAFTS}.enable_adaptive_verification", True),
    # Needs expert load balancing, which needs CUDA.
    ("elastic expert parallelism", EXPERT_PARALLEL, "parallel_config.enable_elastic_ep", True),
    # Needs a multimodal model, whose class does not load there.
    ("encoder-only instance", {}, "ec_transfer_config", ENCODER),
]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    made = tmp_path_factory.mktemp("config")
    (made / "config.json").write_text((tiny_model / "config.json").read_text())
    return made


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes configurations of Model Runner V2, and with sleep mode, here too if it is told that it can."""
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)


def configuration(folder: Path, config_json: dict[str, Any] | None = None, **arguments: Any) -> VllmConfig:
    """What vLLM makes of these arguments, with these changes to the model's `config.json` (None: no such key)."""
    if config_json:
        config = {**json.loads((folder / "config.json").read_text()), **config_json}
        folder = folder.parent / "overridden"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if value is not None})
        )
    args = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=8 << 20,
        **arguments,
    )
    return args.create_engine_config()


def assert_refused(config: VllmConfig, name: str) -> None:
    with pytest.raises(UnsupportedConfig) as refused:
        check_engine_config(config)
    assert str(refused.value) == next(refusal.message for refusal in REFUSALS if refusal.name == name)


# vLLM imports these when it makes a configuration, and with them packages that it does not bring.
NOT_IMPORTED = ("LMCacheMPConnector", "MoRIIOConnector")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"enable_prefix_caching": False},
        {"enable_sleep_mode": True},
        {"speculative_config": NGRAM},
        {**EXPERT_PARALLEL, "all2all_backend": "flashinfer_nvlink_two_sided"},
        {"kv_offloading_size": 1},
        several("NixlConnector", "OffloadingConnector"),
        *(kv_transfer(connector) for connector in CONNECTORS if connector not in NOT_IMPORTED),
    ],
)
def test_what_is_not_refused(folder: Path, arguments: dict[str, Any]) -> None:
    check_engine_config(configuration(folder, **arguments))


@pytest.mark.parametrize(("runner", "overlap", "fits"), [("0", True, False), ("1", False, False), ("1", True, True)])
def test_microbatches(folder: Path, monkeypatch: pytest.MonkeyPatch, runner: str, overlap: bool, fits: bool) -> None:
    """V1's model runner is vLLM's choice where nobody chooses."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    config = configuration(folder, **MICROBATCHES)
    config.parallel_config.enable_dbo = overlap  # which needs CUDA
    if fits:
        check_engine_config(config)
    else:
        assert_refused(config, NOT_THESE_MICROBATCHES)


@pytest.mark.parametrize(("name", "arguments"), REFUSED)
def test_refusals(folder: Path, name: str, arguments: dict[str, Any]) -> None:
    assert_refused(configuration(folder, **arguments), name)


@pytest.mark.parametrize(("name", "arguments", "path", "value"), SET_AFTERWARDS)
def test_refusals_of_what_needs_a_gpu(
    folder: Path, name: str, arguments: dict[str, Any], path: str, value: Any
) -> None:
    config = configuration(folder, **arguments)
    check_engine_config(config)
    owner, _, attribute = path.rpartition(".")
    of: Any = getattr(config, owner) if owner else config
    assert hasattr(of, attribute)
    setattr(of, attribute, value)
    assert_refused(config, name)


@pytest.mark.parametrize(
    ("module", "is_known"),
    [(None, True), ("lmcache.integration.vllm.lmcache_connector_v1", True), ("a.package.of.somebodys", False)],
)
def test_connectors_from_elsewhere(module: str | None, is_known: bool) -> None:
    config = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both", kv_connector_module_path=module)
    assert used_by(config) == [CONNECTORS["LMCacheConnectorV1"] if is_known else None]


def test_every_connector_of_vllm_has_been_looked_at() -> None:
    """A new one must be read before it is in either list."""
    refused = {"DecodeBenchConnector", "ExampleHiddenStatesConnector", "HiSparseConnector", "MultiConnector"}
    own = {name for name in KVConnectorFactory._registry if not name.endswith("OfTheTests")}
    assert own == CONNECTORS.keys() | refused


def test_an_unknown_policy_for_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ON_LOAD_VARIABLE, "guess")
    check_engine_config(configuration(folder))
    assert_refused(configuration(folder, kv_offloading_size=1), POLICY)


def test_rays_older_executor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 has the newer one only."""
    config = configuration(folder)
    config.parallel_config.distributed_executor_backend = "ray"  # without Ray, vLLM makes no such configuration
    check_engine_config(config)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    if getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", None) is False:
        assert_refused(config, OLDER_RAY)


def test_every_refusal_is_tried() -> None:
    tried = {case[0] for case in (*REFUSED, *SET_AFTERWARDS)} | {POLICY, OLDER_RAY}
    assert {refusal.name for refusal in REFUSALS} == tried


def test_refusals_say_what_to_change() -> None:
    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers(dest="subparser"))
    serve.add_flags(parser)
    known = set(parser._option_string_actions)  # hidden ones too
    for message in (BOUNDED_REPLAY, *(refusal.message for refusal in REFUSALS)):
        assert re.search(r"\b(add|remove|set|choose)\b.* --[a-z]", message), message
        for flag in re.findall(r"--[a-z0-9-]+[a-z0-9]", message):
            assert flag in known, f"{flag}: {message}"


# ---- what only the model, or its KV cache, shows ----


def kv_cache_config(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
SLIDING = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=16)


def test_the_group_that_keeps_every_token() -> None:
    """Hybrid models: not group 0 because it is the first (vLLM issue 35744)."""
    assert full_attention_group(kv_cache_config(FULL)) == 0
    assert full_attention_group(kv_cache_config(SLIDING, FULL)) == 1
    with pytest.raises(UnsupportedConfig, match="no full-attention layers"):
        full_attention_group(kv_cache_config(SLIDING))


def test_tokens_of_a_prefix_hit_that_run_again() -> None:
    """DeepSeek-V4.1: as their windows are not kept, what they are routed to then is not what it was the first time."""
    sizes = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32, "sliding_window": 16}
    assert full_attention_group(kv_cache_config(FULL, SlidingWindowMLASpec(**sizes, bounded_replay=False))) == 0
    with pytest.raises(UnsupportedConfig, match="--no-swa-bounded-replay"):
        full_attention_group(kv_cache_config(FULL, SlidingWindowMLASpec(**sizes, bounded_replay=True)))


def test_layers_that_run_on_a_window_of_the_prompt() -> None:
    """DeepSeek-V4.1 decides so when it is made; it needs a GPU, so that only what it says so with is vLLM's here."""
    model = torch.nn.Module()
    model.decoder_replay_layers = None
    assert find_moe_layers(model).runners == ()
    model.decoder_replay_layers = DecoderReplayLayers(16, lambda *_: (), lambda *_: None, set(), "")
    with pytest.raises(UnsupportedConfig, match="--no-swa-bounded-replay"):
        find_moe_layers(model)
