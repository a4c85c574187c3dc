"""Weights that change while answers run: another model's, answers under way, and what each of their
rows must be."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.e2e.harness import (
    ASK,
    COMPLETIONS,
    Answer,
    Oracle,
    Server,
    answer_of,
    check,
    prompt_of,
    read_events,
    scores_of,
    wait_until,
)

HITS = "vllm:prefix_cache_hits_total"
LONG = 400
"""Tokens of answers that are to be under way when something happens."""
_QUIET_S = 1.0
"""After so long without a chunk, everything that the engine sent before a pause has arrived."""


@dataclass(frozen=True)
class Weights:
    """In the folder of a model, which is also a checkpoint for an engine with other weights."""

    model: Path
    oracle: Oracle

    @property
    def file(self) -> Path:
        return self.model / "model.safetensors"

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """What a trainer sends, by the names in a checkpoint."""
        return load_file(self.file)


def make_weights(directory: Path, model: Path) -> list[Weights]:
    """Those of the tiny model and others, made in `directory`."""
    other = directory / "other" / "tiny"
    make_tiny_model(other, seed=7)
    return [Weights(folder, Oracle(folder)) for folder in (model, other)]


class Across(Oracle):
    """The oracle of an answer during which the weights changed: `first` is the position of the
    first token that went through the model after that. With `keeps_kv` the tokens behind read the
    KV that the weights before had made; otherwise all of it was computed again, though the rows
    before stay those that made the tokens."""

    def __init__(self, before: Oracle, after: Oracle, first: int, keeps_kv: bool) -> None:
        self.top_k = before.top_k
        self.decided = self.undecidable = 0
        self._known = {}
        self._before, self._after, self._first, self._keeps_kv = before, after, first, keeps_kv

    def logits(self, tokens: Sequence[int], exact: bool = False) -> np.ndarray:
        known = self._before.logits(tokens, exact)[: self._first]
        if not self._keeps_kv:
            return np.concatenate([known, self._after.logits(tokens, exact)[self._first :]])
        before, after = ((o.exact if exact else o.model) for o in (self._before, self._after))
        with torch.no_grad():
            kv = before(torch.tensor([list(tokens[: self._first])]), use_cache=True).past_key_values
            rest = torch.tensor([list(tokens[self._first :])])
            output = after(rest, past_key_values=kv, use_cache=True, output_router_logits=True)
        return np.concatenate([known, scores_of(output)])


class Running:
    """A streamed answer to 70 tokens, read in a thread while something happens to the server."""

    def __init__(self, server: Server, seed: int, max_tokens: int = LONG, **body: Any) -> None:
        self._chunks: list[dict[str, Any]] = []
        self._body = {
            "model": "tiny",
            "temperature": 0,
            "ignore_eos": True,
            **ASK,
            "prompt": prompt_of(70, seed),
        }
        self._body |= {"max_tokens": max_tokens, "stream": True, **body}
        self._thread = Thread(target=self._read, args=(server,))
        self._thread.start()

    def _read(self, server: Server) -> None:
        with (
            server.client() as client,
            client.stream("POST", COMPLETIONS, json=self._body) as response,
        ):
            assert response.status_code == 200, response.read()
            for chunk in read_events(response.iter_lines()):
                self._chunks.append(chunk)

    @property
    def num_tokens(self) -> int:
        return sum(
            len(choice.get("token_ids") or ())
            for chunk in self._chunks
            for choice in chunk["choices"]
        )

    def wait_for(self, num_tokens: int) -> None:
        wait_until(lambda: self.num_tokens >= num_tokens, "tokens do not come")

    def wait_until_quiet(self) -> int:
        """Tokens that came before a pause."""
        while True:
            before = len(self._chunks)
            time.sleep(_QUIET_S)
            if len(self._chunks) == before:
                return self.num_tokens

    def answer(self) -> Answer:
        self._thread.join(120)
        return answer_of(self._chunks)


@dataclass
class Paused:
    """An answer that was under way when `path` stopped the server, once all has come that was sent
    before."""

    server: Server
    path: str
    seed: int

    def __post_init__(self) -> None:
        self._begin()
        for _ in range(5):
            if self.count < LONG or not self.path.startswith("/pause"):
                break
            self.server.post("/resume")  # on a busy machine an answer may end before the pause
            self._begin()
        assert 10 <= self.count <= LONG

    def _begin(self) -> None:
        self.running = Running(self.server, self.seed)
        self.running.wait_for(10)
        self.server.post(self.path)
        self.count = self.running.wait_until_quiet()

    def check(self, before: Oracle, after: Oracle, keeps_kv: bool = False) -> None:
        """Its rows, when it has gone on with other weights."""
        assert self.count < LONG
        check(self.running.answer(), Across(before, after, 70 + self.count - 1, keeps_kv))


def roll_out(server: Server, oracle: Oracle, seed: int = 1) -> None:
    """Twice, the second time on what the first has left, and nothing before it has."""
    body: dict[str, Any] = {
        **ASK,
        "prompt": prompt_of(90, seed=seed),
        "max_tokens": 12,
        "ignore_eos": True,
    }
    hits = server.metric(HITS)
    check(answer_of(server.complete(**body)), oracle)
    assert server.metric(HITS) == hits, "KV of the weights before was found"
    check(answer_of(server.stream(**body)), oracle)
    assert server.metric(HITS) > hits


def reload_weights(server: Server, weights: Weights) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.model)}}
    server.post("/collective_rpc", body)
