"""The modules of the package, and what they import."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = [
    path
    for folder in ("protocol", "capture", "server")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def _module(path: Path) -> str:
    """Its name, installed."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[:2] == ("protocol", "package"):
        parts = parts[2:]
    return ".".join(("routed_experts", *parts)).removesuffix(".__init__")


MODULES = {_module(path): path for path in PATHS}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def strings(path: Path) -> set[str]:
    """The texts in a file, with `…` for what varies in one."""
    texts = {
        node.value
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            texts.add(
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
            )
    return {re.sub(r"\{\w+\}", "…", text) for text in texts}


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, within functions too: `a.b` for `import a.b` and for `from
    a import b`."""
    names = {
        alias.name for node in nodes(path) if isinstance(node, ast.Import) for alias in node.names
    }
    of = [node for node in nodes(path) if isinstance(node, ast.ImportFrom)]
    return names | {f"{node.module}.{alias.name}" for node in of for alias in node.names}


def packages(path: Path) -> set[str]:
    """The packages of others that a file imports."""
    return {name.partition(".")[0] for name in imports(path)}
