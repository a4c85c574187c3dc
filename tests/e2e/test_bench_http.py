"""The benchmark over HTTP, on real servers: it runs, and counts every row of every answer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


def test_every_row_is_counted(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.http",
        "--layers",
        "4",
        "--repeats",
        "1",
        "--cases",
        "n8",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500)
    runs = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    rows = 2 * (2048 + 8 * 31)  # two prompts, the rows of each once, and eight answers of 32 tokens
    seen = {(run["variant"], run["mode"]): run["rows"] for run in runs}
    assert seen == {
        (variant, mode): rows if variant == "returned" else 0
        for variant in ("off", "captured", "returned")
        for mode in ("streamed", "unstreamed")
    }
    assert all(run["faults"] == [] and run["cpu_us"] > 0 for run in runs)
    assert "| n8, streamed | 1 | returned (object int16) |" in (tmp_path / "table.md").read_text()
