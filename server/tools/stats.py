"""`routed-experts stats`: load of the experts of each layer in saved responses. Needs no vLLM."""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.collect import Routing, RoutingError
from routed_experts.protocol.expert_load import ExpertLoad, Histogram, expert_load, histogram, sum_weights
from routed_experts.protocol.saved import ModelInfo, SavedAnswer, once, read
from routed_experts.server.cli.console import aligned
from routed_experts.server.tools.saved import add_flags, info_of, opened

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
    """Sums over responses."""

    counts: Counts | None = None  # [L, E] for the E experts seen or stated so far; None before the first response
    weights: Sums | None = None  # [L, E], those that experts were chosen with; None if no response has any
    layer_ids: tuple[int, ...] | None = None  # decoder layer of each of the L layers; None if unknown
    answers: int = 0
    rows: int = 0  # including unknown ones
    missing: int = 0

    def add(self, answer: SavedAnswer) -> None:
        """Counts the rows of a response, or its histograms if it has no rows."""
        routings = list(once(answer.routings()))
        with answer.located():
            for found in _histograms(routings, answer.info.num_experts):
                self._add(found, answer.info)
        self.answers += 1

    def _add(self, found: Histogram, info: ModelInfo) -> None:
        counts = np.asarray(found["counts"], dtype=np.int64)
        before = np.zeros((len(counts), 0), dtype=np.int64) if self.counts is None else self.counts
        if len(before) != len(counts):
            raise RoutingError(f"{len(counts)} layers after {len(before)} layers: count one model at a time")
        if None not in (info.layer_ids, self.layer_ids) and info.layer_ids != self.layer_ids:
            raise RoutingError(f"decoder layers {info.layer_ids} after {self.layer_ids}: count one model at a time")
        self.layer_ids = self.layer_ids or info.layer_ids
        experts = max(before.shape[1], counts.shape[1], info.num_experts or 0)
        _check_size(len(counts), experts)
        self.counts = _widened(before, experts) + _widened(counts, experts)
        if "weights" in found:
            sums = np.zeros((len(counts), 0)) if self.weights is None else self.weights
            self.weights = _widened(sums, experts) + _widened(np.asarray(found["weights"], np.float64), experts)
        self.rows += found["rows"]
        self.missing += found["missing"]


def _histograms(routings: Iterable[Routing], num_experts: int | None) -> Iterator[Histogram]:
    """Those of the rows, or what the response has in place of rows."""
    seen: list[Histogram] = []  # choices share their prompt's
    for routing in routings:
        rows, weights = routing.rows, routing.weights
        if len(rows) or routing.histogram is None:
            experts = num_experts or int(rows.max(initial=-1)) + 1
            _check_size(rows.shape[1], experts)
            sums = {} if weights is None else {"weights": sum_weights(rows, weights, experts).tolist()}
            yield {**histogram(rows, experts), **sums}  # type: ignore[typeddict-item]
            continue
        for found in (routing.prompt_histogram, routing.histogram):
            if found is not None and not any(found is one for one in seen):
                seen.append(found)
                yield found


def _widened(counts: NDArray[Number], experts: int) -> NDArray[Number]:
    return np.pad(counts, ((0, 0), (0, experts - counts.shape[1])))


def _check_size(layers: int, experts: int) -> None:
    if layers * experts > _MAX_CELLS:
        raise RoutingError(f"{layers} layers of {experts} experts are more than any model has")


def tally(paths: Sequence[str], given: ModelInfo) -> Tally:
    """The sums over the responses in files."""
    found = Tally()
    for answer in read(opened(paths), given):
        found.add(answer)
    return found


def table(found: Tally, width: int, bars: str = BARS) -> str:
    """The load of each layer as text, at most `width` characters wide."""
    load, layers, weighed = _load(found), report(found)["layers"], found.weights is not None
    columns = {
        **({"MoE layer": "{layer}"} if found.layer_ids is None else {"decoder layer": "{layer_id}"}),
        "entropy": "{entropy:.2f}",
        "balance": "{percent:.1f} %",
        "imbalance": "{imbalance:.2f}",
        **({"weighted": "{weighted_imbalance:.2f}"} if weighed else {}),
        "busiest": "{busiest}",
        "unused": "{unused}",
    }
    cells = aligned(
        [
            list(columns),
            *([form.format(**layer, percent=100 * layer["balance"]) for form in columns.values()] for layer in layers),
        ]
    )
    room = max(width - len(cells[0]) - 2, 8)
    pictures = ["load of each expert", *(_picture(row, room, bars) for row in load.load)]
    experts = load.counts.shape[1]
    each = -(-experts // room)
    column = f"a column is {each} experts" if each > 1 else "a column is an expert"
    return "\n".join(
        [
            *(f"{line}  {picture}".rstrip() for line, picture in zip(cells, pictures, strict=True)),
            f"{found.answers} responses, {found.rows} rows, {found.missing} of them unknown.",
            f"Entropy is in bits. Balance is the entropy divided by its maximum for {experts} experts. Imbalance is",
            f"the load of the busiest expert. Load is in multiples of the even share: {column}, full at {TOP}.",
            *(["Weighted imbalance: choices count with the router's weights."] if weighed else []),
            *([] if found.layer_ids else [WITHOUT_LAYER_IDS]),
        ]
    )


def _picture(load: NDArray[np.float64], room: int, bars: str) -> str:
    """One character per expert, or per group of experts for the busiest of the group."""
    each = -(-len(load) // room)
    padded = np.pad(load, (0, -len(load) % each)).reshape(-1, each).max(axis=1)
    levels = np.ceil(np.minimum(padded / TOP, 1) * (len(bars) - 1)).astype(int)
    return "".join(bars[level] for level in levels)


def _load(found: Tally) -> ExpertLoad:
    assert found.counts is not None
    return expert_load(found.counts)


def report(found: Tally) -> dict[str, Any]:
    """The results for JSON."""
    load = _load(found)
    names = ("entropy", "balance", "imbalance", "busiest", "unused", "counts")
    columns: dict[str, list[Any]] = {name: getattr(load, name).tolist() for name in names}
    if (sums := found.weights) is not None:
        even = np.maximum(sums.mean(axis=1), np.finfo(np.float64).tiny)
        columns |= {"weights": sums.tolist(), "weighted_imbalance": (sums.max(axis=1) / even).tolist()}
    ids = found.layer_ids or [None] * len(load.counts)
    return {
        "answers": found.answers,
        "rows": found.rows,
        "missing": found.missing,
        "num_experts": load.counts.shape[1],
        "layers": [
            {"layer": layer, "layer_id": layer_id} | {name: values[layer] for name, values in columns.items()}
            for layer, layer_id in enumerate(ids)
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
    """Runs `routed-experts stats`; returns the exit status."""
    args = parse(argv)
    found = tally(args.file, info_of(args))
    if args.json:
        print(json.dumps(report(found)))
        return 0
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if sys.stdout.isatty() else _WIDTH
    can_draw = "utf" in (sys.stdout.encoding or "").lower()
    print(table(found, width, BARS if can_draw else PLAIN_BARS))
    return 0
