"""Benchmarks of what is around an engine, with real servers."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.proxy import milliseconds

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[2]


def test_the_api_process_without_an_engine(tmp_path: Path) -> None:
    """Every answer has all its tokens and rows, or the benchmark fails."""
    options = ["--without-engine", "5", "--cases", "1", "--variants", "off", "returned", "--repeats", "1"]
    options += ["--layers", "4", "--clients", "1", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bench.http", *options], cwd=ROOT, check=True, timeout=300)
    runs = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(run["mode"], run["variant"], run["rows"]) for run in runs] == [
        ("streamed", "off", 0),
        ("streamed", "returned", 128 + 255),
        ("unstreamed", "off", 0),
        ("unstreamed", "returned", 128 + 255),
    ]
    assert all(run["cpu_us"] > 0 and not run["faults"] for run in runs)


def test_the_proxy_alone() -> None:
    assert asyncio.run(milliseconds(16, requests=2, repeats=1)) > 0
