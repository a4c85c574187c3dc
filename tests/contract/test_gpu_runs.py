"""Records of runs on GPUs, with a torch that claims to have two, and the pages made from them."""

import json
from pathlib import Path

import pytest
import torch
import vllm

from tests import gpu_runs
from tests.gpu_runs import Run, read, status, when, write

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


def recorded(pytester: pytest.Pytester) -> dict[str, Run]:
    return read(pytester.path / "run.json")["0.32.0"]


def test_each_test_that_ran_is_written_down(pytester: pytest.Pytester, two_gpus: None) -> None:
    pytester.makepyfile(test_it=TESTS)
    record(pytester, "--commit", "abc1234").assert_outcomes(passed=3, failed=1, skipped=1, errors=1)
    runs = recorded(pytester)
    assert {test.removeprefix("test_it.py::test_"): run.outcome for test, run in runs.items()} == {
        **{"passes[one]": "passed", "passes[two, three]": "passed"},
        **{"fails": "failed", "around": "failed"},
    }
    assert {(run.commit, run.device) for run in runs.values()} == {("abc1234", "2 x NVIDIA H200")}


def test_tests_that_run_as_a_group_keep_their_names(pytester: pytest.Pytester, two_gpus: None) -> None:
    pytester.makepyfile(test_it="import pytest\n@pytest.mark.xdist_group('one server')\ndef test_grouped(): pass\n")
    record(pytester, "-n", "1", "--dist", "loadgroup").assert_outcomes(passed=1)
    assert recorded(pytester).keys() == {"test_it.py::test_grouped"}


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
        commits.append(recorded(pytester)["test_it.py::test_it"].commit)
    clean, changed = commits
    assert clean is not None
    assert changed == clean + "+"


def test_a_machine_without_gpus_writes_nothing(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert record(pytester, "--commit", "abc1234").ret == pytest.ExitCode.USAGE_ERROR
    assert not (pytester.path / "run.json").exists()


def run_of(date: str, commit: str | None = "abc1234", outcome: str = "passed") -> Run:
    return Run(outcome, commit, date, "NVIDIA H200")


FIRST = "2026-01-01"
RUNS = {
    "0.32.0": {
        "a.py::test[one]": run_of("2026-01-02", "newer"),
        "a.py::test[two]": run_of(FIRST, "older"),
        "a.py::test_another": run_of(FIRST, "old"),
        "a.py::test_without": run_of(FIRST, commit=None),
        "a.py::test_fails": run_of(FIRST, outcome="failed"),
        "a.py::test_again": run_of(FIRST, outcome="failed"),
    },
    "0.33.0": {"a.py::test_again": run_of("2026-01-03", "newest")},
}


@pytest.mark.parametrize(
    ("tests", "is_exact", "last"),
    [
        (["test[one]"], True, ["2026-01-02, H200, `newer`"]),
        (["test"], True, ["2026-01-01, H200, `older`", "2026-01-02, H200, `newer`"]),
        (["test[two]", "test_another"], True, ["2026-01-01, H200, `old`", "2026-01-01, H200, `older`"]),
        (["test_without"], True, ["2026-01-01, H200, commit not recorded"]),
        (["test_fails"], False, ["2026-01-01, H200, `abc1234` (failed)"]),
        (["test[one]", "test_new"], False, ["2026-01-02, H200, `newer`"]),
        (["tes"], False, ["not run"]),
    ],
)
def test_the_last_run_of_every_test_counts(tests: list[str], is_exact: bool, last: list[str]) -> None:
    names = [f"a.py::{test}" for test in tests]
    assert when(RUNS["0.32.0"], names) == last
    assert status("v2", names, RUNS["0.32.0"]) == ("exact" if is_exact else "untested")
    assert status("cpu", names, RUNS["0.32.0"]) == "exact", "CI runs these"


def test_runs_go_into_the_file_and_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, toml, page, evidence = (
        tmp_path / name for name in ("runs.json", "support.toml", "support.md", "evidence.md")
    )
    for name, file in {"FILE": runs, "SUPPORT": toml, "MATRIX": page, "EVIDENCE": evidence}.items():
        monkeypatch.setattr(gpu_runs, name, file)
    page.write_text(
        "# Support\n<!-- matrix -->\n<!-- end of matrix -->\n<!-- refused -->\n<!-- end of refused -->\nrest\n"
    )
    toml.write_text(
        '[[feature]]\ngroup = "Engine"\nname = "graphs"\nv1 = "refused: tests/b.py"\nv2 = ["a.py::test_again"]\n'
        '[[feature]]\nname = "pieces"\nv1 = "refused: tests/b.py"\nv2 = ["a.py::test_again"]\nwhy = "no time"\n'
        '[[feature]]\nname = "whole graphs"\nv2 = ["a.py::test_again"]\n'
        '[[refused]]\nname = "dense"\ntests = ["tests/c.py"]\n'
    )
    write(runs, RUNS)
    gpu_runs.main([])
    assert "| **Engine**: graphs; pieces | untested | refused | untested | untested | untested |" in page.read_text()
    new = {"a.py::test_again": run_of("2026-01-05", "new")}
    write(tmp_path / "new.json", {"0.32.0": new, "0.33.0": new})
    for _ in range(2):  # the second time nothing changes
        gpu_runs.main([str(tmp_path / "new.json")])
        assert "| **Engine**: graphs; pieces | untested | refused | exact | untested | untested |" in page.read_text()
        assert page.read_text().endswith("- dense\n<!-- end of refused -->\nrest\n")
        assert "- R1: graphs; pieces (CPU untested: no time); whole graphs\n" in evidence.read_text()
        assert "- 2026-01-05, H200: R1 `new`\n" in evidence.read_text()
    written = json.loads(runs.read_text())
    assert (len(written["0.32.0"]), len(written["0.33.0"])) == (6, 1)
    assert {written[version]["a.py::test_again"]["commit"] for version in RUNS} == {"new"}
