"""The Grafana dashboard asks for metrics and labels that the server has."""

import json
import re
from pathlib import Path
from typing import Any

import httpx

from tests.contract.served import serving
from tests.documentation import ROOT

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_what_is_asked_for_is_there_and_every_metric_of_ours_is_shown(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, "--routed-experts-record", str(tmp_path)) as server:
        server.complete(prompt="Hello", max_tokens=3, return_routed_experts=True)
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
    labels: dict[str, set[str]] = {}  # of each metric
    for name, given in re.findall(r"^([a-z_:]+)(?:\{(.*)\})? ", text, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'([a-z_]+)="', given))
    shown = set()
    for query in QUERIES:
        names = re.findall(r"\b(?:routed_experts_|vllm:)[a-z_:]+", query)
        assert names
        shown.update(names)
        for name in names:
            assert name in labels
            for grouped in re.findall(r"\bby \(([a-z_, ]+)\)", query):
                assert set(grouped.split(", ")) <= labels[name], query
            is_counted = re.search(rf"(?:rate|increase)\({re.escape(name)}\[", query) is not None
            assert is_counted == name.endswith("_total"), "a counter's rate, a gauge as it is"
    ours = {name for name in labels if name.startswith("routed_experts_") and not name.endswith("_created")}
    assert ours == {name for name in shown if name.startswith("routed_experts_")}


def test_panels_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({tuple(panel["gridPos"].values()) for panel in panels}) == len(panels)
    assert len({panel["id"] for panel in panels}) == len(panels)
