"""The dashboard and the alerts ask for metrics, labels and reasons that the server has."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.contract.served import serving
from tests.contract.test_docs import anchors
from tests.documentation import ROOT

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"][1:]}
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "docs/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
OF_PROMETHEUS = {"job", "instance"}
"""Labels that the server does not give: Prometheus does."""

ALERTS = [rule["expr"] for rule in RULES]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (apt-get install prometheus)"
)


def labels_in(text: str) -> dict[str, set[str]]:
    """The labels of each metric in what a server says."""
    labels: dict[str, set[str]] = {}
    for name, selector in re.findall(r"^([a-z_:]+)(?:\{(.*)\})? ", text, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'([a-z_]+)="', selector))
    return labels


def metrics_of(query: str) -> list[str]:
    names: list[str] = re.findall(r"\b(?:routed_experts_|vllm:)[a-z_:]+", query)
    return names


def labels_of(name: str, query: str) -> set[str]:
    """The labels by which a query selects a metric, or groups."""
    labels: set[str] = set()
    for groups in re.findall(r"\bby \(([a-z_, ]+)\)", query):
        labels.update(groups.split(", "))
    for selector in re.findall(rf"{re.escape(name)}\{{(.*?)\}}", query):
        labels.update(re.findall(r"(\w+)[=!]~?\"", selector))
    return labels


def is_counted(name: str, query: str) -> bool:
    return re.search(rf"(?:rate|increase)\({re.escape(name)}[\[{{]", query) is not None


def variables_for(labels: set[str]) -> set[str]:
    """The dashboard's variables that choose among a metric with these labels."""
    names = {"model" if label == "model_name" else label for label in labels | OF_PROMETHEUS}
    return names & VARIABLES.keys()


def variables_in(query: str) -> set[str]:
    return {variable for variable in VARIABLES if f"${variable}" in query}


def of_this_project(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("routed_experts_")}


@pytest.fixture(scope="module")
def metrics_text(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a server says that has answered a request."""
    folder = tmp_path_factory.mktemp("recorded")
    with serving(tiny_model, "--routed-experts-record", str(folder)) as server:
        server.complete(prompt="Hello", max_tokens=3, return_routed_experts=True)
        return httpx.get(f"{server.url}/metrics", timeout=300).text


@pytest.mark.parametrize("query", QUERIES + ALERTS)
def test_what_is_asked_for_is_there(metrics_text: str, query: str) -> None:
    labels = labels_in(metrics_text)
    names = metrics_of(query)
    assert names
    assert set(names) <= labels.keys()
    for name in names:
        assert labels_of(name, query) <= labels[name] | OF_PROMETHEUS
        is_of_a_counter = name.endswith("_total")
        assert is_counted(name, query) == is_of_a_counter, "a counter's rate, a gauge as it is"


@pytest.mark.parametrize("query", QUERIES)
def test_every_panel_follows_the_variables_of_its_metrics(metrics_text: str, query: str) -> None:
    labels = labels_in(metrics_text)
    for name in metrics_of(query):
        assert variables_for(labels[name]) <= variables_in(query)


def test_every_metric_of_ours_is_shown(metrics_text: str) -> None:
    for name in ("vllm:num_requests_running", "routed_experts_requests_tracked"):
        assert f'{name}{{engine="0",model_name="tiny"}} ' in metrics_text
    shown = {name for query in QUERIES + ALERTS for name in metrics_of(query)}
    ours = {name for name in labels_in(metrics_text) if not name.endswith("_created")}
    assert of_this_project(ours) == of_this_project(shown)


def test_every_alert_has_a_runbook() -> None:
    for rule in RULES:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert anchor in anchors(ROOT / "docs" / page), rule["alert"]


@needs_promtool
@pytest.mark.release
def test_prometheus_reads_the_alerts_and_the_dashboards_queries(tmp_path: Path) -> None:
    queries = tmp_path / "queries.yaml"
    values = {"$__rate_interval": "1m", "$__range": "1h"}
    rules = [
        {"record": f"r{at}", "expr": re.sub(r"\$__\w+", lambda v: values[v[0]], q)}
        for at, q in enumerate(QUERIES)
    ]
    queries.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    for command in (
        ("check", "rules", str(ROOT / "docs/alerts.yaml"), str(queries)),
        ("test", "rules", str(ROOT / "tests/contract/alerts_test.yaml")),
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
