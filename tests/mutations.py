"""Measures the power of the tests: which of 120 small changes of the code make a test fail.

    python -m tests.mutations list --seed 1 --count 120 > tests/mutations.jsonl
    python -m tests.mutations run --out build/mutations.jsonl

`list` chooses changes in all files, in proportion to their statements: one operator, comparison, constant, condition
or statement each. A change is found again by file, function and text, so the list survives moved lines.

`run` applies one change at a time to a copy of the tree and runs the tests of `make test-fast` that execute the changed
lines, up to the first that fails. Which tests do is measured with `coverage`, which must be importable: once for each
state of the code, and again for each file of tests that changed. Run it again to continue a run that was stopped.
`--tests` takes other tests.
"""

import argparse
import ast
import collections
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/mutations.jsonl"
MEASURED = ("server", "capture", "protocol")
TESTS = [f"tests/{folder}" for folder in ("protocol", "capture", "server", "contract", "clients", "page")]

# By the name of the node: what its sign is, and what it becomes.
COMPARISONS = {
    "Lt": ("<", "<="), "LtE": ("<=", "<"), "Gt": (">", ">="), "GtE": (">=", ">"), "Eq": ("==", "!="),
    "NotEq": ("!=", "=="), "Is": ("is", "is not"), "IsNot": ("is not", "is"), "In": ("in", "not in"),
    "NotIn": ("not in", "in"),
}  # fmt: skip
OPERATORS = {
    "Add": ("+", "-"), "Sub": ("-", "+"), "Mult": ("*", "//"), "FloorDiv": ("//", "*"), "Div": ("/", "*"),
    "Mod": ("%", "//"), "BitAnd": ("&", "|"), "BitOr": ("|", "&"), "LShift": ("<<", ">>"), "RShift": (">>", "<<"),
    "Pow": ("**", "*"), "And": ("and", "or"), "Or": ("or", "and"),
}  # fmt: skip
Change = dict[str, Any]
"""`id`, `kind`, `file`, `line`, `function` (dotted; empty outside of any), `before`, `after`, and which `occurrence` of
`before` in the function it is, from 0."""


# ---- which changes there are ----


