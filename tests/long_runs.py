"""The report of `make test-long`: a table of what ran, of how many cases, and how long it took.

A plugin of pytest: `python -m pytest -m long -p tests.long_runs`. Tests tell the number of their
cases by the fixture `cases`, and make that of hypothesis' examples and of requests by `times`.
"""

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TIMES = float(os.environ.get("LONG_TIMES", "1"))
"""How many times as many cases: 10 for a night, 0.1 to try a test."""
CASES = "cases"
"""A property of the reports of tests that count their cases."""
OPTION = "--long-report"


def times(count: int) -> int:
    return max(1, round(count * TIMES))


# ---- the plugin ----


@dataclass
class Run:
    """What a test has done so far, with its fixtures."""

    cases: int = 1
    seconds: float = 0.0
    result: str = "passed"

    def add(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == CASES and isinstance(value, int):
                self.cases = value
        self.seconds += report.duration
        if report.failed:
            self.result = "FAILED"
        elif report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.result = why.replace("Skipped: ", "skipped: ")


RUNS: dict[str, Run] = {}
BEGUN = time.monotonic()  # clock: for the report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, help="file for the table of what ran")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    RUNS.setdefault(report.nodeid, Run()).add(report)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = table(RUNS, time.monotonic() - BEGUN)  # clock: for the report
    terminalreporter.section("long runs")
    for line in lines:
        terminalreporter.write_line(line)
    if (file := config.getoption(OPTION)) is not None:
        file.write_text("\n".join(lines) + "\n")
        terminalreporter.write_line(f"\nwritten to {file}")


def table(runs: dict[str, Run], seconds: float) -> list[str]:
    """Markdown, with the tests of a file together."""
    rows = [
        f"| {name_of(nodeid)} | {run.cases:,} | {run.seconds:,.0f} | {run.result} |"
        for nodeid, run in sorted(runs.items())
    ]
    failed = sum(run.result == "FAILED" for run in runs.values())
    return [
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, commit {commit()}, "
        f"{time.strftime('%Y-%m-%d')}, {seconds / 60:.0f} minutes, {failed} of {len(runs)} failed.",
        "",
        "| run | cases | seconds | result |",
        "| --- | ---: | ---: | --- |",
        *rows,
    ]


def name_of(nodeid: str) -> str:
    """Without what is the same for all."""
    file, _, test = nodeid.partition("::")
    return f"{file.removeprefix('tests/')}: {test.removeprefix('test_')}".replace("|", "/")


def commit() -> str:
    """Empty outside of a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
