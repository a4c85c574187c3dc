"""`docs/troubleshooting.md` has every sentence that a command, the server or the client library ends with."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from routed_experts.capture.engine.config import BOUNDED_REPLAY, REFUSALS
from routed_experts.server.cli import main, preflight, serve

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
SAID = {
    *("CommandError", "UnsupportedConfig", "SelfTestError"),
    *("VLLMValidationError", "VLLMNotFoundError", "FieldError", "LostRowsError", "StreamLimitError"),
    *("CodecError", "RoutingError", "EventError", "ArgumentTypeError"),
}
"""Errors that people read. Others are faults of the program and say so by their traceback."""


def shape(node: ast.expr) -> str:
    """A text as it stands in the page: what differs from time to time is `…`."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def sentences() -> Iterator[tuple[str, str]]:
    """Where each is raised, and what it says."""
    for folder in ("capture", "protocol", "server"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    name = (
                        node.exc.func.id if isinstance(node.exc.func, ast.Name) else getattr(node.exc.func, "attr", "")
                    )
                    if name in SAID:
                        yield from ((str(path.relative_to(ROOT)), shape(argument)) for argument in node.exc.args)
                if path.name == "preflight.py" and isinstance(node, ast.Return) and node.value is not None:
                    yield str(path.relative_to(ROOT)), shape(node.value)
    for refusal in REFUSALS:
        yield "capture/engine/config.py", refusal.message
    yield "capture/engine/config.py", BOUNDED_REPLAY
    for text in (main.NO_VLLM, serve.ENGINE_DID_NOT_START, preflight.NO_HUB, preflight.NO_SUCH_MODEL):
        yield "server", re.sub(r"\{\w+\}", "…", text)


EVERY = sorted(
    {(where, text) for where, text in sentences() if " " in text and len(re.findall(r"[a-z]{2,}", text)) > 2}
)


def test_there_are_sentences() -> None:
    assert len(EVERY) > 80
    assert {"server/cli/serve.py", "protocol/collect.py", "capture/engine/binding.py"} <= {where for where, _ in EVERY}


@pytest.mark.parametrize(("where", "text"), EVERY, ids=[text[:60] for _, text in EVERY])
def test_the_page_has_it(where: str, text: str) -> None:
    assert f"`{text}`" in PAGE, f"{where}: add a row for `{text}`"


def test_the_page_has_nothing_else() -> None:
    listed = set(re.findall(r"^\| `(.*?)` \|", PAGE, re.MULTILINE))
    assert listed - {text for _, text in EVERY} == set()
