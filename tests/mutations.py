"""Measures the power of the tests: how many small changes of the code make a test fail.

    python -m tests.mutations list --seed 1 --count 120 > tests/mutations.jsonl
    python -m tests.mutations run --out build/mutations.jsonl

`list` chooses changes over all files, in proportion to their statements: one operator, comparison, constant, condition
or statement each. A change is found again by file, function and text, so that the list survives moved lines.

`run` applies one change at a time to a copy of the tree and runs the tests that execute the changed line. Which tests
do is measured once for each state of the code, with `coverage`, which must be importable. A run that was stopped goes
on where it was. Tests that start an engine's process are left out; `--tests` takes others.
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
TESTS = [f"tests/{folder}" for folder in ("protocol", "capture", "server", "contract", "clients", "page", "bench")]

COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"), ast.Pow: ("**", "*"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
Change = dict[str, Any]
"""`id`, `kind`, `file`, `line`, `function` (dotted, or empty), `before`, `after`, `occurrence` of `before` there."""


# ---- which changes there are ----


def changes(file: str, source: str) -> Iterator[Change]:
    """All changes of a file. Left out: annotations, decorators, imports, formatted strings, logging, `__slots__`."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data, scopes = source.encode(), _scopes(source)

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def change(kind: str, shown: tuple[int, int], at: tuple[int, int], new: str, scope: str) -> Change:
        before, after = data[slice(*shown)], data[shown[0] : at[0]] + new.encode() + data[at[1] : shown[1]]
        occurrence = data[scopes[scope][0] : shown[0]].count(before)
        found = {"kind": kind, "file": file, "line": data[: at[0]].count(b"\n") + 1, "function": scope}
        return found | {"before": before.decode(), "after": after.decode(), "occurrence": occurrence}

    def operator(kind: str, node: Any, left: Any, right: Any, signs: tuple[str, str], scope: str) -> Change:
        gap = span(left)[1], span(right)[0]
        return change(kind, span(node), gap, data[slice(*gap)].decode().replace(*signs, 1), scope)

    def visit(node: Any, parent: Any, scope: str) -> Iterator[Change]:
        if _left_out(node, parent):
            return
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                scope = f"{scope}.{node.name}".lstrip(".")
            case ast.Compare():
                for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                    yield operator("comparison", node, left, right, COMPARISONS[type(op)], scope)
            case ast.BinOp() if type(node.op) in OPERATORS and not _is_of_texts_or_types(node):
                yield operator("operator", node, node.left, node.right, OPERATORS[type(node.op)], scope)
            case ast.BoolOp():
                yield operator("operator", node, *node.values[:2], OPERATORS[type(node.op)], scope)
            case ast.AugAssign() if type(node.op) in OPERATORS:
                yield operator("operator", node, node.target, node.value, OPERATORS[type(node.op)], scope)
            case ast.Constant(value=bool()):
                yield change("constant", span(parent), span(node), str(not node.value), scope)
            case ast.Constant(value=int() | float()):
                yield change("constant", span(parent), span(node), str(node.value + 1), scope)
            case ast.If() | ast.While() | ast.IfExp():
                at = span(node.test)
                shown = span(node) if isinstance(node, ast.IfExp) else (span(node)[0], at[1])
                yield change("condition", shown, at, f"not ({data[slice(*at)].decode()})", scope)
            case ast.UnaryOp(op=ast.Not()):
                yield change("condition", span(parent), span(node), data[slice(*span(node.operand))].decode(), scope)
        match node:
            case ast.Return(value=ast.expr()) if node not in getattr(parent, "body", [])[-1:]:
                yield change("statement", span(node), span(node), "pass", scope)
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete() | ast.AugAssign():
                yield change("statement", span(node), span(node), "pass", scope)
            case ast.Continue() | ast.Break() | ast.Assert():
                yield change("statement", span(node), span(node), "pass", scope)
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield change("statement", span(node), span(node), "pass", scope)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list", "bases"):
                    yield from visit(child, node if hasattr(node, "lineno") else parent, scope)

    yield from visit(ast.parse(source), None, "")


