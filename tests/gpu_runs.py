"""Records runs of tests on GPUs, and writes the support matrix from the records.

On the GPU machine, as a plugin of pytest, which writes what the run came to:

    python -m pytest -p tests.gpu_runs --gpu-run run.json --commit $(git rev-parse --short HEAD)
    tests/gpu

Here, to merge it into `docs/gpu-runs.json`, and to write the tables of `docs/support.md`
from that file and `docs/support.toml` (without a file, after a change to
`docs/support.toml`):

    python -m tests.gpu_runs run.json
"""

import datetime
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from routed_experts.capture.engine.config import REFUSALS
from routed_experts.capture.engine.versions import INSTALLED_VLLM

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs/gpu-runs.json"
SUPPORT = ROOT / "docs/support.toml"
PAGE = ROOT / "docs/support.md"

COLUMNS = ("cpu", "v1", "v2", "weights", "weights_cuda")
_IN_CI = ("cpu", "weights")
EXACT, REFUSED, UNTESTED = "exact", "refused", "untested"

Run = dict[str, Any]
"""The last run of a test: `outcome`, `commit` (None where nobody wrote it down), `date` and
`device`."""

Runs = dict[str, dict[str, Run]]
"""By version of vLLM, and by test as pytest names it."""


# ---- on the GPU machine ----


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-run", type=Path, help="file to write the outcome of each test to")
    parser.addoption("--commit", help="the commit that is run, where git cannot tell")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.gpu_run is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(
            Recorder(config.option.gpu_run, config.option.commit or commit())
        )


def commit() -> str:
    """The commit of the working tree, with a plus if it was changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], check=True, cwd=ROOT, text=True, stdout=subprocess.PIPE
        ).stdout.strip()

    try:
        head, changes = (
            git("rev-parse", "--short", "HEAD"),
            git("status", "--porcelain", "--untracked-files=no"),
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise pytest.UsageError(
            "--gpu-run needs --commit where there is no repository of git's"
        ) from error
    return head + "+" if changes else head


class Recorder:
    """Writes the outcomes of a pytest session to a file, after each test, since time on GPUs may
    end at any moment.

    Skipped tests are left out.
    """

    def __init__(self, file: Path, commit: str) -> None:
        import torch
        import vllm

        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu-run needs a GPU")
        count, device = torch.cuda.device_count(), torch.cuda.get_device_name(0)
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        self._run = {
            "commit": commit,
            "date": date,
            "device": device if count == 1 else f"{count} x {device}",
        }
        self._file, self._vllm = file, vllm.__version__.split("+")[0]
        self._outcomes: dict[str, Run] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # failed in the test or around it
        if report.failed or (report.when == "call" and report.passed):
            self._outcomes[report.nodeid.partition("@")[0]] = {
                **self._run,
                "outcome": report.outcome,
            }
        if report.when == "teardown":
            write(self._file, {self._vllm: self._outcomes})


# ---- here ----


def read(file: Path) -> Runs:
    runs: Runs = json.loads(file.read_text(encoding="utf-8"))
    return runs


def write(file: Path, runs: Runs) -> None:
    file.write_text(
        json.dumps(runs, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def last_runs(runs: dict[str, Run], test: str) -> list[Run]:
    """The last run of `test`, one for each of its parameters if it names none."""
    return [run for name, run in runs.items() if name == test or name.startswith(test + "[")]


def passed(runs: dict[str, Run], tests: Sequence[str]) -> bool:
    """True if every test has a recorded run and none failed in its last one."""
    last = [last_runs(runs, test) for test in tests]
    return all(last) and all(run["outcome"] == "passed" for of_test in last for run in of_test)


def support() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(SUPPORT.read_text(encoding="utf-8"))


def status(column: str, cell: list[str] | str | None, runs: dict[str, Run]) -> str:
    """What a cell with these tests says, or with the words of a status and its evidence."""
    if isinstance(cell, str):
        return cell.partition(":")[0]
    if not cell or (column not in _IN_CI and not passed(runs, cell)):
        return UNTESTED
    return EXACT


def matrix(features: Sequence[dict[str, Any]], runs: dict[str, Run]) -> Iterator[str]:
    """The lines of the table: features that are exact on the same devices share one, with their
    remarks.

    V1 on CUDA is not shown: it was run with few features.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for feature in features:
        cells = {column: status(column, feature.get(column), runs) for column in COLUMNS}
        shows = ("note",) if cells["v2"] == EXACT else ("note", "why")  # no reasons for CPUs alone
        remarks = [feature[name] for name in shows if name in feature]
        shown = where(cells["cpu"], cells["v2"]), where(cells["weights"], cells["weights_cuda"])
        lines.setdefault(shown, []).append(
            feature["name"] + (f" ({', '.join(remarks)})" if remarks else "")
        )
    yield "| rows exact on | weights exact on | features |"
    yield "|---|---|---|"
    for (rows, weights), names in sorted(
        lines.items(), key=lambda line: [_WHERE.index(devices) for devices in line[0]]
    ):
        yield f"| {rows} | {weights} | {'; '.join(names)} |"


_WHERE = ("both", "CUDA", "CPU", REFUSED, UNTESTED)


def where(cpu: str, cuda: str) -> str:
    """The devices with status "exact", or what CUDA's status is where neither has it."""
    if cpu == cuda == EXACT:
        return "both"
    return "CPU" if cpu == EXACT else "CUDA" if cuda == EXACT else cuda


def filled(page: str, name: str, text: str) -> str:
    """`page` with `text` between the lines `<!-- name -->` and `<!-- end of name -->`, which it
    must have."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.split(start)
    _, after = rest.split(end)
    return f"{before}{start}{text}\n{end}{after}"


def rendered(page: str, table: dict[str, list[dict[str, Any]]], runs: dict[str, Run]) -> str:
    names = [
        *(refusal.name for refusal in REFUSALS),
        *(other["name"] for other in table["refused"]),
    ]
    page = filled(page, "matrix", "\n".join(matrix(table["feature"], runs)))
    return filled(page, "refused", "; ".join(names) + ".")


_FILES = {
    "engines": "test_engines",
    "several nodes": "test_nodes",
    "sleep, new weights": "test_sleep",
}
"""Columns of the table of versions, and files in `tests/gpu`."""


def passed_by_version(runs: Runs) -> Iterator[str]:
    """The lines of a table of the tests that passed in their last run."""
    yield f"| vLLM | {' | '.join(_FILES)} |"
    yield "|---" * (len(_FILES) + 1) + "|"
    for version, of_tests in sorted(runs.items()):
        names = [name for name, run in of_tests.items() if run["outcome"] == "passed"]
        counts = [sum(f"tests/gpu/{file}.py" in name for name in names) for file in _FILES.values()]
        yield f"| {version} | {' | '.join(str(count or '') for count in counts)} |"


def rendered_versions(page: str, runs: Runs) -> str:
    return filled(page, "GPU runs", "\n".join(passed_by_version(runs)))


def main(files: Sequence[str]) -> int:
    """Merges the runs in `files` into `docs/gpu-runs.json`, and writes the page made from it."""
    runs = read(FILE)
    for file in files:
        for version, of_tests in read(Path(file)).items():
            runs.setdefault(version, {}).update(of_tests)
    write(FILE, runs)
    page = rendered(PAGE.read_text(encoding="utf-8"), support(), runs.get(INSTALLED_VLLM, {}))
    PAGE.write_text(rendered_versions(page, runs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
