"""What replay costs a trainer's step: forward and backward passes of a few layers of
Qwen3-30B-A3B's shape.

    python -m bench.replay

Variants take turns on one GPU. The rows are those that the router chose, so that the experts' work
is the same.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bench.http_table import commit_and_device, described
from bench.shapes import ENGINE_SHAPES
from routed_experts.replay import replayed

NOTHING = "live router"


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
    args = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**ENGINE_SHAPES["qwen3-30b-a3b"], "num_hidden_layers": args.layers})
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


if __name__ == "__main__":
    main()
