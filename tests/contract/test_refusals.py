"""What is refused, on configurations that vLLM itself makes of the tiny model's `config.json`."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
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

from routed_experts.capture.engine.config import (
    BOUNDED_REPLAY,
    REFUSALS,
    UnsupportedConfig,
    check_engine_config,
    full_attention_group,
)
from routed_experts.capture.engine.connectors import CONNECTORS, used_by
from routed_experts.capture.wire.rows import INPUT_KEY, RECOMPUTE_KEY, WEIGHTS_KEY
from routed_experts.capture.wire.vllm_rows import BARE_ROWS_KEY
from routed_experts.capture.worker.moe_layers import find_moe_layers
from routed_experts.server.cli import serve

OLDER_RAY = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
RAY = {"parallel_config.distributed_executor_backend": "ray", OLDER_RAY: "0"}
UNKNOWN_CONNECTOR = "unknown KV connector"
NOT_THESE_MICROBATCHES = "microbatches, except dual-batch overlap on the V2 model runner"
BOTH = {"kv_role": "kv_both"}


def kv_transfer(*connectors: str) -> dict[str, Any]:
    """Of one connector, or of several behind vLLM's `MultiConnector`."""
    first, *others = ({"kv_connector": connector, **BOTH} for connector in connectors)
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [first, *others]},
        **BOTH,
    }
    return {"kv_transfer_config": several if others else first}


DRAFTS = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
}
EXPERT_PARALLEL = {"enable_expert_parallel": True, "data_parallel_size": 2}
MICROBATCHES = {**EXPERT_PARALLEL, "ubatch_size": 2, "all2all_backend": "deepep_low_latency"}
EXTERNAL = {"distributed_executor_backend": "external_launcher", "pipeline_parallel_size": 2}
INPUT = {"additional_config": {INPUT_KEY: True}}
ENCODER = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_producer")

