"""Trains a small MoE model on a CPU, for studies of routers without a download or a GPU.

    python examples/train_small_moe.py small-moe
    routed-experts serve small-moe --enable-routed-experts-input

Its texts are Python's own: the code of the standard library without comments and docstrings, and
the prose of its docstrings and of the language reference. A tenth of each is held out, and written
beside the model: `code.txt` and `prose.txt`. Needs torch, transformers and tokenizers.
"""

import argparse
import ast
import pydoc_data.topics
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

SEED = 0
END = "<|endoftext|>"
VOCABULARY = 1024
NUM_LAYERS = 4
NUM_EXPERTS = 16
TOP_K = 2
SEQUENCE = 128
BATCH = 16
LEARNING_RATE = 3e-3
WARMUP = 0.05  # of the steps
LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "lib2to3"}
HELD_OUT_EVERY = 10


def texts() -> tuple[list[str], list[str]]:
    """Code and prose, a text for each module or topic, in the order of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    code, prose = [], []
    for file in sorted(library.rglob("*.py")):
        if LEFT_OUT & set(file.relative_to(library).parts) or file.stem == "topics":
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:
            continue
        docstrings = take_docstrings(tree)
        code.append(ast.unparse(tree))
        prose.append("\n\n".join(docstrings))
    prose += [text for _, text in sorted(pydoc_data.topics.topics.items())]
    return [text for text in code if text], [text for text in prose if text]


def take_docstrings(tree: ast.Module) -> list[str]:
    """Removes them from the tree."""
    docstrings = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring is not None:
            docstrings.append(docstring)
            node.body = node.body[1:] or [ast.Pass()]
    return docstrings


def split(all_texts: list[str]) -> tuple[list[str], list[str]]:
    """To train on, and held out."""
    held_out = all_texts[::HELD_OUT_EVERY]
    train = [text for index, text in enumerate(all_texts) if index % HELD_OUT_EVERY]
    return train, held_out


def train_tokenizer(train_texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train_texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def tokens_of(tokenizer: PreTrainedTokenizerFast, train_texts: list[str]) -> torch.Tensor:
    joined = [token for text in train_texts for token in [*tokenizer.encode(text), 0]]
    return torch.tensor(joined)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """As Qwen3-30B-A3B in kind: softmax over all experts, renormalised over the chosen."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        moe_intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3MoeForCausalLM(config)


def train(model: Qwen3MoeForCausalLM, domains: list[torch.Tensor], num_steps: int) -> None:
    """Half of each batch is code, half is prose."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=num_steps, pct_start=WARMUP
    )
    random = np.random.default_rng(SEED)
    model.train()
    start = time.monotonic()
    for step in range(num_steps):
        batch = torch.stack(
            [
                domain[begin : begin + SEQUENCE]
                for domain in domains
                for begin in random.integers(len(domain) - SEQUENCE, size=BATCH // len(domains))
            ]
        )
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == num_steps - 1:
            seconds = time.monotonic() - start
            print(f"step {step:>5}, loss {loss.item():.3f}, {seconds:,.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    all_code, all_prose = texts()
    code, held_out_code = split(all_code)
    prose, held_out_prose = split(all_prose)
    tokenizer = train_tokenizer(code + prose)
    model = make_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    domains = [tokens_of(tokenizer, code), tokens_of(tokenizer, prose)]
    print(f"{parameters / 1e6:.1f} million parameters")
    print("tokens of code and prose:", ", ".join(f"{len(domain):,}" for domain in domains))
    train(model, domains, args.steps)
    model.config.output_router_logits = False
    model.save_pretrained(args.directory)
    tokenizer.save_pretrained(args.directory)
    (args.directory / "code.txt").write_text("\n\n".join(held_out_code))
    (args.directory / "prose.txt").write_text("\n\n".join(held_out_prose))


if __name__ == "__main__":
    main()
