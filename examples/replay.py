"""Routing replay in a trainer: log-probabilities with and without the rollout's experts, and one GRPO-style step.

    python examples/replay.py MODEL --url http://localhost:8000

MODEL is the Qwen3-MoE checkpoint that the server has loaded. Needs numpy, torch, transformers and the OpenAI client.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from routed_experts.protocol.batch import align
from routed_experts.protocol.collect import Routing, collect

UNKNOWN = -1


@contextmanager
def replayed(model: torch.nn.Module, rows: torch.Tensor | None) -> Iterator[None]:
    """Within, each router takes the experts of `rows` [batch, tokens, L, K] instead of its own top-k.

    Its scores, and so its gradients, stay its own. Where a row is not known (padding, a sequence's last token), it
    chooses by itself. None replays nothing.
    """
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    handles = []
    for layer, router in enumerate(routers if rows is not None else []):
        given = rows[:, :, layer].reshape(-1, router.top_k).to(router.weight.device)

        def choose(router: Any, args: Any, output: Any, given: torch.Tensor = given) -> Any:
            logits, _, own = output
            chosen = torch.where((given == UNKNOWN).any(dim=1, keepdim=True), own, given)
            weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            return logits, weights.to(logits.dtype), chosen

        handles.append(router.register_forward_hook(choose))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rollouts(url: str, prompt: str, count: int, max_tokens: int) -> tuple[list[Routing], list[list[float]], list[str]]:
    """`count` sampled answers: rows, the server's log-probabilities of their tokens, and texts."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer: Any = client.completions.create(
        model=httpx.get(f"{url}/v1/routed_experts", timeout=60).json()["model"],
        prompt=prompt,
        n=count,
        max_tokens=max_tokens,
        temperature=1.0,
        logprobs=0,
        top_p=1.0,
        extra_body={"top_k": -1, "return_routed_experts": True, "return_token_ids": True},
    )
    choices = answer.choices
    return collect(answer), [choice.logprobs.token_logprobs for choice in choices], [choice.text for choice in choices]


def log_probabilities(model: Any, tokens: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """[batch, tokens - 1]: of each token but the first, given those before it."""
    with replayed(model, rows):
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(dim=-1).gather(2, tokens[:, 1:, None])[..., 0]


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
    routings, server_logprobs, texts = rollouts(args.url, args.prompt, args.group, args.max_tokens)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device).eval()

    # A batch padded on the right. `generated` marks what the server sampled, `old` has its log-probabilities.
    columns = max(routing.end + 1 for routing in routings)
    tokens = torch.zeros((args.group, columns), dtype=torch.long, device=args.device)
    mask, old = torch.zeros_like(tokens), torch.zeros(tokens.shape, device=args.device)
    generated = torch.zeros(tokens.shape, dtype=torch.bool, device=args.device)
    for place, (routing, logprobs) in enumerate(zip(routings, server_logprobs, strict=True)):
        whole = [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())]
        first, end = len(whole) - len(logprobs), len(whole)
        tokens[place, :end], mask[place, :end] = torch.tensor(whole), 1
        generated[place, first:end], old[place, first:end] = True, torch.tensor(logprobs)
    rows = torch.from_numpy(align(routings, columns, last=UNKNOWN, dtype="int64"))

    print("log-probabilities of the sampled tokens:")
    with torch.no_grad():
        for name, taken in (("without replay", None), ("with replay", rows)):
            new = log_probabilities(model, tokens, mask, taken)
            difference = (new - old[:, 1:])[generated[:, 1:]].abs()
            print(f"{name}: {difference.mean():.2e} from the server's on average, {difference.max():.2e} at most")

    # One step towards late letters of the alphabet, a toy. GRPO: rewards relative to the group, and a clipped ratio to
    # the policy that sampled, which is the server's. Without replay, other experts than the server's would be trained.
    rewards = torch.tensor([sum(map(ord, text)) / max(len(text), 1) for text in texts])
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    new = log_probabilities(model, tokens, mask, rows)
    ratio = (new - old[:, 1:]).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    loss = -gain[generated[:, 1:]].mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step: loss {loss.item():.4f}, gradient norm {norm.item():.4f}, ratio {ratio[generated[:, 1:]].mean():.6f}")


if __name__ == "__main__":
    main()
