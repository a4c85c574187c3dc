"""A trainer's step in FSDP2 with replayed rollouts: how far log-probabilities are from the
engine's, and what replay costs.

    python -m bench.fsdp --layers 16 --gpus 2

A model of Qwen3-30B-A3B's widths with random weights is written once. An engine samples from it,
and returns ids and weights of the experts. Then a process on each GPU holds its shard (`fully_shard`
of every layer and of the whole, bfloat16, gradient checkpointing), computes the log-probabilities
of what was sampled, and takes steps of GRPO's form with Adam. Every process has other sequences.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bench.http_table import commit_and_device, described
from bench.shapes import ENGINE_SHAPES
from routed_experts.replay import replayed

LIVE = "live router"
ROLLOUTS = "rollouts.npz"
SMALL = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 512,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
"""For a rehearsal without a GPU."""


def write_model(folder: Path, device: str, layers: int) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": layers, **(SMALL if device == "cpu" else {})}
    config = Qwen3MoeConfig(**{**ENGINE_SHAPES["qwen3-30b-a3b"], **sizes})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")


def write_rollouts(folder: Path, args: argparse.Namespace) -> None:
    """Sampled by an engine: tokens [N, T], log-probabilities of those sampled [N, G], ids and
    weights [N, T - 1, L, K]."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    sizes = (
        {"kv_cache_memory_bytes": 1 << 28, "enforce_eager": True} if args.device == "cpu" else {}
    )
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=args.prompt + args.generated + 1,
        enable_return_routed_experts=True,
        additional_config={"enable_return_routed_expert_weights": True},
        gpu_memory_utilization=0.85,
        **sizes,  # type: ignore[arg-type]
    )
    vocabulary = llm.model_config.hf_config.vocab_size
    random = np.random.default_rng(0)
    prompts = random.integers(1, vocabulary, (args.sequences, args.prompt))
    params = SamplingParams(
        max_tokens=args.generated, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt.tolist()) for prompt in prompts], params
    )
    answers = [output.outputs[0] for output in outputs]
    logprobs = [
        [
            choices[token].logprob
            for token, choices in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        for answer in answers
    ]
    np.savez(
        folder / ROLLOUTS,
        tokens=np.concatenate([prompts, [answer.token_ids for answer in answers]], axis=1),
        logprobs=np.array(logprobs, np.float32),
        ids=np.stack([answer.routed_experts for answer in answers]).astype(np.int16),
        weights=np.stack([answer.routed_expert_weights for answer in answers]),
    )


def sharded(folder: Path, device: torch.device) -> Any:
    """The checkpoint's model, a shard of it in each process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer.to(device), mesh=mesh)
    fully_shard(model.to(device), mesh=mesh)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class Step:
    """A process's part of a batch, and what is done with it."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        rollouts = np.load(folder / ROLLOUTS)
        self.tokens, self.sampled, self.ids, self.weights = (
            torch.from_numpy(rollouts[name][rank::world])
            for name in ("tokens", "logprobs", "ids", "weights")
        )
        self.tokens = self.tokens.to(device)
        self.sampled = self.sampled.to(device)
        # The last token of each sequence has no row: nothing is predicted from it.
        self.ids = torch.nn.functional.pad(self.ids, (0, 0, 0, 0, 0, 1), value=-1)
        self.weights = torch.nn.functional.pad(self.weights, (0, 0, 0, 0, 0, 1), value=float("nan"))
        self.model = sharded(folder, device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-6, foreach=True)
        generator = torch.Generator().manual_seed(rank)
        self.advantages = torch.randn(len(self.tokens), 1, generator=generator).to(device)

    def replays(self) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
        return {
            LIVE: nullcontext,
            "ids": lambda: replayed(self.model, self.ids),
            "ids and weights": lambda: replayed(self.model, self.ids, self.weights),
        }

    def logprobs(self) -> torch.Tensor:
        """Of the sampled tokens, [n, G]."""
        count = self.sampled.shape[1]
        logits = self.model(self.tokens, use_cache=False, logits_to_keep=count + 1).logits
        new = [
            row[:-1].float().log_softmax(-1).gather(1, token[-count:, None])[:, 0]
            for row, token in zip(logits, self.tokens, strict=True)
        ]
        return torch.stack(new)

    def take(self) -> None:
        """One optimizer step with a clipped ratio to the engine's policy."""
        ratio = (self.logprobs() - self.sampled).exp()
        gain = torch.minimum(ratio * self.advantages, ratio.clamp(0.8, 1.2) * self.advantages)
        (-gain.mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def mean_of_all(value: torch.Tensor) -> float:
    """Of all processes."""
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return value.item() / dist.get_world_size()


def say(text: str) -> None:
    """Prints `text` in one of the processes."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(folder: Path, args: argparse.Namespace) -> None:
    """What each process runs."""
    is_cuda = args.device == "cuda"
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if is_cuda else "cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    step = Step(folder, device)
    say(f"{step.tokens.numel()} tokens a process")
    say_differences(step)
    say_times(times_of(step, args.repeats))
    if is_cuda:
        say(f"largest memory: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    dist.destroy_process_group()


def say_differences(step: Step) -> None:
    """From the engine's log-probabilities."""
    for name, replay in step.replays().items():
        with torch.no_grad(), replay():
            off = (step.logprobs() - step.sampled).abs()
        say(f"mean |Δ log p|, {name}: {mean_of_all(off.mean()):.3e}")


def times_of(step: Step, repeats: int) -> dict[str, list[float]]:
    """Seconds of `repeats` steps with each way to replay, in turns, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in step.replays()}
    for repeat in range(-1, repeats):
        names = list(seconds) if repeat % 2 else list(reversed(seconds))
        for name in names:
            taken = seconds_of(step, step.replays()[name])
            if repeat >= 0:
                seconds[name].append(taken)
    return seconds


def seconds_of(step: Step, replay: Callable[[], AbstractContextManager[Any]]) -> float:
    """How long one step takes, all processes beginning at once."""
    dist.barrier()
    begin = time.perf_counter()
    with replay():
        step.take()
    if step.tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def say_times(seconds: dict[str, list[float]]) -> None:
    live = median(seconds[LIVE])
    for name, runs in seconds.items():
        share = 100 * (median(runs) / live - 1)
        say(
            f"a step, {name}: {1000 * median(runs):.0f} ms ({share:+.1f} %), all: {[round(1000 * run) for run in runs]}"
        )
    halves = [median(seconds[LIVE][start::2]) for start in (0, 1)]
    say(f"a step, {LIVE}, even turns to odd: {100 * (halves[0] / halves[1] - 1):+.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--gpus", type=int, default=2, help="or processes, on a CPU")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--generated", type=int, default=512, help="tokens")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--commit", help="if this is no checkout")
    parser.add_argument("--part", choices=["model", "rollouts", "train"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "model":
        return write_model(args.folder, args.device, args.layers)
    if args.part == "rollouts":
        return write_rollouts(args.folder, args)
    if args.part == "train":
        return train(args.folder, args)
    with tempfile.TemporaryDirectory() as folder:
        own = [*sys.argv[1:], "--folder", folder]
        launch = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(args.gpus), "-m", "bench.fsdp"),
        ]
        for part, command in (
            ("model", [sys.executable, "-m", "bench.fsdp"]),
            ("rollouts", [sys.executable, "-m", "bench.fsdp"]),
            ("train", launch),
        ):
            begin = time.perf_counter()
            subprocess.run([*command, *own, "--part", part], check=True)
            print(f"{part}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(described(commit_and_device(args.device, args.commit)))
    print(
        json.dumps(
            {key: value for key, value in vars(args).items() if key not in ("part", "folder")}
        )
    )


if __name__ == "__main__":
    main()
