"""Does replay help a small model to learn? Curves of GRPO with live and with replayed routers.

    python examples/grpo_curve.py curves.jsonl
    python examples/grpo_curve.py curves.jsonl --table

A Qwen3-MoE model of 0.6 million parameters learns to write symbols in reverse, and is rewarded for
each that is right. It is trained in float32 by transformers. Its rollouts are sampled by the same
class in bfloat16, which stands for an inference engine: it has a KV cache, and its routers may
have noise, in units of the standard deviation of a token's logits. Noise makes routers part as
other kernels, quantisation or older weights do, only more so.

A process for each run, and a JSON line for each step; the table is made from these. Needs torch and
transformers, no server, no GPU and no download. docs/replay.md explains the table.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from routed_experts.replay import replayed

NUM_SYMBOLS = 16
SEPARATOR = NUM_SYMBOLS
LENGTH = 8  # symbols of a prompt, and of its answer
NUM_LAYERS = 3
NUM_EXPERTS = 16
TOP_K = 2
PROMPTS = 32  # in a step
GROUP = 8  # answers to a prompt
MINIBATCHES = 2  # updates in a step
CLIP = 0.2
LEARNING_RATE = 1e-3
WARM_UP_LOSS = 1.4  # of a symbol; a model that knows nothing has 2.8
LAST_STEPS = 20  # which the table calls the end
UNKNOWN = -1
LIVE = "live"
IDS = "ids"
IDS_AND_WEIGHTS = "ids and weights"
ROUTERS = (LIVE, IDS, IDS_AND_WEIGHTS)


def make_model(dtype: torch.dtype, device: str) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=NUM_SYMBOLS + 1,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).to(device, dtype)
    # A loop over the experts is quick on a CPU, and slow on a GPU.
    model.set_experts_implementation("eager" if device == "cpu" else "batched_mm")
    return model


def make_prompts(count: int, generator: torch.Generator) -> Tensor:
    """[count, LENGTH + 1]"""
    symbols = torch.randint(NUM_SYMBOLS, (count, LENGTH), generator=generator)
    return torch.cat([symbols, torch.full((count, 1), SEPARATOR)], dim=1)


def right_answers(prompts: Tensor) -> Tensor:
    return prompts[:, :LENGTH].flip(1)


def log_probabilities(model: Any, tokens: Tensor) -> Tensor:
    """[B, LENGTH]: of the answers."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, LENGTH:-1].float()
    answers = tokens[:, LENGTH + 1 :]
    return logits.log_softmax(dim=-1).gather(2, answers[..., None])[..., 0]


def warm_up(seed: int, device: str, target: float, file: Path) -> None:
    """Writes the weights of a model that was shown right answers until it knows a part of them: by
    GRPO alone, a model that knows nothing would take long to begin."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = make_model(torch.float32, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)
    loss = torch.tensor(torch.inf)
    while loss > target:
        prompts = make_prompts(128, generator)
        tokens = torch.cat([prompts, right_answers(prompts)], dim=1).to(device)
        loss = -log_probabilities(model, tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), file)


@dataclass
class Rollouts:
    """Prompts with answers that were sampled."""

    tokens: Tensor  # [B, S]
    old: Tensor  # [B, LENGTH], the answers' log-probabilities
    rows: Tensor  # [B, S, L, K]; the last token never entered the model
    weights: Tensor  # likewise

    def part(self, first: int, end: int) -> "Rollouts":
        return Rollouts(
            self.tokens[first:end],
            self.old[first:end],
            self.rows[first:end],
            self.weights[first:end],
        )


class Engine:
    """Samples as an inference engine does, in its own precision, and records its routers."""

    def __init__(self, dtype: torch.dtype, noise: float, device: str, seed: int) -> None:
        self.model = make_model(dtype, device).eval()
        self.noise = noise
        self.generator = torch.Generator(device).manual_seed(seed)
        self.chosen: list[tuple[Tensor, Tensor]] = []  # ids and weights, of each layer in turn
        for layer in self.model.model.layers:
            layer.mlp.gate.register_forward_hook(self._route)

    def _route(self, gate: Any, args: Any, output: Any) -> Any:
        logits, weights, ids = output
        if self.noise:
            exact = logits.float()
            drawn = torch.randn(exact.shape, generator=self.generator, device=exact.device)
            noisy = exact + self.noise * exact.std(dim=-1, keepdim=True) * drawn
            scores, ids = noisy.softmax(dim=-1).topk(TOP_K, dim=-1)
            weights = (scores / scores.sum(dim=-1, keepdim=True)).to(weights.dtype)
        self.chosen.append((ids, weights.float()))
        return logits, weights, ids

    def _take_chosen(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Ids and weights [B, S, L, K] of the last forward pass."""
        ids = torch.stack([ids for ids, _ in self.chosen], dim=1).unflatten(0, shape)
        weights = torch.stack([weights for _, weights in self.chosen], dim=1).unflatten(0, shape)
        self.chosen.clear()
        return ids, weights

    @torch.no_grad()
    def take_weights(self, trained: Qwen3MoeForCausalLM) -> None:
        for own, new in zip(self.model.parameters(), trained.parameters(), strict=True):
            own.copy_(new)

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> Rollouts:
        tokens = prompts
        inputs = prompts
        cache: Any = None
        old: list[Tensor] = []
        rows: list[Tensor] = []
        weights: list[Tensor] = []
        for _ in range(LENGTH):
            output = self.model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            new_rows, new_weights = self._take_chosen((inputs.shape[0], inputs.shape[1]))
            rows.append(new_rows)
            weights.append(new_weights)
            scores = output.logits[:, -1].float().log_softmax(dim=-1)
            inputs = torch.multinomial(scores.exp(), 1, generator=self.generator)
            old.append(scores.gather(1, inputs))
            tokens = torch.cat([tokens, inputs], dim=1)
        rows.append(torch.full_like(rows[-1], UNKNOWN))
        weights.append(torch.full_like(weights[-1], torch.nan))
        return Rollouts(
            tokens, torch.cat(old, dim=1), torch.cat(rows, dim=1), torch.cat(weights, dim=1)
        )


