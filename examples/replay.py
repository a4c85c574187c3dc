"""Routing replay in a trainer: log-probabilities with and without the rollout's experts, and one GRPO-style step.

If the server captures the router's weights (`--enable-return-routed-expert-weights`), these are replayed too.

    python examples/replay.py MODEL --url http://localhost:8000

MODEL is the Qwen3-MoE checkpoint that the server has loaded. Needs numpy, torch, transformers and the OpenAI client.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from routed_experts.protocol.batch import align, align_values, align_weights, scaled
from routed_experts.protocol.collect import Routing, collect

UNKNOWN = -1


@contextmanager
def replayed(model: torch.nn.Module, rows: torch.Tensor | None, weights: torch.Tensor | None = None) -> Iterator[None]:
    """Within, each router takes the experts of `rows` [batch, tokens, L, K] instead of its own top-k.

    Its scores, and so its gradients, stay its own. Where a row is not known (padding, a sequence's last token), it
    chooses by itself. None replays nothing.

    Args:
        weights: of the experts, like `rows`: takes the place of those by the router's own scores, but not of their
            gradients.
    """
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    handles = []
    for layer, router in enumerate(routers if rows is not None else []):
        given = rows[:, :, layer].reshape(-1, router.top_k).to(router.weight.device)
        factors = None if weights is None else weights[:, :, layer].reshape(given.shape).to(given.device)

        def choose(
            router: Any, args: Any, output: Any, given: torch.Tensor = given, factors: torch.Tensor | None = factors
        ) -> Any:
            logits, _, own = output
            is_unknown = (given == UNKNOWN).any(dim=1, keepdim=True)
            chosen = torch.where(is_unknown, own, given)
            computed = logits.softmax(dim=-1, dtype=torch.float32).gather(1, chosen)
            if router.norm_topk_prob:
                computed = computed / computed.sum(dim=-1, keepdim=True)
            if factors is not None:
                computed = torch.where(is_unknown, computed, factors + (computed - computed.detach()))
            return logits, computed.to(logits.dtype), chosen

        handles.append(router.register_forward_hook(choose))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rollouts(url: str, prompt: str, count: int, max_tokens: int) -> tuple[list[Routing], list[str]]:
    """`count` sampled answers: rows with the server's log-probabilities of their tokens, and texts."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    info = httpx.get(f"{url}/v1/routed_experts", timeout=60).json()
    asked = {"return_routed_experts": True, "return_routed_expert_weights": info["weights"], "return_token_ids": True}
    answer: Any = client.completions.create(
        model=info["model"],
        prompt=prompt,
        n=count,
        max_tokens=max_tokens,
        temperature=1.0,
        logprobs=0,
        top_p=1.0,
        extra_body={"top_k": -1, **asked},
    )
    routings = collect(answer)
    if info["weights"]:
        routings = [replace(each, weights=scaled(weights_of(each), info)) for each in routings]
    return routings, [choice.text for choice in answer.choices]


def weights_of(routing: Routing) -> Any:
    """[n, L, K], of a response that has them."""
    assert routing.weights is not None
    return routing.weights


def log_probabilities(
    model: Any,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """[batch, tokens - 1]: of each token but the first, given those before it."""
    with replayed(model, rows, weights):
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(dim=-1).gather(2, tokens[:, 1:, None])[..., 0]


def differences(new: torch.Tensor, old: torch.Tensor) -> tuple[float, float, float, float]:
    """How far log-probabilities are from those of the policy that sampled: mean and largest absolute difference, and K1
    and K3, two estimates of the KL divergence."""
    ratio = new - old
    figures = ratio.abs().mean(), ratio.abs().max(), -ratio.mean(), (ratio.exp() - 1 - ratio).mean()
    mean, largest, k1, k3 = (figure.item() for figure in figures)
    return mean, largest, k1, k3


def compared(new: torch.Tensor, old: torch.Tensor) -> str:
    """`differences`, in words."""
    mean, largest, k1, k3 = differences(new, old)
    return f"{mean:.2e} from the server's on average, {largest:.2e} at most, K1 {k1:.2e}, K3 {k3:.2e}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--prompt", default="Which experts?")
    parser.add_argument("--group", type=int, default=4, help="answers in a group")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    routings, texts = rollouts(args.url, args.prompt, args.group, args.max_tokens)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device).eval()

    # A batch padded on the right. `generated` marks what the server sampled, `old` has its log-probabilities.
    columns = max(routing.end + 1 for routing in routings)

    def batch_of(values: list[Any]) -> torch.Tensor:
        return torch.from_numpy(align_values(routings, values, columns)).to(args.device)

    tokens = batch_of([(*(routing.prompt_token_ids or ()), *(routing.token_ids or ())) for routing in routings])
    mask = batch_of([np.ones(routing.end + 1, dtype=np.int64) for routing in routings])
    generated = batch_of([np.ones(len(routing.token_ids or ()), dtype=np.bool_) for routing in routings])
    old = batch_of([routing.logprobs for routing in routings]).float()
    rows = torch.from_numpy(align(routings, columns, last=UNKNOWN, dtype="int64"))
    weights = None
    if routings[0].weights is not None:
        weights = torch.from_numpy(align_weights(routings, columns))

    print("log-probabilities of the sampled tokens:")
    replays = [("without replay", None, None), ("with replay", rows, None), ("with replay of weights", rows, weights)]
    with torch.no_grad():
        for name, *taken in replays if weights is not None else replays[:2]:
            new = log_probabilities(model, tokens, mask, *taken)
            print(f"{name}: {compared(new[generated[:, 1:]], old[:, 1:][generated[:, 1:]])}")

    # One step towards late letters of the alphabet, a toy. GRPO: rewards relative to the group, and a clipped ratio to
    # the policy that sampled, which is the server's. Without replay, other experts than the server's would be trained.
    rewards = torch.tensor([sum(map(ord, text)) / max(len(text), 1) for text in texts])
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    new = log_probabilities(model, tokens, mask, rows, weights)
    ratio = (new - old[:, 1:]).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    loss = -gain[generated[:, 1:]].mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step: loss {loss.item():.4f}, gradient norm {norm.item():.4f}, ratio {ratio[generated[:, 1:]].mean():.6f}")


if __name__ == "__main__":
    main()
