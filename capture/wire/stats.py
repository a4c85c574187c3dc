"""What an engine counts of the capture, for the metrics of the API processes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire.message import PlacedRows
from routed_experts.protocol.codec import UNKNOWN, Rows

INTERVAL_S = 1.0
"""Between two reports of an engine that is busy, and between two samples of the load of its
experts."""

_SAMPLED_ROWS = 512
# of the counts so far, with each new sample: the load is that of the last ten seconds or so
_EARLIER_SHARE = 0.9


@dataclass
class EngineStats:
    """The numbers of one engine. Counters are cumulative, so a lost report does no harm."""

    engine: int  # data-parallel rank
    rows_captured: int = 0  # tokens of all forward passes, padding not counted
    copy_wait_s: float = 0.0  # seconds that outputs of steps waited for their rows
    requests_tracked: int = 0  # requests with the opt-in that the engine holds state for
    host_cache_bytes: int = 0  # memory that the rows in the host cache take
    # For each layer, how often its busiest expert was chosen and how often all of them were, in
    # samples of which newer ones weigh more; empty before the first.
    busiest: list[float] = field(default_factory=list)
    routed: list[float] = field(default_factory=list)
    rows_recomputed: int = 0  # tokens that were computed again with the experts that they had
    rows_rerouted: int = 0  # tokens that were computed again as the router chose then
    rows_forgotten: int = 0  # rows discarded because the KV connector did something unexpected


class ExpertLoad:
    """How often each expert was chosen, as a moving average of samples."""

    def __init__(self) -> None:
        self._counts: NDArray[np.float64] = np.zeros((0, 0))  # [L, experts seen so far]

    def sample(self, rows: Rows) -> None:
        """Counts some of a step's `rows` ([n, L, K]), evenly spread over them."""
        stride = -(-len(rows) // _SAMPLED_ROWS)
        sample = rows[::stride].astype(np.int64)
        if sample.max() < 0:
            return  # none of them is known
        earlier = self._counts
        num_layers = sample.shape[1]
        num_experts = max(int(sample.max()) + 1, earlier.shape[1])
        # a number for each expert of each layer
        numbers = sample + np.arange(num_layers)[:, None] * num_experts
        counts = np.bincount(numbers[sample >= 0], minlength=num_layers * num_experts)
        self._counts = counts.reshape(num_layers, num_experts).astype(np.float64)
        self._counts[: len(earlier), : earlier.shape[1]] += _EARLIER_SHARE * earlier

    def busiest(self) -> list[float]:
        """[L], how often the busiest expert of each layer was chosen."""
        return [float(count) for count in self._counts.max(axis=1, initial=0)]

    def routed(self) -> list[float]:
        """[L], how often all experts of each layer were chosen."""
        return [float(count) for count in self._counts.sum(axis=1)]


class StatsRecorder:
    """Counts what an engine captures, and says when to report it."""

    def __init__(self, engine: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.totals = EngineStats(engine)
        self._clock = clock
        self._load = ExpertLoad()
        self._next_sample = self._next_report = clock()
        self._was_idle = True

    def count_step(self, rows: Rows, copy_wait_s: float) -> None:
        """Counts a step that has arrived with `rows` ([n, L, K]), for which its output waited so
        many seconds."""
        self.totals.rows_captured += len(rows)
        self.totals.copy_wait_s += copy_wait_s
        if len(rows) and self._clock() >= self._next_sample:
            self._next_sample = self._clock() + INTERVAL_S
            self._load.sample(rows)

    def count_recomputed(self, recomputed: Mapping[str, PlacedRows], num_again: int) -> None:
        """Counts tokens that are scheduled to be computed again with the experts that they had. Of
        an unknown row, no expert is given. `num_again`: all tokens so far that were computed again
        after their rows had been sent."""
        for placed in recomputed.values():
            is_known = (placed.rows != UNKNOWN).any(axis=(1, 2))
            self.totals.rows_recomputed += int(is_known.sum())
        self.totals.rows_rerouted = num_again - self.totals.rows_recomputed

    def report(
        self, is_idle: bool, requests_tracked: int, host_cache_bytes: Callable[[], int]
    ) -> EngineStats | None:
        """The numbers after a step, if they are due: once in an interval, and when the engine
        begins or ends work."""
        now = self._clock()
        if not (is_idle or self._was_idle or now >= self._next_report):
            return None
        self._was_idle = is_idle
        self._next_report = now + INTERVAL_S
        return replace(
            self.totals,
            requests_tracked=requests_tracked,
            host_cache_bytes=host_cache_bytes(),
            busiest=self._load.busiest(),
            routed=self._load.routed(),
        )
