"""`routed-experts stats`: how evenly the experts of each layer shared the work in saved answers. Needs no vLLM."""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.collect import Routing, collect
from routed_experts.protocol.histogram import count_experts
from routed_experts.protocol.load import ExpertLoad, expert_load
from routed_experts.server.complaint import complain

BARS = " ▁▂▃▄▅▆▇█"
PLAIN_BARS = " .:-=+*#@"
TOP = 4  # times the even share, at which a bar is full
_WIDTH = 100  # of the table where it does not go to a terminal

Counts = NDArray[np.int64]


class StatsError(Exception):
    """A file that cannot be counted. The message says what to change."""


@dataclass
class Tally:
    """What the answers of a file add up to.

    Attributes:
        counts: [L, E], E being as many as were seen or said; None before the first answer.
        rows: counted, those with ids that are not known included.
    """

    num_experts: int = 0
    counts: Counts | None = None
    answers: int = 0
    rows: int = 0
    missing: int = 0
    _seen: list[int] = field(default_factory=list)

    def add_answer(self, answer: dict[str, Any]) -> None:
        """Counts the rows of an answer, or its histograms where it has no rows.

        Raises:
            StatsError: it has neither, or is of another model than those before.
        """
        histograms = list(_histograms(answer))
        if histograms and not _has_rows(answer):
            for histogram in histograms:
                self._add(np.asarray(histogram["counts"], dtype=np.int64), histogram["rows"], histogram["missing"])
        else:
            for rows, missing in _rows_once(collect(answer)):
                experts = max(self.num_experts, int(rows.max(initial=-1)) + 1)
                self._add(count_experts(rows, experts), len(rows), missing)
        self.answers += 1

    def _add(self, counts: Counts, rows: int, missing: int) -> None:
        before = np.zeros((len(counts), 0), dtype=np.int64) if self.counts is None else self.counts
        if len(before) != len(counts):
            raise StatsError(f"{len(counts)} layers, and {len(before)} before: count one model's answers at a time")
        experts = max(before.shape[1], counts.shape[1], self.num_experts)
        self.counts = _widened(before, experts) + _widened(counts, experts)
        self.rows += rows
        self.missing += missing


def _widened(counts: Counts, experts: int) -> Counts:
    return np.pad(counts, ((0, 0), (0, experts - counts.shape[1])))


def _has_rows(answer: dict[str, Any]) -> bool:
    return any("routed_experts" in choice for choice in answer.get("choices") or ())


