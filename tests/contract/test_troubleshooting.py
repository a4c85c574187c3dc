"""The messages in `docs/troubleshooting.md` are those of the code."""

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
"""Errors for users. Others are bugs, and come with a traceback."""


def shape(node: ast.expr) -> str:
    """A message with `…` for what varies."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def sentences() -> Iterator[tuple[str, str]]:
    """The file that raises each message, and the message."""
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


EVERY = {(where, text) for where, text in sentences() if " " in text and len(re.findall(r"[a-z]{2,}", text)) > 2}


def listed() -> list[str]:
    """The messages of the page: the code in the first column of its tables of messages."""
    tables = re.findall(r"^\| message \|.*\n\|[- |]*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    cells = [re.split(r"(?<!\\)\|", row)[1] for table in tables for row in table.splitlines()]
    return [message for cell in cells for message in re.findall(r"`(.*?)`", cell)]


def test_messages_of_the_page_exist() -> None:
    """`…` in the page stands for any text."""
    assert len(EVERY) > 80
    assert {"server/cli/serve.py", "protocol/collect.py", "capture/engine/binding.py"} <= {where for where, _ in EVERY}
    patterns = {message: ".*".join(re.escape(part.strip()) for part in message.split("…")) for message in listed()}
    assert len(patterns) > 40
    found = [text for _, text in EVERY]
    assert [message for message, form in patterns.items() if not any(re.fullmatch(form, t) for t in found)] == []
