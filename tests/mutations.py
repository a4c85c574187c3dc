"""Measures the power of the tests: which of 200 small changes of the code make a test fail.

    python -m tests.mutations run --out build/mutations.jsonl

Most are drawn from all files, in proportion to their statements: one operator, comparison,
constant, condition or statement each. Those of the kind `own` were written by readers who looked
for what no test sees. A change is found again by file, function and text, so the list survives
moved lines.

`run` applies one change at a time to a copy of the tree and runs the files of `make test-fast` that
the list names for it as `tests`, up to the first test that fails. They were chosen by reading:
which execute the changed code, or name it. Run it again to continue a run that was stopped.
"""

import argparse
import ast
import collections
import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/mutations.jsonl"

Change = dict[str, Any]
"""`id`, `kind`, `file`, `line`, `function` (dotted; empty outside of any), `before`, `after`, and
which `occurrence` of `before` in the function it is, from 0."""


def _scope_of(node: ast.AST, outer: str) -> str:
    is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return f"{outer}.{node.name}".lstrip(".") if is_scope else outer  # type: ignore[attr-defined]


def _functions(source: bytes) -> dict[str, tuple[int, int]]:
    """Where each function and class begins and ends; the whole file by an empty name."""
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    spans = {"": (0, starts[-1])}

    def visit(node: Any, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            if (inner := _scope_of(child, scope)) != scope:
                spans[inner] = starts[child.lineno - 1], starts[child.end_lineno or 0]  # type: ignore[attr-defined]
            visit(child, inner)

    visit(ast.parse(source), "")
    return spans


def locate(change: Change, source: bytes) -> int | None:
    """Where `before` begins in the source, or None if it is gone."""
    start, end = _functions(source).get(change["function"], (0, 0))
    before = change["before"].encode()
    at = start - len(before)
    for _ in range(change["occurrence"] + 1):
        if (at := source.find(before, at + len(before), end)) < 0:
            return None
    return at


def apply(change: Change, source: bytes, at: int) -> bytes:
    return source[:at] + change["after"].encode() + source[at + len(change["before"].encode()) :]


def in_child(run: Callable[[], int], limit: float, log: Path) -> int | None:
    """Returns what `run` returns in a fork of this process, or None after `limit` seconds.

    vLLM is imported once, in this process: that takes longer than most tests.
    """

    def child() -> None:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os._exit(run())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(limit)
    code = process.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return code


class Failures:
    """A pytest plugin."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def run_tests(tests: Sequence[str], result: Path) -> int:
    """Runs files of tests up to the first that fails, and writes that."""
    failures, quiet = (
        Failures(),
        ["-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=120"],
    )
    code = int(
        pytest.main(
            [*quiet, "-m", "not (e2e or gpu or release or slow or long)", *tests],
            plugins=[failures],
        )
    )
    result.write_text(json.dumps(failures.failed))
    return code


def failing(tests: Sequence[str], limit: float, folder: Path) -> str | None:
    """The first test that fails, None if all pass. "time limit" and "exit CODE" where none has
    failed."""
    result = folder / "failed.json"
    result.unlink(missing_ok=True)
    code = in_child(partial(run_tests, tests, result), limit, folder / "log")
    if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    failed = json.loads(result.read_text()) if result.exists() else []
    return failed[0] if failed else "time limit" if code is None else f"exit {code}"


def run_change(change: Change, folder: Path, limit: float, mtimes: Iterator[int]) -> dict[str, Any]:
    """Runs the tests of a change."""
    path = Path(change["file"])
    source = path.read_bytes() if path.exists() else b""
    if (at := locate(change, source)) is None:
        return {"outcome": "gone"}

    def write(text: bytes) -> None:
        path.write_bytes(text)
        os.utime(path, (0, next(mtimes)))  # no bytecode of another change has this time

    began = time.monotonic()  # clock: for the report
    write(apply(change, source, at))
    by = failing(change["tests"], limit, folder)
    write(source)
    # no test failed: look
    outcome = "unseen" if by is None else "unclear" if by.startswith("exit ") else "seen"
    seconds = round(time.monotonic() - began, 1)  # clock: for the report
    return {"outcome": outcome, "by": by, "seconds": seconds}


def copy_tree(folder: Path) -> dict[str, str]:
    """Copies the working tree to `folder`/tree. Returns the environment that imports the copy."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    subprocess.run(
        [sys.executable, folder / "tree/bench/link_package.py", folder / "site"], check=True
    )
    paths = (str(folder / "site"), str(folder / "tree"), os.environ.get("PYTHONPATH", ""))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MUTATIONS_IN_COPY": "1",
    }


def run(args: argparse.Namespace) -> None:
    """Runs in the copy."""
    import vllm.entrypoints.openai.api_server  # noqa: F401
    import vllm.v1.engine.async_llm  # noqa: F401

    assert "routed_experts" not in sys.modules, "each child imports the code with its change"
    folder = Path.cwd().parent
    mtimes = itertools.count(10**9)
    changes = lines_of(args.changes)
    if args.unchanged:
        run_unchanged({test for change in changes for test in change["tests"]}, args.limit, folder)
    for change in left_of(changes, args):
        result = {"id": change["id"]} | run_change(change, folder, args.limit, mtimes)
        with args.out.open("a") as file:
            print(json.dumps(result), file=file)
        print(change["file"], change["line"], result, flush=True)
    print(dict(collections.Counter(result["outcome"] for result in lines_of(args.out))))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none where it is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def left_of(changes: list[Change], args: argparse.Namespace) -> list[Change]:
    """The chosen changes that have no result yet."""
    done = {result["id"] for result in lines_of(args.out)}
    chosen = [change for change in changes if not args.only or change["id"] in args.only]
    return [change for change in chosen if change["id"] not in done]


def run_unchanged(tests: set[str], limit: float, folder: Path) -> None:
    """Runs files of tests on the code as it is."""
    for test in sorted(tests):
        began = time.monotonic()  # clock: for the report
        outcome = failing([test], limit, folder) or "passes"
        seconds = time.monotonic() - began  # clock: for the report
        print(test, outcome, f"{seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--changes", type=Path, default=LIST)
    running.add_argument("--only", nargs="+", type=int, help="ids of changes")
    running.add_argument(
        "--limit", type=float, default=300, help="seconds of tests for each change"
    )
    running.add_argument(
        "--unchanged", action="store_true", help="first run each file of tests on the code as it is"
    )
    running.add_argument(
        "--out", type=Path, required=True, help="file for one JSON object for each change"
    )
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if "MUTATIONS_IN_COPY" in os.environ:
        run(args)
        return
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        again = [sys.executable, "-m", "tests.mutations", *sys.argv[1:], "--out", str(args.out)]
        again += ["--changes", str(args.changes.absolute())]
        environment = copy_tree(Path(folder))
        sys.exit(
            subprocess.run(again, cwd=f"{folder}/tree", env=environment, check=False).returncode
        )


if __name__ == "__main__":
    main()
