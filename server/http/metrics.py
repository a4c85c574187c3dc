"""Metrics of the capture, next to vLLM's own in `/metrics`. `docs/metrics.md` explains each.

vLLM exports every metric that is registered with prometheus_client. With several API processes it adds up their values;
this is right for the metrics of an engine because only one API process receives them.
"""

import asyncio
from collections.abc import Sequence, Sized

from prometheus_client import Counter, Gauge

from routed_experts.capture.stats import EngineStats
from routed_experts.protocol.version import VERSION
from routed_experts.server.http.encoding import Sent
from routed_experts.server.vllm_api import VLLM_VERSION

_NOT_CAPTURED, _NOT_ARRIVED = "not_captured", "not_arrived"

BUILD_INFO = Gauge(  # prometheus_client's Info does not work with several API processes
    "routed_experts_build_info", "1; the labels are versions.", ["version", "vllm_version"], multiprocess_mode="max"
)
ROWS_RETURNED = Counter("routed_experts_rows_returned", "Rows in responses.")
ROWS_MISSING = Counter("routed_experts_rows_missing", "Rows returned as -1 because they are unknown.", ["reason"])
SENT_BYTES = Counter("routed_experts_sent_bytes", "Encoded bytes of the arrays in responses.")
FEEDS_OPEN = Gauge("routed_experts_feeds_open", "Running choices with rows.", multiprocess_mode="livesum")

ROWS_CAPTURED = Counter("routed_experts_rows_captured", "Tokens whose routing was captured.", ["engine"])
ROWS_FORGOTTEN = Counter(
    "routed_experts_rows_forgotten",
    "Rows discarded because a KV connector behaved unexpectedly.",
    ["engine"],
)
COPY_WAIT = Counter(
    "routed_experts_copy_wait_seconds", "Seconds that steps waited for the copy of their rows to the host.", ["engine"]
)
REQUESTS_TRACKED = Gauge(
    "routed_experts_requests_tracked",
    "Running requests with routing.",
    ["engine"],
    multiprocess_mode="mostrecent",
)
HOST_CACHE_BYTES = Gauge(
    "routed_experts_host_cache_bytes",
    "Memory of the rows of cached and offloaded tokens.",
    ["engine"],
    multiprocess_mode="mostrecent",
)
EXPERT_LOAD = Gauge(
    "routed_experts_expert_load_ratio",
    "Recent load of the busiest expert of a layer, divided by the mean load.",
    ["engine", "layer"],
    multiprocess_mode="mostrecent",
)

RECORDED_REQUESTS = Counter("routed_experts_recorded_requests", "Prompts whose routing was written to a file.")
RECORDED_BYTES = Counter("routed_experts_recorded_bytes", "Bytes of the files with recorded routing.")
RECORD_DROPPED = Counter("routed_experts_record_dropped", "Prompts that were to be recorded and are not.", ["reason"])

BUILD_INFO.labels(VERSION, VLLM_VERSION).set(1)
for _reason in (_NOT_CAPTURED, _NOT_ARRIVED):
    ROWS_MISSING.labels(_reason)  # exported as 0 from the start


def count_response(sent: Sent, lost: int) -> None:
    """Counts a finished response.

    Args:
        lost: number of rows that did not arrive from the engine.
    """
    ROWS_RETURNED.inc(sent.rows)
    SENT_BYTES.inc(sent.num_bytes)
    if sent.missing:
        lost = min(lost, sent.missing)
        ROWS_MISSING.labels(_NOT_ARRIVED).inc(lost)
        ROWS_MISSING.labels(_NOT_CAPTURED).inc(sent.missing - lost)


class EngineMetrics:
    """The metrics of engines.

    Args:
        layer_ids: decoder layer of each of the L layers.
        num_experts: experts per layer.
    """

    def __init__(self, layer_ids: Sequence[int], num_experts: int) -> None:
        self._layer_ids = layer_ids
        self._num_experts = num_experts
        self._last: dict[int, EngineStats] = {}

    def update(self, stats: EngineStats) -> None:
        """Exports the counters that an engine reported."""
        last = self._last.get(stats.engine, EngineStats(stats.engine))
        self._last[stats.engine] = stats
        engine = str(stats.engine)  # as vLLM labels its metrics
        ROWS_CAPTURED.labels(engine).inc(stats.rows_captured - last.rows_captured)
        ROWS_FORGOTTEN.labels(engine).inc(stats.rows_forgotten - last.rows_forgotten)
        COPY_WAIT.labels(engine).inc(stats.copy_wait_s - last.copy_wait_s)
        REQUESTS_TRACKED.labels(engine).set(stats.requests_tracked)
        HOST_CACHE_BYTES.labels(engine).set(stats.host_cache_bytes)
        for layer, busiest, routed in zip(self._layer_ids, stats.busiest, stats.routed, strict=False):
            EXPERT_LOAD.labels(engine, str(layer)).set(busiest * self._num_experts / routed if routed else 0)


async def watch_buffers(buffers: Sized, interval_s: float = 1.0) -> None:
    """Updates the number of open buffers once a second, because vLLM has no hook for the end of a request."""
    while True:
        FEEDS_OPEN.set(len(buffers))
        await asyncio.sleep(interval_s)