# Of a refusal: its name, vLLM's arguments, and what is then changed, of which only the last is
# refused: variables, and what vLLM does not make here, whatever is asked for, which is set on the
# configuration that vLLM made.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense model", {"hf_overrides": {"num_local_experts": 0, "num_experts": 0}}, {}),
    # vLLM has no encoder-decoder model with experts
    ("encoder-decoder or pooling model", {"runner": "pooling"}, {}),
    ("diffusion model", {"diffusion_config": {"canvas_length": 32}}, {}),
    (UNKNOWN_CONNECTOR, kv_transfer("DecodeBenchConnector"), {}),
    (UNKNOWN_CONNECTOR, kv_transfer("ExampleConnector"), {}),
    (UNKNOWN_CONNECTOR, kv_transfer("NixlConnector", "DecodeBenchConnector"), {}),
    (
        "several KV connectors that transfer KV between instances",
        kv_transfer("NixlConnector", "NixlPushConnector"),
        {},
    ),
    ("pipeline parallelism under an external launcher", EXTERNAL, {}),
    (
        "decode context parallelism",
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
        {},
    ),
    ("prefill context parallelism", {"prefill_context_parallel_size": 2}, {}),
    (NOT_THESE_MICROBATCHES, MICROBATCHES, {}),
    ("KV-sharing fast prefill", {"kv_sharing_fast_prefill": True}, {}),
    # Without Ray, vLLM makes no such configuration; vLLM 0.33 has the newer executor only.
    *([("Ray with compiled graphs", {}, RAY)] if hasattr(envs, OLDER_RAY) else []),
    # With the package installed, the argument means this capture.
    ("vLLM's own capture", {}, {"aux_output_config.enable_return_routed_experts": True}),
    # Needs full CUDA graphs.
    (
        "adaptive draft verification",
        DRAFTS,
        {"speculative_config.enable_adaptive_verification": True},
    ),
    (
        "equal request ids",
        {},
        {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"},
    ),
    # Needs expert load balancing, which needs CUDA.
    ("elastic expert parallelism", EXPERT_PARALLEL, {"parallel_config.enable_elastic_ep": True}),
    (
        "the router's weights with KV of other instances",
        {"additional_config": {WEIGHTS_KEY: True}, **kv_transfer("NixlConnector")},
        {},
    ),
    (
        "routing as an input with KV of other instances",
        {**INPUT, **kv_transfer("NixlConnector")},
        {},
    ),
    # Needs CUDA.
    (
        "routing as an input with microbatches",
        {**INPUT, **EXPERT_PARALLEL, "all2all_backend": "deepep_low_latency"},
        {"VLLM_USE_V2_MODEL_RUNNER": "1", "parallel_config.enable_dbo": True},
    ),
    (
        "replay on recomputation without routing as an input",
        {"additional_config": {RECOMPUTE_KEY: True}},
        {},
    ),
    (
        "replay on recomputation with drafts and pipeline parallelism",
        {
            "additional_config": {INPUT_KEY: True, RECOMPUTE_KEY: True},
            "pipeline_parallel_size": 2,
            **DRAFTS,
        },
        {},
    ),
    (
        "the router's weights behind vLLM's front end in Rust",
        {"additional_config": {BARE_ROWS_KEY: True, WEIGHTS_KEY: True}},
        {},
    ),
    (
        "routing as an input behind vLLM's front end in Rust",
        {"additional_config": {BARE_ROWS_KEY: True, INPUT_KEY: True}},
        {},
    ),
    (
        "KV of other instances behind vLLM's front end in Rust",
        {"additional_config": {BARE_ROWS_KEY: True}, **kv_transfer("NixlConnector")},
        {},
    ),
    # Needs a multimodal model, whose class does not load there.
    ("encoder-only instance", {}, {"ec_transfer_config": ENCODER}),
    (
        "encoder-only instance",
        {},
        {"model_config.multimodal_config": SimpleNamespace(mm_encoder_only=True)},
    ),
]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return Path(shutil.copy(tiny_model / "config.json", tmp_path_factory.mktemp("config"))).parent


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes configurations of Model Runner V2, and with sleep mode, here too if it is told
    that it can."""
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)


def configuration(folder: Path, **arguments: Any) -> VllmConfig:
    """What vLLM makes of these arguments."""
    every = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
    }
    return EngineArgs(
        model=str(folder), kv_cache_memory_bytes=8 << 20, **every, **arguments
    ).create_engine_config()


def assert_refused(config: VllmConfig, name: str) -> None:
    with pytest.raises(UnsupportedConfig) as refused:
        check_engine_config(config)
    assert str(refused.value) == next(
        refusal.message for refusal in REFUSALS if refusal.name == name
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"enable_prefix_caching": False},
        {"enable_sleep_mode": True},
        DRAFTS,
        {**EXPERT_PARALLEL, "all2all_backend": "flashinfer_nvlink_two_sided"},
        {"kv_offloading_size": 1},
        {"kv_offloading_size": 1, **INPUT},
        {"additional_config": {INPUT_KEY: True, RECOMPUTE_KEY: True}, **DRAFTS},
        {
            "additional_config": {INPUT_KEY: True, RECOMPUTE_KEY: True},
            "pipeline_parallel_size": 2,
        },
        kv_transfer("NixlConnector", "OffloadingConnector"),
        *(kv_transfer(connector) for connector in CONNECTORS),
    ],
)
def test_what_is_not_refused(folder: Path, arguments: dict[str, Any]) -> None:
    check_engine_config(configuration(folder, **arguments))


@pytest.mark.parametrize(
    ("runner", "overlap", "fits"), [("0", True, False), ("1", False, False), ("1", True, True)]
)
def test_microbatches(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runner: str, overlap: bool, fits: bool
) -> None:
    """V1's model runner is vLLM's choice where nobody chooses."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    config = configuration(folder, **MICROBATCHES)
    config.parallel_config.enable_dbo = overlap  # which needs CUDA
    if fits:
        check_engine_config(config)
    else:
        assert_refused(config, NOT_THESE_MICROBATCHES)


