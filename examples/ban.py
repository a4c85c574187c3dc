"""Bans experts, and shows the perplexity of two texts: how much are their experts missed?

    python examples/ban.py code.txt prose.txt --url http://localhost:8000

In each layer, it bans random experts, those that a text takes most, those that the other text takes
most, and those whose share of the text's choices is above that of the other text's by most. One half
of the prompts says which experts these are, the other half is measured. Prints a Markdown table:
`had` is the share of the text's choices that the banned experts had, and intervals are of 95 %.
The server needs `--enable-routed-experts-input`. Needs numpy and the OpenAI client.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from openai import OpenAI

from routed_experts.protocol.score import logprobs_of

RESAMPLES = 2000
Experts = NDArray[np.intp]
"""[L, n], of each MoE layer."""
Losses = NDArray[np.float64]
"""[prompts, 2]: the sum of the negative log-probabilities, and of how many tokens."""


@dataclass
class Model:
    """A server, and what it says of its model."""

    client: OpenAI
    info: dict[str, Any]
    parallel: int

    def answer(self, prompt: str, **fields: Any) -> dict[str, Any]:
        return self.client.completions.create(
            model=self.info["model"],
            prompt=prompt,
            max_tokens=1,
            extra_body={"return_token_ids": True, **fields},
        ).model_dump()

    def counts(self, prompts: list[str]) -> NDArray[np.int64]:
        """How often the prompts take each expert, [L, E]."""

        def of_prompt(prompt: str) -> NDArray[np.int64]:
            answer = self.answer(prompt, routed_experts_histogram=True)
            return np.array(answer["prompt_routed_experts_histogram"]["counts"])

        with ThreadPoolExecutor(self.parallel) as threads:
            return np.sum(list(threads.map(of_prompt, prompts)), axis=0)

    def losses(self, prompts: list[str], banned: Experts | None) -> Losses:
        fields: dict[str, Any] = {"prompt_logprobs": 0}
        if banned is not None:
            fields["routed_experts_deactivate"] = [
                [layer_id, int(expert)]
                for layer_id, experts in zip(self.info["layer_ids"], banned, strict=True)
                for expert in experts
            ]

        def of_prompt(prompt: str) -> tuple[float, int]:
            answer = self.answer(prompt, **fields)
            # The first token has no log-probability.
            logprobs = logprobs_of(answer, answer["choices"][0]["prompt_token_ids"])[1:]
            return -logprobs.sum(), len(logprobs)

        with ThreadPoolExecutor(self.parallel) as threads:
            return np.array(list(threads.map(of_prompt, prompts)))


@dataclass
class Text:
    """What is known of one of the two texts."""

    name: str
    measured: list[str]  # prompts
    counts: NDArray[np.int64]  # [L, E], of the other half of its prompts

    @property
    def load(self) -> NDArray[np.float64]:
        """[L, E], the share of each expert."""
        return self.counts / self.counts.sum(axis=1, keepdims=True)

    def share_of(self, bans: list[Experts]) -> float:
        """Of the text's choices, those that the banned experts had."""
        shares = [np.take_along_axis(self.load, banned, axis=1).sum(axis=1) for banned in bans]
        return float(np.mean(shares))


def prompts_of(file: Path, num_prompts: int, num_characters: int) -> list[str]:
    """Pieces of a file, as far from each other as they can be."""
    text = file.read_text()
    starts = np.linspace(0, len(text) - num_characters, num_prompts).astype(int)
    if len(text) < num_prompts * num_characters:
        raise SystemExit(f"{file} has {len(text):,} characters: use fewer or shorter prompts")
    return [text[start : start + num_characters] for start in starts]


def most_used(load: NDArray[np.float64], num_banned: int) -> Experts:
    return np.argsort(-load, axis=1, kind="stable")[:, :num_banned]


def random_experts(shape: tuple[int, ...], num_banned: int, seed: int) -> Experts:
    return np.random.default_rng(seed).random(shape).argsort(axis=1)[:, :num_banned]


