"""`routed-experts compare`: are the experts in answers those of a Hugging Face forward pass of the same checkpoint?

The same tokens are scored once more, in a precision and on a device of the user's choice. Where the two differ, the gap
between the scores says whether rounding can have decided.
"""

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import UNKNOWN
from routed_experts.protocol.collect import Routing, RoutingError, collect
from routed_experts.server.complaint import complain
from routed_experts.server.progress import say
from routed_experts.server.reference import CompareError, Ids, Reference, Scores

DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = ("Which experts does this token go to, and why?", "def fibonacci(n):", "Es war einmal ein König.")


@dataclass
class LayerCount:
    """What was found in one layer.

    Attributes:
        gaps: for each row that differs, how far apart the scores are of the experts that only one side chose, in
            standard deviations of all experts' scores for that token.
    """

    rows: int = 0
    differing_slots: int = 0
    gaps: list[float] = field(default_factory=list)

    def add(self, ours: Ids, theirs: Ids, scores: Scores) -> None:
        """Compares rows [n, K] of the answer with those of the checkpoint, and `scores` [n, experts]."""
        only_ours, only_theirs = _only(ours, theirs, scores.shape)
        self.rows += len(ours)
        self.differing_slots += int(only_theirs.sum())
        for row in np.flatnonzero(only_theirs.any(axis=1)):
            gap = scores[row, only_theirs[row]].max() - scores[row, only_ours[row]].min()
            self.gaps.append(float(abs(gap) / max(float(scores[row].std()), 1e-30)))

    def summary(self, near_tie: float) -> dict[str, Any]:
        near = sum(gap <= near_tie for gap in self.gaps)
        return {
            "rows": self.rows,
            "equal_rows": self.rows - len(self.gaps),
            "differing_slots": self.differing_slots,
            "near_ties": near,
            "other_rows": len(self.gaps) - near,
            "gap_median": float(np.median(self.gaps)) if self.gaps else None,
            "gap_max": max(self.gaps, default=None),
        }


