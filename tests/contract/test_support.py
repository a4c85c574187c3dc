"""The support matrix: what makes it, its tests exist, its page is current, and it has every
connector."""

import re

import pytest

from routed_experts.capture.engine.connectors import CONNECTORS
from routed_experts.capture.engine.versions import INSTALLED_VLLM, SUPPORTED_VLLM
from tests.documentation import exists
from tests.e2e.shapes import SHAPES, SIXTEEN_BIT
from tests.gpu.test_engines import ENGINES
from tests.gpu_runs import (
    COLUMNS,
    FILE,
    PAGE,
    Run,
    matrix,
    passed,
    read,
    rendered,
    rendered_versions,
    status,
    support,
)

pytestmark = pytest.mark.release

TABLE, RUNS = support(), read(FILE)
SHAPE_NAMES = {shape.name for shape in (*SHAPES, *SIXTEEN_BIT)}


def evidence_in(*columns: str) -> list[str]:
    """The tests that these columns name."""
    cells = [feature.get(column) for feature in TABLE["feature"] for column in columns]
    return [test for cell in cells if isinstance(cell, list) for test in cell]


def test_tests_that_are_named_exist() -> None:
    refused = [test for other in TABLE["refused"] for test in other["tests"]]
    named = evidence_in("cpu", "weights") + refused
    assert [test for test in named if not exists(test)] == []
    assert {test.partition("[")[2].removesuffix("]") for test in named} - {""} <= SHAPE_NAMES


def test_tests_of_gpus_that_are_named_exist() -> None:
    """Others than those in `tests/gpu` have to exist at the commit of their run only: they ran
    once on a GPU, and are run without one now."""
    named = [test for test in evidence_in(*COLUMNS) if test.startswith("tests/gpu/")]
    assert named
    assert [test for test in named if not exists(test)] == []


def test_reasons_that_name_a_test_name_one_that_exists() -> None:
    """A cell that says why there is no test, as `refused: TEST`."""
    cells = [feature.get(column, "") for feature in TABLE["feature"] for column in COLUMNS]
    reasons = [cell for cell in cells if isinstance(cell, str)]
    named = [word for reason in reasons for word in reason.split() if "::" in word]
    assert named
    assert [test for test in named if not exists(test)] == []


def test_every_cell_has_tests_or_a_reason() -> None:
    """The columns of CUDA V1 apart, which the page does not show."""
    for feature in TABLE["feature"]:
        cells = {
            column: status(column, feature.get(column), RUNS[INSTALLED_VLLM]) for column in COLUMNS
        }
        assert set(cells.values()) <= {"exact", "refused", "untested", "\N{EN DASH}"}
        assert "why" in feature or "untested" not in (cells["cpu"], cells["v2"]), feature["name"]
        listed = [column for column in COLUMNS if isinstance(feature.get(column), list)]
        assert all(cells[column] == "exact" for column in listed), (
            f"{feature['name']}: a test of it has not passed"
        )


def test_the_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page, TABLE, RUNS[INSTALLED_VLLM]) == page, "run `python -m tests.gpu_runs`"
    assert rendered_versions(page, RUNS) == page, "run `python -m tests.gpu_runs`"
    _, _, connectors = page.partition("\n## KV connectors\n")
    assert set(re.findall(r"\b\w+Connector(?:V1)?\b", connectors)) >= CONNECTORS.keys()
    rows = re.findall(r"^\| (\d\S+) \|", page, re.MULTILINE)
    assert rows == 2 * [*SUPPORTED_VLLM], "each version has a row for CPUs and one for GPUs"


@pytest.mark.parametrize("version", SUPPORTED_VLLM)
def test_supported_versions_passed_on_gpus(version: str) -> None:
    """V1 with asynchronous scheduling is among them, which no test without a GPU runs on every
    version. V2 by name is for versions before 0.29, which run V1 by default."""
    needed = [engine.name for engine in ENGINES if engine.runner != "v2"]
    assert passed(
        RUNS[version],
        [f"tests/gpu/test_engines.py::test_every_row_is_exact[{name}]" for name in needed],
    )


def run_of(day: int, outcome: str = "passed") -> Run:
    return {
        "outcome": outcome,
        "commit": "abc1234",
        "date": f"2026-01-0{day}",
        "device": "NVIDIA H200",
    }


SOME_RUNS = {
    "a.py::test[one]": run_of(2),
    "a.py::test[two]": run_of(1),
    "a.py::test_fails": run_of(1, outcome="failed"),
}


@pytest.mark.parametrize(
    ("tests", "is_exact"),
    [
        (["test[one]"], True),
        (["test"], True),
        (["test_fails"], False),
        (["test[one]", "test_new"], False),
        (["tes"], False),
    ],
)
def test_the_last_run_of_every_test_counts(tests: list[str], is_exact: bool) -> None:
    names = [f"a.py::{test}" for test in tests]
    status_of_v2 = "exact" if is_exact else "untested"
    assert (status("v2", names, SOME_RUNS), status("cpu", names, SOME_RUNS)) == (
        status_of_v2,
        "exact",
    ), "CI runs those on CPUs"
    features = [
        {"name": "third", "cpu": names},
        {"name": "it", "v2": names, "note": "odd"},
        {"name": "other", "v2": names},
    ]
    shared = f"| {'CUDA' if is_exact else 'untested'} | untested | it (odd); other |"
    lines = ["| CPU | untested | third |", shared]
    assert list(matrix(features, SOME_RUNS))[2:] == sorted(lines, reverse=is_exact)
