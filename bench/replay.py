"""What replay costs a trainer's step: forward and backward passes of a few layers of
Qwen3-30B-A3B's shape.

    python -m bench.replay

Variants take turns on one GPU. The rows are those that the router chose, so that the experts' work
is the same. With `--by-tokens`, `TokenReplay` finds them, too; how long that takes is also measured
alone.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bench.fsdp import SMALL
from bench.http_table import commit_and_device, described
from bench.shapes import ENGINE_SHAPES
from routed_experts.protocol.routing import Routing
from routed_experts.replay import TokenReplay, replayed
from routed_experts.replay.kept_rows import KeptRows
from routed_experts.replay.sequences import sequences_of

NOTHING = "live router"
TO_FIND = (64, 2048)


def chosen(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights [T, L, K] of the model's own routers, on the host, as a server sends them."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    handles = [
        layers.register_forward_pre_hook(lambda module, args: seen.append(args[1:3]))
        for layers in experts
    ]
    with torch.no_grad():
        model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    ids, weights = (torch.stack(layers, dim=1).cpu() for layers in zip(*seen, strict=True))
    return ids.to(torch.int16), weights.float()


def routings_of(
    tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
) -> list[Routing]:
    """As a server's responses have `ids` [B * S, L, K]."""
    lines = tokens.tolist()
    rows = ids.unflatten(0, tokens.shape).numpy()
    of_rows = None if weights is None else weights.unflatten(0, tokens.shape).numpy()
    return [
        Routing(
            rows[line],
            prompt_len=1,
            prompt_token_ids=(sequence[0],),
            token_ids=tuple(sequence[1:]),
            weights=None if of_rows is None else of_rows[line],
        )
        for line, sequence in enumerate(lines)
    ]


def finding_ms(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Time to cut a forward pass into its sequences and to find their rows, without a copy of
    them."""
    kept = KeptRows(1 << 30, None, has_weights=False)
    kept.put(routings_of(tokens, torch.zeros(tokens.numel(), 1, 1, dtype=torch.int16), None))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    took = []
    for _ in range(20):
        start = time.perf_counter()
        found = sequences_of(model, (), inputs)
        for first, end in zip(found.bounds[:-1], found.bounds[1:], strict=True):
            assert kept.find(found.tokens[first:end]) is not None
        took.append(1000 * (time.perf_counter() - start))
    return median(took)


def step_ms(model: torch.nn.Module, tokens: torch.Tensor, replay: Callable[[], Any]) -> float:
    """Wall time of a forward and a backward pass, with all that replay does on the host."""
    finish = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    model.zero_grad(set_to_none=True)
    finish()
    start = time.perf_counter()
    with replay():
        model(tokens, use_cache=False, logits_to_keep=1).logits.float().sum().backward()
    finish()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of each sequence")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--by-tokens", action="store_true", help="rows are found by tokens, too")
    parser.add_argument("--small", action="store_true", help="widths for a rehearsal without a GPU")
    args = parser.parse_args()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": args.layers, **(SMALL if args.small else {})}
    config = Qwen3MoeConfig(**{**ENGINE_SHAPES["qwen3-30b-a3b"], **sizes})
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tokens = torch.randint(config.vocab_size, (args.sequences, args.tokens))
    model.train()
    if args.recompute:
        model.gradient_checkpointing_enable()
    ids, weights = chosen(model, tokens)
    variants: dict[str, Callable[[], Any]] = {
        NOTHING: nullcontext,
        "ids": lambda: replayed(model, ids),
        "ids and weights": lambda: replayed(model, ids, weights),
    }
    if args.by_tokens:
        of_ids = TokenReplay(model)
        of_ids.put(routings_of(tokens, ids, None))
        of_weights = TokenReplay(model, weights=True)
        of_weights.put(routings_of(tokens, ids, weights))
        variants["ids, by tokens"] = lambda: of_ids
        variants["ids and weights, by tokens"] = lambda: of_weights
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(-2, args.repeats):
        for name in list(variants) if repeat % 2 else reversed(variants):
            took = step_ms(model, tokens, variants[name])
            if repeat >= 0:
                seconds[name].append(took)
    print(described(commit_and_device(args.device, None)))
    print(
        f"{tokens.numel()} tokens, {args.layers} layers, {'recomputed, ' if args.recompute else ''}ms a step:"
    )
    live = seconds[NOTHING]
    lines = [(name, runs, live) for name, runs in seconds.items()]
    lines.append((f"{NOTHING}: even turns to odd", live[::2], live[1::2]))
    for name, runs, base in lines:
        took, above = median(runs), median(runs) - median(base)
        share = above / median(base)
        print(
            f"{name}: {took:.2f} ({100 * share:+.2f} %, {1000 * above / args.layers:+.0f} µs a layer)"
        )
    if args.by_tokens:
        lines_and_length = torch.randint(config.vocab_size, TO_FIND, device=args.device)
        took = finding_ms(model, lines_and_length)
        print(f"finding the rows of {TO_FIND[0]} sequences of {TO_FIND[1]} tokens: {took:.2f} ms")


if __name__ == "__main__":
    main()