def _only(ours: Ids, theirs: Ids, shape: tuple[int, ...]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which experts only one side chose, [n, experts] each."""
    chosen = np.zeros((2, *shape), dtype=np.bool_)
    for mask, ids in zip(chosen, (ours, theirs), strict=True):
        np.put_along_axis(mask, ids.astype(np.int64), True, axis=1)
    return chosen[0] & ~chosen[1], chosen[1] & ~chosen[0]


@dataclass
class Comparison:
    """Counts for each layer, over all answers.

    Attributes:
        missing: rows that the server could not know; they are not compared.
    """

    reference: Reference
    layers: list[LayerCount] = field(default_factory=list)
    answers: int = 0
    missing: int = 0

    def __post_init__(self) -> None:
        self.layers = [LayerCount() for _ in self.reference.layer_ids]

    def add(self, routing: Routing) -> None:
        """Scores the tokens of `routing` and compares each of its rows.

        Raises:
            CompareError: it lacks token ids, or is not of this checkpoint.
        """
        if routing.prompt_token_ids is None or routing.token_ids is None:
            raise CompareError("An answer has no token ids: ask with return_token_ids.")
        if routing.rows.max(initial=0) >= self.reference.num_experts:
            raise CompareError(
                f"An id is {routing.rows.max()}, and the checkpoint has {self.reference.num_experts} experts."
            )
        self.answers += 1
        self.missing += routing.missing
        known = np.flatnonzero((routing.rows != UNKNOWN).all(axis=(1, 2)))
        tokens = (*routing.prompt_token_ids, *routing.token_ids)[: routing.end]
        if not len(known):
            return
        positions = known + routing.start

        def take(place: int, chosen: Ids, scores: Scores) -> None:
            self.layers[place].add(routing.rows[known, place], chosen[positions], scores[positions])

        self.reference.score(tokens, take)

    def report(self, near_tie: float) -> dict[str, Any]:
        """The findings as JSON has them."""
        whole = LayerCount(
            rows=sum(layer.rows for layer in self.layers),
            differing_slots=sum(layer.differing_slots for layer in self.layers),
            gaps=[gap for layer in self.layers for gap in layer.gaps],
        )
        return {
            "answers": self.answers,
            "missing_rows": self.missing,
            "near_tie": near_tie,
            "layers": [
                {"layer": place, "layer_id": layer_id, **layer.summary(near_tie)}
                for place, (layer_id, layer) in enumerate(zip(self.reference.layer_ids, self.layers, strict=True))
            ],
            "total": whole.summary(near_tie),
        }


def table(report: dict[str, Any]) -> str:
    """`report` for people."""
    head = [
        "layer",
        "decoder layer",
        "rows",
        "equal",
        "slots differ",
        "near-ties",
        "other rows",
        "median gap",
        "max gap",
    ]
    lines = [head]
    for entry in (*report["layers"], {"layer": "all", "layer_id": "", **report["total"]}):
        gaps = ["" if entry[name] is None else f"{entry[name]:.2g}" for name in ("gap_median", "gap_max")]
        counts = ("layer", "layer_id", "rows", "equal_rows", "differing_slots", "near_ties", "other_rows")
        lines.append([*(str(entry[name]) for name in counts), *gaps])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(
        [
            *rows,
            f"{report['answers']} answers; {report['missing_rows']} rows that the server could not know are left out.",
            f"Gaps are in standard deviations of a token's scores; up to {report['near_tie']:.2g} is a near-tie.",
        ]
    )


# ---- where answers come from ----


def collected(answer: str | dict[str, Any], shape: tuple[int, int], where: str) -> list[Routing]:
    """The choices of an answer; `shape` is (L, K).

    Raises:
        CompareError: it is not an answer with routing; names `where` it came from.
    """
    try:
        return collect(answer, num_layers=shape[0], top_k=shape[1])
    except (RoutingError, ValueError) as error:
        raise CompareError(f"{where}: {error}") from error


def ask(url: str, prompt: str, max_tokens: int, api_key: str | None) -> dict[str, Any]:
    """One answer of the server at `url` to `prompt`.

    Raises:
        CompareError: the server cannot be reached or refuses.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def call(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url.rstrip("/") + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=600) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    try:
        body = {"model": call("/v1/routed_experts")["model"], "prompt": prompt, "max_tokens": max_tokens}
        body |= {"return_routed_experts": True, "routed_experts_layers": "moe", "return_token_ids": True}
        return call("/v1/completions", body)
    except urllib.error.HTTPError as error:
        raise CompareError(f"{url} answered {error.code}: {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, ValueError) as error:
        raise CompareError(f"{url}: {error}") from error


# ---- the command ----


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routed-experts compare",
        description="Compares the experts in answers with those of a Hugging Face forward pass of the same checkpoint. "
        "Exits with 1 where they differ by more than near-ties.",
    )
    parser.add_argument("model", help="checkpoint: a folder or a name on the Hugging Face hub")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--answers",
        type=Path,
        help="file with an answer of the server in each line, asked with return_routed_experts and return_token_ids",
    )
    source.add_argument("--url", help="of a running server, which is asked now")
    parser.add_argument("--prompts", type=Path, help="with --url: a file with a prompt in each line")
    parser.add_argument("--max-tokens", type=int, default=64, help="with --url: of each answer (default 64)")
    parser.add_argument("--api-key", help="with --url")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the forward pass (default float32)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, or auto for several at once")
    parser.add_argument(
        "--near-tie",
        type=float,
        help="largest gap, in standard deviations of a token's scores, that counts as a near-tie "
        "(default: the square root of the precision's epsilon, 0.00035 in float32, 0.088 in bfloat16)",
    )
    parser.add_argument("--json", type=Path, help="also write the findings to this file; - for standard output only")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts compare`; returns the exit status."""
    args = parse(argv)
    try:
        report = compare(args)
    except CompareError as error:
        return complain(error)
    text = json.dumps(report, indent=1)
    if args.json and str(args.json) != "-":
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text if str(args.json) == "-" else table(report))
    return 1 if report["total"]["other_rows"] else 0


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The findings for the command line `args`."""
    from tqdm import tqdm

    sources = _lines(args.answers or args.prompts) if args.answers or args.prompts else list(enumerate(PROMPTS, 1))
    say(f"Loading {args.model}.")
    reference = Reference(args.model, args.dtype, args.device)
    comparison = Comparison(reference)
    shape = (len(reference.layer_ids), reference.top_k)
    for number, line in tqdm(sources, desc="comparing", unit=" answers", disable=None):
        answer = line if args.answers else ask(args.url, line, args.max_tokens, args.api_key)
        for routing in collected(answer, shape, f"{args.answers}, line {number}" if args.answers else args.url):
            comparison.add(routing)
    near_tie = reference.epsilon**0.5 if args.near_tie is None else args.near_tie
    return {"model": args.model, "dtype": args.dtype, "device": args.device, **comparison.report(near_tie)}


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CompareError(str(error)) from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
