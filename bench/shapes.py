"""The benchmarks' models: folders for `--load-format dummy`, with a configuration and a tokenizer
but no weights."""

import json
from pathlib import Path
from typing import Any

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}

# The router of DeepSeek-V3 (58 MoE layers, top 8 of 256 experts in 8 groups of which 4 count,
# sigmoid with bias) beside the attention above; experts as narrow as two engines on one GPU need.
GROUPED_256 = {
    **QWEN3_30B_A3B,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 256,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "attention_bias": False,
}

# As many experts of which as many are chosen as in Qwen3-Next.
TEN_OF_512 = {
    **QWEN3_30B_A3B,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 128,
}

# As many of as many as in latent MoE models (Nemotron 3), whose experts are narrow.
LATENT_22_OF_512 = {**TEN_OF_512, "num_experts_per_tok": 22}

ENGINE_SHAPES = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "grouped-256": GROUPED_256,
    "ten-of-512": TEN_OF_512,
    "22-of-512": LATENT_22_OF_512,
}


def kv_bytes(config: dict[str, Any]) -> int:
    """Bytes of KV that a token has in all layers."""
    width = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return int(width * (2 if config["torch_dtype"] == "bfloat16" else 4))


# As many rows, and as wide, as Qwen3-30B-A3B's; everything that costs the engine time is as small
# as its kernels allow.
TINY = {
    **QWEN3_30B_A3B,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1024,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "torch_dtype": "float32",
}

TOKEN_CHARS = 5
"""Every token's text has this many characters, so that the length of a chunk's text says how many
tokens it brings."""


def token_text(index: int) -> str:
    """A space and the index in letters: one word a token, as with a real vocabulary, and no two
    alike."""
    letters = ""
    for _ in range(TOKEN_CHARS - 1):
        index, digit = divmod(index, 26)
        letters = chr(ord("a") + digit) + letters
    return " " + letters


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level tokenizer that decodes every id below `vocab_size`. It cannot encode: prompts
    are sent as ids."""
    # here: client processes import this module
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token_text(index).replace(" ", "Ġ"): index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    ).save_pretrained(directory)


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """Writes `config` and a tokenizer of its vocabulary's size to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, config["vocab_size"])
    (directory / "config.json").write_text(json.dumps(config))
