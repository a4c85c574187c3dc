"""Metrics of the capture, next to vLLM's own in `/metrics`. `docs/metrics.md` explains each.

vLLM serves what is registered with prometheus_client in this process. With several API processes it adds up what each
wrote into a file, which the metrics of an engine survive only because one API process alone gets its numbers.
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
ROWS_RETURNED = Counter("routed_experts_rows_returned", "Rows that were put into answers.")
ROWS_MISSING = Counter("routed_experts_rows_missing", "Rows of answers that are not known and are -1.", ["reason"])
SENT_BYTES = Counter("routed_experts_sent_bytes", "Bytes of the arrays of rows in answers, as encoded.")
FEEDS_OPEN = Gauge("routed_experts_feeds_open", "Choices under way that have rows.", multiprocess_mode="livesum")

ROWS_CAPTURED = Counter("routed_experts_rows_captured", "Tokens whose routing was captured.", ["engine"])
ROWS_FORGOTTEN = Counter(
    "routed_experts_rows_forgotten",
    "Rows given up because the KV connector did something unexpected.",
    ["engine"],
)
COPY_WAIT = Counter(
    "routed_experts_copy_wait_seconds", "Seconds that steps waited for their rows to reach the host.", ["engine"]
)
REQUESTS_TRACKED = Gauge(
    "routed_experts_requests_tracked",
    "Requests that asked for routing and have not ended.",
    ["engine"],
    multiprocess_mode="mostrecent",
)
HOST_CACHE_BYTES = Gauge(
    "routed_experts_host_cache_bytes",
    "Memory that the rows of the tokens in the KV cache take.",
    ["engine"],
    multiprocess_mode="mostrecent",
)
EXPERT_LOAD = Gauge(
    "routed_experts_expert_load_ratio",
    "How often the busiest expert of a layer was chosen lately, over the mean of all its experts.",
    ["engine", "layer"],
    multiprocess_mode="mostrecent",
)

BUILD_INFO.labels(VERSION, VLLM_VERSION).set(1)
for _reason in (_NOT_CAPTURED, _NOT_ARRIVED):
    ROWS_MISSING.labels(_reason)  # so that they are there from the start, as 0


def count_answer(sent: Sent, lost: int) -> None:
    """Counts a response that has ended.

    Args:
        lost: how many rows did not arrive from the engine.
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
        layer_ids: absolute decoder-layer index of each of the L layers.
        num_experts: of a layer.
    """

    def __init__(self, layer_ids: Sequence[int], num_experts: int) -> None:
        self._layer_ids = layer_ids
        self._num_experts = num_experts
        self._last: dict[int, EngineStats] = {}

    def update(self, stats: EngineStats) -> None:
        """Takes the report of an engine."""
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
    """Updates the number of open buffers once a second: vLLM has no hook for requests that end or abort."""
    while True:
        FEEDS_OPEN.set(len(buffers))
        await asyncio.sleep(interval_s)
