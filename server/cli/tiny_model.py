"""Creates a tiny MoE model: random weights from a fixed seed, a byte-level tokenizer, a chat
template.

It is a Qwen3-MoE model with 6 decoder layers (the first is dense) and 16 experts, top 4. Its text
has no meaning, but its routing is real, and it needs neither a download nor a GPU.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from routed_experts.server.cli.console import hide_transformers_progress, say

_SEED = 20261120
_END = "<|endoftext|>"
_IM_START = "<|im_start|>"
_IM_END = "<|im_end|>"

_CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in (_END, _IM_START, _IM_END)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_IM_END,
        pad_token=_END,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def make_tiny_model(directory: Path, seed: int = _SEED) -> None:
    """Writes the model and its tokenizer to `directory`, a few MB in float32, in a few seconds.

    Complete files are moved there, `config.json` last, so a folder with `config.json` is complete.
    Concurrent processes write the same bytes.
    """
    hide_transformers_progress()
    tokenizer = make_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=6,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                # Large router weights keep scores apart, so that rounding never changes the choice.
                std = 1.0 if name.endswith("mlp.gate.weight") else 0.08
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        # Makes only printable ASCII and the end token likely, so that each token is one character.
        printable = [tokenizer.convert_tokens_to_ids(chr(c)) for c in range(33, 127)] + [
            tokenizer.eos_token_id
        ]
        rows = torch.randn((len(printable), config.hidden_size), generator=generator) * 0.6
        model.lm_head.weight.zero_()
        model.lm_head.weight[printable] = rows
    generation = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".unfinished-", dir=directory) as unfinished:
        for part in (model, tokenizer, generation):
            part.save_pretrained(unfinished)
        for file in sorted(Path(unfinished).iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(directory / file.name)


def main(argv: list[str]) -> int:
    """`routed-experts tiny-model DIR`; returns the command's exit status."""
    parser = argparse.ArgumentParser(
        prog="routed-experts tiny-model", description="Writes the tiny MoE model."
    )
    parser.add_argument("directory", metavar="DIR", type=Path)
    directory = parser.parse_args(argv).directory
    say(f"Making the tiny model in {directory}; this takes some seconds.")
    make_tiny_model(directory)
    print(f"Wrote the tiny MoE model to {directory}.")
    return 0