def _is_of_texts_or_types(node: ast.BinOp) -> bool:
    match node:
        case ast.BinOp(op=ast.BitOr(), right=ast.Name() | ast.Constant() | ast.Subscript()):
            return True
        case ast.BinOp(left=ast.JoinedStr() | ast.Constant(value=str())):
            return True
        case ast.BinOp(right=ast.JoinedStr() | ast.Constant(value=str())):
            return True
    return False


def _left_out(node: ast.AST, parent: ast.AST | None) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Assign(targets=[ast.Name(id="__slots__" | "__all__")]) | ast.keyword(arg="stacklevel"):
            return True
    return isinstance(node, ast.Constant) and parent is None


def _scopes(source: str) -> dict[str, tuple[int, int]]:
    """From where to where the functions and classes go, in bytes."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    found = {"": (0, starts[-1])}

    def visit(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{scope}.{child.name}".lstrip(".")
                found[inner] = starts[child.lineno - 1], starts[child.end_lineno or 0]
            visit(child, inner)

    visit(ast.parse(source), "")
    return found


def apply(change: Change, source: str) -> str | None:
    """The source with the change, or None if what it changes is gone."""
    at = _offset(change, source)
    if at is None:
        return None
    data, before = source.encode(), change["before"].encode()
    return (data[:at] + change["after"].encode() + data[at + len(before) :]).decode()


def _offset(change: Change, source: str) -> int | None:
    start, end = _scopes(source).get(change["function"], (0, 0))
    data, before = source.encode(), change["before"].encode()
    at = start - len(before)
    for _ in range(change["occurrence"] + 1):
        at = data.find(before, at + len(before), end)
        if at < 0:
            return None
    return at


def choose(seed: int, count: int) -> list[Change]:
    """The same changes for the same seed and code: at least one for each file, the others by its statements."""
    files = {p.relative_to(ROOT).as_posix(): p.read_text() for d in MEASURED for p in sorted((ROOT / d).rglob("*.py"))}
    found = {f: list(changes(f, s)) for f, s in files.items() if "/openapi/" not in f and not f.endswith("__init__.py")}
    found = {file: some for file, some in found.items() if some}
    sizes = {file: sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(files[file]))) for file in found}
    shares = collections.Counter(found)
    for file in found:
        shares[file] = 1
    while shares.total() < count:
        open_files = [file for file in found if shares[file] < len(found[file])]
        shares[max(open_files, key=lambda file: sizes[file] / (shares[file] + 1))] += 1
    chosen: list[Change] = []
    for file, some in found.items():
        rng = random.Random(f"{seed} {file}")
        mine: list[Change] = []
        while len(mine) < shares[file]:
            kind = rng.choice(sorted({c["kind"] for c in some}))
            drawn = rng.choice([c for c in some if c["kind"] == kind])
            some.remove(drawn)
            with contextlib.suppress(SyntaxError):  # an operator's sign in a comment
                if ast.dump(ast.parse(apply(drawn, files[file]) or "")) != ast.dump(ast.parse(files[file])):
                    mine.append(drawn)
        chosen += sorted(mine, key=lambda c: c["line"])
    return [{"id": number, **change} for number, change in enumerate(chosen, 1)]


# ---- which tests there are for each ----


class Recorder:
    """A plugin of pytest that keeps the seconds of each test, and tells `coverage` which test runs."""

    def __init__(self, measured: Any = None, only: set[str] | None = None) -> None:
        self.measured, self.only = measured, only
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.only is None or item.nodeid in self.only]

    def _enter(self, context: str) -> None:
        os.environ["MUTATIONS_CONTEXT"] = context  # for the processes that a test starts
        if self.measured is not None:
            self.measured.switch_context(context)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._enter(nodeid.partition("::")[0])  # what fixtures of a whole file do is for all of its tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._enter(item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._enter(item.nodeid.partition("::")[0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


class TestMap:
    """Which tests execute which lines, and how long they take."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        self.data = CoverageData(str(folder / "coverage"))
        self.data.read()
        self.seconds: dict[str, float] = json.loads((folder / "tests.json").read_text())

    def tests_of(self, change: Change, source: str, line: int, budget: float) -> list[str]:
        """Those that execute the line, in the order in which to run them: by file, cheapest first.

        What is executed at import is for all that execute any line of the file. Of each test function the first case
        is taken, then the second, and so on, as long as there is budget (seconds).
        """
        measured = [file for file in self.data.measured_files() if file.endswith(f"/{change['file']}")]
        by_line: dict[int, set[str]] = collections.defaultdict(set)
        for file in measured:
            for number, contexts in self.data.contexts_by_lineno(file).items():
                by_line[number] |= set(contexts)
        lines = _lines_of_statement(source, line)
        found = set().union(*(by_line[number] for number in lines)) - {""}
        if not found or not _is_in_function(source, line):
            found = set().union(*by_line.values()) - {""}
        whole = {context for context in found if "::" not in context}
        calls = found & set(self.seconds)
        others = {test for test in self.seconds if test.partition("::")[0] in whole} - calls
        seen: collections.Counter[str] = collections.Counter()
        ranked = []
        for rank, some in enumerate((calls, others)):
            for test in self.seconds:
                if test in some:
                    ranked.append((rank, seen[test.partition("[")[0]], test))
                    seen[test.partition("[")[0]] += 1
        chosen: dict[str, list[str]] = collections.defaultdict(list)
        left = budget
        for _, _, test in sorted(ranked, key=lambda r: r[:2]):
            if left > 0:
                left -= self.seconds[test]
                chosen[test.partition("::")[0]].append(test)
        stem = Path(change["file"]).stem

        def cost(file: str) -> tuple[bool, float]:
            return stem not in file, sum(self.seconds[test] for test in chosen[file])

        return [test for file in sorted(chosen, key=cost) for test in chosen[file]]


