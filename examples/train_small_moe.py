"""Trains a small MoE model, for studies of routers without a download.

    python examples/train_small_moe.py small-moe
    routed-experts serve small-moe --enable-routed-experts-input

That takes minutes of a CPU. Five minutes of a GPU train a model with the layers and experts of a
large one:

    python examples/train_small_moe.py deep-moe --device cuda --dtype bfloat16 \\
        --num-layers 48 --num-experts 128 --top-k 8 --hidden-size 256 --expert-size 64 \\
        --vocabulary 4096 --sequence 256 --batch 64 --learning-rate 1e-3 --balance layer \\
        --minutes 5 --packages torch transformers numpy

Its texts are Python's own: the code of the standard library without comments and docstrings, and
the prose of its docstrings and of the language reference. A tenth of each is held out, and written
beside the model: `code.txt` and `prose.txt`. `--packages` adds texts to train on. `training.json`
has what was done, and the loss on what was held out. Needs torch, transformers and tokenizers.
"""

import argparse
import ast
import importlib.util
import json
import platform
import pydoc_data.topics
import shlex
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

SEED = 0
END = "<|endoftext|>"
HEAD_DIM = 32
WARMUP = 0.05  # of the steps
BALANCE = 0.01  # the share of the load-balancing loss
LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "lib2to3"}
HELD_OUT_EVERY = 10
MOST_MEASURED = 64  # sequences of each held-out text


@dataclass
class Texts:
    """Those of code, and those of prose."""

    code: list[str]
    prose: list[str]

    def split(self) -> tuple["Texts", "Texts"]:
        """To train on, and held out."""
        parts = [split(self.code), split(self.prose)]
        return Texts(*(train for train, _ in parts)), Texts(*(held_out for _, held_out in parts))

    def with_packages(self, names: list[str]) -> "Texts":
        """With the texts of installed packages behind them."""
        code, prose = [*self.code], [*self.prose]
        for name in names:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise SystemExit(f"--packages: {name} is not installed.")
            package = texts_in(Path(spec.origin).parent)
            code += package.code
            prose += package.prose
        return Texts(code, prose)


def texts() -> Texts:
    """Of the standard library and the language reference, in the order of their names."""
    found = texts_in(Path(sysconfig.get_paths()["stdlib"]))
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    return Texts(found.code, [*found.prose, *filter(None, topics)])


def texts_in(folder: Path) -> Texts:
    """A text of code and one of prose for each module that has them."""
    files = [
        file
        for file in sorted(folder.rglob("*.py"))
        if not LEFT_OUT & set(file.relative_to(folder).parts) and file.stem != "topics"
    ]
    with ProcessPoolExecutor() as pool:
        pairs = list(pool.map(code_and_prose, files, chunksize=16))
    return Texts([code for code, _ in pairs if code], [prose for _, prose in pairs if prose])


def code_and_prose(file: Path) -> tuple[str, str]:
    """Of a module; two empty texts if it is not of this version of Python, or too deep."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(file.read_bytes())
        docstrings = take_docstrings(tree)
        return ast.unparse(tree), "\n\n".join(docstrings)
    except (SyntaxError, ValueError, RecursionError):
        return "", ""


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


def train_tokenizer(train_texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train_texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def tokens_of(tokenizer: PreTrainedTokenizerFast, some_texts: list[str]) -> torch.Tensor:
    """All in a row, each with the token that ends a text."""
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(some_texts)
    return torch.cat([torch.tensor([*text.ids, 0]) for text in encoded])


def make_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> Qwen3MoeForCausalLM:
    """As Qwen3-30B-A3B in kind: softmax over all experts, renormalised over the chosen."""
    config = Qwen3MoeConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden_size,
        moe_intermediate_size=args.expert_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        num_experts=args.num_experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=args.dtype,
    )
    model = Qwen3MoeForCausalLM(config).to(args.device)
    for parameter in model.parameters():  # not what rotates positions, which is no parameter
        parameter.data = parameter.data.to(getattr(torch, args.dtype))
    return model


def imbalance(router_logits: Iterable[torch.Tensor], top_k: int, balance: str) -> torch.Tensor:
    """The load-balancing loss of Switch Transformers: the sum over experts of the share of tokens
    that chose one times its mean probability, in multiples of what equal probabilities give a
    single choice.

    Args:
        router_logits: of each layer, [tokens, experts].
        balance: of the experts of each "layer", or, as transformers has it, of those of the whole
            "model": then an expert may be idle in one layer if its number is busy in another.
    """
    probabilities = torch.stack([logits.float() for logits in router_logits]).softmax(dim=-1)
    chosen = torch.zeros_like(probabilities)
    chosen.scatter_(-1, probabilities.detach().topk(top_k).indices, 1)
    tokens = 1 if balance == "layer" else (0, 1)
    products = chosen.mean(dim=tokens) * probabilities.mean(dim=tokens)
    return probabilities.shape[-1] * products.sum(dim=-1).mean()


def loss_of(
    model: Qwen3MoeForCausalLM, batch: torch.Tensor, balance: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the next tokens in nats a token, and of the balance."""
    output = model.model(input_ids=batch, use_cache=False, output_router_logits=True)
    logits = model.lm_head(output.last_hidden_state[:, :-1]).float()
    loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    return loss, imbalance(output.router_logits, model.config.num_experts_per_tok, balance)