def changes(file: str, source: bytes) -> Iterator[Change]:
    """Yields all changes of a file."""
    starts, functions = _starts(source), _functions(source)

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def visit(node: Any, parent: Any, scope: str) -> Iterator[Change]:
        def change(kind: str, shown: tuple[int, int], at: tuple[int, int], new: str | bytes) -> Change:
            new = new.encode() if isinstance(new, str) else new
            before, after = source[slice(*shown)], source[shown[0] : at[0]] + new + source[at[1] : shown[1]]
            found = {"kind": kind, "file": file, "line": source[: at[0]].count(b"\n") + 1, "function": scope}
            found |= {"before": before.decode(), "after": after.decode()}
            return found | {"occurrence": source[functions[scope][0] : shown[0]].count(before)}

        def operator(kind: str, left: Any, right: Any, signs: tuple[str, str]) -> Change:
            gap = span(left)[1], span(right)[0]
            return change(kind, span(node), gap, source[slice(*gap)].decode().replace(*signs, 1))

        if _is_left_out(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = f"{scope}.{node.name}" if scope else node.name
        match node:
            case ast.Compare():
                for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                    yield operator("comparison", left, right, COMPARISONS[type(op).__name__])
            case ast.BinOp() if type(node.op).__name__ in OPERATORS and not _joins_texts_or_types(node):
                yield operator("operator", node.left, node.right, OPERATORS[type(node.op).__name__])
            case ast.BoolOp():
                yield operator("operator", *node.values[:2], OPERATORS[type(node.op).__name__])
            case ast.AugAssign() if type(node.op).__name__ in OPERATORS:
                yield operator("operator", node.target, node.value, OPERATORS[type(node.op).__name__])
            case ast.Constant(value=bool() | int() | float()) if parent is not None:
                new = not node.value if isinstance(node.value, bool) else node.value + 1
                yield change("constant", span(parent), span(node), str(new))
            case ast.If() | ast.While() | ast.IfExp():
                at = span(node.test)
                shown = span(node) if isinstance(node, ast.IfExp) else (span(node)[0], at[1])
                yield change("condition", shown, at, b"not (%b)" % source[slice(*at)])
            case ast.UnaryOp(op=ast.Not()):
                yield change("condition", span(parent), span(node), source[slice(*span(node.operand))])
        if _can_be_deleted(node, parent):
            yield change("statement", span(node), span(node), "pass")
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list", "bases"):
                    yield from visit(child, node if hasattr(node, "lineno") else parent, scope)

    yield from visit(ast.parse(source), None, "")


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Assign(targets=[ast.Name(id="__slots__" | "__all__")]) | ast.keyword(arg="stacklevel"):
            return True
    return False


def _joins_texts_or_types(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    is_text = any(isinstance(s, ast.JoinedStr) or isinstance(getattr(s, "value", None), str) for s in sides)
    return is_text or (isinstance(node.op, ast.BitOr) and isinstance(sides[1], ast.Name | ast.Constant | ast.Subscript))


def _can_be_deleted(node: ast.AST, parent: ast.AST | None) -> bool:
    match node:
        case ast.Return(value=ast.expr()):
            return node not in getattr(parent, "body", [])[-1:]
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return isinstance(node, ast.Raise | ast.Delete | ast.AugAssign | ast.Continue | ast.Break | ast.Assert)


def _starts(source: bytes) -> list[int]:
    return [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]


def _functions(source: bytes) -> dict[str, tuple[int, int]]:
    """Where each function and class begins and ends; the whole file by an empty name."""
    starts = _starts(source)
    found = {"": (0, starts[-1])}

    def visit(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{scope}.{child.name}" if scope else child.name
                found[inner] = starts[child.lineno - 1], starts[child.end_lineno or 0]
            visit(child, inner)

    visit(ast.parse(source), "")
    return found


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


def choose(seed: int, count: int) -> list[Change]:
    """Returns the same changes for the same seed and code, at least one for each file."""
    paths = [path for folder in MEASURED for path in sorted((ROOT / folder).rglob("*.py"))]
    sources = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths if path.name != "__init__.py"}
    found = {file: list(changes(file, source)) for file, source in sources.items() if "/openapi/" not in file}
    found = {file: some for file, some in found.items() if some}
    sizes = {file: sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(sources[file]))) for file in found}
    shares = dict.fromkeys(found, 1)
    while sum(shares.values()) < count:
        waiting = [file for file in found if shares[file] < len(found[file])]
        shares[max(waiting, key=lambda file: sizes[file] / (shares[file] + 1))] += 1
    chosen: list[Change] = []
    for file, some in found.items():
        rng = random.Random(f"{seed} {file}")
        mine: list[Change] = []
        while len(mine) < shares[file]:
            kind = rng.choice(sorted({change["kind"] for change in some}))
            drawn = rng.choice([change for change in some if change["kind"] == kind])
            some.remove(drawn)
            with contextlib.suppress(SyntaxError):  # the sign was in a comment
                changed = ast.parse(apply(drawn, sources[file], locate(drawn, sources[file]) or 0))
                if ast.dump(changed) != ast.dump(ast.parse(sources[file])):
                    mine.append(drawn)
        chosen += sorted(mine, key=lambda change: change["line"])
    return [{"id": number, **change} for number, change in enumerate(chosen, 1)]


# ---- which tests execute which lines ----


