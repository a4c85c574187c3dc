"""The table of situations says what is so: its tests exist, and every refusal stands in it."""

import re
from pathlib import Path

import pytest

from routed_experts.capture.engine.config import REFUSALS

ROOT = Path(__file__).resolve().parents[2]


def rows() -> list[tuple[str, str, str]]:
    situations, _, _ = (ROOT / "docs/support.md").read_text().partition("\n## ")
    lines = situations.splitlines()
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("| ")]
    return [(row[0], row[1], row[2]) for row in cells[2:]]


@pytest.mark.parametrize(("situation", "status", "shown_by"), rows())
def test_what_is_named_exists(situation: str, status: str, shown_by: str) -> None:
    assert status in ("exact", "refused", "untested")
    named = re.findall(r"`(tests/[^`]+)`", shown_by)
    assert bool(named) == (status != "untested"), situation
    assert len(shown_by) > 20
    for test in named:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^\s*(?:async )?(?:def|class) {re.escape(name)}\b", text, re.MULTILINE), test


def test_every_refusal_is_in_the_table() -> None:
    refused = {situation for situation, status, _ in rows() if status == "refused"}
    assert {refusal.name for refusal in REFUSALS} <= refused