def _histograms(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    prompts = answer.get("prompt_routed_experts_histogram")
    yield from prompts if isinstance(prompts, list) else [prompts] if prompts else []
    for choice in answer.get("choices") or ():
        if "routed_experts_histogram" in choice:
            yield choice["routed_experts_histogram"]


def _rows_once(routings: list[Routing]) -> Iterator[tuple[NDArray[np.int16], int]]:
    """The rows of an answer's choices, those of a prompt once however many choices it has, and how many are missing."""
    prompts: list[NDArray[np.int16]] = []
    for routing in routings:
        if routing.prompt_len is None:
            rows = routing.rows
        else:
            rows = routing.generated_rows
            if not any(np.array_equal(routing.prompt_rows, prompt) for prompt in prompts):
                prompts.append(routing.prompt_rows)
                rows = routing.rows
        yield rows, int((rows < 0).any(axis=(1, 2)).sum())


def tally(path: Path, num_experts: int = 0) -> Tally:
    """The sum over a file with an answer in each line.

    Raises:
        StatsError: it cannot be read, or a line is not an answer with routing.
    """
    found = Tally(num_experts)
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    _add_line(found, line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise StatsError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.") from error
    if found.counts is None:
        raise StatsError(f"{path} has no rows: it should hold an answer of the server in each line.")
    return found


def _add_line(found: Tally, line: str, where: str) -> None:
    try:
        answer = json.loads(line)
    except ValueError as error:
        raise StatsError(f"{where} is not JSON: each line should hold an answer of the server.") from error
    if not isinstance(answer, dict):
        raise StatsError(f"{where} is not an answer of the server: it should be a JSON object.")
    try:
        found.add_answer(answer)
    except (StatsError, ValueError, KeyError, TypeError) as error:
        raise StatsError(f"{where}: {error}.") from error


def table(found: Tally, width: int, bars: str = BARS) -> str:
    """The load of each layer for people, at most `width` characters wide."""
    load = _load(found)
    head = ["layer", "entropy", "balance", "imbalance", "busiest", "unused"]
    lines = [
        [
            str(layer),
            f"{load.entropy[layer]:.2f}",
            f"{100 * load.balance[layer]:.1f} %",
            f"{load.imbalance[layer]:.2f}",
            str(load.busiest[layer]),
            str(load.unused[layer]),
        ]
        for layer in range(len(load.counts))
    ]
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    room = max(width - sum(widths) - 2 * len(widths), 8)
    pictures = ["load of each expert", *(_picture(row, room, bars) for row in load.load)]
    rows = [
        "  ".join([*(cell.rjust(size) for cell, size in zip(line, widths, strict=True)), picture]).rstrip()
        for line, picture in zip([head, *lines], pictures, strict=True)
    ]
    experts = load.counts.shape[1]
    columns = -(-experts // -(-experts // room))
    each = f"a column is {-(-experts // columns)} experts" if columns < experts else "a column is an expert"
    return "\n".join(
        [
            *rows,
            f"{found.answers} answers, {found.rows} rows, {found.missing} of them not known to the server.",
            f"Entropy in bits; balance is its share of what it can be at most with {experts} experts; imbalance is the",
            f"busiest expert's load in even shares. Load: {each}, full at {TOP} even shares.",
        ]
    )


def _picture(load: NDArray[np.float64], room: int, bars: str) -> str:
    """A character for each expert or for a few, of which the busiest counts."""
    each = -(-len(load) // room)
    padded = np.pad(load, (0, -len(load) % each)).reshape(-1, each).max(axis=1)
    levels = np.ceil(np.minimum(padded / TOP, 1) * (len(bars) - 1)).astype(int)
    return "".join(bars[level] for level in levels)


def _load(found: Tally) -> ExpertLoad:
    assert found.counts is not None
    return expert_load(found.counts)


def report(found: Tally) -> dict[str, Any]:
    """The findings as JSON has them."""
    load = _load(found)
    return {
        "answers": found.answers,
        "rows": found.rows,
        "missing": found.missing,
        "num_experts": load.counts.shape[1],
        "layers": [
            {
                "layer": layer,
                "entropy": float(load.entropy[layer]),
                "balance": float(load.balance[layer]),
                "imbalance": float(load.imbalance[layer]),
                "busiest": int(load.busiest[layer]),
                "unused": int(load.unused[layer]),
                "counts": load.counts[layer].tolist(),
            }
            for layer in range(len(load.counts))
        ],
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routed-experts stats",
        description="Says for each layer how evenly its experts shared the work in saved answers.",
    )
    parser.add_argument(
        "file",
        type=Path,
        help="file with an answer of the server in each line, asked with return_routed_experts or "
        "routed_experts_histogram",
    )
    parser.add_argument("--num-experts", type=int, default=0, help="of a layer (default: as many as the answers show)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, with all counts")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts stats`; returns the exit status."""
    args = parse(argv)
    try:
        found = tally(args.file, args.num_experts)
    except StatsError as error:
        return complain(error)
    if args.json:
        print(json.dumps(report(found)))
        return 0
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if sys.stdout.isatty() else _WIDTH
    can_draw = "utf" in (sys.stdout.encoding or "").lower()
    print(table(found, width, BARS if can_draw else PLAIN_BARS))
    return 0