class Optimizer:
    """AdamW on float32 copies of the parameters; of float32, on the parameters themselves."""

    def __init__(self, model: Qwen3MoeForCausalLM, learning_rate: float, num_steps: int) -> None:
        self._parameters = list(model.parameters())
        self._copies = [parameter.detach().float() for parameter in self._parameters]
        fused = self._copies[0].is_cuda
        self._adam = torch.optim.AdamW(
            self._copies, lr=learning_rate, betas=(0.9, 0.95), fused=fused or None
        )
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._adam, learning_rate, total_steps=num_steps, pct_start=WARMUP
        )

    def step(self, num_done: int) -> None:
        """Moves the parameters against their gradients; then `num_done` steps of the schedule are
        behind."""
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._copies, 1.0)
        self._adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._copies)
        while self._schedule.last_epoch < num_done:
            self._schedule.step()


def train(
    model: Qwen3MoeForCausalLM, domains: list[torch.Tensor], args: argparse.Namespace
) -> dict[str, Any]:
    """Half of each batch is code, half is prose. Returns what `training.json` says of it."""
    optimizer = Optimizer(model, args.learning_rate, args.steps)
    random = np.random.default_rng(SEED)
    model.train()
    losses: list[tuple[int, float]] = []
    start = time.monotonic()
    step = num_done = 0
    while num_done < args.steps:
        batch = torch.stack(
            [
                domain[begin : begin + args.sequence]
                for domain in domains
                for begin in random.integers(
                    len(domain) - args.sequence, size=args.batch // len(domains)
                )
            ]
        ).to(args.device, non_blocking=True)
        loss, unbalanced = loss_of(model, batch, args.balance)
        (loss + BALANCE * unbalanced).backward()
        seconds = time.monotonic() - start
        num_done = int(args.steps * seconds / 60 / args.minutes) if args.minutes else step + 1
        optimizer.step(min(num_done, args.steps - 1))
        if step % 50 == 0 or num_done >= args.steps:
            losses.append((step, round(loss.item(), 4)))
            print(
                f"step {step:>5}, loss {loss.item():.3f}, balance {unbalanced.item():.3f}, "
                f"{seconds:,.0f} s",
                flush=True,
            )
        step += 1
    return {"steps": step, "seconds": round(time.monotonic() - start), "losses": losses}


@torch.no_grad()
def measure(model: Qwen3MoeForCausalLM, tokens: torch.Tensor, args: argparse.Namespace) -> Any:
    """The loss of a held-out text, in nats a token, from sequences without anything before them."""
    model.eval()
    count = min(len(tokens) // args.sequence, MOST_MEASURED)
    sequences = tokens[: count * args.sequence].reshape(count, args.sequence).to(args.device)
    losses = [loss_of(model, one, args.balance)[0].item() for one in sequences.split(16)]
    sizes = [len(one) for one in sequences.split(16)]
    loss = float(np.average(losses, weights=sizes))
    return {"loss": round(loss, 4), "perplexity": round(float(np.exp(loss)), 2)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="as many steps as take this long")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-experts", type=int, default=16, help="of each layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts of each token")
    parser.add_argument("--hidden-size", type=int, default=96)
    parser.add_argument("--expert-size", type=int, default=96, help="of an expert's middle")
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens")
    parser.add_argument("--sequence", type=int, default=128, help="tokens")
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--balance", choices=("model", "layer"), default="model")
    parser.add_argument("--packages", nargs="+", default=[], help="more texts to train on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    if args.minutes:
        args.steps = max(args.steps, 1000)  # parts of the schedule
    return args


def main() -> None:
    args = parse()
    torch.manual_seed(SEED)
    library, held_out = texts().split()
    train_texts = library.with_packages(args.packages)
    tokenizer = train_tokenizer(train_texts.code + train_texts.prose, args.vocabulary)
    model = make_model(tokenizer, args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    domains = [tokens_of(tokenizer, some) for some in (train_texts.code, train_texts.prose)]
    print(f"{parameters / 1e6:.1f} million parameters")
    print("tokens of code and prose:", ", ".join(f"{len(domain):,}" for domain in domains))
    done = train(model, domains, args)
    measured = {
        name: measure(model, tokens_of(tokenizer, some), args)
        for name, some in (("code", held_out.code), ("prose", held_out.prose))
    }
    print("held out:", json.dumps(measured))
    model.save_pretrained(args.directory)
    tokenizer.save_pretrained(args.directory)
    (args.directory / "code.txt").write_text("\n\n".join(held_out.code))
    (args.directory / "prose.txt").write_text("\n\n".join(held_out.prose))
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": parameters,
        "tokens of code and prose": [len(domain) for domain in domains],
        "tokens seen": done["steps"] * args.batch * args.sequence,
        **done,
        "held out": measured,
    }
    (args.directory / "training.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
