"""Tiny random models of many architectures, made on the spot, and an oracle that fits them all."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from routed_experts.server.cli.tiny_model import make_tokenizer
from tests.e2e.harness import Oracle, Wrong, differences

_SEED = 20261121


@dataclass(frozen=True)
class Shape:
    """An architecture, and what its arrays must look like."""

    name: str
    model_type: str  # as in `config.json`
    options: dict[str, Any]  # of the Hugging Face configuration, beside those that all shapes share
    layer_ids: tuple[int, ...]  # decoder layers that have experts
    # Of the router's weights. Wide ones keep the experts' scores apart, so that rounding never
    # decides which one is chosen; a sigmoid needs narrower ones, as it would round large scores to
    # equal ones.
    router_std: float = 1.0
    env: Mapping[str, str] = field(default_factory=dict)  # of the server
    flags: tuple[str, ...] = ()  # of the server, in float32
    engine: Mapping[str, Any] = field(default_factory=dict)  # further arguments of vLLM, in 16 bits
    prefix_cache: bool = True  # whether vLLM has a prefix cache for it
    needs_gpu: str = ""  # why vLLM's CPU build cannot run it, if it cannot
    needs_cpu: str = ""  # why it is not run on a GPU, if it is not

    @property
    def num_experts(self) -> int:
        return self._option("num_experts", "n_routed_experts", "num_local_experts")

    @property
    def top_k(self) -> int:
        return self._option("num_experts_per_tok", "top_k_experts")

    def _option(self, *names: str) -> int:
        return next((int(self.options[name]) for name in names if name in self.options), 0)

    @property
    def repeats_logits(self) -> bool:
        """Whether the model hands out `router_logits` that alone say which experts are chosen.

        Some releases of transformers do not hand out Granite's.
        """
        return self.model_type not in (
            "deepseek_v2",
            "deepseek_v3",
            "granitemoehybrid",
            "lfm2_moe",
            "llama4_text",
        )


_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_QWEN3_MOE = {
    **_ATTENTION,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
# The head size, 512 + 64, is the only one that vLLM's CPU kernel for latent attention has; 128 + 64
# and 128 those of CUDA's for prefill.
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# As every DeepSeek has it. (vLLM's CPU operator for plain rotary embeddings rotates wrongly where
# queries come as [tokens, heads, head size].)
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_DEEPSEEK_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 1024}
_DEEPSEEK = {
    **_MLA,
    "rope_parameters": _DEEPSEEK_YARN,
    **{
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
    },
    **{
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
    },
    **{"n_group": 4, "topk_group": 2},
}
_DEEPSEEK_V2 = {
    **_DEEPSEEK,
    **{"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "group_limited_greedy"},
    **{"routed_scaling_factor": 1.0, "norm_topk_prob": False},
}
_DEEPSEEK_V3 = {
    **_DEEPSEEK,
    **{
        "q_lora_rank": 32,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    # for vLLM; Hugging Face knows no others
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
_MIXTRAL = {
    **_ATTENTION,
    **{
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_YARN |= {"truncate": False, "original_max_position_embeddings": 1024}
_WITHOUT_MLA = {"VLLM_MLA_DISABLE": "1"}
_NO_FLOAT32 = (
    "vLLM's kernels for latent attention take no float32 on CUDA, and in bfloat16 near-ties decide"
)

_OLMOE = {
    **{
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    **{"num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 4},
}
_QWEN2_MOE = {
    **{
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
    },
    **{
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    },
    **{"num_experts": 12, "num_experts_per_tok": 3, "decoder_sparse_step": 2},
}
_GPT_OSS = {
    **_ATTENTION,
    **{
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
    },
    **{"sliding_window": 40, "rope_parameters": _YARN},
}
_GRANITEMOEHYBRID = {
    **{
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
    },
    **{"shared_intermediate_size": 64, "num_local_experts": 16, "num_experts_per_tok": 4},
    **{
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_state": 32,
    },
    **{"mamba_expand": 2, "mamba_chunk_size": 64, "attention_multiplier": 0.2},
}
_JAMBA = {
    **{
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
    },
    **{
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
}
_LFM2_MOE = {
    **{
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
    },
    **{
        "moe_intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_dense_layers": 2,
        "num_experts": 16,
    },
    **{"num_experts_per_tok": 4, "tie_word_embeddings": True},
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
}
_LLAMA4 = {
    **_ATTENTION,
    **{"intermediate_size": 64, "intermediate_size_mlp": 128, "num_hidden_layers": 4},
    **{"num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    **{"attention_chunk_size": 128, "no_rope_layers": [1, 0, 1, 0]},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
}
_FEW_EXPERTS = {**_QWEN3_MOE, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 1}
_MANY_EXPERTS = {**_FEW_EXPERTS, "num_experts": 300, "num_experts_per_tok": 8}
_MAMBA_1 = "vLLM's CPU build has no operator for Mamba 1 (selective_scan_fwd)"
_ROTARY = (
    "vLLM's CPU operator for rotary embeddings rotates [tokens, heads, head size] queries wrongly"
)
# Where the CPU has AMX, vLLM prefers kernels that take 16-bit weights only.
_LATENT: dict[str, Any] = {
    "prefix_cache": False,
    "needs_cpu": _NO_FLOAT32,
    "flags": ("--attention-backend", "CPU_MLA"),
}
_LFM2 = "lfm2-moe, convolutions and full attention, sigmoid with bias"
SHAPES = (
    Shape("mixtral", "mixtral", _MIXTRAL, (0, 1, 2, 3)),
    Shape("olmoe", "olmoe", _OLMOE, (0, 1, 2)),
    Shape("qwen2-moe, shared expert, every other layer", "qwen2_moe", _QWEN2_MOE, (1, 3, 5)),
    Shape("deepseek-v2, latent attention", "deepseek_v2", _DEEPSEEK_V2, (1, 2, 3), **_LATENT),
    Shape("deepseek-v2, plain attention", "deepseek_v2", _DEEPSEEK_V2, (1, 2, 3), env=_WITHOUT_MLA),
    Shape("deepseek-v3, latent attention", "deepseek_v3", _DEEPSEEK_V3, (1, 2, 3), 0.2, **_LATENT),
    Shape(
        "deepseek-v3, plain attention",
        "deepseek_v3",
        _DEEPSEEK_V3,
        (1, 2, 3),
        0.2,
        env=_WITHOUT_MLA,
    ),
    Shape("gpt-oss, sliding and full attention", "gpt_oss", _GPT_OSS, (0, 1, 2, 3)),
    Shape(
        "granite-moe-hybrid, mamba and full attention",
        "granitemoehybrid",
        _GRANITEMOEHYBRID,
        (0, 1, 2, 3),
    ),
    Shape("jamba, mamba and full attention", "jamba", _JAMBA, (1, 3), needs_gpu=_MAMBA_1),
    Shape(_LFM2, "lfm2_moe", _LFM2_MOE, (2, 3, 4), 0.15, needs_gpu=_ROTARY),
    Shape("llama4, chunked and full attention, top 1", "llama4_text", _LLAMA4, (1, 3)),
    Shape("qwen3-moe, 300 experts", "qwen3_moe", _MANY_EXPERTS, (0, 1, 2)),
    Shape("qwen3-moe, top 1", "qwen3_moe", _FEW_EXPERTS, (0, 1, 2)),
)

_GATED_DELTA = {
    **{**_ATTENTION, "num_hidden_layers": 4, "intermediate_size": 128, "moe_intermediate_size": 64},
    **{
        "shared_expert_intermediate_size": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    **{
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ]
    },
}
# Of the kernels on Hopper, the one that FlashInfer need not compile first, which takes minutes.
_FLA = {"gdn_prefill_backend": "triton"}
_SPARSE = {
    **{key: value for key, value in _DEEPSEEK_V3.items() if key != "rope_parameters"},
    **{"q_lora_rank": 64, "index_n_heads": 32, "index_head_dim": 128},
}
_SPARSE_ENV = {
    "VLLM_USE_DEEP_GEMM": "0",  # for products of matrices; the indexer has nothing else
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parent / "without_deep_gemm"), os.environ.get("PYTHONPATH", "")]
    ),
}
_INDEXED: dict[str, Any] = {"router_std": 0.2, "env": _SPARSE_ENV}
_INDEXED["needs_gpu"] = "vLLM's CPU build has no sparse attention for this model"
_DEEPSEEK_V32 = {**_SPARSE, "index_topk": 128}
_GLM_5 = {
    **_SPARSE,
    "index_topk": 512,
    "n_group": 1,
    "topk_group": 1,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}

_GLM4_MOE = {
    **{**_ATTENTION, "num_hidden_layers": 4, "first_k_dense_replace": 1, "intermediate_size": 128},
    **{
        "moe_intermediate_size": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
    },
    **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "use_qk_norm": True},
}
_MINIMAX_M2 = {
    **{**_ATTENTION, "num_hidden_layers": 3, "intermediate_size": 64, "num_local_experts": 16},
    **{
        "num_experts_per_tok": 4,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
}
_NEMOTRON_H = {
    **{**_ATTENTION, "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "moe"]},
    **{
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "n_groups": 1,
        "chunk_size": 64,
    },
    **{
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_routed_experts": 16,
    },
    **{"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "use_mamba_kernels": False},
}
_GEMMA4 = {
    **{**_ATTENTION, "num_hidden_layers": 4, "intermediate_size": 128, "enable_moe_block": True},
    **{
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 64,
        "hidden_size_per_layer_input": 0,
    },
    **{"sliding_window": 40, "global_head_dim": 32},
    **{
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ]
    },
}
_VISION = "vLLM's file of this model needs torchvision, which its CPU build does not bring"
_SIGMOID = "vLLM's router for CPUs has no sigmoid without groups"
_NO_GATE = "vLLM's CPU build has no experts without a gate (relu2)"
_NEMOTRON = "nemotron-h, mamba, experts and full attention by turns"
_QWEN3_5: dict[str, Any] = {"engine": _FLA, "needs_gpu": _VISION}
SIXTEEN_BIT = (
    Shape(
        "qwen3-next, gated delta networks", "qwen3_next", _GATED_DELTA, (0, 1, 2, 3), engine=_FLA
    ),
    Shape(
        "qwen3.5-moe, gated delta networks",
        "qwen3_5_moe_text",
        _GATED_DELTA,
        (0, 1, 2, 3),
        **_QWEN3_5,
    ),
    Shape("deepseek-v3.2, sparse attention", "deepseek_v32", _DEEPSEEK_V32, (1, 2, 3), **_INDEXED),
    Shape("glm-5, sparse attention", "glm_moe_dsa", _GLM_5, (1, 2, 3), **_INDEXED),
    Shape("glm4-moe, sigmoid with bias in float32", "glm4_moe", _GLM4_MOE, (1, 2, 3), 0.2),
    Shape(
        "minimax-m2, sigmoid with bias in float32",
        "minimax_m2",
        _MINIMAX_M2,
        (0, 1, 2),
        0.2,
        needs_gpu=_SIGMOID,
    ),
    Shape(_NEMOTRON, "nemotron_h", _NEMOTRON_H, (1, 3, 5), 0.2, needs_gpu=_NO_GATE),
    Shape("gemma4, experts beside a dense layer", "gemma4_text", _GEMMA4, (0, 1, 2, 3)),
)
"""Run in 16 bits only."""

OWN_FORMULA = {"llama4_text", "gemma4_text"}
"""Types of models whose routers have a formula of their own: requests cannot say their experts."""

SLIDING_ONLY = Shape(
    "sliding window only", "mixtral", {**_MIXTRAL, "sliding_window": 40}, (0, 1, 2, 3)
)


def make_model(shape: Shape, directory: Path) -> None:
    """Writes a random float32 model of `shape` and the byte-level tokenizer to `directory`."""
    tokenizer = make_tokenizer()
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    shared = {
        "hidden_size": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    config = AutoConfig.for_model(
        shape.model_type, **{**shared, **special, **shape.options}, vocab_size=len(tokenizer)
    )
    fill_and_save(AutoModelForCausalLM, config, tokenizer, directory, shape.router_std)


def fill_and_save(
    auto: Any, config: PreTrainedConfig, tokenizer: Any, directory: Path, router_std: float = 1.0
) -> None:
    """Writes a model that Hugging Face's class `auto` makes, with random weights, and its tokenizer
    to `directory`."""
    torch.manual_seed(_SEED)
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in sorted(
            {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
        ):
            std = _std_of(name, tensor.dim(), router_std)
            if std is not None:
                tensor.normal_(0, std)
        # Printable ASCII only, so that every token is a character of the text.
        head = model.get_output_embeddings().weight
        head[:33] = head[127:] = 0
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


_BIAS_OF_ROUTER = re.compile("correction_bias|expert_bias")
_ROUTER = re.compile(r"\.(gate|router|router\.layer|router\.proj)\.weight")


def _std_of(name: str, num_dimensions: int, router_std: float) -> float | None:
    """The standard deviation of a weight's random values. None for norms, and for what describes a
    recurrence: they stay as Hugging Face initialises them."""
    if _BIAS_OF_ROUTER.search(name):
        return 0.3
    if _ROUTER.search(name):
        return router_std
    if name == "lm_head.weight":
        return 0.6
    if "embed_tokens" in name:
        # enough to tell tokens apart, and little beside what attention adds: both must matter
        return 0.3
    if name.endswith(("_bias", ".bias")) or "sinks" in name:
        return None if "dt" in name else 0.1
    if num_dimensions > 1 and name.endswith(("weight", "_proj")):
        return 0.08
    return None


class HookOracle(Oracle):
    """The experts that Hugging Face's own routers hand to its own experts, whatever rule they
    choose them by."""

    def __init__(self, model: Path | PreTrainedModel, shape: Shape) -> None:
        if isinstance(model, Path):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = model.eval()
        self.top_k = shape.top_k
        self._known = {}
        self._seen: list[torch.Tensor] = []
        for name, module in self.model.named_modules():
            if type(module).__name__ == "Llama4Router":
                module.register_forward_hook(self._see_scores)
            elif name.endswith(".experts") and not self._is_llama4():
                module.register_forward_pre_hook(self._see_indices)

    def rows(self, tokens: Sequence[int]) -> np.ndarray:
        """[tokens, L, K], the chosen experts in ascending order."""
        key = tuple(tokens)
        if key not in self._known:
            self._seen.clear()
            with torch.no_grad():
                self.model(**self.inputs(tokens), use_cache=False)
            self._known[key] = np.sort(torch.stack(self._seen, dim=1).numpy(), axis=2)
        return self._known[key]

    def inputs(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """Of a forward pass of `tokens`."""
        return {"input_ids": torch.tensor([list(tokens)])}

    def wrong(self, rows: np.ndarray, tokens: Sequence[int], start: int = 0) -> list[Wrong]:
        """As `Oracle.wrong`, without what float64 would say: the scores are not seen."""
        not_seen = np.full(rows.shape[:2], np.nan)
        return differences(
            np.sort(rows, axis=2), self.rows(tokens)[start:], start, not_seen, not_seen
        )

    def _is_llama4(self) -> bool:
        return str(self.model.config.model_type).startswith("llama4")

    def _see_indices(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Every family but one calls its experts with hidden states, chosen indices, weights."""
        self._seen.append(args[1].reshape(-1, self.top_k))

    def _see_scores(
        self, module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Llama 4 runs every expert, with a score of 0 for those that were not chosen."""
        self._seen.append(output[0].nonzero()[:, 1].reshape(-1, self.top_k))


def write_adapter(config: PreTrainedConfig, directory: Path, seed: int) -> None:
    """Writes a random LoRA adapter for the attention projections of a Qwen3-MoE model to
    `directory`."""
    hidden = config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    sizes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads),
        "self_attn.o_proj": (heads, hidden),
    }
    _write_adapter(sizes, range(config.num_hidden_layers), directory, seed)


def write_adapter_of_experts(config: PreTrainedConfig, directory: Path, seed: int) -> None:
    """Writes a random LoRA adapter for every expert of a Qwen3-MoE model to `directory`."""
    hidden = config.hidden_size
    inner = config.moe_intermediate_size
    sizes: dict[str, tuple[int, int]] = {}
    for expert in range(config.num_experts):
        sizes[f"mlp.experts.{expert}.gate_proj"] = (hidden, inner)
        sizes[f"mlp.experts.{expert}.up_proj"] = (hidden, inner)
        sizes[f"mlp.experts.{expert}.down_proj"] = (inner, hidden)
    layers = set(range(config.num_hidden_layers)) - set(config.mlp_only_layers)
    _write_adapter(sizes, sorted(layers), directory, seed)


def _write_adapter(
    sizes: Mapping[str, tuple[int, int]], layers: Sequence[int], directory: Path, seed: int
) -> None:
    """`sizes` are those of the projections of a layer, in and out."""
    rank, alpha, scale = 8, 16, 0.1
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in layers:
        for name, (fan_in, fan_out) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = (
                torch.randn((rank, fan_in), generator=generator) * scale
            )
            tensors[f"{key}.lora_B.weight"] = (
                torch.randn((fan_out, rank), generator=generator) * scale
            )
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in sizes}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(described))


def keep_few_letters(tensors: dict[str, torch.Tensor], *heads: str) -> None:
    """Leaves the heads four tokens to choose from, so that even a random draft is right now and
    then."""
    for head in heads:
        tensors[head][: ord("A")] = tensors[head][ord("E") :] = 0


@contextmanager
def rewritten(directory: Path, **fields: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a model, to be changed, and its configuration with these `fields`."""
    config, weights = directory / "config.json", directory / "model.safetensors"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    tensors = load_file(weights)
    yield tensors
    save_file(tensors, weights, metadata={"format": "pt"})


def make_draft_model(model: Path, directory: Path) -> None:
    """Writes a copy of `model` to `directory` with weights a little off, so that some of its drafts
    are right."""
    shutil.copytree(model, directory)
    generator = torch.Generator().manual_seed(_SEED)
    with rewritten(directory) as tensors:
        for name, tensor in sorted(tensors.items()):
            if tensor.dim() > 1:
                tensors[name] = (
                    tensor + torch.randn(tensor.shape, generator=generator) * 0.02 * tensor.std()
                )


def make_mtp_model(directory: Path) -> Shape:
    """A DeepSeek-V3 whose last layer is one for multi-token prediction, with experts of its own."""
    shape = next(shape for shape in SHAPES if shape.name == "deepseek-v3, plain attention")
    own = int(shape.options["num_hidden_layers"])
    make_model(replace(shape, options={**shape.options, "num_hidden_layers": own + 1}), directory)
    layer = f"model.layers.{own}."
    generator = torch.Generator().manual_seed(_SEED)
    with rewritten(directory, num_hidden_layers=own, num_nextn_predict_layers=1) as tensors:
        hidden = tensors["lm_head.weight"].shape[1]
        tensors |= {
            f"{layer}{norm}.weight": torch.ones(hidden)
            for norm in ("enorm", "hnorm", "shared_head.norm")
        }
        tensors[f"{layer}eh_proj.weight"] = (
            torch.randn((hidden, 2 * hidden), generator=generator) * 0.08
        )
        tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        keep_few_letters(tensors, "lm_head.weight", f"{layer}shared_head.head.weight")
    return shape


def make_mxfp4_model(directory: Path) -> Shape:
    """A GPT-OSS whose experts have random weights of 4 bits, in the form of the released ones."""
    shape = next(shape for shape in SHAPES if shape.model_type == "gpt_oss")
    sizes = {"hidden_size": 256, "intermediate_size": 256}  # which no kernel has to pad
    make_model(replace(shape, options={**shape.options, **sizes}), directory)
    others = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": others}
    generator = torch.Generator().manual_seed(_SEED)
    with rewritten(directory, quantization_config=quantised) as tensors:
        for name in sorted(
            name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))
        ):
            experts, fan_in, fan_out = tensors.pop(name).shape
            # Two numbers to a byte, of up to 6, and to every 32 of them an exponent less 127.
            blocks = (experts, fan_out, fan_in // 32)
            tensors[f"{name}_blocks"] = torch.randint(
                256, (*blocks, 16), generator=generator, dtype=torch.uint8
            )
            tensors[f"{name}_scales"] = torch.randint(
                120, 123, blocks, generator=generator, dtype=torch.uint8
            )
    return shape


def make_eagle_models(directory: Path, head: Path) -> Shape:
    """A Mixtral in `directory`, and in `head` a random EAGLE head for it, which uses its embeddings
    and its LM head."""
    shape = SHAPES[0]
    make_model(shape, directory)
    with rewritten(directory) as tensors:
        keep_few_letters(tensors, "lm_head.weight")
    target = json.loads((directory / "config.json").read_text())
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    config = {key: target[key] for key in sizes} | {
        "num_hidden_layers": 1,
        "max_position_embeddings": 4096,
    }
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    layer = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).model.layers[0]
    generator = torch.Generator().manual_seed(_SEED)
    own = {f"layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    del own["layers.0.input_layernorm.weight"]
    hidden = int(config["hidden_size"])
    own["fc.weight"] = torch.randn((hidden, 2 * hidden), generator=generator) * 0.08
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config))
    save_file(own, head / "model.safetensors", metadata={"format": "pt"})
    return shape