def _lines_of_statement(source: str, line: int) -> range:
    """The lines of the innermost statement around a line; of a compound one its header."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            end = body[0].lineno if body and body[0].lineno > node.lineno else (node.end_lineno or 0) + 1
            if line < end and node.lineno >= best.start - (line - node.lineno):
                best = range(node.lineno, end)
    return best


def _is_in_function(source: str, line: int) -> bool:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    return any(node.body[0].lineno <= line <= (node.end_lineno or 0) for node in found)


# ---- running them ----


def in_child(run: Callable[[], int], limit: float, log: Path) -> int | None:
    """What `run` returns in a fork of this process, with all processes that it started; None after `limit` seconds.

    vLLM is imported here, once for all: that takes longer than most tests.
    """
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            with log.open("w") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
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
    return int(pytest.main([*quiet, "-m", "not (slow or e2e or gpu)", *options, *tests], plugins=[recorder]))


def make_map(folder: Path, tests: list[str]) -> None:
    """Runs the tests once, unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "coveragerc"
    sources = "".join(f"    {Path.cwd() / name}\n" for name in MEASURED)
    settings.write_text(
        f"[run]\nsource =\n{sources}context = ${{MUTATIONS_CONTEXT}}\nparallel = true\n"
        f"data_file = {folder}/parts/coverage\n"
    )
    (folder / "parts").mkdir(exist_ok=True)

    def run() -> int:
        import coverage

        os.environ["MUTATIONS_CONTEXT"] = ""
        measured = coverage.Coverage(config_file=str(settings))
        measured.start()
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        recorder = Recorder(measured)
        code = run_pytest(recorder, tests)
        measured.stop()
        measured.save()
        passed = {test: seconds for test, seconds in recorder.seconds.items() if test not in recorder.failed}
        (folder / "failed.json").write_text(json.dumps(recorder.failed))
        (folder / "tests.json").write_text(json.dumps(passed))
        return code

    code = in_child(run, 3600, folder / "log")
    if code not in (0, 1):
        sys.exit(f"The tests could not be run ({code}): {folder / 'log'}")
    from coverage import CoverageData
    from coverage.data import combine_parallel_data

    data = CoverageData(str(folder / "coverage"))
    combine_parallel_data(data, data_paths=[str(folder / "parts")], strict=True)
    data.write()


