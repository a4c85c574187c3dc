"""Records runs of tests on GPUs, and writes the support matrix from the records.

On the GPU machine, as a plugin of pytest, which writes what the run came to:

    python -m pytest -p tests.gpu_runs --gpu-run run.json --commit $(git rev-parse --short HEAD) tests/gpu

Here, to merge it into `docs/gpu-runs.json`, and to write `docs/support.md` and `docs/lab/evidence.md` from that file
and `docs/support.toml` (without a file, after a change to `docs/support.toml`):

    python -m tests.gpu_runs run.json
"""

import datetime
import json
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
    "weights": "weights on CPU",
    "weights_cuda": "weights on CUDA",
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
            self._outcomes[report.nodeid] = replace(self._run, outcome=report.outcome)
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


def when(runs: dict[str, Run], tests: Sequence[str]) -> str:
    """The last runs of `tests`: date, commits and devices, oldest first."""
    found = [run for test in tests for run in last_runs(runs, test)]
    if not found:
        return "not run"
    by_date: dict[tuple[str, str], set[str]] = {}
    for run in found:
        outcome = "" if run.outcome == "passed" else f" ({run.outcome})"
        commit = f"`{run.commit}`" if run.commit else "commit not recorded"
        by_date.setdefault((run.date, run.device), set()).add(commit + outcome)
    return "; ".join(
        f"{date}, {device}, {', '.join(sorted(by_date[date, device]))}" for date, device in sorted(by_date)
    )


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
    lines = [f"| feature | {' | '.join(COLUMNS.values())} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for feature in features:
        if "group" in feature:
            lines.append(f"| **{feature['group']}** |{' |' * len(COLUMNS)}")
        cells = [status(column, feature.get(column), runs) for column in COLUMNS]
        lines.append(f"| {feature['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def evidence(table: dict[str, list[dict[str, Any]]], runs: dict[str, Run]) -> str:
    """The text of `docs/lab/evidence.md`."""
    return "\n".join(_evidence(table, runs)) + "\n"


def _evidence(table: dict[str, list[dict[str, Any]]], runs: dict[str, Run]) -> Iterator[str]:
    sources = "`docs/support.toml` and `docs/gpu-runs.json`"
    yield "# Evidence for the support matrix"
    yield ""
    yield f"Written by `python -m tests.gpu_runs` from {sources}, vLLM {RUN_ON_GPUS[-1]}."
    yield "Tests are in `tests/`; a name without a file belongs to the file before it. CI runs the tests of CPU."
    yield "R1, R2, … are the last [runs on GPUs](#runs-on-gpus), with test names of those commits."
    numbers: dict[str, int] = {}
    for feature in table["feature"]:
        if "group" in feature:
            yield from ("", f"## {feature['group']}", "")
        titles: dict[str, str] = {}  # columns by their evidence, since CPU and V2 often have the same
        for column, heading in COLUMNS.items():
            cell, title = feature.get(column), heading.removeprefix("CUDA ")
            said = cell if isinstance(cell, str) else _short(cell or ())
            if isinstance(cell, list) and column not in _IN_CI:
                title += f" (R{numbers.setdefault(when(runs, cell), len(numbers) + 1)})"
            if said and cell != "\N{EN DASH}":  # the feature does not exist there
                titles[said] = f"{titles[said]}, {title}" if said in titles else title
        parts = [f"{title}: {said}" for said, title in titles.items()]
        parts += [
            f"{title}: {feature[key]}" for key, title in (("why", "Untested"), ("note", "Note")) if key in feature
        ]
        yield f"- **{feature['name']}**. {'. '.join(parts)}."
    yield from ("", "## Refused", "", "- All in `capture/engine/config.py`: `contract/test_refusals.py`.")
    for other in table["refused"]:
        yield f"- {other['name']}: {_short(other['tests'])}."
    yield from ("", "## Runs on GPUs", "")
    for run, number in numbers.items():
        yield f"- R{number}: {run}"


def _short(tests: Sequence[str]) -> str:
    """Names of tests, without what the name before has too: the file, or all but the parameters."""
    names: list[str] = []
    before = ["", "", ""]
    for test in tests:
        path, _, name = test.removeprefix("tests/").partition("::")
        function, bracket, parameters = name.partition("[")
        parts = [path, f"::{function}" if function else "", bracket + parameters]
        same = 0 if path != before[0] else 2 if parts[1] == before[1] else 1
        names.append(f"`{''.join(parts[same:])}`")
        before = parts
    return ", ".join(names)


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
