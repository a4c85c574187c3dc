"""`routed-experts compare`: compares the experts in responses with a Hugging Face forward pass of the same checkpoint.

The forward pass scores the same tokens. Where experts differ, the gap between their scores tells whether rounding
explains the difference.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import UNKNOWN
from routed_experts.protocol.collect import Routing, RoutingError
from routed_experts.server.cli.console import CommandError, aligned, say
from routed_experts.server.cli.reference import Ids, Reference, Scores
from routed_experts.server.cli.running import Body, RunningServer, add_server_flags, bodies_of
from routed_experts.server.cli.saved import ModelInfo, add_flags, info_of, opened, read

DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = ("Which experts does this token go to, and why?", "def fibonacci(n):", "Es war einmal ein König.")


@dataclass
class LayerCount:
    """Counts of one layer.

    Attributes:
        gaps: for each differing row, the score gap between the experts that only one side chose, in standard deviations
            of all scores of that token.
    """

    rows: int = 0
    differing_slots: int = 0
    gaps: list[float] = field(default_factory=list)
    weights: "WeightCount" = field(default_factory=lambda: WeightCount())

    def add(self, ours: Ids, theirs: Ids, scores: Scores) -> None:
        """Compares rows [n, K] of the response with those of the checkpoint; `scores` is [n, experts]."""
        only_ours, only_theirs = _only(ours, theirs, scores.shape)
        self.rows += len(ours)
        self.differing_slots += int(only_theirs.sum())
        for row in np.flatnonzero(only_theirs.any(axis=1)):
            gap = scores[row, only_theirs[row]].max() - scores[row, only_ours[row]].min()
            self.gaps.append(float(abs(gap) / max(float(scores[row].std()), 1e-30)))

    def summary(self, near_tie: float) -> dict[str, Any]:
        near = sum(gap <= near_tie for gap in self.gaps)
        return {
            **(self.weights.summary() if self.weights.slots else {}),
            "rows": self.rows,
            "equal_rows": self.rows - len(self.gaps),
            "differing_slots": self.differing_slots,
            "near_ties": near,
            "other_rows": len(self.gaps) - near,
            "gap_median": float(np.median(self.gaps)) if self.gaps else None,
            "gap_max": max(self.gaps, default=None),
        }


@dataclass
class WeightCount:
    """Differences between the weights of experts that both sides chose.

    Attributes:
        slots: how many weights were compared.
    """

    slots: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, ours: Ids, our_weights: Scores, theirs: Ids, their_weights: Scores) -> None:
        """Compares the weights of rows [n, K], whose experts may be in another order."""
        same = ours[:, :, None] == theirs[:, None, :]
        difference = np.abs(our_weights[:, :, None].astype(np.float64) - their_weights[:, None, :])[same]
        self.slots += len(difference)
        self.total += float(difference.sum())
        self.largest = max(self.largest, float(difference.max(initial=0)))

    def merged(self, other: "WeightCount") -> "WeightCount":
        return WeightCount(self.slots + other.slots, self.total + other.total, max(self.largest, other.largest))

    def summary(self) -> dict[str, Any]:
        return {
            "weights": self.slots,
            "weight_difference_mean": self.total / self.slots,
            "weight_difference_max": self.largest,
        }


def _only(ours: Ids, theirs: Ids, shape: tuple[int, ...]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks [n, experts] of the experts that only one side chose."""
    chosen = np.zeros((2, *shape), dtype=np.bool_)
    for mask, ids in zip(chosen, (ours, theirs), strict=True):
        np.put_along_axis(mask, ids.astype(np.int64), True, axis=1)
    return chosen[0] & ~chosen[1], chosen[1] & ~chosen[0]