@pytest.mark.parametrize(("name", "arguments", "changes"), REFUSED)
def test_refusals(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    arguments: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    config = configuration(folder, **arguments)
    for path, value in changes.items():
        check_engine_config(config)
        owner, _, attribute = path.rpartition(".")
        if attribute.isupper():
            monkeypatch.setenv(attribute, value)
            continue
        of = getattr(config, owner) if owner else config
        assert hasattr(of, attribute)
        setattr(of, attribute, value)
    assert_refused(config, name)


@pytest.mark.parametrize(("module", "is_known"), [(None, True), ("a.package.of.somebodys", False)])
def test_connectors_from_elsewhere(module: str | None, is_known: bool) -> None:
    config = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", kv_connector_module_path=module
    )
    assert used_by(config) == [CONNECTORS["NixlConnector"] if is_known else None]


def test_every_connector_of_vllm_has_been_looked_at() -> None:
    """A new one must be read before it is in either list."""
    refused = {
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "HiSparseConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MoRIIOConnector",
        "MooncakeStoreConnector",
        "MultiConnector",
        "SimpleCPUOffloadConnector",
    }
    own = {name for name in KVConnectorFactory._registry if not name.endswith("OfTheTests")}
    assert own == CONNECTORS.keys() | refused


def test_every_refusal_is_tried() -> None:
    gone = set() if hasattr(envs, OLDER_RAY) else {"Ray with compiled graphs"}
    assert {refusal.name for refusal in REFUSALS} - gone == {case[0] for case in REFUSED}


def test_refusals_say_what_to_change() -> None:
    parser = ServeSubcommand().subparser_init(
        FlexibleArgumentParser().add_subparsers(dest="subparser")
    )
    serve.add_flags(parser)
    known = set(parser._option_string_actions)  # hidden ones too
    for message in (BOUNDED_REPLAY, *(refusal.message for refusal in REFUSALS)):
        assert re.search(r"\b(add|remove|set|choose)\b.* --[a-z]", message), message
        for flag in re.findall(r"--[a-z0-9-]+[a-z0-9]", message):
            assert flag in known, f"{flag}: {message}"


# ---- what only the model, or its KV cache, shows ----


ABOUT = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**ABOUT)
SLIDING = SlidingWindowSpec(**ABOUT, sliding_window=16)


def group(*specs: KVCacheSpec) -> int:
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return full_attention_group(
        KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    )


def test_the_group_that_keeps_every_token() -> None:
    """Hybrid models: not group 0 because it is the first (vLLM issue 35744)."""
    assert group(FULL) == 0
    assert group(SLIDING, FULL) == 1
    with pytest.raises(UnsupportedConfig, match="no full-attention layers"):
        group(SLIDING)


def test_tokens_of_a_prefix_hit_that_run_again() -> None:
    """DeepSeek-V4.1: as their windows are not kept, what they are routed to then is not what it was
    the first time."""
    assert group(FULL, SlidingWindowMLASpec(**ABOUT, sliding_window=16, bounded_replay=False)) == 0
    with pytest.raises(UnsupportedConfig, match="--no-swa-bounded-replay"):
        group(FULL, SlidingWindowMLASpec(**ABOUT, sliding_window=16, bounded_replay=True))


def test_layers_that_run_on_a_window_of_the_prompt() -> None:
    """DeepSeek-V4.1 decides so when it is made; it needs a GPU, so that only what it says so with
    is vLLM's here."""
    model = torch.nn.Module()
    model.decoder_replay_layers = None
    assert find_moe_layers(model).runners == ()
    model.decoder_replay_layers = DecoderReplayLayers(16, lambda *_: (), lambda *_: None, set(), "")
    with pytest.raises(UnsupportedConfig, match="--no-swa-bounded-replay"):
        find_moe_layers(model)
