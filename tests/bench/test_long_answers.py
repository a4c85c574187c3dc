"""The benchmark of long answers runs, and checks that every row came."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[2]


def test_both_tables() -> None:
    command = [sys.executable, "-m", "bench.long_answers", "--rows", "600", "--answers", "2", "--streams", "4"]
    command += ["--seconds", "0.2", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    both_ends = {row[0].removeprefix("| ") for row in rows if len(row) == 6}
    assert {"base64", "MessagePack"} < both_ends
    held = [float(row[1]) for row in rows if len(row) == 4 and row[1][0].isdigit()]
    assert len(held) == 9
    assert all(value > 0 for value in held)