@dataclass
class Comparison:
    """Counts of each layer over all responses.

    Attributes:
        missing: unknown rows, which are not compared.
        with_weights: whether weights are compared too.
    """

    reference: Reference
    with_weights: bool = False
    layers: list[LayerCount] = field(default_factory=list)
    answers: int = 0
    missing: int = 0

    def __post_init__(self) -> None:
        self.layers = [LayerCount() for _ in self.reference.layer_ids]

    def add(self, routing: Routing, scale: Sequence[float] | None = None) -> None:
        """Scores the tokens of `routing` and compares each of its rows.

        Args:
            scale: [L], what the server's weights are to be multiplied by.

        Raises:
            RoutingError: the response has no token ids, or no weights.
        """
        if self.with_weights and routing.weights is None:
            raise RoutingError("the response has no weights: set return_routed_expert_weights in the request")
        if routing.prompt_token_ids is None or routing.token_ids is None:
            raise RoutingError("the response has no token ids: set return_token_ids in the request")
        self.answers += 1
        self.missing += routing.missing
        known = np.flatnonzero((routing.rows != UNKNOWN).all(axis=(1, 2)))
        tokens = (*routing.prompt_token_ids, *routing.token_ids)[: routing.end]
        if not len(known):
            return
        positions = known + routing.start

        def take(place: int, chosen: Ids, scores: Scores) -> None:
            self.layers[place].add(routing.rows[known, place], chosen[positions], scores[positions])

        def take_weights(place: int, chosen: Ids, weights: Scores) -> None:
            assert routing.weights is not None
            own = routing.weights[known, place] * np.float32(1 if scale is None else scale[place])
            self.layers[place].weights.add(routing.rows[known, place], own, chosen[positions], weights[positions])

        self.reference.score(tokens, take, take_weights if self.with_weights else None)

    def report(self, near_tie: float) -> dict[str, Any]:
        """The results for JSON."""
        whole = LayerCount(
            rows=sum(layer.rows for layer in self.layers),
            differing_slots=sum(layer.differing_slots for layer in self.layers),
            gaps=[gap for layer in self.layers for gap in layer.gaps],
            weights=reduce(WeightCount.merged, (layer.weights for layer in self.layers), WeightCount()),
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
    """The results as text."""
    of_weights = {"weight_difference_mean": "mean Δ weight", "weight_difference_max": "max Δ weight"}
    of_weights = of_weights if "weights" in report["total"] else {}
    head = ["decoder layer", "rows", "equal", "slots differ", "near-ties", "other rows", "median gap", "max gap"]
    lines = [[*head, *of_weights.values()]]
    for entry in (*report["layers"], {"layer_id": "all", **report["total"]}):
        gaps = ["" if entry[name] is None else f"{entry[name]:.2g}" for name in ("gap_median", "gap_max")]
        counts = ("layer_id", "rows", "equal_rows", "differing_slots", "near_ties", "other_rows")
        differences = [f"{entry[name]:.2g}" if name in entry else "" for name in of_weights]
        lines.append([*(str(entry[name]) for name in counts), *gaps, *differences])
    return "\n".join(
        [
            *aligned(lines),
            f"{report['answers']} responses; {report['missing_rows']} unknown rows are not compared.",
            f"Gaps are in standard deviations of a token's scores. A gap up to {report['near_tie']:.2g} is a near-tie.",
        ]
    )


# ---- the command ----


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routed-experts compare",
        description="Compares the experts in responses with a Hugging Face forward pass of the same checkpoint. "
        "Exit status: 0 if they are equal or differ only in near-ties, 1 if they differ by more, 2 on error.",
    )
    parser.add_argument("model", help="checkpoint: a folder or a name on the Hugging Face Hub")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--answers",
        nargs="+",
        metavar="FILE",
        help="responses to requests with return_routed_experts and return_token_ids; - for standard input",
    )
    source.add_argument("--url", help="URL of a running server; sends requests to it")
    add_server_flags(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="dtype of the forward pass (default float32)"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="device of the forward pass: cpu (default), cuda, cuda:1, or auto for several GPUs",
    )
    parser.add_argument(
        "--near-tie",
        type=float,
        help="maximum score gap of a near-tie, in standard deviations of the token's scores "
        "(default: the square root of the dtype's epsilon, 0.00035 in float32, 0.088 in bfloat16)",
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="compare the router's weights too, where both sides chose the same expert; needs "
        "return_routed_expert_weights in the requests",
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file; - for standard output only")
    add_flags(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts compare`; returns the exit status.

    Raises:
        CommandError: the command cannot run.
    """
    args = parse(argv)
    to_stdout = args.json is not None and str(args.json) == "-"
    with _writable(None if to_stdout else args.json):
        report = compare(args)
        text = json.dumps(report, indent=1)
        if args.json and not to_stdout:
            args.json.write_text(text + "\n", encoding="utf-8")
    print(text if to_stdout else table(report))
    return 1 if report["total"]["other_rows"] else 0


@contextmanager
def _writable(path: Path | None) -> Iterator[None]:
    """Fails before the work begins if the file cannot be written. Leaves no empty file."""
    if path is None:
        yield
        return
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise CommandError(f"--json {path} cannot be written: {error.strerror}.") from error
    try:
        yield
    finally:
        if is_new and path.is_file() and not path.stat().st_size:
            path.unlink()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The results for the command line `args`.

    Raises:
        CommandError: there is nothing to compare, or the comparison fails.
    """
    from tqdm import tqdm

    server = RunningServer(args.url, args.api_key) if args.url else None
    sources: list[Any] = _bodies(args) if server else list(read(opened(args.answers), info_of(args)))
    say(f"Loading {args.model}.")
    reference = Reference(args.model, args.dtype, args.device)
    if args.weights and not reference.has_weights:
        raise CommandError(f"The routers of {args.model} in transformers do not return their weights.")
    comparison = Comparison(reference, args.weights)
    for source in tqdm(sources, desc="comparing", unit=" responses", disable=None):
        answer = server.ask(source[0], source[1], args.weights) if server else source
        try:
            _check_layers(answer.info, reference)
            for routing in answer.routings(_info_of(reference)):
                comparison.add(routing, answer.info.weights_scale)
        except (RoutingError, ValueError) as error:
            raise CommandError(f"{answer.where}: {error}.") from error
    near_tie = reference.epsilon**0.5 if args.near_tie is None else args.near_tie
    report = comparison.report(near_tie)
    if not report["total"]["rows"]:
        missing = report["missing_rows"]
        raise CommandError(f"Nothing to compare: all {missing} rows of {report['answers']} responses are unknown.")
    return {"model": args.model, "dtype": args.dtype, "device": args.device, **report}


def _info_of(reference: Reference) -> ModelInfo:
    layer_ids = tuple(reference.layer_ids)
    return ModelInfo(len(layer_ids), reference.top_k, reference.num_experts, layer_ids)


def _check_layers(info: ModelInfo, reference: Reference) -> None:
    if info.layer_ids not in (None, tuple(reference.layer_ids)):
        ids = list(info.layer_ids or ())
        raise RoutingError(f"its MoE layers are decoder layers {ids}, but the checkpoint has {reference.layer_ids}")


def _bodies(args: argparse.Namespace) -> list[tuple[str, Body]]:
    """Place and request of each prompt."""
    if args.prompts:
        return bodies_of(args.prompts, args.max_tokens)
    return [(args.url, {"prompt": prompt, "max_tokens": args.max_tokens}) for prompt in PROMPTS]
