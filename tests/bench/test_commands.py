"""Each benchmark says what it does, and runs; those that count rows fail where one is missing."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from bench.offloading import VARIANTS, play, reload_table
from bench.scheduler import ends_table, long_prompt_table, step_table
from tests.documentation import ROOT

pytestmark = pytest.mark.release

COMMANDS = sorted(
    path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text("utf-8")
)


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"gpu", "http", "scheduler", "offloading"} < set(COMMANDS)
    for name in COMMANDS:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"bench.{name}", run_name="__main__")
        said = capsys.readouterr().out
        assert (ended.value.code, said[:6]) == (0, "usage:"), name
        assert len(said.splitlines()) > 4, f"a sentence on what {name} measures"


def rows_of(table: str) -> list[list[str]]:
    """The cells of the tables in a text in Markdown, without their heads."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line[:2] == "| "
    ]
    ruled = [at for at, row in enumerate(rows) if row[0] == "---"]
    return [row for at, row in enumerate(rows) if at not in ruled and at + 1 not in ruled]


def test_the_schedulers_thread() -> None:
    assert [len(row) for row in rows_of(step_table(4, steps=2))] == [3] * 4
    *_, ended = rows_of(ends_table(4, num_tokens=20, later=5))
    assert int(ended[4]) == 0, "few fit a message"
    *_, returned = rows_of(long_prompt_table(length=1024, repeats=2, forward_s=0, num_running=3))
    assert "steps, at most" in returned[4]


def test_the_capture_changes_no_schedule_of_reloads() -> None:
    plays = [play(*variant, prompts=60, length=1700, rounds=1) for variant in VARIANTS.values()]
    assert {(one_play.steps, one_play.num_loaded, one_play.num_stored) for one_play in plays} == {
        (plays[0].steps, 60 * 1696, 0)
    }
    off, *_ = rows_of(reload_table(repeats=1, prompts=60, length=1700, rounds=1))
    assert off[:3] == ["off", f"{plays[0].steps:,}", "101,760"]


@pytest.mark.parametrize(
    "legs", [[], ["--prefill-decode"]], ids=["one server", "prefill and decode"]
)
def test_the_api_process_without_an_engine(legs: list[str], tmp_path: Path) -> None:
    """Every answer has all its tokens and rows, and every decode server loads its prompts, or the
    benchmark fails."""
    options = [
        "--without-engine",
        "5",
        "--cases",
        "1",
        "--variants",
        "off",
        "returned",
        "--repeats",
        "1",
        *legs,
    ]
    command = [
        sys.executable,
        "-m",
        "bench.http",
        *options,
        "--layers",
        "4",
        "--clients",
        "1",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True
    )
    # each run when it is known, and the table
    shown = [row[:3] for row in rows_of(done.stdout)]
    assert shown.count(["1, streamed", "1", "off"]) == 2
    runs = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    expected = [
        (mode, *of)
        for mode in ("streamed", "unstreamed")
        for of in (("off", 0), ("returned", 128 + 255))
    ]
    assert [(run["mode"], run["variant"], run["rows"]) for run in runs] == expected
    assert all(run["cpu_us"] > 0 and not run["faults"] for run in runs)


def test_conversations_on_a_cpu(tmp_path: Path) -> None:
    """vLLM's own capture needs a GPU. The engine's host counts the rows of each turn."""
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--shape", "tiny"]
    command += ["--conversations", "4 of 3 turns", "--skip-peer", "--layers", "2"]
    command += ["--repeats", "1", "--logs", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, check=True, timeout=400, capture_output=True, text=True
    )
    lines = [row[1] for row in rows_of(done.stdout) if row[0] == "4 of 3 turns"]
    assert lines == ["off", "captured, not asked for", "new rows", "all rows"]
