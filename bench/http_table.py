"""The table of `bench.http`: medians of the repeats, beside those of the baseline that ran in the
same turns."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

Run = dict[str, Any]

HEAD = (
    "| case | API processes | variant | tokens/s | to off | TTFT p50 ms | to off | p99 | above off | "
    "ITL p50 ms | p99 | to off | API CPU µs a token | above off | bytes a token | rows |"
)


def table(runs: list[Run]) -> str:
    """Markdown. A row of the baseline's even turns to its odd ones shows what a difference is
    worth."""
    groups: dict[tuple[Any, ...], dict[str, list[Run]]] = {}
    for run in runs:
        key = (run["case"], run["api_servers"], run["mode"])
        groups.setdefault(key, {}).setdefault(run["variant"], []).append(run)
    rows = [HEAD, "| --- " * len(HEAD.split(" | ")) + "|"]
    for (case, api_servers, mode), variants in groups.items():
        for variant, mine in variants.items():
            base = variants.get(mine[0]["baseline"], [])
            rows.append(
                _row(f"{case}, {mode}", api_servers, variant, mine, [] if base is mine else base)
            )
            if base is mine and len(mine) > 1:
                name = f"{variant}: even turns to odd"
                rows.append(_row(f"{case}, {mode}", api_servers, name, mine[::2], mine[1::2]))
    conditions = dict.fromkeys(described(run) for run in runs)
    repeats = sorted({len(mine) for variants in groups.values() for mine in variants.values()})
    busiest = max((run["client_busy"] for run in runs), default=0.0)
    notes = f"{'; '.join(conditions)}. Repeats: {', '.join(map(str, repeats))}. "
    notes += f"Busiest client process: {100 * busiest:.0f} %."
    return notes + "\n\n" + "\n".join(rows) + "\n"


def row_of(run: Run) -> str:
    """A row of the table for one run."""
    return _row(f"{run['case']}, {run['mode']}", run["api_servers"], run["variant"], [run], [])


def _row(case: str, api_servers: int, variant: str, mine: list[Run], base: list[Run]) -> str:
    def middle(runs: list[Run], key: str) -> float | None:
        values = [run[key] for run in runs if run[key] is not None]
        return median(values) if values else None

    def value(key: str) -> str:
        return _digits(middle(mine, key))

    def ratio(key: str) -> str:
        a, b = middle(mine, key), middle(base, key)
        return "" if a is None or not b else f"{100 * (a / b - 1):+.1f} %"

    def above(key: str) -> str:
        a, b = middle(mine, key), middle(base, key)
        return "" if a is None or b is None else f"{a - b:+.1f}"

    faults = sum(len(run["faults"]) for run in mine)
    cells = [case, str(api_servers), variant, value("tokens_per_s"), ratio("tokens_per_s")]
    cells += [
        value("ttft_p50_ms"),
        ratio("ttft_p50_ms"),
        value("ttft_p99_ms"),
        above("ttft_p99_ms"),
    ]
    cells += [value("itl_p50_ms"), value("itl_p99_ms"), ratio("itl_p99_ms")]
    cells += [value("cpu_us"), above("cpu_us"), value("bytes")]
    cells += [f"{faults} ANSWERS WRONG" if faults else f"{median(run['rows'] for run in mine):.0f}"]
    return "| " + " | ".join(cells) + " |"


def _digits(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def described(run: dict[str, Any]) -> str:
    """What `commit_and_device` gave, or a run that holds it, in words."""
    return f"{run['device']}, {run['date']}, commit {run['commit']}"


def commit_and_device(device: str, commit: str | None) -> dict[str, str]:
    """What a figure must be quoted with."""
    commit = commit or _output("git", "describe", "--always", "--dirty") or "unknown"
    if device == "cuda":
        devices = _output(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        ).splitlines()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        devices = [
            line.split(":")[1].strip() for line in lines if line.startswith("model name")
        ] or ["CPU"]
    name = f"{len(devices)} x {devices[0]}"
    return {"commit": commit, "device": name, "date": datetime.now(UTC).date().isoformat()}


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""
