"""Routing replay in a trainer: log-probabilities with and without the rollout's experts, and one
GRPO-style step.

    python examples/replay.py MODEL --url http://localhost:8000

MODEL is the checkpoint that the server has loaded, of any family that `routed_experts.replay` knows
but Llama 4. If the server captures the router's weights (`--enable-return-routed-expert-weights`),
they are replayed too. Needs the extra `torch`, transformers and the OpenAI client. docs/replay.md
explains the table.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from routed_experts.protocol.batch import (
    align,
    align_generated,
    align_logprobs,
    align_values,
    align_weights,
    scaled,
)
from routed_experts.protocol.collect import Routing, collect
from routed_experts.replay import replayed

UNKNOWN = -1
COLUMNS = {"mean |Δ log p|": 16, "K1": 12, "K3": 12, "tokens with other experts": 28}


def rollouts(
    url: str, prompt: str, count: int, max_tokens: int
) -> tuple[dict[str, Any], list[Routing], list[str]]:
    """What the server says of itself, and `count` sampled answers: rows with log-probabilities, and
    texts."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    info = httpx.get(f"{url}/v1/routed_experts", timeout=60).json()
    fields = {
        "return_routed_experts": True,
        "return_routed_expert_weights": info["weights"],
        "return_token_ids": True,
    }
    answer: Any = client.completions.create(
        model=info["model"],
        prompt=prompt,
        n=count,
        max_tokens=max_tokens,
        temperature=1.0,
        logprobs=0,
        top_p=1.0,
        extra_body={"top_k": -1, **fields},
    )
    routings = collect(answer)
    if info["weights"]:
        routings = [replace(routing, weights=scaled(routing.weights, info)) for routing in routings]  # type: ignore[arg-type]
    return info, routings, [choice.text for choice in answer.choices]


