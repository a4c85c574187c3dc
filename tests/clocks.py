"""Finds what makes a test depend on how fast a machine is: sleeps, clocks and short time limits.

    python -m tests.clocks

It looks at all of `tests`, but for tests marked `long`. A test waits for an event, or opens a gate. A
sleep in a `while` loop is such a wait. What has to look at a clock says why on one of its lines:
`# clock: REASON`.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = "# clock: "
LEAST_LIMIT_S = 60
LONG_FILE = re.compile("^pytestmark = .*mark.long", re.MULTILINE)
CLOCKS = {
    "time.monotonic",
    "time.perf_counter",
    "time.process_time",
    "time.thread_time",
    "resource.getrusage",
}
TIME = "time.time"
"""Alone a name for now, and a clock where it is compared."""
SLEEPS = {"time.sleep", "asyncio.sleep", "anyio.sleep"}
LIMITED = {
    "communicate": 1,
    "join": 0,
    "result": 0,
    "settimeout": 0,
    "timeout": 0,
    "wait": 0,
    "wait_for": 1,
    "wait_until": 2,
}
"""What waits, by the position of its limit among the arguments."""
LIMITS = {"limit_s", "timeout", "timeout_s"}


def found_in(text: str) -> Iterator[tuple[int, str]]:
    """The lines that depend on a clock, and how."""
    if LONG_FILE.search(text):
        return
    lines = text.splitlines()
    for node in _nodes(ast.parse(text)):
        what = _dependence(node)
        is_allowed = any(ALLOWED in line for line in lines[node.lineno - 1 : node.end_lineno])
        if what and not is_allowed:
            yield node.lineno, what


def _nodes(node: ast.AST) -> Iterator[ast.expr]:
    """All expressions but those of tests that are marked `long`, and sleeps in loops."""
    if isinstance(node, ast.expr):
        yield node
    for child in ast.iter_child_nodes(node):
        is_wait = isinstance(node, ast.While) and isinstance(child, ast.Expr) and _is_sleep(child)
        if not is_wait and not _is_long(child):
            yield from _nodes(child)


def _is_long(node: ast.AST) -> bool:
    return any("mark.long" in ast.unparse(mark) for mark in getattr(node, "decorator_list", []))


def _is_sleep(statement: ast.Expr) -> bool:
    value = statement.value
    call = value.value if isinstance(value, ast.Await) else value
    return isinstance(call, ast.Call) and ast.unparse(call.func) in SLEEPS


def _dependence(node: ast.expr) -> str:
    if isinstance(node, ast.Compare):
        return "a time, compared" if f"{TIME}()" in ast.unparse(node) else ""
    if not isinstance(node, ast.Call):
        return ""
    function = ast.unparse(node.func)
    if function in SLEEPS and ast.unparse(node.args[0]) != "0":
        return "a sleep"
    if function in CLOCKS:
        return "a clock"
    position = LIMITED.get(function.rpartition(".")[2])
    limits = [keyword.value for keyword in node.keywords if keyword.arg in LIMITS]
    limits += node.args[position : position + 1] if position is not None else []
    for limit in limits:
        seconds = getattr(limit, "value", None)
        if isinstance(seconds, int | float) and seconds is not True and 0 < seconds < LEAST_LIMIT_S:
            return f"a limit of {seconds} seconds"
    return ""


def main() -> int:
    count = 0
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for line, what in found_in(path.read_text()):
            print(f"{path.relative_to(ROOT)}:{line}: {what}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
