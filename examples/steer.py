"""Bans the experts that prompts use most, and shows the load and the perplexity before and after.

    python examples/steer.py --url http://localhost:8000 --layers 3 --experts 1

The server needs `--enable-routed-experts-input`. Needs numpy and the OpenAI client.
"""

import argparse
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from openai import OpenAI

from routed_experts.protocol.codec import decode
from routed_experts.protocol.expert_load import count_experts
from routed_experts.protocol.score import logprobs_of

PROMPTS = [
    "Which experts does this token go to, and why?",
    "def fibonacci(n):",
    "Es war einmal ein König.",
]


def profile(client: OpenAI, info: dict[str, Any], **fields: Any) -> tuple[NDArray[np.int64], float]:
    """How often the prompts take each expert, [L, E], and their perplexity."""
    counts = np.zeros((info["num_layers"], info["num_experts"]), np.int64)
    logprobs = []
    for prompt in PROMPTS:
        answer = client.completions.create(
            model=info["model"],
            prompt=prompt,
            max_tokens=1,
            extra_body={
                "return_routed_experts": True,
                "return_token_ids": True,
                "prompt_logprobs": 0,
                **fields,
            },
        ).model_dump()
        counts += count_experts(decode(answer["prompt_routed_experts"]), info["num_experts"])
        tokens = answer["choices"][0]["prompt_token_ids"]
        logprobs.append(logprobs_of(answer, tokens)[1:])
    return counts, float(np.exp(-np.concatenate(logprobs).mean()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--layers", type=int, default=1, help="how many layers to steer")
    parser.add_argument("--experts", type=int, default=1, help="how many to ban in each")
    args = parser.parse_args()
    info = httpx.get(f"{args.url}/v1/routed_experts", timeout=60).json()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    before, perplexity = profile(client, info)
    print(f"perplexity {perplexity:.2f}")
    banned = [
        [info["layer_ids"][layer], int(expert)]
        for layer in range(args.layers)
        for expert in np.argsort(-before[layer])[: args.experts]
    ]
    print("banned, [decoder layer, expert]:", banned)
    after, perplexity = profile(client, info, routed_experts_deactivate=banned)
    print(f"perplexity {perplexity:.2f}")
    for layer in range(args.layers):
        print(f"decoder layer {info['layer_ids'][layer]}")
        print("  before", before[layer].tolist())
        print("  after ", after[layer].tolist())


if __name__ == "__main__":
    main()
