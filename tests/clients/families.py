"""Every family of transformers that has routers, as a tiny model of random weights.

    python -m tests.clients.families

writes the list in `docs/replay.md`.
"""

import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

PAGE = Path(__file__).parents[2] / "docs/replay.md"
BEGIN, END = "<!-- written by tests/clients/families.py -->\n", "<!-- end -->\n"

EXPERTS, TOP_K, VOCABULARY = 8, 2, 64

_MLA = {"num_key_value_heads": 4}
_PERIODIC = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_LAYERS = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_RELATIVE = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
_RELATIVE |= {"d_rel": 4, "rel_extent": 16, "sliding_window_size": 8, "unpadded_vocab_size": 64}
SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    # experts
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "top_k_experts": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "ffn_hidden_size": 32,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
    "num_layers": 2,
}
"""Options of configurations, where they have them."""
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3"), _MLA),
    **dict.fromkeys(("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash"), _MLA),
    **dict.fromkeys(("mistral4", "mistral_large4"), _MLA),
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 16,
            "ffn_act_fn": {"name": "silu"},
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
        },
    },
    "deepseek_ocr2": _LAYERS,
    "deepseek_v4": {"mlp_layer_types": ["moe"] * 4},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots3_note": {**_MLA, "shared_experts_intermediate_size": 16},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16], "rope_parameters": _PERIODIC},
    "gemma4": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 8,
    },
    "glm4v_moe": {"rope_parameters": {**_PERIODIC, "partial_rotary_factor": 1.0}},
    "glm5_next": {
        **_MLA,
        "index_topk": 16,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "granitemoehybrid": {"mamba_n_heads": 4, "layer_types": ["mamba", "attention"] * 2},
    "hy_v4_vl": {"rope_parameters": _PERIODIC},
    "inkling2": _RELATIVE,
    "inkling2_loop": {
        **_RELATIVE,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_gate_rank": 4,
    },
    "kimi_linear": {**_MLA, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "muse_spark": {"moe_hidden_size": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 4, "chunk_size": 8},
    "nllb_moe": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 2,
        "split_ngram_parts": 2,
        "heads_per_ngram": 2,
        "ple_embed_dim": 8,
        "hc_lowrank": 8,
    },
    "switch_transformers": {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 4},
    "unlimited_ocr": _LAYERS,
    "zaya": {"num_experts_per_tok": 1},
}
NUM_EXPERTS = {"longcat_flash": EXPERTS + SHARED["zero_expert_num"]}  # type: ignore[operator]
"""Of routers that have others than `EXPERTS`."""

NEWER = [
    "bailing_hybrid",
    "beam",
    "dots3_note",
    "flint",
    "hy_v4_vl",
    "inkling2",
    "inkling2_loop",
    "kolibri1",
    "lara_mini",
    "mistral_large4",
    "muse_spark",
    "unlimited_ocr",
]
"""Those that transformers 5.24 has and 5.19 has not."""
REFUSED = {
    "doge": ("its experts are products of keys", "DogeCDMoE returns"),
    "inkling": (
        "weights of its shared experts depend on those chosen",
        "InklingTopkRouter returns",
    ),
    "inkling2_loop": ("layers run several times", "second forward pass"),
    "jetmoe": ("its router returns no ids", "JetMoeTopKGating returns"),
    "nllb_moe": ("drops experts that are full", "but the router has"),
    "phimoe": ("a weight depends on the experts chosen before", "PhimoeTopKRouter computes"),
    "switch_transformers": (
        "drops experts that are full",
        "SwitchTransformersTop1Router returns",
    ),
    "zaya": ("its router hands its state on", "ZayaRouter returns"),
}
"""Why, and what the error says."""


def installed() -> list[str]:
    """Families of the installed transformers whose code has a router."""
    root = Path(transformers.__file__).parent / "models"
    has_router = re.compile(r"self\.top_k\s*=|^class \w*Router\(", re.MULTILINE)
    return [
        path.parent.name
        for path in sorted(root.glob("*/modeling_*.py"))
        if has_router.search(text := path.read_text(encoding="utf-8")) and "expert" in text
    ]


FAMILIES = sorted({*installed(), *NEWER})
"""What the page lists."""


def tiny_model(family: str) -> Any:
    """In float32, with weights that keep scores apart."""
    model_class = _model_class(family)
    config_class = model_class.config_class
    fields = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map}
    shared = {name: value for name, value in SHARED.items() if name in fields}
    torch.manual_seed(3)
    model = model_class(config_class(**{**shared, **OPTIONS.get(family, {})}))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            is_router = re.search(r"gate|router", name) is not None
            if tensor.is_floating_point() and tensor.dim() > 1:
                tensor.normal_(0, 0.3 if is_router else 0.1)
            elif "bias" in name:
                tensor.normal_(0, 0.2)
    return model.eval()


def _model_class(family: str) -> Any:
    """The language model, without its head if there is none with it."""
    path = next((Path(transformers.__file__).parent / "models" / family).glob("modeling_*.py"))
    module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
    classes = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    }
    endings = ("ForCausalLM", "TextModel", "ForConditionalGeneration", "Model")
    return next(
        value
        for ending in endings
        for name, value in classes.items()
        if name.endswith(ending) and hasattr(value, "config_class") and "PreTrained" not in name
    )


def block() -> str:
    """The list of the page."""
    replayed = [name for name in FAMILIES if name not in (*REFUSED, *NEWER)]
    refused = [f"`{name}` ({why})" for name, (why, _) in REFUSED.items() if name not in NEWER]
    newer = [name for name in FAMILIES if name in NEWER and name not in REFUSED]
    newer_refused = [f"`{name}` ({why})" for name, (why, _) in REFUSED.items() if name in NEWER]
    return (
        f"{_listed(replayed)}.\n\nRefused: {'; '.join(refused)}.\n\n"
        f"In transformers 5.24 also: {_listed(newer)}. Refused: {'; '.join(newer_refused)}.\n"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + block() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