@contextmanager
def experts_seen(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Within, the ids [tokens, K] that the experts of each layer are called with, in the layers'
    order."""
    seen: list[torch.Tensor] = []
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    handles = [
        module.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        for module in experts
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def log_probabilities(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[batch, tokens - 1]: of each token but the first, given those before it."""
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(dim=-1).gather(2, tokens[:, 1:, None])[..., 0]


def figures(new: torch.Tensor, old: torch.Tensor) -> tuple[float, float, float]:
    """How far log-probabilities are from those of the policy that sampled: mean absolute
    difference, and K1 and K3, two estimates of the KL divergence."""
    ratio = new - old
    return ratio.abs().mean().item(), -ratio.mean().item(), (ratio.exp() - 1 - ratio).mean().item()


def mistakes(rows: torch.Tensor, prompt_len: int) -> dict[str, torch.Tensor]:
    """Rows [batch, tokens, L, K] as trainers have got them wrong, and for comparison without those
    of prompts."""
    without_prompt = rows.clone()
    without_prompt[:, :prompt_len] = UNKNOWN
    return {
        "rows one token late": rows.roll(1, dims=1),
        "rows one layer up": rows.roll(1, dims=2),
        "no rows of prompts": without_prompt,
    }


@dataclass
class Batch:
    """Answers, padded on the right."""

    tokens: torch.Tensor  # [batch, tokens]
    mask: torch.Tensor  # [batch, tokens], 1 where there is a token
    # of each token but the first, as `log_probabilities` has them: [batch, tokens - 1]
    generated: torch.Tensor  # whether the server sampled it
    old: torch.Tensor  # its log-probability there
    rows: torch.Tensor  # [batch, tokens, L, K]
    weights: torch.Tensor | None


def batch_of(routings: list[Routing], has_weights: bool, device: str) -> Batch:
    columns = max(routing.end + 1 for routing in routings)

    def padded(values: list[Any]) -> torch.Tensor:
        return torch.from_numpy(align_values(routings, values, columns)).to(device)

    generated = torch.from_numpy(align_generated(routings, columns)).to(device)
    old = torch.from_numpy(align_logprobs(routings, columns)).to(device).float()
    return Batch(
        tokens=padded(
            [
                (*(routing.prompt_token_ids or ()), *(routing.token_ids or ()))
                for routing in routings
            ]
        ),
        mask=padded([np.ones(routing.end + 1, dtype=np.int64) for routing in routings]),
        generated=generated[:, 1:],
        old=old[:, 1:],
        rows=torch.from_numpy(align(routings, columns)),
        weights=torch.from_numpy(align_weights(routings, columns)) if has_weights else None,
    )


Replay = Callable[[], AbstractContextManager[Any]]
"""Within what it returns, the model chooses its experts in another way."""


def table_row(model: Any, batch: Batch, replay: Replay) -> list[str]:
    """How far the model's log-probabilities are from the server's, and how many tokens went to other
    experts than there."""
    with torch.no_grad(), experts_seen(model) as seen, replay():
        new = log_probabilities(model, batch.tokens, batch.mask)
    used = torch.stack(seen, dim=1).reshape(batch.rows.shape).cpu()
    is_known = (batch.rows >= 0).all(dim=(2, 3))
    is_other = (used.sort().values != batch.rows.sort().values).any(dim=(2, 3))[is_known]
    shown = [
        f"{figure:.2e}" for figure in figures(new[batch.generated], batch.old[batch.generated])
    ]
    return [*shown, f"{int(is_other.sum())} of {len(is_other)}"]


def train(model: Any, batch: Batch, texts: list[str], replay: Replay) -> str:
    """One step towards late letters of the alphabet, a toy. GRPO: rewards relative to the group, and
    a clipped ratio to the policy that sampled, which is the server's. Without replay, other experts
    than the server's would be trained."""
    rewards = torch.tensor([sum(map(ord, text)) / max(len(text), 1) for text in texts])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    advantages = advantages.to(batch.old.device)[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with replay():
        ratio = (log_probabilities(model, batch.tokens, batch.mask) - batch.old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -gain[batch.generated].mean()
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean_ratio = ratio[batch.generated].mean()
    return f"loss {loss.item():.4f}, gradient norm {norm.item():.4f}, ratio {mean_ratio:.6f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--prompt", default="Which experts?")
    parser.add_argument("--group", type=int, default=4, help="answers in a group")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtype", help="of the model here (default: the server's)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--mistakes", action="store_true", help="show what common mistakes look like, too"
    )
    args = parser.parse_args()
    info, routings, texts = rollouts(args.url, args.prompt, args.group, args.max_tokens)
    dtype = args.dtype or info["model_dtype"]
    if dtype != info["model_dtype"]:
        # Their log-probabilities differ by rounding alone, which would hide what replay does.
        parser.error(
            f"the server's model is in {info['model_dtype']}: start it with --dtype {dtype}, or leave --dtype out here"
        )
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype))
    model = model.to(args.device).eval()
    batch = batch_of(routings, info["weights"], args.device)

    def replaying(rows: torch.Tensor, weights: torch.Tensor | None = None) -> Replay:
        return lambda: replayed(model, rows, weights, layer_ids=info["layer_ids"])

    replays: dict[str, Replay] = {"live router": nullcontext, "ids": replaying(batch.rows)}
    if batch.weights is not None:
        replays["ids with weights"] = replaying(batch.rows, batch.weights)
    if args.mistakes:
        for name, wrong in mistakes(batch.rows, routings[0].prompt_len or 0).items():
            replays[name] = replaying(wrong)
    print(f"{'':20}" + "".join(f"{column:>{width}}" for column, width in COLUMNS.items()))
    for name, replay in replays.items():
        cells = zip(table_row(model, batch, replay), COLUMNS.values(), strict=True)
        print(f"{name:20}" + "".join(f"{cell:>{width}}" for cell, width in cells))
    print("step:", train(model, batch, texts, replaying(batch.rows, batch.weights)))


if __name__ == "__main__":
    main()
