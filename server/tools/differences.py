"""Counts where the experts of responses differ from those of a checkpoint, and writes the table of
`compare`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import UNKNOWN, Rows
from routed_experts.protocol.routing import Routing

Ids = NDArray[np.integer[Any]]
Scores = NDArray[np.float32]
Flags = NDArray[np.bool_]


def unmatched(ours: Ids, theirs: Ids) -> tuple[Flags, Flags]:
    """Which experts [..., K] of each side the other did not choose, in whatever order."""
    same = ours[..., :, None] == theirs[..., None, :]  # [..., K of ours, K of theirs]
    only_ours: Flags = ~same.any(axis=-1)
    only_theirs: Flags = ~same.any(axis=-2)
    return only_ours, only_theirs


# ---- rows ----


@dataclass
class LayerCount:
    """Counts of one layer."""

    rows: int = 0
    differing_rows: int = 0
    differing_slots: int = 0
    # For each differing row, the score gap between the experts that only one side chose, in
    # standard deviations of all scores of that token.
    gaps: list[float] = field(default_factory=list)

    def add(self, ours: Ids, theirs: Ids, gaps: Scores) -> None:
        """Compares two sides' rows [n, K], with their `gaps` [n] where they differ."""
        _, only_theirs = unmatched(ours, theirs)
        differs = np.any(only_theirs, axis=1)
        self.rows += len(ours)
        self.differing_rows += int(differs.sum())
        self.differing_slots += int(only_theirs.sum())
        self.gaps += gaps[differs].tolist()

    def merged(self, other: "LayerCount") -> "LayerCount":
        return LayerCount(
            **{name: value + getattr(other, name) for name, value in vars(self).items()}
        )

    def summary(self, near_tie: float) -> dict[str, Any]:
        num_near = sum(gap <= near_tie for gap in self.gaps)
        return {
            "rows": self.rows,
            "equal_rows": self.rows - self.differing_rows,
            "differing_slots": self.differing_slots,
            "other_rows": self.differing_rows - num_near,
            "near_ties": num_near,
            "gap_median": float(np.median(self.gaps)) if self.gaps else None,
            "gap_max": max(self.gaps, default=None),
        }


@dataclass
class Comparison:
    """Counts of each layer over all responses."""

    layer_ids: Sequence[int]  # decoder layer of each of the L layers
    layers: list[LayerCount] = field(default_factory=list)
    answers: int = 0
    missing: int = 0  # rows that are unknown, which are not compared

    def __post_init__(self) -> None:
        self.layers = [LayerCount() for _ in self.layer_ids]

    def add(self, ours: Routing, theirs: Rows, gaps: Scores) -> None:
        """Compares a response with the checkpoint's rows [positions, L, K] of all its tokens.

        Args:
            gaps: [positions, L] in scores, where rows differ.
        """
        self.answers += 1
        is_known = (ours.rows != UNKNOWN).all(axis=(1, 2))
        self.missing += int((~is_known).sum())
        positions = ours.start + np.flatnonzero(is_known)
        for index, layer in enumerate(self.layers):
            layer.add(ours.rows[is_known, index], theirs[positions, index], gaps[positions, index])

    def report(self, near_tie: float) -> dict[str, Any]:
        """The results for JSON."""
        of_layers = []
        for index, layer in enumerate(self.layers):
            of_layer = {"layer": index, "layer_id": self.layer_ids[index]}
            of_layers.append({**of_layer, **layer.summary(near_tie)})
        return {
            "answers": self.answers,
            "missing_rows": self.missing,
            "near_tie": near_tie,
            "layers": of_layers,
            "total": reduce(LayerCount.merged, self.layers, LayerCount()).summary(near_tie),
        }


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
}


def table(report: dict[str, Any]) -> str:
    """The results as text."""
    total = {"layer_id": "all", **report["total"]}
    lines = [[_cell(entry[name]) for name in _HEADINGS] for entry in (*report["layers"], total)]
    text = [
        *_aligned([list(_HEADINGS.values()), *lines]),
        f"{report['answers']} responses; {report['missing_rows']} unknown rows are not compared.",
        f"Gaps are in standard deviations of a token's scores. A gap up to {report['near_tie']:.2g} is a near-tie.",
    ]
    return "\n".join(text)


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def _aligned(lines: list[list[str]]) -> list[str]:
    """The rows of a table, with right-aligned cells."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
