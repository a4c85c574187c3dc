"""`routed-experts compare --force`: what of the difference between a server and saved responses is
that other experts were chosen.

The server computes each response twice: with the experts of its own routers, and with those of the
response.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from routed_experts.protocol.batch import logprobs_of_tokens
from routed_experts.protocol.codec import UNKNOWN, Rows
from routed_experts.protocol.collect import collect
from routed_experts.protocol.routing import Routing
from routed_experts.protocol.saved import read
from routed_experts.protocol.score import Score, forcing, logprobs_of, sampling
from routed_experts.server.cli.console import CommandError
from routed_experts.server.tools.differences import (
    Flags,
    aligned,
    tails,
    unmatched,
)
from routed_experts.server.tools.running import FIELDS_FOR_SAVED, RunningServer
from routed_experts.server.tools.saved import info_of, opened

_OWN = {**FIELDS_FOR_SAVED, "routed_experts_prompt_start": 0, "prompt_logprobs": 0}
"""Fields of a request for the server's own rows, from the first on."""
PARTS = ("whole", "routing", "rest")
"""Of a difference, as `Split` names them."""


@dataclass
class Differences:
    """Of all tokens of all responses."""

    answers: int = 0
    missing: int = 0  # rows that the responses do not have, or know: there the router chose
    tokens: int = 0
    other_tokens: int = 0  # whose row, in the response and by the server's own choice, differs
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def add(self, routing: Routing, scored: Score, own_rows: Rows) -> None:
        """Adds the tokens of a response. `own_rows` [P + G, L, K] are what the server's routers
        choose for its tokens."""
        logprobs = logprobs_of_tokens(routing, np.nan)[len(routing.prompt_token_ids or ()) :]
        known = ~np.isnan(logprobs)
        split = scored.split(logprobs)
        for part in PARTS:
            self.parts[part] += getattr(split, part)[known].tolist()
        self.answers += 1
        self.missing += _num_missing(routing)
        self.tokens += int(known.sum())
        self.other_tokens += int(_other_experts(routing, own_rows)[known].sum())

    def report(self) -> dict[str, Any]:
        """The results for JSON."""
        differences = {}
        for part, values in self.parts.items():
            mean = float(np.mean(values)) if values else None
            differences[part] = {"signed_mean": mean, **tails([abs(value) for value in values])}
        return {
            "answers": self.answers,
            "missing_rows": self.missing,
            "tokens": self.tokens,
            "tokens_with_other_experts": self.other_tokens,
            "differences": differences,
        }


def compare_forced(args: argparse.Namespace) -> dict[str, Any]:
    """The results for the command line `args`, whose model is the URL of a server."""
    from tqdm import tqdm

    server = RunningServer(args.model, args.api_key)
    if server.document.get("input") is not True:
        raise CommandError(
            f"{server.url} takes no routing: start it with --enable-routed-experts-input."
        )
    differences = Differences()
    answers = list(read(opened(args.answers), info_of(args)))
    for answer in tqdm(answers, desc="comparing", unit=" responses", disable=None):
        routings = answer.routings()
        with answer.located():
            for routing in routings:
                tokens = routing.all_token_ids
                scored, own_rows = _score(server, answer.where, routing, tokens)
                differences.add(routing, scored, own_rows)
    return {"model": server.url, **differences.report()}


def _score(
    server: RunningServer, where: str, routing: Routing, tokens: Sequence[int]
) -> tuple[Score, Rows]:
    """What the server says of a response's tokens, and its own rows of all of them."""
    num_prompt = len(routing.prompt_token_ids or ())
    body = sampling(tokens)
    forced = server.complete(where, {**body, **forcing(routing.rows, routing.start)})
    own = server.complete(where, {**body, **_OWN})
    (own_routing,) = collect(own)
    scored = Score(
        forced=logprobs_of(forced, tokens)[num_prompt:],
        own=logprobs_of(own, tokens)[num_prompt:],
    )
    return scored, own_routing.rows[: len(tokens)]


def _num_missing(routing: Routing) -> int:
    """Of how many tokens, but the last, which needs none, there is no row that is known."""
    return len(routing.all_token_ids) - 1 - (len(routing.rows) - routing.missing)


def _other_experts(routing: Routing, own_rows: Rows) -> Flags:
    """[G], whether the server's routers choose other experts where a generated token was sampled:
    for the token before it, in any layer. Unknown ids do not count."""
    only_theirs, _ = unmatched(routing.rows, own_rows[routing.start : routing.end])
    is_other = np.zeros(len(own_rows), bool)
    is_other[routing.start : routing.end] = (only_theirs & (routing.rows != UNKNOWN)).any(
        axis=(1, 2)
    )
    num_generated = len(routing.token_ids or ())
    return is_other[-num_generated - 1 : -1]


_NAMES = {
    "whole": "server - response",
    "routing": "other experts",
    "rest": "same experts",
}
_COLUMNS = ("signed_mean", "mean", "p50", "p90", "p99", "max")


def forced_table(report: dict[str, Any]) -> str:
    """The results as text."""
    lines = [["Δ log-probability", "mean", "mean |Δ|", "p50", "p90", "p99", "max"]]
    for part, name in _NAMES.items():
        values = report["differences"][part]
        cells = ["" if values[column] is None else f"{values[column]:.2g}" for column in _COLUMNS]
        lines.append([name, *cells])
    text = aligned(lines)
    text.append(
        f"{report['tokens']} tokens of {report['answers']} responses; for "
        f"{report['tokens_with_other_experts']} the server's own routers choose other experts. "
        f"{report['missing_rows']} rows are unknown, and not forced."
    )
    return "\n".join(text)
