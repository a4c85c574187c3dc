"""The Grafana dashboard asks for metrics and labels that the server has."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.served import serving

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text(encoding="utf-8"))
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
METRIC = re.compile(r"\b(?:routed_experts_|vllm:)[a-z_:]+")


@pytest.fixture(scope="module")
def metrics(tiny_model: Path) -> dict[str, set[str]]:
    """The labels of each metric of a server that has answered, by the metric's name."""
    with serving(tiny_model) as server:
        server.complete(prompt="Hello", max_tokens=3, return_routed_experts=True)
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    found: dict[str, set[str]] = {}
    for line in lines:
        if match := re.match(r"([a-z_:]+)(?:\{(.*)\})? ", line):
            found.setdefault(match[1], set()).update(re.findall(r'([a-z_]+)="', match[2] or ""))
    return found


def test_what_is_asked_for_is_there(metrics: dict[str, set[str]]) -> None:
    named = [(query, METRIC.findall(query)) for _, query in QUERIES]
    assert all(names for _, names in named)
    for query, name in ((query, name) for query, names in named for name in names):
        assert name in metrics
        for labels in re.findall(r"\bby \(([a-z_, ]+)\)", query):
            assert set(labels.split(", ")) <= metrics[name], query
        is_counted = re.search(rf"(?:rate|increase)\({re.escape(name)}\[", query) is not None
        assert is_counted == name.endswith("_total"), "a counter's rate, a gauge as it is"


def test_every_metric_of_ours_is_shown(metrics: dict[str, set[str]]) -> None:
    ours = {name for name in metrics if name.startswith("routed_experts_") and not name.endswith("_created")}
    assert ours == {
        name for _, query in QUERIES for name in METRIC.findall(query) if name.startswith("routed_experts_")
    }


def test_panels_do_not_overlap() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
