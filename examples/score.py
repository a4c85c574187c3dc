"""How much of the difference between two servers' log-probabilities is their routing.

    python examples/score.py --url http://localhost:8000 --other http://localhost:8001

Generates on the first server and scores on the other, which needs `--enable-routed-experts-input`.
Both may be the same one. Needs numpy and the OpenAI client.
"""

import argparse
from typing import Any

import numpy as np
from openai import OpenAI

from routed_experts.protocol.collect import collect
from routed_experts.protocol.score import score

PROMPTS = ["Which experts?", "Why?"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--other", default="http://localhost:8000")
    parser.add_argument("--max-tokens", type=int, default=12)
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    other = OpenAI(base_url=f"{args.other}/v1", api_key="none")
    answer: Any = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=PROMPTS,
        max_tokens=args.max_tokens,
        logprobs=0,
        extra_body={"return_routed_experts": True, "return_token_ids": True},
    )
    whole, routing, rest = [], [], []
    for sequence in collect(answer, n=1):
        assert sequence.prompt_token_ids is not None
        assert sequence.token_ids is not None
        scored = score(
            other,
            sequence.prompt_token_ids,
            sequence.token_ids,
            sequence.rows,
            start=sequence.start,
        )
        split = scored.split(sequence.logprobs)
        whole.append(split.whole)
        routing.append(split.routing)
        rest.append(split.rest)
    print("mean |difference| of log-probabilities")
    print(f"  of the servers:             {np.abs(np.concatenate(whole)).mean():.2e}")
    print(f"  because of other experts:   {np.abs(np.concatenate(routing)).mean():.2e}")
    print(f"  with the same experts:      {np.abs(np.concatenate(rest)).mean():.2e}")


if __name__ == "__main__":
    main()