class Recorder:
    """A pytest plugin that times the tests and tells `coverage` which one runs."""

    def __init__(self, measured: Any = None, only: set[str] | None = None) -> None:
        self.measured, self.only = measured, only
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.failed: list[str] = []

    def _enter(self, context: str) -> None:
        os.environ["MUTATIONS_CONTEXT"] = context  # for the processes that a test starts
        if self.measured is not None:
            self.measured.switch_context(context)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.only is None or item.nodeid in self.only]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._enter(nodeid.partition("::")[0])  # fixtures may be shared by all tests of the file

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._enter(item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._enter(item.nodeid.partition("::")[0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def make_map(folder: Path, tests: list[str]) -> None:
    """Runs the tests once, unchanged, each file in a process of its own; not those that were run as they are now."""
    import coverage
    from coverage.data import combine_parallel_data

    folder.mkdir(parents=True, exist_ok=True)
    settings, kept, of_file = folder / "coveragerc", folder / "tests.json", folder / "file.json"
    sources = "".join(f"    {Path.cwd() / name}\n" for name in MEASURED)
    options = "context = ${MUTATIONS_CONTEXT}\nparallel = true\n"
    seconds: dict[str, dict[str, float]] = json.loads(kept.read_text()) if kept.exists() else {}
    parts = []

    def run(file: str) -> int:
        os.environ |= {"MUTATIONS_CONTEXT": "", "COVERAGE_PROCESS_START": str(settings)}
        measured = coverage.Coverage(config_file=str(settings))
        measured.start()
        recorder = Recorder(measured)
        code = run_pytest(recorder, [file])
        measured.stop()
        measured.save()
        passed = {test: seconds for test, seconds in recorder.seconds.items() if test not in recorder.failed}
        of_file.write_text(json.dumps([passed, recorder.failed]))
        return code

    for path in [path for name in tests for path in sorted(Path(name).rglob("test_*.py")) or [Path(name)]]:
        file, state = path.as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        parts.append(folder / "parts" / f"{path.stem}-{state}")
        if file not in seconds or not parts[-1].exists():
            parts[-1].mkdir(parents=True, exist_ok=True)
            settings.write_text(f"[run]\nsource =\n{sources}{options}data_file = {parts[-1]}/coverage\n")
            seconds.pop(file, None)
            kept.write_text(json.dumps(seconds))
            of_file.write_text("[{}, []]")
            code = in_child(lambda file=file: run(file), 1200, folder / "log")  # type: ignore[misc]
            seconds[file], failed = json.loads(of_file.read_text())
            kept.write_text(json.dumps(seconds))
            print(f"{file}: exit {code}, {len(seconds[file])} tests passed, {failed=}", flush=True)
    (folder / "coverage").unlink(missing_ok=True)
    data = coverage.CoverageData(str(folder / "coverage"))
    combine_parallel_data(data, data_paths=[str(part) for part in parts if any(part.iterdir())], keep=True)
    data.write()


class TestMap:
    """Which tests execute which lines, and the seconds that they take."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        self.data = CoverageData(str(folder / "coverage"))
        self.data.read()
        by_file: dict[str, dict[str, float]] = json.loads((folder / "tests.json").read_text())
        self.seconds = {test: seconds for tests in by_file.values() for test, seconds in tests.items()}

    def tests_of(self, file: str, lines: range | None, budget: float) -> dict[str, list[str]]:
        """Returns the tests that execute one of `lines`, by test file, in the order in which to run them.

        With None for `lines`, or where none does (a line that is executed at import), those that execute any line of
        the file. The first case of each test function is taken before the second of any, up to `budget` seconds; tests
        that execute the lines only in fixtures come last.
        """
        by_line: dict[int, set[str]] = collections.defaultdict(set)
        for measured in self.data.measured_files():
            if measured.endswith(f"/{file}"):
                for line, contexts in self.data.contexts_by_lineno(measured).items():
                    by_line[line] |= {*contexts} - {""}
        found = set().union(*(by_line[line] for line in lines or ())) or set().union(*by_line.values())
        cases: collections.Counter[str] = collections.Counter()
        ranked = []
        for test in self.seconds:
            if test in found or test.partition("::")[0] in found:
                function = test.partition("[")[0]
                ranked.append((test not in found, cases[function], len(ranked), test))
                cases[function] += 1
        chosen: dict[str, list[str]] = collections.defaultdict(list)
        for *_, test in sorted(ranked):
            if budget > 0:
                budget -= self.seconds[test]
                chosen[test.partition("::")[0]].append(test)

        def cost(tests_file: str) -> tuple[bool, float]:
            return Path(file).stem not in tests_file, sum(self.seconds[test] for test in chosen[tests_file])

        return {tests_file: chosen[tests_file] for tests_file in sorted(chosen, key=cost)}


# ---- running them ----


def in_child(run: Callable[[], int], limit: float, log: Path) -> int | None:
    """Returns what `run` returns in a fork of this process, or None after `limit` seconds.

    vLLM is imported once, in this process: that takes longer than most tests.
    """
    if (pid := os.fork()) == 0:
        code = 70
        try:
            os.setsid()
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                code = run()
        finally:
            os._exit(code)
    until = time.monotonic() + limit
    ended, status = 0, 0
    while not ended and time.monotonic() < until:
        time.sleep(0.05)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def run_pytest(recorder: Recorder, tests: list[str], *options: str) -> int:
    quiet = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=120"]
    return int(pytest.main([*quiet, "-m", "not (slow or e2e or gpu or release)", *options, *tests], plugins=[recorder]))


def run_change(change: Change, tests: TestMap, result: Path, budget: float, mtimes: Iterator[int]) -> dict[str, Any]:
    """Runs the tests of a change. A test that fails after other files is run again without them."""
    path = Path(change["file"])
    source = path.read_bytes() if path.exists() else b""
    if (at := locate(change, source)) is None:
        return {"outcome": "gone"}
    first_line = source[:at].count(b"\n") + 1
    lines = range(first_line, first_line + change["before"].count("\n") + 1)
    chosen = tests.tests_of(change["file"], lines if _is_in_function(change, source) else None, budget)
    limit = 120 + 4 * sum(tests.seconds[test] for some in chosen.values() for test in some)
    waiting, by = list(chosen), None

    def run() -> int:
        recorder = Recorder(only={test for some in chosen.values() for test in some})
        code = run_pytest(recorder, waiting, "-x")
        result.write_text(json.dumps(recorder.failed))
        return code

    def write(text: bytes) -> None:
        path.write_bytes(text)
        os.utime(path, (0, next(mtimes)))  # no bytecode of another change has this time

    began = time.monotonic()
    write(apply(change, source, at))
    while waiting and by is None:
        result.unlink(missing_ok=True)
        if (code := in_child(run, limit, result.with_suffix(".log"))) in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            break
        failed = json.loads(result.read_text()) if result.exists() else []
        by = failed[0] if failed else "time limit" if code is None else f"exit {code}"
        if (file := by.partition("::")[0]) in waiting[1:]:
            waiting, by = waiting[waiting.index(file) :], None
    write(source)
    found = {"tests": sum(map(len, chosen.values())), "seconds": round(time.monotonic() - began, 1)}
    outcome = "unseen" if by is None else "unclear" if by.startswith("exit ") else "seen"  # no test failed: look
    return {"outcome": outcome, "by": by, **found}


def _is_in_function(change: Change, source: bytes) -> bool:
    return "." in change["function"] or f"def {change['function']}(".encode() in source


def copy_tree(folder: Path) -> dict[str, str]:
    """Copies the working tree to `folder`/tree. Returns the environment that imports the copy."""
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    site = folder / "site"
    subprocess.run([sys.executable, folder / "tree/bench/link_package.py", site], check=True)
    (site / "sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")
    paths = (str(site), str(folder / "tree"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "MUTATIONS_IN_COPY": "1"}


def run(args: argparse.Namespace) -> None:
    """Runs in the copy."""
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.async_llm  # noqa: F401

    assert "routed_experts" not in sys.modules, "each child imports the code with its change"
    code = sorted(path for folder in MEASURED for path in Path(folder).rglob("*.py"))
    state = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()[:12]
    folder, mtimes = args.out.parent / f"mutations-{state}", itertools.count(10**9)
    make_map(folder, args.tests)
    tests = TestMap(folder)
    results = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {result["id"] for result in results}
    for change in map(json.loads, LIST.read_text().splitlines()):
        if change["id"] not in done and (not args.only or change["id"] in args.only):
            results.append({"id": change["id"]} | run_change(change, tests, folder / "run.json", args.budget, mtimes))
            with args.out.open("a") as file:
                print(json.dumps(results[-1]), file=file)
            print(change["file"], change["line"], results[-1], flush=True)
    print(dict(collections.Counter(result["outcome"] for result in results)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list")
    listing.add_argument("--seed", type=int, default=1)
    listing.add_argument("--count", type=int, default=120)
    running = commands.add_parser("run")
    running.add_argument("--tests", nargs="+", default=TESTS)
    running.add_argument("--only", nargs="+", type=int, help="ids of changes")
    running.add_argument("--budget", type=float, default=60, help="seconds of tests for each change (default: 60)")
    running.add_argument("--out", type=Path, required=True, help="file for one JSON object for each change")
    args = parser.parse_args()
    if args.command == "list":
        for change in choose(args.seed, args.count):
            print(json.dumps(change))
        return
    args.out = args.out.absolute()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if "MUTATIONS_IN_COPY" in os.environ:
        run(args)
        return
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        again = [sys.executable, "-m", "tests.mutations", *sys.argv[1:], "--out", str(args.out)]
        environment = copy_tree(Path(folder))
        sys.exit(subprocess.run(again, cwd=f"{folder}/tree", env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
