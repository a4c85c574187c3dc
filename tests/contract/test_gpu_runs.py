"""Records of runs on GPUs, with a torch that claims to have two, and the page made from them."""

from pathlib import Path

import pytest
import torch
import vllm

from tests import gpu_runs
from tests.gpu_runs import Run, matrix, read, status, write

pytestmark = pytest.mark.release

pytest_plugins = "pytester"

TESTS = """
import pytest

@pytest.mark.xdist_group("one server")
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


@pytest.mark.parametrize("options", [(), ("-n", "1", "--dist", "loadgroup")])
def test_each_test_that_ran_is_written_down(pytester: pytest.Pytester, two_gpus: None, options: tuple[str]) -> None:
    """By its own name, also where tests run as a group."""
    pytester.makepyfile(test_it=TESTS)
    record(pytester, "--commit", "abc1234", *options).assert_outcomes(passed=3, failed=1, skipped=1, errors=1)
    runs = recorded(pytester)
    assert {test.removeprefix("test_it.py::test_"): run["outcome"] for test, run in runs.items()} == {
        **{"passes[one]": "passed", "passes[two, three]": "passed"},
        **{"fails": "failed", "around": "failed"},
    }
    assert {(run["commit"], run["device"]) for run in runs.values()} == {("abc1234", "2 x NVIDIA H200")}


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
        commits.append(recorded(pytester)["test_it.py::test_it"]["commit"])
    clean, changed = commits
    assert clean is not None
    assert changed == clean + "+"


def test_a_machine_without_gpus_writes_nothing(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert record(pytester, "--commit", "abc1234").ret == pytest.ExitCode.USAGE_ERROR
    assert not (pytester.path / "run.json").exists()


def run_of(day: int, outcome: str = "passed") -> Run:
    return {"outcome": outcome, "commit": "abc1234", "date": f"2026-01-0{day}", "device": "NVIDIA H200"}


RUNS = {
    "a.py::test[one]": run_of(2),
    "a.py::test[two]": run_of(1),
    "a.py::test_fails": run_of(1, outcome="failed"),
}


@pytest.mark.parametrize(
    ("tests", "is_exact", "days"),
    [
        (["test[one]"], True, "H200 2026-01-02"),
        (["test"], True, "H200 2026-01-01; H200 2026-01-02"),
        (["test_fails"], False, "H200 2026-01-01"),
        (["test[one]", "test_new"], False, "H200 2026-01-02"),
        (["tes"], False, ""),
    ],
)
def test_the_last_run_of_every_test_counts(tests: list[str], is_exact: bool, days: str) -> None:
    names = [f"a.py::{test}" for test in tests]
    found = "exact" if is_exact else "untested"
    assert (status("v2", names, RUNS), status("cpu", names, RUNS)) == (found, "exact"), "CI runs those on CPUs"
    *_, line = matrix([{"name": "it", "v1": "refused: b.py", "v2": names, "note": "odd"}], RUNS)
    assert line == f"| it | untested | refused | {found} | untested | untested | {f'{days}; '.lstrip('; ')}odd |"


def test_runs_go_into_the_file_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, toml, page, new = (tmp_path / name for name in ("runs.json", "support.toml", "support.md", "new.json"))
    for name, file in {"FILE": runs, "SUPPORT": toml, "MATRIX": page}.items():
        monkeypatch.setattr(gpu_runs, name, file)
    marks = [f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in ("matrix", "refused")]
    page.write_text("".join(["# Support\n", *marks, "rest\n"]))
    toml.write_text(
        '[[feature]]\nname = "graphs"\nv2 = ["a.py::test_fails"]\n[[refused]]\nname = "dense"\ntests = ["c.py"]\n'
    )
    write(runs, {"0.32.0": RUNS, "0.33.0": {}})
    gpu_runs.main([])
    assert "| graphs | untested | untested | untested |" in page.read_text()
    write(new, {"0.32.0": {"a.py::test_fails": run_of(5)}, "0.33.0": {"a.py::test_fails": run_of(5)}})
    for _ in range(2):  # the second time nothing changes
        gpu_runs.main([str(new)])
        assert "| graphs | untested | untested | exact | untested | untested | H200 2026-01-05 |" in page.read_text()
        assert page.read_text().endswith("- dense\n<!-- end of refused -->\nrest\n")
    assert read(runs) == {
        version: of | {"a.py::test_fails": run_of(5)} for version, of in (("0.32.0", RUNS), ("0.33.0", {}))
    }
