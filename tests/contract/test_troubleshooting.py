"""The messages in `docs/troubleshooting.md` are those of the code."""

import ast
import re
from collections.abc import Iterator

import pytest

from routed_experts.capture.engine.config import BOUNDED_REPLAY, REFUSALS
from routed_experts.server.cli import main, preflight, serve
from tests.documentation import ROOT
from tests.sources import PATHS, nodes

pytestmark = pytest.mark.release

# Errors for users. Others are bugs, and come with a traceback.
SAID = {
    *("CommandError", "UnsupportedConfig", "SelfTestError"),
    *("VLLMValidationError", "VLLMNotFoundError", "FieldError", "LostRowsError", "StreamLimitError"),
    *("CodecError", "RoutingError", "EventError", "ArgumentTypeError"),
}


def shape(node: ast.expr) -> str:
    """A message with `…` for what varies."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def messages() -> Iterator[str]:
    for path in PATHS:
        for node in nodes(path):
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))) if name in SAID:
                    yield from map(shape, node.exc.args)  # type: ignore[union-attr]
                case ast.Return(value=ast.expr() as value) if path.name == "preflight.py":
                    yield shape(value)
    yield from (BOUNDED_REPLAY, *(refusal.message for refusal in REFUSALS))
    for text in (main.NO_VLLM, serve.ENGINE_DID_NOT_START, preflight.NO_HUB, preflight.NO_SUCH_MODEL):
        yield re.sub(r"\{\w+\}", "…", text)


def test_messages_of_the_page_exist() -> None:
    """They are the code at the beginning of its list items, before a colon; `…` in the page stands for any text."""
    known = {text for text in messages() if " " in text and len(re.findall(r"[a-z]{2,}", text)) > 2}
    assert len(known) > 80
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    heads = re.findall(r"^- (`.*?`): ", page, re.MULTILINE)
    listed = {message for head in heads for message in re.findall(r"`(.*?)`", head)}
    assert len(listed) > 25
    forms = {message: ".*".join(re.escape(part.strip()) for part in message.split("…")) for message in listed}
    assert [message for message, form in forms.items() if not any(re.fullmatch(form, text) for text in known)] == []
