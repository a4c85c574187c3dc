"""Runs the variants side by side, repeat by repeat, and tabulates medians as ratios to the engine without capture."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from routed_experts.server.cli.console import say

Run = dict[str, float]

WEIGHTS = "weights"
"""In place of True: requests ask for rows and their weights."""


@dataclass(frozen=True)
class Case:
    """One load.

    Attributes:
        long: length of one more prompt that arrives among the decoding requests; 0 for none.
        again: whether the same prompts come in every run.
    """

    name: str
    size: int
    prompt_len: int
    new_tokens: int
    long: int = 0
    again: bool = False


@dataclass
class Host:
    """A running `bench.engine_host`."""

    variant: str
    process: subprocess.Popen[str]
    info: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, variant: str, engine: dict[str, Any], device: str, log: Path) -> "Host":
        command = [sys.executable, "-m", "bench.engine_host", "--variant", variant]
        command += ["--device", device, "--engine", json.dumps(engine)]
        with log.open("w") as out:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True)
        host = cls(variant, process)
        say(f"Starting the engine of {variant}; its log is {log}.")
        host.info = host._read(log)["info"]
        return host

    def run(self, case: Case, routing: bool | str) -> Run:
        """One load; `routing` says what requests ask for: nothing, rows, or rows with `WEIGHTS`."""
        assert self.process.stdin is not None
        body = {key: value for key, value in asdict(case).items() if key != "name"}
        self.process.stdin.write(json.dumps({**body, "routing": routing}) + "\n")
        self.process.stdin.flush()
        return self._read(None)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def _read(self, log: Path | None) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine of variant {self.variant} ended" + (f": see {log}" if log else ""))
        answer: dict[str, Any] = json.loads(line)
        return answer


def start_all(starts: list[Callable[[], Host]]) -> list[Host]:
    """The hosts, started at the same time: a start is mostly waiting."""
    with ThreadPoolExecutor(len(starts)) as pool:
        return list(pool.map(lambda start: start(), starts))


def interleave(
    hosts: list[Host],
    lines: list[tuple[str, Host, bool | str]],
    cases: list[Case],
    repeats: int,
    results: dict[str, dict[str, list[Run]]],
    save: Path,
) -> None:
    """Runs every line (name, host, routing asked for) of every case `repeats` times, in turns, after a warm-up."""
    for case in cases:
        for host in hosts:
            host.run(case if case.long else replace(case, new_tokens=32), routing=False)
        with tqdm(total=repeats * len(lines), desc=case.name, unit=" runs", disable=None) as bar:
            for repeat in range(repeats):
                order = lines if repeat % 2 == 0 else lines[::-1]
                for name, host, routing in order:
                    results.setdefault(case.name, {}).setdefault(name, []).append(host.run(case, routing))
                    bar.update()
        save.write_text(json.dumps(results))


def table(results: dict[str, dict[str, list[Run]]], baseline: dict[str, str]) -> str:
    """Markdown: medians, and their ratios to the baseline that ran in the same turns.

    The noise is a row of its own: the runs of the baseline in even turns against those in odd ones.
    """
    figures = {"tokens_per_s": "tokens/s", "first_token_ms": "first token ms", "tpot_ms": "TPOT ms"}
    figures["itl_p99_ms"] = "ITL p99 ms"
    head = f"| case | variant | {' | to off | '.join(figures.values())} | to off | ITL max ms |"
    rows = [head, "| --- " * (head.count("|") - 1) + "|"]
    for case, variants in results.items():
        lines = [(name, runs, variants[baseline[name]]) for name, runs in variants.items()]
        lines.append(("off: even turns to odd", variants["off"][::2], variants["off"][1::2]))
        for name, runs, base in lines:
            cells = [case, name]
            for key in figures:
                value, reference = median(run[key] for run in runs), median(run[key] for run in base)
                ratio = "" if runs is base else f"{100 * (value / reference - 1):+.2f} %"
                cells += [f"{value:.1f}" if value >= 100 else f"{value:.2f}", ratio]
            cells.append(f"{median(run['itl_max_ms'] for run in runs):.1f}")
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
