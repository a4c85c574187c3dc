"""Records of runs on GPUs, with a torch that claims to have two, and the page made from them."""

import pytest
import torch
import vllm

from tests.gpu_runs import Run, matrix, read, status

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


@pytest.mark.parametrize("options", [(), ("-n", "1", "--dist", "loadgroup")])
def test_each_test_that_ran_is_written_down(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str]
) -> None:
    """By its own name, also where tests run as a group."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(vllm, "__version__", "0.32.0+cu130")
    pytester.makepyfile(test_it=TESTS)
    about = ("-p", "tests.gpu_runs", "--gpu-run", "run.json", "--commit", "abc1234")
    done = pytester.runpytest_inprocess(*about, *options)
    done.assert_outcomes(passed=3, failed=1, skipped=1, errors=1)
    runs = read(pytester.path / "run.json")["0.32.0"]
    assert {test.removeprefix("test_it.py::test_"): run["outcome"] for test, run in runs.items()} == {
        **{"passes[one]": "passed", "passes[two, three]": "passed"},
        **{"fails": "failed", "around": "failed"},
    }
    assert {(run["commit"], run["device"]) for run in runs.values()} == {("abc1234", "2 x NVIDIA H200")}


def run_of(day: int, outcome: str = "passed") -> Run:
    return {"outcome": outcome, "commit": "abc1234", "date": f"2026-01-0{day}", "device": "NVIDIA H200"}


RUNS = {
    "a.py::test[one]": run_of(2),
    "a.py::test[two]": run_of(1),
    "a.py::test_fails": run_of(1, outcome="failed"),
}


@pytest.mark.parametrize(
    ("tests", "is_exact"),
    [
        (["test[one]"], True),
        (["test"], True),
        (["test_fails"], False),
        (["test[one]", "test_new"], False),
        (["tes"], False),
    ],
)
def test_the_last_run_of_every_test_counts(tests: list[str], is_exact: bool) -> None:
    names = [f"a.py::{test}" for test in tests]
    found = "exact" if is_exact else "untested"
    assert (status("v2", names, RUNS), status("cpu", names, RUNS)) == (found, "exact"), "CI runs those on CPUs"
    features = [{"name": name, "v1": "refused: b.py", "v2": names, "note": "odd"} for name in ("it", "other")]
    line = list(matrix([*features, {"name": "third"}], RUNS))[-2]
    assert line == f"| it; other | untested | {found} | untested | untested | V1: refused; odd |"
