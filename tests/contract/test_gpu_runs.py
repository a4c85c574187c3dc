"""How runs on GPUs are written down, with a torch that says that it has two."""

import json
from pathlib import Path

import pytest
import torch
import vllm

from tests import gpu_runs
from tests.gpu_runs import Run, last_run, read, render, write

pytestmark = pytest.mark.release

pytest_plugins = "pytester"

TESTS = """
import pytest

@pytest.mark.parametrize("what", ["one", "two, three"])
def test_passes(what): pass

def test_fails(): assert False

def test_skips(): pytest.skip()

@pytest.fixture
def broken():
    yield
    raise RuntimeError

def test_around(broken): pass
"""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(vllm, "__version__", "0.32.0+cu130")


def record(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "tests.gpu_runs", "--gpu-run", "run.json", *options)


def test_each_test_that_ran_is_written_down(pytester: pytest.Pytester, two_gpus: None) -> None:
    pytester.makepyfile(test_it=TESTS)
    record(pytester, "--commit", "abc1234").assert_outcomes(passed=3, failed=1, skipped=1, errors=1)
    runs = read(pytester.path / "run.json")["0.32.0"]
    assert {test: run.outcome for test, run in runs.items()} == {
        "test_it.py::test_passes[one]": "passed",
        "test_it.py::test_passes[two, three]": "passed",
        "test_it.py::test_fails": "failed",
        "test_it.py::test_around": "failed",
    }
    assert {(run.commit, run.device) for run in runs.values()} == {("abc1234", "2 x NVIDIA H200")}


def test_a_run_knows_its_commit_and_its_changes(
    pytester: pytest.Pytester, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_runs, "ROOT", pytester.path)
    file = pytester.makepyfile(test_it="def test_it(): pass")
    assert record(pytester).ret == pytest.ExitCode.USAGE_ERROR  # no repository
    for command in (["init", "-q"], ["add", "test_it.py"], ["commit", "-qm", "first"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        assert pytester.run("git", *who, *command).ret == 0
    commits = []
    for text in ("def test_it(): pass", "def test_it(): assert True"):
        file.write_text(text)
        record(pytester)
        commits.append(read(pytester.path / "run.json")["0.32.0"]["test_it.py::test_it"].commit)
    clean, changed = commits
    assert clean is not None
    assert changed == clean + "+"


def test_a_machine_without_gpus_writes_nothing(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert record(pytester, "--commit", "abc1234").ret == pytest.ExitCode.USAGE_ERROR
    assert not (pytester.path / "run.json").exists()


def run_of(date: str, commit: str | None = "abc1234", outcome: str = "passed") -> Run:
    return Run(outcome, commit, date, "NVIDIA H200")


RUNS = {
    "0.32.0": {
        "tests/a.py::test[one]": run_of("2026-01-02", "newer"),
        "tests/a.py::test[two]": run_of("2026-01-01", "older"),
        "tests/a.py::test_another": run_of("2026-01-01", "old"),
        "tests/a.py::test_without": run_of("2026-01-01", commit=None),
        "tests/a.py::test_fails": run_of("2026-01-01", outcome="failed"),
        "tests/a.py::test_again": run_of("2026-01-01", outcome="failed"),
    },
    "0.33.0": {"tests/a.py::test_again": run_of("2026-01-03", "newest")},
}


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (["test[one]"], "last run 2026-01-02, commit `newer`"),
        (["test"], "last run 2026-01-01, commit `older`"),
        (["test[one]", "test"], "last run 2026-01-01, commit `older`"),
        (["test[two]", "test_another"], "last run 2026-01-01, commits `old`, `older`"),
        (["test_without"], "last run 2026-01-01, commit not recorded"),
        (["test", "test_fails"], "failed in its last run"),
        (["test_again"], "failed in its last run"),
        (["test", "test_new"], "not run since it was written"),
        (["tes"], "not run since it was written"),
    ],
)
def test_the_oldest_of_the_last_runs_counts(tests: list[str], said: str) -> None:
    assert last_run(RUNS["0.32.0"], [f"tests/a.py::{test}" for test in tests]) == said


def test_runs_go_into_the_file_and_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runs, "FILE", tmp_path / "gpu-runs.json")
    monkeypatch.setattr(gpu_runs, "TABLE", tmp_path / "support.md")
    row = "| graphs (GPU) | exact | `tests/a.py::test`{} |\n"
    others = "| on CPU | exact | `tests/a.py::test` |\n| Ray (GPU) | untested | no Ray there |\n"
    (tmp_path / "support.md").write_text(row.format("") + others)
    write(tmp_path / "gpu-runs.json", RUNS)
    new = {"tests/a.py::test[two]": run_of("2026-01-05", "new")}
    write(tmp_path / "new.json", {"0.32.0": new, "0.33.0": new})
    gpu_runs.main([str(tmp_path / "new.json")])
    assert (tmp_path / "support.md").read_text() == row.format("; last run 2026-01-02, commit `newer`") + others
    written = json.loads((tmp_path / "gpu-runs.json").read_text())
    assert len(written["0.32.0"]) == 6
    assert {written[version]["tests/a.py::test[two]"]["commit"] for version in RUNS} == {"new"}
    assert len(written["0.33.0"]) == 2
    table = (tmp_path / "support.md").read_text()
    assert render(table, read(tmp_path / "gpu-runs.json")) == table