def factor_of(losses: list[Losses], base: list[Losses]) -> str:
    """The perplexity divided by that of `base`, and its 95 % interval: prompts are drawn again, and
    of several bans (seeds) the bans, too. Of several bans it is the geometric mean."""
    random = np.random.default_rng(0)
    num_tokens = base[0][:, 1]
    num_prompts = len(num_tokens)
    of_bans = np.stack([of_ban[:, 0] for of_ban in losses])  # [bans, prompts]
    of_base = np.stack([of_ban[:, 0] for of_ban in base])

    def factor(bans: Any, bases: Any, prompts: Any) -> float:
        difference = of_bans[bans].mean(axis=0) - of_base[bases].mean(axis=0)
        return float(np.exp(difference[prompts].sum() / num_tokens[prompts].sum()))

    drawn = [
        factor(
            random.integers(len(of_bans), size=len(of_bans)),
            random.integers(len(of_base), size=len(of_base)),
            random.integers(num_prompts, size=num_prompts),
        )
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    everything = slice(None)
    return f"{factor(everything, everything, everything):.2f} ({low:.2f} to {high:.2f})"


def perplexity(losses: list[Losses]) -> float:
    """Of several bans, the geometric mean."""
    mean = np.mean(losses, axis=0)
    return float(np.exp(mean[:, 0].sum() / mean[:, 1].sum()))


def table(model: Model, texts: list[Text], nums_banned: list[int], num_seeds: int) -> None:
    """A line for each text, kind of ban, and number of experts."""
    print("| text | banned in each layer | had | perplexity | to no ban | to random bans |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for text, other in (texts, texts[::-1]):
        without_ban = [model.losses(text.measured, None)]
        print(f"| {text.name} | nothing | | {perplexity(without_ban):.2f} | | |")
        for num_banned in nums_banned:
            at_random = [
                random_experts(text.counts.shape, num_banned, seed) for seed in range(num_seeds)
            ]
            kinds = {
                f"{num_banned} at random": at_random,
                f"top {num_banned}": [most_used(text.load, num_banned)],
                f"top {num_banned} of the other text": [most_used(other.load, num_banned)],
                f"{num_banned} most its own": [most_used(text.load - other.load, num_banned)],
            }
            randomly: list[Losses] = []
            for name, bans in kinds.items():
                losses = [model.losses(text.measured, banned) for banned in bans]
                is_random = bans is at_random
                if is_random:
                    randomly = losses
                against_random = "" if is_random else factor_of(losses, randomly)
                print(
                    f"| {text.name} | {name} | {text.share_of(bans):.0%} | "
                    f"{perplexity(losses):.2f} | {factor_of(losses, without_ban)} | "
                    f"{against_random} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs=2, type=Path, metavar="TEXT")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--banned", type=int, nargs="+", default=[1, 2, 4], help="in each layer")
    parser.add_argument("--prompts", type=int, default=48, help="of each text")
    parser.add_argument("--characters", type=int, default=1000, help="of a prompt")
    parser.add_argument("--seeds", type=int, default=5, help="of random bans")
    parser.add_argument("--parallel", type=int, default=8, help="requests at once")
    args = parser.parse_args()
    info = httpx.get(f"{args.url}/v1/routed_experts", timeout=60).json()
    model = Model(OpenAI(base_url=f"{args.url}/v1", api_key="none"), info, args.parallel)
    texts = []
    for file in args.files:
        prompts = prompts_of(file, args.prompts, args.characters)
        texts.append(Text(file.stem, prompts[::2], model.counts(prompts[1::2])))
    num_layers, num_experts = texts[0].counts.shape
    print(f"{info['model']}, {num_layers} MoE layers, {info['top_k']} of {num_experts} experts")
    distance = np.abs(texts[0].load - texts[1].load).sum(axis=1) / 2
    print("distance of the two texts' loads, by layer:", *np.round(distance, 2))
    print()
    table(model, texts, args.banned, args.seeds)


if __name__ == "__main__":
    main()