def replaying(model: Any, router: str, rollouts: Rollouts) -> AbstractContextManager[Any]:
    if router == LIVE:
        return nullcontext()
    weights = rollouts.weights if router == IDS_AND_WEIGHTS else None
    return replayed(model, rollouts.rows, weights)


@contextmanager
def experts_seen(model: Any) -> Iterator[list[Tensor]]:
    """Within, the ids [tokens, K] that each layer's experts are called with."""
    seen: list[Tensor] = []
    handles = [
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        for layer in model.model.layers
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def live_figures(model: Any, rollouts: Rollouts) -> dict[str, float]:
    """How far the live router is from the rollouts, whatever the router that is trained with."""
    with experts_seen(model) as seen:
        new = log_probabilities(model, rollouts.tokens)
    rows = rollouts.rows[:, :-1]
    used = torch.stack(seen, dim=1).reshape(rollouts.rows.shape)[:, :-1]
    others = (used.sort().values != rows.sort().values).any(dim=(2, 3))
    return {
        "live difference": (new - rollouts.old).abs().mean().item(),
        "other experts": others.float().mean().item(),
    }


def update(
    model: Any, optimizer: Any, router: str, rollouts: Rollouts, advantages: Tensor
) -> dict[str, float]:
    """One step of GRPO, with the ratio to the policy that sampled."""
    with replaying(model, router, rollouts):
        difference = log_probabilities(model, rollouts.tokens) - rollouts.old
        ratio = difference.exp()
        gain = torch.minimum(
            ratio * advantages[:, None],
            ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None],
        )
        optimizer.zero_grad()
        (-gain.mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {
        "difference": difference.abs().mean().item(),
        "k3": (ratio - 1 - difference).mean().item(),
        "clipped": ((ratio - 1).abs() > CLIP).float().mean().item(),
        "gradient norm": norm.item(),
    }


@dataclass
class Run:
    """One curve."""

    seed: int
    noise: float
    router: str


def learn(run: Run, weights: Path, args: argparse.Namespace, deadline: float) -> None:
    """Writes a line for each step. Runs of a seed have the same first weights and prompts."""
    generator = torch.Generator().manual_seed(1000 + run.seed)
    model = make_model(torch.float32, args.device).train()
    model.load_state_dict(torch.load(weights, map_location=args.device))
    engine = Engine(getattr(torch, args.engine_dtype), run.noise, args.device, seed=run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0)
    for step in range(args.steps):
        if time.time() > deadline:
            return
        engine.take_weights(model)
        prompts = make_prompts(PROMPTS, generator).repeat_interleave(GROUP, dim=0).to(args.device)
        rollouts = engine.sample(prompts)
        is_right = rollouts.tokens[:, LENGTH + 1 :] == right_answers(prompts)
        rewards = is_right.float().mean(dim=1).reshape(PROMPTS, GROUP)
        spread = rewards.std(dim=1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).flatten()
        figures = live_figures(model, rollouts) if step % 10 == 0 else {}
        size = len(prompts) // MINIBATCHES
        updates = [
            update(
                model,
                optimizer,
                run.router,
                rollouts.part(first, first + size),
                advantages[first : first + size],
            )
            for first in range(0, len(prompts), size)
        ]
        # The first update's: the weights are still those that sampled.
        figures |= updates[0]
        write_line(
            args.file,
            {**vars(run), "step": step, "reward": rewards.mean().item(), **figures},
        )


def write_line(file: Path, line: dict[str, Any]) -> None:
    """Several processes write, each a whole line at once."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{json.dumps(line)}\n".encode())
    finally:
        os.close(descriptor)


def learn_all(args: argparse.Namespace) -> None:
    start = time.time()
    deadline = start + args.limit
    seeds = range(args.seeds)
    runs = [
        Run(seed, noise, router) for noise in args.noise for seed in seeds for router in ROUTERS
    ]
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    options = {name: value for name, value in vars(args).items() if name != "file"}
    write_line(args.file, {"device": device, **versions, "options": options})
    context = multiprocessing.get_context("spawn")
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            args.workers, context, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool,
    ):
        weights = [Path(folder) / f"{seed}.pt" for seed in seeds]
        warm = [
            pool.submit(warm_up, seed, args.device, args.warm_up_loss, weights[seed])
            for seed in seeds
        ]
        for future in warm:
            future.result()
        print(f"warmed up, {time.time() - start:.0f} s", flush=True)
        futures = [pool.submit(learn, run, weights[run.seed], args, deadline) for run in runs]
        for run, future in zip(runs, futures, strict=True):
            future.result()
            print(f"{run}, {time.time() - start:.0f} s", flush=True)


def table(file: Path) -> str:
    """Of each noise and router, means over the seeds whose runs are whole for all routers."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    num_steps = lines[0]["options"]["steps"]
    curves: dict[tuple[float, str, int], list[dict[str, Any]]] = defaultdict(list)
    for line in lines[1:]:
        curves[line["noise"], line["router"], line["seed"]].append(line)
    whole = {key: curve for key, curve in curves.items() if len(curve) == num_steps}
    out = [
        "| noise | other experts | router | mean abs. Δ log p | clipped "
        "| reward at the end | reward, all steps | to live, by seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for noise in sorted({noise for noise, _, _ in whole}):
        seeds = [
            seed
            for seed in range(lines[0]["options"]["seeds"])
            if all((noise, router, seed) in whole for router in ROUTERS)
        ]
        for router in ROUTERS if seeds else ():
            of_seeds = [whole[noise, router, seed] for seed in seeds]
            live = [whole[noise, LIVE, seed] for seed in seeds]
            ends = [mean_of(curve[-LAST_STEPS:], "reward") for curve in of_seeds]
            apart = [
                f"{mean_of(curve, 'reward') - mean_of(live_curve, 'reward'):+.3f}"
                for curve, live_curve in zip(of_seeds, live, strict=True)
            ]
            others = mean(mean_of(curve, "other experts") for curve in live)
            cells = [
                f"{noise:g}" if router == LIVE else "",
                f"{others:.0%}" if router == LIVE else "",
                router,
                f"{mean(mean_of(curve, 'difference') for curve in of_seeds):.2e}",
                f"{mean(mean_of(curve, 'clipped') for curve in of_seeds):.1%}",
                f"{mean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})",
                f"{mean(mean_of(curve, 'reward') for curve in of_seeds):.3f}",
                "" if router == LIVE else ", ".join(apart),
            ]
            out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def mean_of(curve: list[dict[str, Any]], name: str) -> float:
    return mean(line[name] for line in curve if name in line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, help="of JSON lines, to write or to read")
    parser.add_argument("--table", action="store_true", help="read the file")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--noise", type=float, nargs="+", default=[0, 0.1, 0.3, 1.0])
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--warm-up-loss", type=float, default=WARM_UP_LOSS)
    parser.add_argument("--engine-dtype", default="bfloat16")
    parser.add_argument("--limit", type=float, default=3600, help="seconds; runs then stop")
    args = parser.parse_args()
    if args.table:
        print(table(args.file))
    else:
        args.file.unlink(missing_ok=True)
        learn_all(args)


if __name__ == "__main__":
    main()
