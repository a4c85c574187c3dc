"""The metrics of the API process, as prometheus_client gives them to whoever scrapes it."""

import asyncio
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import vllm
from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from routed_experts.capture.wire.message import Cause
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.server.http import metrics
from routed_experts.server.http.metrics import EngineMetrics, label_with, show_buffers
from tests.server.known import rows_of
from tests.server.test_response import answer_of, answered, long_answer
from tests.server.test_row_buffer import Frontend, message, output
from tests.server.test_streaming import Engine, aligner_of, arrays_of, stream

PREFIX = "routed_experts_"
REASONS = ("not_captured", "not_arrived", "kv_transfer")
ROOT = Path(__file__).resolve().parents[2]


MODEL = "a model"


@pytest.fixture(autouse=True)
def _model() -> Iterator[None]:
    before = metrics._model
    label_with(MODEL)
    yield
    metrics._model = before  # that of a server in this process


def value(name: str, **labels: str) -> float:
    of_model = {} if name == "build_info" else {"model_name": MODEL}
    return REGISTRY.get_sample_value(PREFIX + name, {**of_model, **labels}) or 0.0


def growth(run: Callable[[], Any]) -> dict[str, float]:
    """By how much each of the counters of answers grew while `run` ran."""

    def counters() -> Counter[str]:
        missing = {reason: value("rows_missing_total", reason=reason) for reason in REASONS}
        return Counter(
            {"rows": value("rows_returned_total"), "bytes": value("sent_bytes_total"), **missing}
        )  # type: ignore[dict-item]

    before = counters()
    run()
    return +(counters() - before)


def test_versions_are_labels() -> None:
    labels = {"version": version("routed-experts-server"), "vllm_version": vllm.__version__}
    assert value("build_info", **labels) == 1


def test_a_stream_counts_when_it_has_ended() -> None:
    engine = Engine(4)
    chunks: list[Any] = []
    outputs = [engine.step(), engine.step(), engine.step(2, finish="stop")]
    grown = growth(lambda: chunks.extend(stream(aligner_of(), outputs)))
    arrays = [array for chunk in chunks for array in arrays_of(chunk) if array is not None]
    assert len(arrays) == 3
    assert grown == {"rows": 4 + 3, "bytes": sum(len(orjson.dumps(array)) for array in arrays)}


def test_rows_are_missing_for_a_reason_and_histograms_count_nothing() -> None:
    engine = Engine(4)
    last = engine.step(3, finish="stop", late=2)
    engine.buffer._arrays[0] = np.concatenate(
        [np.full((1, 2, 3), -1, dtype=np.int16), rows_of(1, 4)]
    )
    grown = growth(lambda: stream(aligner_of(), [last]))
    assert grown == {"rows": 6, "not_captured": 1, "not_arrived": 2, "bytes": grown["bytes"]}
    engine = Engine(4)
    outputs = [engine.step(), engine.step(finish="stop")]
    assert growth(lambda: stream(aligner_of(rows=False, histogram=True), outputs)) == {}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("layout", "prompt"), [("split", 3), ("joined", 2 * 3)])
