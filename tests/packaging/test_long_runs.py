"""The report of `make test-long`, and that no other target runs what is in it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation import ROOT

pytestmark = pytest.mark.release

TESTS = """
import pytest

pytestmark = pytest.mark.long

def test_hostile_requests(record_property):
    record_property("cases", 1500)

@pytest.mark.parametrize("kind", ["a|b"])
def test_that_fails(kind):
    assert False

def test_that_cannot_run():
    pytest.skip("needs a tool")
"""


def test_the_report_has_every_run(tmp_path: Path) -> None:
    """With its number of cases, its time, and what became of it; also where several processes run
    them."""
    (tmp_path / "test_of_long.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "long",
        "-p",
        "tests.long_runs",
        "--rootdir",
        str(tmp_path),
    ]
    command += [
        "-n2",
        "-p",
        "no:cacheprovider",
        "--long-report",
        str(tmp_path / "report.md"),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert report.strip() in done.stdout
    assert "minutes, 1 of 3 failed." in report.splitlines()[0]
    rows = dict(re.findall(r"^\| \S+: (\S+) \| (.*) \|$", report, re.MULTILINE))
    assert re.fullmatch(r"1,500 \| \d+ \| passed", rows["hostile_requests"])
    assert re.fullmatch(r"1 \| \d+ \| FAILED", rows["that_fails[a/b]"])
    assert re.fullmatch(r"1 \| \d+ \| skipped: needs a tool", rows["that_cannot_run"])


def test_other_targets_run_none_of_them() -> None:
    rules = (ROOT / "Makefile").read_text()
    for target in ("test-fast", "test", "test-release"):
        (selected,) = re.findall(
            rf'^{target}: setup\n(?:\t@.*\n)?\t\$\(PYTEST\) -m "(.*)" ', rules, re.MULTILINE
        )
        assert re.search(r"not \((\w+ or )*long\)", selected), target
    assert "-m 'not (slow or long)'" in (ROOT / "pyproject.toml").read_text()
