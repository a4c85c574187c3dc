"""Metrics of the capture, next to vLLM's own in `/metrics`. `docs/metrics.md` explains each.

vLLM exports every metric that is registered with prometheus_client. With several API processes it
adds up their values; this is right for the metrics of an engine because only one API process
receives them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from prometheus_client import Counter, Gauge

from routed_experts.capture.wire.message import Cause
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.protocol.version import VERSION
from routed_experts.server.http.encoding.encoding import Encoder
from routed_experts.server.outputs.processor import RowBuffers
from routed_experts.server.outputs.row_buffer import Causes
from routed_experts.server.vllm_api import VLLM_VERSION

_NOT_CAPTURED = "not_captured"
_NOT_ARRIVED = "not_arrived"
_STORED = "stored"
_FAILED = "failed"
_KV_TRANSFER = "kv_transfer"
"""The reason that follows from settings. The others are faults."""
_MODEL = "model_name"  # as vLLM labels its metrics
_ENGINE = "engine"


class NotRecorded(StrEnum):
    """Why a prompt is not recorded; `docs/metrics.md` explains each."""

    FULL = "full"
    QUEUE = "queue"
    MEMORY = "memory"
    FAILED = "failed"
    NO_ROWS = "no_rows"
    STREAMED_INPUT = "streamed_input"
    BEAM_SEARCH = "beam_search"
    INPUT = "input"


def _counter(name: str, documentation: str, *labels: str) -> Counter:
    return Counter(f"routed_experts_{name}", documentation, [_MODEL, *labels])


def _gauge(name: str, documentation: str, *labels: str) -> Gauge:
    """A gauge of the API processes, or of an engine, whose last value counts."""
    mode: Any = "mostrecent" if labels else "livesum"
    return Gauge(f"routed_experts_{name}", documentation, [_MODEL, *labels], multiprocess_mode=mode)


BUILD_INFO = Gauge(  # prometheus_client's Info does not work with several API processes
    "routed_experts_build_info",
    "1; the labels are versions.",
    ["version", "vllm_version"],
    multiprocess_mode="max",
)
ROWS_RETURNED = _counter("rows_returned", "Rows in responses.")
ROWS_MISSING = _counter("rows_missing", "Rows returned as -1 because they are unknown.", "reason")
SENT_BYTES = _counter("sent_bytes", "Encoded bytes of the arrays in responses.")
BUFFERS_OPEN = _gauge("buffers_open", "Running choices with rows.")
REPORTS_FAILED = _gauge("reports_failed", "Reports of engines that could not be read.")

STORED_ARRAYS = _counter("stored_arrays", "Arrays to be returned by reference.", "result")
STORE_BYTES = Gauge(
    "routed_experts_store_bytes",
    "Size of the arrays in the store's folder.",
    [_MODEL],
    multiprocess_mode="livemax",  # each process counts those of all
)
STORE_WAITING = _gauge(
    "store_waiting", "Responses that wait for their arrays to be stored, or for a turn."
)

RECORDED_REQUESTS = _counter("recorded_requests", "Prompts whose routing was written to a file.")
RECORDED_BYTES = _counter("recorded_bytes", "Bytes of the files with recorded routing.")
RECORD_DROPPED = _counter(
    "record_dropped", "Prompts that were to be recorded and are not.", "reason"
)

# By their names in `EngineStats`.
ENGINE_COUNTERS = {
    "rows_captured": _counter("rows_captured", "Tokens whose routing was captured.", _ENGINE),
    "rows_recomputed": _counter(
        "rows_recomputed", "Tokens computed again with the experts that they had.", _ENGINE
    ),
    "rows_rerouted": _counter(
        "rows_rerouted",
        "Tokens computed again, after their rows were sent, as routed then.",
        _ENGINE,
    ),
    "rows_forgotten": _counter(
        "rows_forgotten", "Rows discarded because a KV connector behaved unexpectedly.", _ENGINE
    ),
    "copy_wait_s": _counter(
        "copy_wait_seconds",
        "Seconds that steps waited for the copy of their rows to the host.",
        _ENGINE,
    ),
}
ENGINE_GAUGES = {
    "requests_tracked": _gauge("requests_tracked", "Running requests with routing.", _ENGINE),
    "host_cache_bytes": _gauge(
        "host_cache_bytes", "Memory of the rows of cached and offloaded tokens.", _ENGINE
    ),
}
EXPERT_LOAD = _gauge(
    "expert_load_ratio",
    "Recent load of the busiest expert of a layer, divided by the mean load.",
    _ENGINE,
    "layer",
)

BUILD_INFO.labels(VERSION, VLLM_VERSION).set(1)

_model = ""
"""Name of the served model. Other names that it is served under are not told apart."""


def label_with(model: str) -> None:
    """Labels the metrics of responses with `model` from now on, and exports the counters as 0."""
    global _model
    _model = model
    ROWS_RETURNED.labels(model)
    SENT_BYTES.labels(model)
    STORE_BYTES.labels(model)
    STORE_WAITING.labels(model)
    for result in (_STORED, _FAILED):
        STORED_ARRAYS.labels(model, result)
    for reason in (_NOT_CAPTURED, _NOT_ARRIVED, _KV_TRANSFER):
        ROWS_MISSING.labels(model, reason)


def count_response(encoder: Encoder, lost: int, causes: Causes) -> None:
    """Counts a finished response. `lost` rows did not arrive from the engine; it did not know
    others for `causes`."""
    ROWS_RETURNED.labels(_model).inc(encoder.counts.rows)
    SENT_BYTES.labels(_model).inc(encoder.num_bytes)
    left = encoder.counts.missing
    if not left:
        return
    for reason, count in ((_NOT_ARRIVED, lost), (_KV_TRANSFER, causes[Cause.KV_TRANSFER])):
        count = min(count, left)
        ROWS_MISSING.labels(_model, reason).inc(count)
        left -= count
    ROWS_MISSING.labels(_model, _NOT_CAPTURED).inc(left)


def count_stored(succeeded: bool) -> None:
    """Counts an array that was to be stored, or a request that was refused because the store is
    full."""
    STORED_ARRAYS.labels(_model, _STORED if succeeded else _FAILED).inc()


@contextmanager
def waiting_for_store() -> Iterator[None]:
    """Counts a response while its arrays are stored, or wait for that."""
    gauge = STORE_WAITING.labels(_model)
    gauge.inc()
    try:
        yield
    finally:
        gauge.dec()


def show_store(num_bytes: int) -> None:
    STORE_BYTES.labels(_model).set(num_bytes)


def count_recorded(num_bytes: int) -> None:
    RECORDED_REQUESTS.labels(_model).inc()
    RECORDED_BYTES.labels(_model).inc(num_bytes)


def count_dropped(reason: NotRecorded, count: int = 1) -> None:
    """Counts prompts that were to be recorded and are not. A `count` of 0 exports the counter."""
    RECORD_DROPPED.labels(_model, reason).inc(count)


class EngineMetrics:
    def __init__(self, model: str, layer_ids: Sequence[int], num_experts: int) -> None:
        self._model = model
        self._layer_ids = layer_ids  # decoder layer of each of the L layers
        self._num_experts = num_experts
        self._last: dict[int, EngineStats] = {}

    def update(self, stats: EngineStats) -> None:
        last = self._last.get(stats.engine, EngineStats(stats.engine))
        self._last[stats.engine] = stats
        labels = self._model, str(stats.engine)
        for name, counter in ENGINE_COUNTERS.items():
            counter.labels(*labels).inc(getattr(stats, name) - getattr(last, name))
        for name, gauge in ENGINE_GAUGES.items():
            gauge.labels(*labels).set(getattr(stats, name))
        for layer, busiest, routed in zip(
            self._layer_ids, stats.busiest, stats.routed, strict=False
        ):
            EXPERT_LOAD.labels(*labels, str(layer)).set(
                busiest * self._num_experts / routed if routed else 0
            )


async def show_buffers(buffers: RowBuffers) -> None:
    """Updates the metrics of buffers. Called once a second, because vLLM has no hook for the end of
    a request."""
    BUFFERS_OPEN.labels(_model).set(len(buffers))
    REPORTS_FAILED.labels(_model).set(buffers.num_failed_reports)
