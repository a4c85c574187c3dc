"""Sampled answers with their routing, as a padded batch for a trainer.

    python examples/rollout.py --url http://localhost:8000

Needs numpy and the OpenAI client.
"""

import argparse
from typing import Any

import httpx
from openai import OpenAI

from routed_experts.protocol.batch import align, align_values, verify
from routed_experts.protocol.collect import collect

PROMPTS = ["Which experts?", "Why?"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--max-tokens", type=int, default=12)
    args = parser.parse_args()
    info = httpx.get(f"{args.url}/v1/routed_experts", timeout=60).json()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    stream: Any = client.completions.create(
        model=info["model"],
        prompt=PROMPTS,
        n=2,
        max_tokens=args.max_tokens,
        temperature=1.0,
        stream=True,
        extra_body={"return_routed_experts": True, "return_token_ids": True},
    )
    routings = collect(stream, n=2)  # four: two of each prompt
    for routing in routings:
        verify(routing, info["num_experts"])
    prompt_columns = max(len(routing.prompt_token_ids or ()) for routing in routings)
    # Prompts end, and generated tokens begin, in one column. The last token has no row: its row is
    # said to be unknown.
    columns = prompt_columns + args.max_tokens
    batch = align(routings, columns, padding=prompt_columns)
    sequences = [
        (*(routing.prompt_token_ids or ()), *(routing.token_ids or ())) for routing in routings
    ]
    tokens = align_values(routings, sequences, columns, padding=prompt_columns)
    print("tokens of each:", [routing.end + 1 for routing in routings])
    print("batch, tokens:", tokens.shape, tokens.dtype)
    print("batch, tokens, layers, experts:", batch.shape, batch.dtype)


if __name__ == "__main__":
    main()
