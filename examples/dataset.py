"""A torch Dataset of rollouts whose rows stay in the store until a pipeline rank needs its own
layers of them.

    python examples/dataset.py --url http://localhost:8000

Needs numpy and torch. The ranks may run on other hosts: what they get is some hundred bytes for each
turn, and with a bucket as the store (`--routed-experts-store s3://…`) they read it without the server.
"""

import argparse
import json
import urllib.request
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from routed_experts.protocol.batch import join_turns
from routed_experts.protocol.fetch import Span, fetch_spans

Reference = dict[str, Any]
TURNS, NUM_TOKENS = ["Which experts?", " And then?", " Why?"], 64


class RoutingDataset(Dataset[torch.Tensor]):
    """The expert ids of sequences: int16 [layers, num_tokens, K], layers first, -1 behind the last
    row.

    Args:
        sequences: for each, the references of its turns. Together they cover its rows from position
            0 on.
        layers: the layers of this rank: the first, and the one after the last.
        base_url: of the server's API.
    """

    def __init__(
        self,
        sequences: list[list[Reference]],
        layers: tuple[int, int],
        num_tokens: int,
        base_url: str,
    ) -> None:
        self._base_url = base_url
        self._sequences: list[list[Span]] = [join_turns(references) for references in sequences]
        self._layers = layers
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> torch.Tensor:
        spans = self._sequences[index]
        count = min(sum(span.end - span.first for span in spans), self._num_tokens)
        rows = fetch_spans(spans, layers=self._layers, tokens=(0, count), base_url=self._base_url)
        ids = torch.full((len(rows), self._num_tokens, rows.shape[2]), -1, dtype=torch.int16)
        ids[:, :count] = torch.from_numpy(rows)
        return ids


def converse(url: str, model: str) -> tuple[list[Reference], list[int]]:
    """The references and the tokens of a conversation, each turn of which asks for the rows that
    are not known yet."""
    references: list[Reference] = []
    tokens: list[int] = []
    for text in TURNS:
        tokens += post(f"{url}/tokenize", {"model": model, "prompt": text})["tokens"]
        fields = {
            "return_routed_experts": True,
            "routed_experts_delivery": "reference",
            "return_token_ids": True,
        }
        fields["routed_experts_prompt_start"] = sum(
            reference["shape"][0] for reference in references
        )
        answer = post(
            f"{url}/v1/completions", {"model": model, "prompt": tokens, "max_tokens": 8, **fields}
        )
        (choice,) = answer["choices"]
        references += [answer["prompt_routed_experts"], choice["routed_experts"]]
        tokens += choice["token_ids"]
    return references, tokens


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument(
        "--ranks", type=int, default=2, help="pipeline stages, which share the layers"
    )
    args = parser.parse_args()
    with urllib.request.urlopen(f"{args.url}/v1/routed_experts") as response:
        info = json.load(response)
    sequences = [converse(args.url, info["model"])[0] for _ in range(3)]
    bounds = [rank * info["num_layers"] // args.ranks for rank in range(args.ranks + 1)]
    for rank, layers in enumerate(pairwise(bounds)):  # each in a process of its own, in earnest
        for batch in DataLoader(
            RoutingDataset(sequences, layers, NUM_TOKENS, f"{args.url}/v1"), batch_size=3
        ):
            print(f"rank {rank}, layers {layers[0]} to {layers[1] - 1}: {list(batch.shape)}")


if __name__ == "__main__":
    main()
