"""The table of situations: its tests exist, every refusal is in it, and it says when tests last ran on a GPU."""

import re
from pathlib import Path

import pytest

from routed_experts.capture.engine.config import REFUSALS
from routed_experts.capture.engine.kv_transfer.connectors import CONNECTORS
from routed_experts.capture.engine.versions import SUPPORTED_VLLM
from tests.e2e.shapes import SHAPES, SIXTEEN_BIT
from tests.gpu.test_engines import ENGINES
from tests.gpu_runs import FILE, TABLE, named, read, render

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = {engine.name for engine in ENGINES} | {shape.name for shape in (*SHAPES, *SIXTEEN_BIT)}

RECORDED = {test for of_tests in read(FILE).values() for test in of_tests}


def rows() -> list[tuple[str, str, str]]:
    situations, _, _ = (ROOT / "docs/support.md").read_text().partition("\n## ")
    lines = situations.splitlines()
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("| ")]
    return [(row[0], row[1], row[2]) for row in cells[2:]]


@pytest.mark.parametrize(("situation", "status", "shown_by"), rows())
def test_what_is_named_exists(situation: str, status: str, shown_by: str) -> None:
    assert status in ("exact", "refused", "untested")
    assert bool(named(shown_by)) == (status != "untested"), situation
    assert len(shown_by) > 20
    for test in named(shown_by):
        path, _, name = test.partition("::")
        name, _, parameters = name.partition("[")
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^\s*(?:async )?(?:def|class) {re.escape(name)}\b", text, re.MULTILINE), test
        assert not parameters or parameters.removesuffix("]") in PARAMETERS or test in RECORDED, test


def test_every_refusal_is_in_the_table() -> None:
    refused = {situation for situation, status, _ in rows() if status == "refused"}
    assert {refusal.name for refusal in REFUSALS} <= refused


def test_every_connector_is_in_the_table() -> None:
    _, _, connectors = (ROOT / "docs/support.md").read_text().partition("\n## KV connectors\n")
    named_there = set(re.findall(r"\b\w+Connector(?:V1)?\b", connectors))
    assert named_there >= CONNECTORS.keys()


def test_the_table_says_when_gpus_were_last_asked() -> None:
    table = TABLE.read_text(encoding="utf-8")
    assert render(table, read(FILE)) == table, "run `python -m tests.gpu_runs`"
    on_gpus = [shown_by for situation, _, shown_by in rows() if "(GPU)" in situation]
    assert on_gpus
    assert [cell for cell in on_gpus if "; last run " not in cell and "; not run since " not in cell] == []


@pytest.mark.parametrize("version", SUPPORTED_VLLM)
def test_supported_versions_passed_on_gpus(version: str) -> None:
    """V1 with asynchronous scheduling is among them, which no test without a GPU runs on every version."""
    passed = {test for test, run in read(FILE)[version].items() if run.outcome == "passed"}
    assert {f"tests/gpu/test_engines.py::test_every_row_is_exact[{engine.name}]" for engine in ENGINES} <= passed