_MTIMES = itertools.count(10**9)


def run_change(change: Change, tests: TestMap, result: Path, budget: float) -> dict[str, Any]:
    """Runs the tests with the change in the current folder, and puts it back."""
    path = Path(change["file"])
    source = path.read_text() if path.exists() else ""
    changed, offset = apply(change, source), _offset(change, source)
    if changed is None or offset is None:
        return {"outcome": "gone"}
    differs = next(i for i, (a, b) in enumerate(zip(change["before"], change["after"] + "\0", strict=False)) if a != b)
    line = source.encode()[: offset + len(change["before"][:differs].encode())].count(b"\n") + 1
    chosen = tests.tests_of(change, source, line, budget)
    if not chosen:
        return {"outcome": "unseen", "tests": 0, "seconds": 0}
    files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))

    def run() -> int:
        recorder = Recorder(only=set(chosen))
        code = run_pytest(recorder, files, "-x")
        result.write_text(json.dumps(recorder.failed))
        return code

    def write(text: str) -> None:
        path.write_text(text)
        os.utime(path, (0, next(_MTIMES)))  # so that no bytecode of another change fits

    began = time.monotonic()
    result.unlink(missing_ok=True)
    write(changed)
    try:
        code = in_child(run, 120 + 4 * sum(tests.seconds[test] for test in chosen), result.with_suffix(".log"))
    finally:
        write(source)
    found = {"tests": len(chosen), "seconds": round(time.monotonic() - began, 1)}
    if code == 0:
        return {"outcome": "unseen", **found}
    failed = json.loads(result.read_text()) if result.exists() else []
    return {"outcome": "seen", "by": failed[0] if failed else "time limit" if code is None else "crash", **found}


def copy_tree(folder: Path) -> dict[str, str]:
    """Copies the working tree to `folder`/tree. Returns the environment in which that is what is imported."""
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    site = folder / "site"
    subprocess.run([sys.executable, folder / "tree/bench/link_package.py", site], check=True)
    (site / "sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")
    paths = (str(site), str(folder / "tree"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "MUTATIONS_COPY": str(folder)}


def state_of_code() -> str:
    files = sorted(p for d in (*MEASURED, "tests") for p in Path(d).rglob("*.py") if p.name != Path(__file__).name)
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()[:12]


def run(args: argparse.Namespace) -> None:
    """Runs in the copy."""
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.async_llm  # noqa: F401

    assert not any(name.startswith("routed_experts") for name in sys.modules)
    folder = args.out.parent / f"mutations-{state_of_code()}"
    if not (folder / "coverage").exists():
        make_map(folder, args.tests)
    tests = TestMap(folder)
    results = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {result["id"] for result in results}
    for change in map(json.loads, LIST.read_text().splitlines()):
        if change["id"] in done or (args.only and change["id"] not in args.only):
            continue
        result = {"id": change["id"], **run_change(change, tests, folder / "failed.json", args.budget)}
        results.append(result)
        with args.out.open("a") as file:
            print(json.dumps(result), file=file)
        print(change["id"], change["file"], change["line"], result, flush=True)
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
    running.add_argument("--budget", type=float, default=60, help="seconds of tests for a change (default: 60)")
    running.add_argument("--out", type=Path, required=True, help="file for one JSON object for each change")
    args = parser.parse_args()
    if args.command == "list":
        for change in choose(args.seed, args.count):
            print(json.dumps(change))
        return
    args.out = args.out.absolute()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if (copy := os.environ.get("MUTATIONS_COPY")) is None:
        with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
            environment = copy_tree(Path(folder))
            again = [sys.executable, "-m", "tests.mutations", *sys.argv[1:], "--out", str(args.out)]
            sys.exit(subprocess.run(again, cwd=f"{folder}/tree", env=environment, check=False).returncode)
    assert Path.cwd() == Path(copy).resolve() / "tree"
    run(args)


if __name__ == "__main__":
    main()
