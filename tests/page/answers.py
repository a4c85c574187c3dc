"""Answers such as a server gives, with rows that are known and have something to look at."""

from typing import Any

import numpy as np

from routed_experts.protocol.codec import UNKNOWN_WEIGHT
from tests.protocol.forms import encode

TEXT = (
    "The router sends every token to a few experts, and which ones it takes depends on what it reads. Some prefer "
    "code, some numbers, some the ends of sentences; what many are for, nobody knows.\n"
)
TOPIC = 120  # tokens


def rows_of(count: int, layers: int, top_k: int, experts: int, seed: int = 0) -> np.ndarray:
    """Rows [count, L, K] of a router with favourites, which change with the topic and the word."""
    rng = np.random.default_rng(seed)
    favourites = np.log(np.random.default_rng(100).gamma(1.2, 1, (layers, experts)) + 0.05)
    topics = np.log(np.random.default_rng(101).gamma(0.6, 1, (4, layers, experts)) + 0.05)
    words = np.random.default_rng(102).normal(size=(len(words_of(1)), layers, experts))
    rows = np.empty((count, layers, top_k), dtype=np.int16)
    for i in range(count):
        scores = favourites + 0.8 * topics[i // TOPIC % 4] + 0.8 * words[i % len(words)]
        scores = scores + 0.9 * rng.gumbel(size=scores.shape)
        rows[i] = np.argsort(-scores, axis=1)[:, :top_k]
    return rows


def words_of(times: int) -> list[str]:
    words = TEXT.split(" ")
    return [word if i == 0 else f" {word}" for i, word in enumerate(words * times)]


def weights_of(rows: np.ndarray, seed: int = 0) -> np.ndarray:
    """Weights of rows [n, L, K], float32: each choice has less than the one before, and unknown ids
    have none."""
    shares = np.random.default_rng(seed).dirichlet(np.full(rows.shape[2], 1.5), rows.shape[:2])
    weights = -np.sort(-shares, axis=2).astype(np.float32)
    return np.where(rows < 0, UNKNOWN_WEIGHT, weights)


def array(rows: np.ndarray, start: int = 0) -> Any:
    """Of ids or weights."""
    return encode(rows, start=start)


def answer(
    rows: np.ndarray, prompt: int, texts: list[str] | None = None, weights: np.ndarray | None = None
) -> dict[str, Any]:
    """A completion's body with `rows` of `prompt` tokens and those generated after them."""
    count = len(rows) + 1
    texts = (texts or words_of(count // 20 + 1))[:count]
    ids = [sum(map(ord, text)) for text in texts]
    choice = {
        "index": 0,
        "text": "".join(texts[prompt:]),
        "token_ids": ids[prompt:],
        "finish_reason": "length",
    }
    choice |= {"logprobs": {"tokens": texts}, "routed_experts": array(rows[prompt:], prompt)}
    of_prompt = {"prompt_token_ids": ids[:prompt], "prompt_routed_experts": array(rows[:prompt])}
    if weights is not None:
        choice["routed_expert_weights"] = array(weights[prompt:], prompt)
        of_prompt["prompt_routed_expert_weights"] = array(weights[:prompt])
    return {"object": "text_completion", **of_prompt, "choices": [choice]}


def two_that_part(
    count: int, prompt: int, at: int, has_weights: bool = False
) -> list[dict[str, Any]]:
    """Two answers of 24 layers, top 8 of 128, whose experts part at a position and whose tokens one
    later."""
    one, other = rows_of(count, 24, 8, 128, seed=1), rows_of(count, 24, 8, 128, seed=2)
    other[:at] = one[:at]
    other[at, :2] = one[at, :2]
    texts = words_of(count // 20 + 1)
    others = [*texts[: at + 1], *(text.swapcase() for text in texts[at + 1 :])]
    sides = ((one, texts), (other, others))
    weights = (weights_of(one), weights_of(other)) if has_weights else (None, None)
    return [
        answer(rows, prompt, words, beside)
        for (rows, words), beside in zip(sides, weights, strict=True)
    ]
