"""Counts where two sides' experts, weights and log-probabilities differ, and writes the table of
`compare`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.batch import logprobs_of_tokens
from routed_experts.protocol.codec import UNKNOWN
from routed_experts.protocol.routing import Routing, RoutingError, num_same

Ids = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]
Flags = NDArray[np.bool_]


def unmatched(ours: Ids, theirs: Ids) -> tuple[Flags, Flags]:
    """Which experts [..., K] of each side the other did not choose, in whatever order."""
    same = ours[..., :, None] == theirs[..., None, :]  # [..., K of ours, K of theirs]
    only_ours: Flags = ~same.any(axis=-1)
    only_theirs: Flags = ~same.any(axis=-2)
    return only_ours, only_theirs


# ---- rows and weights ----


@dataclass
class LayerCount:
    """Counts of one layer."""

    rows: int = 0
    differing_rows: int = 0
    differing_slots: int = 0
    weights: int = 0  # of experts that both sides chose
    weight_difference_sum: float = 0.0
    weight_difference_max: float = 0.0
    # For each differing row, the score gap between the experts that only one side chose, in
    # standard deviations of all scores of that token; none if there are no scores.
    gaps: list[float] = field(default_factory=list)

    def add(self, ours: Ids, theirs: Ids, gaps: Floats | None = None) -> Flags:
        """Compares two sides' rows [n, K], with their `gaps` [n] where they differ. Returns which
        do."""
        _, only_theirs = unmatched(ours, theirs)
        differs = np.any(only_theirs, axis=1)
        self.rows += len(ours)
        self.differing_rows += int(differs.sum())
        self.differing_slots += int(only_theirs.sum())
        if gaps is not None:
            self.gaps += gaps[differs].tolist()
        return differs

    def add_weights(
        self, ours: Ids, theirs: Ids, our_weights: Floats, their_weights: Floats
    ) -> None:
        """Compares the weights [n, K] of experts that both chose, which may be in another order."""
        same = ours[:, :, None] == theirs[:, None, :]
        differences = np.abs(our_weights[:, :, None].astype(np.float64) - their_weights[:, None, :])
        of_both = differences[same]
        self.weights += len(of_both)
        self.weight_difference_sum += float(of_both.sum())
        largest = float(of_both.max(initial=0))
        self.weight_difference_max = max(self.weight_difference_max, largest)

    def merged(self, other: "LayerCount") -> "LayerCount":
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        largest = max(self.weight_difference_max, other.weight_difference_max)
        return LayerCount(**{**sums, "weight_difference_max": largest})

    def summary(self, near_tie: float | None) -> dict[str, Any]:
        """Without gaps and near-ties if `near_tie` is None."""
        near = 0 if near_tie is None else sum(gap <= near_tie for gap in self.gaps)
        of_weights = {
            "weights": self.weights,
            "weight_difference_mean": self.weight_difference_sum / max(self.weights, 1),
            "weight_difference_max": self.weight_difference_max,
        }
        of_gaps = {
            "near_ties": near,
            "gap_median": float(np.median(self.gaps)) if self.gaps else None,
            "gap_max": max(self.gaps, default=None),
        }
        return {
            **(of_weights if self.weights else {}),
            "rows": self.rows,
            "equal_rows": self.rows - self.differing_rows,
            "differing_slots": self.differing_slots,
            "other_rows": self.differing_rows - near,
            **(of_gaps if near_tie is not None else {}),
        }


EQUAL = 0
DIFFERENT = 1
NOT_KNOWN = 2
_STATE_NAMES = ("equal_rows", "different_rows", "unknown_rows")
"""How the rows compare that tokens were sampled from, by these three."""
_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


def tails(values: list[float]) -> dict[str, Any]:
    """Number, mean and percentiles of `values`; None where there are none."""
    summary: dict[str, Any] = {"tokens": len(values), "mean": None}
    summary |= dict.fromkeys(_PERCENTILES)
    if values:
        summary["mean"] = float(np.mean(values))
        for name, percentile in _PERCENTILES.items():
            summary[name] = float(np.percentile(values, percentile))
    return summary


@dataclass
class Comparison:
    """Counts of each layer over all responses."""

    layer_ids: Sequence[int]  # decoder layer of each of the L layers
    with_weights: bool = False
    with_logprobs: bool = False
    layers: list[LayerCount] = field(default_factory=list)
    # Absolute differences of log-probabilities, for tokens whose rows are equal in all layers,
    # differ, or are unknown. The row of a token is that of the position before it, whose forward
    # pass gives the token its probability.
    logprobs: tuple[list[float], ...] = field(default_factory=lambda: ([], [], []))
    answers: int = 0
    missing: int = 0  # rows that are unknown on a side, which are not compared

    def __post_init__(self) -> None:
        self.layers = [LayerCount() for _ in self.layer_ids]

    def add(
        self,
        ours: Routing,
        theirs: Routing,
        scales: Sequence[Sequence[float] | None] = (None, None),
        gaps: Floats | None = None,
    ) -> None:
        """Compares two responses as far as their tokens are the same.

        Args:
            scales: of the layers of each side's model, if they are known. Weights are multiplied by
                them.
            gaps: [positions, L] in scores, where rows differ.
        """
        shared_end = num_same(ours.all_token_ids, theirs.all_token_ids)
        num_prompt = min(len(ours.prompt_token_ids or ()), len(theirs.prompt_token_ids or ()))
        if shared_end < num_prompt:
            raise RoutingError(
                f"the responses have different prompts, from position {shared_end} on"
            )
        if ours.rows.shape[1:] != theirs.rows.shape[1:] or ours.rows.shape[1] != len(self.layers):
            raise RoutingError(f"rows of shapes {ours.rows.shape[1:]} and {theirs.rows.shape[1:]}")
        self.answers += 1
        first = max(ours.start, theirs.start)
        end = max(min(ours.end, theirs.end, shared_end), first)
        positions = np.arange(first, end)
        is_known = _is_known(ours, positions) & _is_known(theirs, positions)
        self.missing += int((~is_known).sum())
        positions = positions[is_known]
        states = np.full(shared_end, NOT_KNOWN, dtype=np.int8)
        states[positions] = EQUAL
        for index, layer in enumerate(self.layers):
            our_ids = ours.rows[positions - ours.start, index]
            their_ids = theirs.rows[positions - theirs.start, index]
            differs = layer.add(
                our_ids, their_ids, None if gaps is None else gaps[positions, index]
            )
            states[positions[differs]] = DIFFERENT
            if self.with_weights:
                our_weights = _weights_of(ours, positions, index, scales[0])
                their_weights = _weights_of(theirs, positions, index, scales[1])
                layer.add_weights(our_ids, their_ids, our_weights, their_weights)
        if self.with_logprobs:
            our_logprobs = logprobs_of_tokens(ours, np.nan)[:shared_end]
            their_logprobs = logprobs_of_tokens(theirs, np.nan)[:shared_end]
            self._add_logprobs(our_logprobs, their_logprobs, states)

    def _add_logprobs(
        self, ours: NDArray[np.float64], theirs: NDArray[np.float64], states: NDArray[np.int8]
    ) -> None:
        """Compares [n] tokens, whose rows compare as `states` says. Those without a value (NaN) are
        left out, and the first, which no row is before."""
        differences = np.abs(ours - theirs)[1:]
        for state, of_state in enumerate(self.logprobs):
            of_state += differences[(states[:-1] == state) & ~np.isnan(differences)].tolist()

    def report(self, near_tie: float | None) -> dict[str, Any]:
        """The results for JSON."""
        of_layers = []
        for index, layer in enumerate(self.layers):
            of_layer = {"layer": index, "layer_id": self.layer_ids[index]}
            of_layers.append({**of_layer, **layer.summary(near_tie)})
        report: dict[str, Any] = {"answers": self.answers, "missing_rows": self.missing}
        if near_tie is not None:
            report["near_tie"] = near_tie
        report["layers"] = of_layers
        report["total"] = reduce(LayerCount.merged, self.layers, LayerCount()).summary(near_tie)
        if self.with_logprobs:
            report["logprobs"] = {"all": tails([*chain(*self.logprobs)])}
            for name, of_state in zip(_STATE_NAMES, self.logprobs, strict=True):
                report["logprobs"][name] = tails(of_state)
        return report


def _is_known(routing: Routing, positions: NDArray[np.intp]) -> NDArray[np.bool_]:
    """[n], whether all ids of the rows at `positions` are known."""
    known: NDArray[np.bool_] = (routing.rows[positions - routing.start] != UNKNOWN).all(axis=(1, 2))
    return known


def _weights_of(
    routing: Routing, positions: NDArray[np.intp], layer: int, scale: Sequence[float] | None
) -> NDArray[np.float32]:
    """The weights [n, K] at some positions in a layer."""
    if routing.weights is None:
        raise RoutingError(
            "the response has no weights: set return_routed_expert_weights in the request"
        )
    factor = np.float32(scale[layer] if scale else 1)
    scaled: NDArray[np.float32] = routing.weights[positions - routing.start, layer] * factor
    return scaled


# ---- the table ----


_HEADINGS = {
    "layer_id": "decoder layer",
    "rows": "rows",
    "equal_rows": "equal",
    "differing_slots": "slots differ",
    "near_ties": "near-ties",
    "other_rows": "other rows",
    "gap_median": "median gap",
    "gap_max": "max gap",
    "weight_difference_mean": "mean Δ weight",
    "weight_difference_max": "max Δ weight",
}


def table(report: dict[str, Any]) -> str:
    """The results as text."""
    total = {"layer_id": "all", **report["total"]}
    columns = {name: heading for name, heading in _HEADINGS.items() if name in total}
    lines = [[_cell(entry.get(name)) for name in columns] for entry in (*report["layers"], total)]
    text = [
        *aligned([list(columns.values()), *lines]),
        f"{report['answers']} responses; {report['missing_rows']} unknown rows are not compared.",
    ]
    if "near_tie" in report:
        text.append(
            f"Gaps are in standard deviations of a token's scores. A gap up to {report['near_tie']:.2g} is a near-tie."
        )
    if "logprobs" in report:
        names = ("tokens", "mean", "p50", "p90", "p99", "max")
        lines = [
            [rows.removesuffix("_rows"), *(_cell(tails.get(name)) for name in names)]
            for rows, tails in report["logprobs"].items()
        ]
        text += [
            "",
            "Absolute differences of log-probabilities, by the rows that the tokens were sampled from:",
        ]
        text += aligned([["rows", *names], *lines])
    return "\n".join(text)


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def aligned(lines: list[list[str]]) -> list[str]:
    """The rows of a table, with right-aligned cells."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
