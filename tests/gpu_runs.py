"""Which test was last run on a GPU, when, and at which commit.

On the GPU machine, as a plugin of pytest, which writes what the run came to:

    python -m pytest -p tests.gpu_runs --gpu-run run.json --commit $(git rev-parse --short HEAD) tests/gpu

Here, to take it into `docs/gpu-runs.json`, and the newest state of that file into the table of `docs/support.md`:

    python -m tests.gpu_runs run.json
"""

import datetime
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from routed_experts.capture.engine.versions import SUPPORTED_VLLM

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs/gpu-runs.json"
TABLE = ROOT / "docs/support.md"


@dataclass(frozen=True)
class Run:
    """The last run of a test.

    Attributes:
        commit: None where nobody wrote it down.
    """

    outcome: str
    commit: str | None
    date: str
    device: str


Runs = dict[str, dict[str, Run]]
"""By version of vLLM, and by test as pytest names it."""


# ---- on the GPU machine ----


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-run", type=Path, help="file to write the outcome of each test to")
    parser.addoption("--commit", help="the commit that is run, where git cannot tell")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.gpu_run is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.option.gpu_run, config.option.commit or _commit()))


def _commit() -> str:
    """The commit of the working tree, with a plus if it was changed since."""
    try:
        head, changes = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError) as error:
        raise pytest.UsageError("--gpu-run needs --commit where there is no repository of git's") from error
    return head + "+" if changes else head


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, check=True, cwd=ROOT, text=True, stdout=subprocess.PIPE).stdout.strip()


class Recorder:
    """Writes a file of the outcomes of a session of pytest, after each test, as time on GPUs may end at any moment.
    Skipped tests were not run."""

    def __init__(self, file: Path, commit: str) -> None:
        import torch
        import vllm

        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu-run needs a GPU")
        self._file = file
        self._outcomes: dict[str, str] = {}
        count = torch.cuda.device_count()
        device = torch.cuda.get_device_name(0)
        self._run = Run(
            outcome="",
            commit=commit,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            device=device if count == 1 else f"{count} x {device}",
        )
        self._vllm = vllm.__version__.split("+")[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:  # whether in the test or around it
            self._outcomes[report.nodeid] = "failed"
        elif report.when == "call" and report.passed:
            self._outcomes[report.nodeid] = "passed"
        if report.when == "teardown":
            self.write()

    def write(self) -> None:
        runs = {test: replace(self._run, outcome=outcome) for test, outcome in self._outcomes.items()}
        write(self._file, {self._vllm: runs})


# ---- here ----


def read(file: Path) -> Runs:
    loaded: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return {version: {test: Run(**run) for test, run in runs.items()} for version, runs in loaded.items()}


def write(file: Path, runs: Runs) -> None:
    plain = {version: {test: asdict(run) for test, run in of_tests.items()} for version, of_tests in runs.items()}
    file.write_text(json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def last_run(runs: dict[str, Run], tests: Sequence[str]) -> str:
    """When `tests`, with all of their parameters where they name none, last ran: the oldest of their last runs."""
    last: list[Run] = []
    for test in tests:
        found = [run for name, run in runs.items() if is_of(name, test)]
        if not found:
            return "not run since it was written"
        last += found
    if any(run.outcome != "passed" for run in last):
        return "failed in its last run"
    date = min(run.date for run in last)
    commits = {run.commit for run in last if run.date == date}
    if None in commits:
        return f"last run {date}, commit not recorded"
    names = ", ".join(f"`{commit}`" for commit in sorted(commits, key=str))
    return f"last run {date}, {'commit' if len(commits) == 1 else 'commits'} {names}"


def is_of(name: str, test: str) -> bool:
    """Whether `name` is `test`, or `test` with parameters."""
    return name == test or name.startswith(test + "[")


def named(text: str) -> list[str]:
    """The tests that a text names."""
    return re.findall(r"`(tests/[^`]+)`", text)


def render(table: str, runs: Runs) -> str:
    """`table`, whose rows about GPUs say when they were last run on one, with the version that has a CPU build too."""
    of_tests = runs.get(SUPPORTED_VLLM[0], {})
    lines = table.splitlines(keepends=True)
    for index, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 3 and "GPU" in cells[0] and named(cells[2]):
            tests = named(cells[2])
            cells[2] = ", ".join(f"`{test}`" for test in tests) + f"; {last_run(of_tests, tests)}"
            lines[index] = f"| {' | '.join(cells)} |\n"
    return "".join(lines)


def main(files: Sequence[str]) -> int:
    """Takes the runs in `files` into `docs/gpu-runs.json`, and all of that into the table."""
    runs = read(FILE)
    for file in files:
        for version, of_tests in read(Path(file)).items():
            runs.setdefault(version, {}).update(of_tests)
    write(FILE, runs)
    TABLE.write_text(render(TABLE.read_text(encoding="utf-8"), runs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
