"""The benchmark of rows as one more layer of the KV cache runs, and finds what it pulled."""

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.release


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
def test_pulls_and_copies() -> None:
    command = [sys.executable, "-m", "bench.rows_layer", "--prompts", "32", "64", "--repeats", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split(" | ")[0] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["| a pull of", "| ---", "| 32 tokens", "| 64 tokens", "| rows", "| ---", "| 32", "| 64"]
