"""Counts where two sides' experts, weights and log-probabilities differ, and writes the table of
`compare`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import UNKNOWN
from routed_experts.protocol.routing import Routing, RoutingError
from routed_experts.server.tools.reference import Ids, Reference, Scores


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

    def add(
        self,
        ours: Ids,
        theirs: Ids,
        scores: Scores | None = None,
        weights: tuple[Scores, Scores] | None = None,
    ) -> NDArray[np.bool_]:
        """Compares two sides' rows [n, K] and their weights; `scores` is [n, experts]. Returns
        which rows differ."""
        same = ours[:, :, None] == theirs[:, None, :]  # [n, K of ours, K of theirs]
        only_ours = ~same.any(axis=2)
        only_theirs = ~same.any(axis=1)
        differs: NDArray[np.bool_] = only_theirs.any(axis=1)
        self.rows += len(ours)
        self.differing_rows += int(differs.sum())
        self.differing_slots += int(only_theirs.sum())
        if scores is not None:
            for row in np.flatnonzero(differs):
                gap = (
                    scores[row, theirs[row, only_theirs[row]]].max()
                    - scores[row, ours[row, only_ours[row]]].min()
                )
                self.gaps.append(float(abs(gap) / max(float(scores[row].std()), 1e-30)))
        if weights is not None:  # of experts that both chose, which may be in another order
            our_weights, their_weights = weights
            differences = np.abs(
                our_weights[:, :, None].astype(np.float64) - their_weights[:, None, :]
            )
            of_both = differences[same]
            largest = float(of_both.max(initial=0))
            self.weights += len(of_both)
            self.weight_difference_sum += float(of_both.sum())
            self.weight_difference_max = max(self.weight_difference_max, largest)
        return differs

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
        self, routing: Routing, reference: Reference, scale: Sequence[float] | None = None
    ) -> None:
        """Scores the tokens of `routing` in the checkpoint and compares each of its rows. The
        server's weights are multiplied by `scale` [L]."""
        tokens = self._tokens_of(routing)
        logprobs = self._logprobs_of(routing, tokens)
        # nothing says how probable the first token is
        valued = np.flatnonzero(~np.isnan(logprobs[1:])) + 1
        first = int(valued.min(initial=len(tokens)))
        self.answers += 1
        self.missing += routing.missing
        known = np.flatnonzero((routing.rows != UNKNOWN).all(axis=(1, 2)))
        if not len(known) and not len(valued):
            return
        positions = known + routing.start
        states = _states(len(tokens) - 1, positions)

        def compare_layer(index: int, chosen: Ids, scores: Scores, weights: Scores | None) -> None:
            both_weights = None
            if self.with_weights and weights is not None:
                our_weights = _scaled(routing, known, index, scale)
                both_weights = (our_weights, weights[positions])
            ours = routing.rows[known, index]
            layer = self.layers[index]
            differs = layer.add(ours, chosen[positions], scores[positions], both_weights)
            states[positions[differs]] = DIFFERENT

        theirs = reference.score(tokens[:-1], compare_layer, tokens[first:])
        self._add_logprobs(logprobs[first:], theirs, states[first - 1 :])

    def add_pair(
        self,
        ours: Routing,
        theirs: Routing,
        scales: Sequence[Sequence[float] | None] = (None, None),
    ) -> None:
        """Compares two responses as far as their tokens are the same. `scales` are those of the
        layers of each side's model, if they are known."""
        our_tokens = self._tokens_of(ours)
        their_tokens = self._tokens_of(theirs)
        num_same = _num_same(our_tokens, their_tokens)
        num_prompt = min(len(ours.prompt_token_ids or ()), len(theirs.prompt_token_ids or ()))
        if num_same < num_prompt:
            raise RoutingError(f"the responses have different prompts, from position {num_same} on")
        if ours.rows.shape[1:] != theirs.rows.shape[1:] or ours.rows.shape[1] != len(self.layers):
            raise RoutingError(f"rows of shapes {ours.rows.shape[1:]} and {theirs.rows.shape[1:]}")
        self.answers += 1
        first = max(ours.start, theirs.start)
        end = max(min(ours.end, theirs.end, num_same), first)
        positions = np.arange(first, end)
        is_known = _is_known(ours, positions) & _is_known(theirs, positions)
        self.missing += int((~is_known).sum())
        positions = positions[is_known]
        our_rows = positions - ours.start
        their_rows = positions - theirs.start
        states = _states(num_same, positions)
        for index, layer in enumerate(self.layers):
            weights = None
            if self.with_weights:
                weights = (
                    _scaled(ours, our_rows, index, scales[0]),
                    _scaled(theirs, their_rows, index, scales[1]),
                )
            our_ids = ours.rows[our_rows, index]
            their_ids = theirs.rows[their_rows, index]
            differs = layer.add(our_ids, their_ids, None, weights)
            states[positions[differs]] = DIFFERENT
        our_logprobs = self._logprobs_of(ours, our_tokens)[1:num_same]
        their_logprobs = self._logprobs_of(theirs, their_tokens)[1:num_same]
        self._add_logprobs(our_logprobs, their_logprobs, states[:-1])

    def _add_logprobs(
        self,
        ours: NDArray[np.floating[Any]],
        theirs: NDArray[np.floating[Any]],
        states: NDArray[np.int8],
    ) -> None:
        """Compares [n] tokens, whose rows compare as `states` says. Those without a value (NaN) are
        left out."""
        difference = np.abs(ours.astype(np.float64) - theirs)
        for state, of_state in enumerate(self.logprobs):
            of_state += difference[(states == state) & ~np.isnan(difference)].tolist()

    def _tokens_of(self, routing: Routing) -> tuple[int, ...]:
        if self.with_weights and routing.weights is None:
            raise RoutingError(
                "the response has no weights: set return_routed_expert_weights in the request"
            )
        if routing.prompt_token_ids is None or routing.token_ids is None:
            raise RoutingError("the response has no token ids: set return_token_ids in the request")
        return (*routing.prompt_token_ids, *routing.token_ids)

    def _logprobs_of(self, routing: Routing, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Those of all tokens, NaN where the response has none."""
        of_all = np.full(len(tokens), np.nan)
        if not self.with_logprobs:
            return of_all
        if routing.logprobs is None:
            raise RoutingError("the response has no log-probabilities: set logprobs in the request")
        generated = len(routing.token_ids or ())
        if len(routing.logprobs) not in (generated, len(tokens)):
            raise RoutingError(
                f"{len(routing.logprobs)} log-probabilities of {generated} generated tokens"
            )
        of_all[len(tokens) - len(routing.logprobs) :] = routing.logprobs
        return of_all

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


def _num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for index, (our_token, their_token) in enumerate(zip(ours, theirs, strict=False)):
        if our_token != their_token:
            return index
    return min(len(ours), len(theirs))


def _is_known(routing: Routing, positions: NDArray[np.intp]) -> NDArray[np.bool_]:
    """[n], whether all ids of the rows at `positions` are known."""
    known: NDArray[np.bool_] = (routing.rows[positions - routing.start] != UNKNOWN).all(axis=(1, 2))
    return known


def _states(count: int, known: NDArray[np.intp]) -> NDArray[np.int8]:
    """Of `count` rows, before they are compared."""
    states = np.full(count, NOT_KNOWN, dtype=np.int8)
    states[known] = EQUAL
    return states


def _scaled(
    routing: Routing, rows: NDArray[np.intp], layer: int, scale: Sequence[float] | None
) -> Scores:
    """The weights [n, K] of some rows in a layer."""
    assert routing.weights is not None
    factor = np.float32(1 if scale is None else scale[layer])
    scaled: Scores = routing.weights[rows, layer] * factor
    return scaled


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