def test_rows_that_settings_leave_out_are_told_from_faults(
    layout: str, prompt: int, streamed: bool
) -> None:
    """Two choices of a prompt of 4; of their rows 4 are unknown, 3 because of a setting, and one
    own of each."""
    engines = [Engine(4, index=index) for index in range(2)]
    outputs = [engine.step(3, finish="stop") for engine in engines]
    for engine in engines:
        engine.buffer._arrays = [
            np.concatenate([np.full((5, 2, 3), -1, dtype=np.int16), rows_of(5, 6)])
        ]
        engine.buffer.prompt_causes = Counter({Cause.KV_TRANSFER: 3})
        engine.buffer.own_causes = Counter({Cause.KV_TRANSFER: 1})
    outputs[0].outputs += outputs[1].outputs
    if streamed:
        grown = growth(lambda: stream(aligner_of(2, layout=layout), outputs[:1]))
    else:
        grown = growth(lambda: answered(answer_of(outputs[:1], layout=layout)[0]))
    del grown["rows"], grown["bytes"]
    assert grown == {"kv_transfer": prompt + 2, "not_captured": prompt // 3}


@pytest.mark.parametrize("rows", [10, 100_000], ids=["at once", "in parts"])
def test_whole_answers(rows: int) -> None:
    sent: list[bytes] = []
    grown = growth(lambda: sent.append(answered(long_answer(rows))[1]))
    assert grown == {"rows": rows, "bytes": grown["bytes"]}
    assert 0 < len(sent[0]) - grown["bytes"] < 300


def test_numbers_of_engines_are_added_up() -> None:
    of_engines = EngineMetrics(MODEL, layer_ids=[1, 4], num_experts=8)
    counters = [("rows_captured", "5", 14), ("rows_captured", "6", 3)]
    counters += [("copy_wait_seconds", "5", 0.75), ("rows_forgotten", "6", 7)]
    counters += [("rows_recomputed", "6", 4), ("rows_rerouted", "6", 2)]
    before = [value(f"{name}_total", engine=engine) for name, engine, _ in counters]
    of_engines.update(
        EngineStats(5, rows_captured=10, copy_wait_s=0.5, requests_tracked=2, host_cache_bytes=7)
    )
    values: dict[str, Any] = {"busiest": [3, 2], "routed": [12, 16], "rows_forgotten": 7}
    values |= {"rows_recomputed": 4, "rows_rerouted": 2}
    of_engines.update(EngineStats(6, rows_captured=3, requests_tracked=1, **values))
    of_engines.update(EngineStats(5, rows_captured=14, copy_wait_s=0.75, host_cache_bytes=9))
    for (name, engine, grown), count in zip(counters, before, strict=True):
        assert value(f"{name}_total", engine=engine) - count == grown
    assert [value("requests_tracked", engine=engine) for engine in ("5", "6")] == [0, 1]
    assert value("host_cache_bytes", engine="5") == 9
    assert [value("expert_load_ratio", engine="6", layer=layer) for layer in ("1", "4")] == [2, 1]
    # nothing stays for servers of later tests
    of_engines.update(EngineStats(6, rows_captured=3, **values))


def test_open_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()  # servers of other tests in this process count theirs
    monkeypatch.setattr(
        metrics, "BUFFERS_OPEN", Gauge("buffers_open", "", ["model_name"], registry=registry)
    )

    async def counted() -> float | None:
        await show_buffers(frontend.buffers)
        return registry.get_sample_value("buffers_open", {"model_name": MODEL})

    frontend = Frontend()
    frontend.step(output("a", 1, first=0, rows=3))
    assert asyncio.run(counted()) == 1
    frontend.processor.abort_requests(["a"], internal=True)
    assert asyncio.run(counted()) == 0


def test_reports_that_cannot_be_read_do_not_end_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM's output handler ends with what is raised in it; answers go on, and the reports are
    counted."""
    frontend = Frontend()
    frontend.buffers.on_stats = EngineMetrics(MODEL, [1], 8).update
    tokens = frontend.add("b")
    # a negative difference
    more, less = (asdict(EngineStats(7, rows_captured=count)) for count in (5, 4))
    reports: list[Any] = [{"stats": stats} for stats in (more, less, {"unknown": 1}, "none")]
    unknown_cause = [b"", "b", False, 99, 1]
    reports += [
        {"unknown": unknown} for unknown in (5, [5], [["b", False, 99, 1]], [unknown_cause])
    ]
    reports += [5]
    for report in reports:
        outputs = message(output("b", 1, first=0, rows=1))
        outputs[0].kv_transfer_params = report
        frontend.processor.process_outputs(outputs)
    assert frontend.buffers.num_failed_reports == len(reports) - 1
    assert len([record for record in caplog.records if "cannot be read" in record.message]) == 1
    assert tokens.get_nowait() is not None


def test_the_documentation_lists_them_all() -> None:
    listed = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        if match := re.match(rf"- `({PREFIX}\w+)` \((\w+)(.*?)\): ", line):
            name, kind, labels = match.groups()
            of_all = ("model_name",) if listed else ()  # "each but the first has the label"
            listed[name] = (kind, (*of_all, *re.findall(r"`(\w+)`", labels)))
    ours = {}
    for collector in list(REGISTRY._collector_to_names):
        for metric in collector.describe() if hasattr(collector, "describe") else ():
            if metric.name.startswith(PREFIX):
                name = metric.name + ("_total" if metric.type == "counter" else "")
                ours[name] = (metric.type, collector._labelnames)
    assert listed == ours


TWO_PROCESSES = """
import os
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.server.http import metrics

other = os.fork()
metrics.BUFFERS_OPEN.labels("m").set(2)
metrics.ROWS_RETURNED.labels("m").inc(10)
if other:  # engines report to one
    metrics.EngineMetrics("m", [1], 8).update(EngineStats(0, rows_captured=50, requests_tracked=4))
    os.waitpid(other, 0)
    multiprocess.MultiProcessCollector(registry := CollectorRegistry())
    print(generate_latest(registry).decode())
"""


@pytest.mark.e2e
@pytest.mark.release
def test_several_api_processes_are_added_up(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    text = subprocess.check_output([sys.executable, "-c", TWO_PROCESSES], env=env, text=True)
    for line in (
        'buffers_open{model_name="m"} 4.0',
        'rows_returned_total{model_name="m"} 20.0',
        'rows_captured_total{engine="0",model_name="m"} 50.0',
        'requests_tracked{engine="0",model_name="m"} 4.0',
    ):
        assert PREFIX + line in text
