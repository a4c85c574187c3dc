"""`routed-experts stats`: load of the experts of each layer in saved responses. Needs no vLLM."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import count_missing
from routed_experts.protocol.collect import RoutingError
from routed_experts.protocol.expert_load import ExpertLoad, Histogram, count_experts, expert_load, sum_weights
from routed_experts.protocol.saved import ModelInfo, SavedAnswer, once, read
from routed_experts.server.cli.console import aligned
from routed_experts.server.cli.saved import add_flags, info_of, opened

BARS = " ▁▂▃▄▅▆▇█"
PLAIN_BARS = " .:-=+*#@"
TOP = 4  # load of a full bar, in multiples of the even share
WITHOUT_LAYER_IDS = (
    "MoE layers are counted from 0. For decoder layers, put the response of GET /v1/routed_experts into the file."
)
_MAX_CELLS = 1 << 22  # layers times experts, of which real models have some 20,000
_WIDTH = 100  # of the table if the output is not a terminal

Counts = NDArray[np.int64]
Sums = NDArray[np.float64]
Number = TypeVar("Number", bound=np.generic)


@dataclass
class Tally:
    """Sums over responses.

    Attributes:
        counts: [L, E] for the E experts seen or stated so far; None before the first response.
        layer_ids: decoder layer of each of the L layers; None if unknown.
        rows: number of rows, including unknown ones.
        weights: [L, E] sums of the weights that experts were chosen with; None if no response has any.
    """

    counts: Counts | None = None
    weights: Sums | None = None
    layer_ids: tuple[int, ...] | None = None
    answers: int = 0
    rows: int = 0
    missing: int = 0

    def add(self, answer: SavedAnswer) -> None:
        """Counts the rows of a response, or its histograms if it has no rows.

        Raises:
            RoutingError: it has neither, or belongs to another model than earlier ones.
        """
        info, counted = answer.info, set()
        routings = list(once(answer.routings()))
        with answer.located():
            for routing in routings:
                if not len(routing.rows) and routing.histogram is not None:
                    for histogram in (routing.prompt_histogram, routing.histogram):
                        if histogram is not None and id(histogram) not in counted:  # choices share their prompt's
                            counted.add(id(histogram))
                            self._add_histogram(histogram, info)
                    continue
                rows, weights = routing.rows, routing.weights
                experts = info.num_experts or int(rows.max(initial=-1)) + 1
                _check_size(rows.shape[1], experts)
                self._add(count_experts(rows, experts), len(rows), count_missing(rows), info)
                if weights is not None:
                    self._add_weights(sum_weights(rows, weights, experts))
        self.answers += 1

    def _add_histogram(self, histogram: Histogram, info: ModelInfo) -> None:
        counts = np.asarray(histogram["counts"], dtype=np.int64)
        self._add(counts, histogram["rows"], histogram["missing"], info)
        if "weights" in histogram:
            self._add_weights(np.asarray(histogram["weights"], dtype=np.float64))

    def _add_weights(self, sums: Sums) -> None:
        assert self.counts is not None
        before = np.zeros((len(sums), 0)) if self.weights is None else self.weights
        self.weights = _widened(before, self.counts.shape[1]) + _widened(sums, self.counts.shape[1])

    def _add(self, counts: Counts, rows: int, missing: int, info: ModelInfo) -> None:
        before = np.zeros((len(counts), 0), dtype=np.int64) if self.counts is None else self.counts
        if len(before) != len(counts):
            raise RoutingError(f"{len(counts)} layers after {len(before)} layers: count one model at a time")
        if None not in (info.layer_ids, self.layer_ids) and info.layer_ids != self.layer_ids:
            raise RoutingError(f"decoder layers {info.layer_ids} after {self.layer_ids}: count one model at a time")
        self.layer_ids = self.layer_ids or info.layer_ids
        experts = max(before.shape[1], counts.shape[1], info.num_experts or 0)
        _check_size(len(counts), experts)
        self.counts = _widened(before, experts) + _widened(counts, experts)
        self.rows += rows
        self.missing += missing


def _widened(counts: NDArray[Number], experts: int) -> NDArray[Number]:
    return np.pad(counts, ((0, 0), (0, experts - counts.shape[1])))


def _check_size(layers: int, experts: int) -> None:
    if layers * experts > _MAX_CELLS:
        raise RoutingError(f"{layers} layers of {experts} experts are more than any model has")


def tally(paths: Sequence[str], given: ModelInfo) -> Tally:
    """The sums over the responses in files.

    Raises:
        CommandError, RoutingError: a file cannot be read, or has other contents.
    """
    found = Tally()
    for answer in read(opened(paths), given):
        found.add(answer)
    return found


def table(found: Tally, width: int, bars: str = BARS) -> str:
    """The load of each layer as text, at most `width` characters wide."""
    load, weighed = _load(found), _weighted_imbalance(found)
    name = "MoE layer" if found.layer_ids is None else "decoder layer"
    head = [name, "entropy", "balance", "imbalance", *([] if weighed is None else ["weighted"]), "busiest", "unused"]
    lines = [
        [
            str(_layer_id(found, layer)),
            f"{load.entropy[layer]:.2f}",
            f"{100 * load.balance[layer]:.1f} %",
            f"{load.imbalance[layer]:.2f}",
            *([] if weighed is None else [f"{weighed[layer]:.2f}"]),
            str(load.busiest[layer]),
            str(load.unused[layer]),
        ]
        for layer in range(len(load.counts))
    ]
    cells = aligned([head, *lines])
    room = max(width - len(cells[0]) - 2, 8)
    pictures = ["load of each expert", *(_picture(row, room, bars) for row in load.load)]
    rows = [f"{line}  {picture}".rstrip() for line, picture in zip(cells, pictures, strict=True)]
    experts = load.counts.shape[1]
    columns = -(-experts // -(-experts // room))
    each = f"a column is {-(-experts // columns)} experts" if columns < experts else "a column is an expert"
    return "\n".join(
        [
            *rows,
            f"{found.answers} responses, {found.rows} rows, {found.missing} of them unknown.",
            f"Entropy is in bits. Balance is the entropy divided by its maximum for {experts} experts. Imbalance is",
            f"the load of the busiest expert. Load is in multiples of the even share: {each}, full at {TOP}.",
            *([] if weighed is None else ["Weighted imbalance: choices count with the router's weights."]),
            *([] if found.layer_ids else [WITHOUT_LAYER_IDS]),
        ]
    )


def _layer_id(found: Tally, layer: int) -> int:
    return layer if found.layer_ids is None else found.layer_ids[layer]


def _picture(load: NDArray[np.float64], room: int, bars: str) -> str:
    """One character per expert, or per group of experts for the busiest of the group."""
    each = -(-len(load) // room)
    padded = np.pad(load, (0, -len(load) % each)).reshape(-1, each).max(axis=1)
    levels = np.ceil(np.minimum(padded / TOP, 1) * (len(bars) - 1)).astype(int)
    return "".join(bars[level] for level in levels)


def _load(found: Tally) -> ExpertLoad:
    assert found.counts is not None
    return expert_load(found.counts)


def _weighted_imbalance(found: Tally) -> Sums | None:
    """[L], the largest sum of weights in multiples of the even share; None without weights."""
    if (sums := found.weights) is None:
        return None
    return sums.max(axis=1) / np.maximum(sums.mean(axis=1), np.finfo(np.float64).tiny)


def report(found: Tally) -> dict[str, Any]:
    """The results for JSON."""
    load, weighed = _load(found), _weighted_imbalance(found)
    weights: list[dict[str, Any]] = [{} for _ in load.counts]
    if found.weights is not None and weighed is not None:
        for layer, (sums, imbalance) in enumerate(zip(found.weights, weighed, strict=True)):
            weights[layer] = {"weights": sums.tolist(), "weighted_imbalance": float(imbalance)}
    return {
        "answers": found.answers,
        "rows": found.rows,
        "missing": found.missing,
        "num_experts": load.counts.shape[1],
        "layers": [
            {
                "layer": layer,
                "layer_id": found.layer_ids[layer] if found.layer_ids else None,
                "entropy": float(load.entropy[layer]),
                "balance": float(load.balance[layer]),
                "imbalance": float(load.imbalance[layer]),
                "busiest": int(load.busiest[layer]),
                "unused": int(load.unused[layer]),
                "counts": load.counts[layer].tolist(),
                **weights[layer],
            }
            for layer in range(len(load.counts))
        ],
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routed-experts stats",
        description="Reports how evenly the experts of each layer are used in saved responses.",
    )
    parser.add_argument(
        "file",
        nargs="+",
        help="responses to requests with return_routed_experts or routed_experts_histogram; - for standard input",
    )
    add_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON, with all counts")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts stats`; returns the exit status.

    Raises:
        CommandError: the command cannot run.
    """
    args = parse(argv)
    found = tally(args.file, info_of(args))
    if args.json:
        print(json.dumps(report(found)))
        return 0
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if sys.stdout.isatty() else _WIDTH
    can_draw = "utf" in (sys.stdout.encoding or "").lower()
    print(table(found, width, BARS if can_draw else PLAIN_BARS))
    return 0
