"""Records runs of tests on GPUs, and writes the support matrix from the records.

On the GPU machine, as a plugin of pytest, which writes what the run came to:

    python -m pytest -p tests.gpu_runs --gpu-run run.json --commit $(git rev-parse --short HEAD) tests/gpu

Here, to merge it into `docs/gpu-runs.json`, and to write `docs/support.md` and `docs/lab/evidence.md` from that file
and `docs/support.toml` (without a file, after a change to `docs/support.toml`):

    python -m tests.gpu_runs run.json
"""

import datetime
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from routed_experts.capture.engine.config import REFUSALS
from routed_experts.capture.engine.versions import RUN_ON_GPUS

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs/gpu-runs.json"
SUPPORT = ROOT / "docs/support.toml"
MATRIX = ROOT / "docs/support.md"
EVIDENCE = ROOT / "docs/lab/evidence.md"

COLUMNS = {
    "cpu": "CPU",
    "v1": "CUDA V1",
    "v2": "CUDA V2",
    "weights": "weights CPU",
    "weights_cuda": "weights CUDA",
}
_IN_CI = ("cpu", "weights")
EXACT, UNTESTED = "exact", "untested"


@dataclass(frozen=True)
class Run:
    """The last run of a test."""

    outcome: str
    commit: str | None  # None where nobody wrote it down
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
        config.pluginmanager.register(Recorder(config.option.gpu_run, config.option.commit or commit()))


def commit() -> str:
    """The commit of the working tree, with a plus if it was changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], check=True, cwd=ROOT, text=True, stdout=subprocess.PIPE
        ).stdout.strip()

    try:
        head, changes = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError) as error:
        raise pytest.UsageError("--gpu-run needs --commit where there is no repository of git's") from error
    return head + "+" if changes else head


class Recorder:
    """Writes the outcomes of a pytest session to a file, after each test, since time on GPUs may end at any moment.

    Skipped tests are left out.
    """

    def __init__(self, file: Path, commit: str) -> None:
        import torch
        import vllm

        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu-run needs a GPU")
        count, device = torch.cuda.device_count(), torch.cuda.get_device_name(0)
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        self._run = Run("", commit, date, device if count == 1 else f"{count} x {device}")
        self._file, self._vllm = file, vllm.__version__.split("+")[0]
        self._outcomes: dict[str, Run] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.when == "call" and report.passed):  # failed in the test or around it
            self._outcomes[report.nodeid.partition("@")[0]] = replace(self._run, outcome=report.outcome)
        if report.when == "teardown":
            write(self._file, {self._vllm: self._outcomes})


# ---- here ----


def read(file: Path) -> Runs:
    loaded: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return {version: {test: Run(**run) for test, run in runs.items()} for version, runs in loaded.items()}


def write(file: Path, runs: Runs) -> None:
    plain = {version: {test: asdict(run) for test, run in of_tests.items()} for version, of_tests in runs.items()}
    file.write_text(json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def last_runs(runs: dict[str, Run], test: str) -> list[Run]:
    """The last run of `test`, one for each of its parameters if it names none."""
    return [run for name, run in runs.items() if name == test or name.startswith(test + "[")]


def passed(runs: dict[str, Run], tests: Sequence[str]) -> bool:
    """True if every test has a recorded run and none failed in its last one."""
    found = [last_runs(runs, test) for test in tests]
    return all(found) and all(run.outcome == "passed" for of_test in found for run in of_test)


def when(runs: dict[str, Run], tests: Sequence[str]) -> list[str]:
    """The last runs of `tests`: date, device and commit of each, oldest first."""
    return sorted({_said(run) for test in tests for run in last_runs(runs, test)}) or ["not run"]


def _said(run: Run) -> str:
    commit = f"`{run.commit}`" if run.commit else "commit not recorded"
    outcome = "" if run.outcome == "passed" else f" ({run.outcome})"
    return f"{run.date}, {re.sub('NVIDIA | 80GB HBM3', '', run.device)}, {commit}{outcome}"


Cell = list[str] | str | None
"""Of the support table: tests that show exact rows, or a status and its evidence, or nothing."""


def support() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(SUPPORT.read_text(encoding="utf-8"))


def status(column: str, cell: Cell, runs: dict[str, Run]) -> str:
    if isinstance(cell, str):
        return cell.partition(":")[0]
    if not cell or (column not in _IN_CI and not passed(runs, cell)):
        return UNTESTED
    return EXACT


def matrix(features: Sequence[dict[str, Any]], runs: dict[str, Run]) -> str:
    """The table. Features with the same cells share a line, so that it fits a screen."""
    lines: dict[str, list[str]] = {}
    group = ""
    for feature in features:
        group = feature.get("group", group)
        cells = " | ".join(status(column, feature.get(column), runs) for column in COLUMNS)
        alike = lines.setdefault(cells, [])
        begins = group and not any(name.startswith(f"**{group}**") for name in alike)
        alike.append(f"**{group}**: {feature['name']}" if begins else feature["name"])
    head = [f"| feature | {' | '.join(COLUMNS.values())} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
    return "\n".join([*head, *(f"| {'; '.join(alike)} | {cells} |" for cells, alike in lines.items())])


def evidence(table: dict[str, list[dict[str, Any]]], runs: dict[str, Run]) -> str:
    """The text of `docs/lab/evidence.md`."""
    return "\n".join(_evidence(table, runs)) + "\n"


def _evidence(table: dict[str, list[dict[str, Any]]], runs: dict[str, Run]) -> Iterator[str]:
    yield "# Evidence for the support matrix"
    yield ""
    yield f"The last [runs](#runs) of each feature's tests on GPUs, vLLM {RUN_ON_GPUS[-1]}, V2 runner; in brackets,"
    yield "those of other columns. CI runs the tests on CPUs. `python -m tests.gpu_runs` writes this page from"
    yield "[`support.toml`](../support.toml), with the tests of each cell, and [`gpu-runs.json`](../gpu-runs.json)."
    yield ""
    numbers: dict[str, int] = {}
    lines: dict[str, list[str]] = {}  # features by their evidence
    for feature in table["feature"]:
        of_v2, of_v1, of_weights = (
            _of_cell(feature.get(column), runs, numbers) for column in ("v2", "v1", "weights_cuda")
        )
        others: dict[str, list[str]] = {}
        for column, said in (("V1", of_v1), ("weights", of_weights)):
            others.setdefault(said, []).append(column)
        remarks = [f"{', '.join(columns)}: {said}" for said, columns in others.items() if said]
        if "why" in feature and of_v2:
            remarks.append(f"CPU untested: {feature['why']}")
        if "note" in feature:
            remarks.append(feature["note"])
        name = feature["name"] + f" ({'; '.join(remarks)})" * bool(remarks)
        if head := of_v2 or feature.get("why", ""):
            lines.setdefault(head if of_v2 else f"CUDA untested, {head}", []).append(name)
    yield from (f"- {head}: {'; '.join(alike)}" for head, alike in lines.items())
    yield from ("", "## Runs", "")
    of_machine: dict[str, list[str]] = {}
    for run, number in numbers.items():
        machine, _, commit = run.rpartition(", ")
        of_machine.setdefault(machine, []).append(f"R{number} {commit}")
    for machine, its_runs in sorted(of_machine.items()):
        yield f"- {machine}: {', '.join(its_runs)}"


def _of_cell(cell: Cell, runs: dict[str, Run], numbers: dict[str, int]) -> str:
    """The runs of a cell's tests by their `numbers`, or its other evidence."""
    if isinstance(cell, list):
        return ", ".join(f"R{numbers.setdefault(run, len(numbers) + 1)}" for run in when(runs, cell))
    return cell.removeprefix(f"{EXACT}: ") if isinstance(cell, str) and cell.startswith(EXACT) else ""


def filled(page: str, name: str, text: str) -> str:
    """`page` with `text` between the lines `<!-- name -->` and `<!-- end of name -->`, which it must have."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.split(start)
    _, after = rest.split(end)
    return f"{before}{start}{text}\n{end}{after}"


def rendered(page: str, table: dict[str, list[dict[str, Any]]], runs: dict[str, Run]) -> str:
    names = [*(refusal.name for refusal in REFUSALS), *(other["name"] for other in table["refused"])]
    page = filled(page, "matrix", matrix(table["feature"], runs))
    return filled(page, "refused", "\n".join(f"- {name}" for name in names))


def main(files: Sequence[str]) -> int:
    """Merges the runs in `files` into `docs/gpu-runs.json`, and writes the pages made from it."""
    runs = read(FILE)
    for file in files:
        for version, of_tests in read(Path(file)).items():
            runs.setdefault(version, {}).update(of_tests)
    write(FILE, runs)
    newest = runs.get(RUN_ON_GPUS[-1], {})
    MATRIX.write_text(rendered(MATRIX.read_text(encoding="utf-8"), support(), newest), encoding="utf-8")
    EVIDENCE.write_text(evidence(support(), newest), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
