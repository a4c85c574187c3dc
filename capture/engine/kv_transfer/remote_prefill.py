"""Rows that came with `kv_transfer_params`. They are valid only while the prefill instance surely keeps their KV.

NIXL's prefill instance frees a prompt's KV when its lease ends, when a request has pulled it, or when the decode
request is aborted. A later pull reads whatever those blocks contain by then, without an error. The decode instance
extends the lease: its steps send heartbeats for all waiting requests, at most one per sixth of a lease, and each sets
the time left to two thirds of a lease. The first heartbeat to an instance may be used up by the handshake.
(vLLM 0.32, `kv_connector/v1/nixl/`: `kv_lease_duration`, `_send_heartbeats`, `_get_new_notifs`.)

So a request must arrive within a third of the lease, and a step must run in every sixth of it; then the KV is kept for
at least another third after the pull begins. A pull that ends later counts as a failed load: on a busy machine, its
heartbeats may have come too late.
"""

import math
import time
from dataclasses import dataclass

from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.handoff import HandedRows

_ARRIVAL = 1 / 3
"""Share of a lease within which a request must arrive."""
_SILENCE = 1 / 6
"""Longest time without a step, as a share of a lease."""
_PULL = 1 / 3
"""Longest time of a pull, as a share of a lease."""

Source = tuple[str | None, str | None]
"""The instance that keeps the KV, and that instance's request id."""


@dataclass
class _Pull:
    """A request that pulls KV. Times are seconds of `time.monotonic`."""

    request: Request
    rows: HandedRows | None  # of the KV, from position 0 on; None once the pull has begun
    arrived: float
    # End of the lease without heartbeats; once the pull has begun, the time by which it must end; no limit once it has
    # ended.
    kept_until: float
    is_lost: bool = False  # whether the blocks may hold another prompt's KV by now


class RemotePrefillRows:
    """Tracks pulls. The state of a request is dropped when it ends; pulled KV is remembered until its lease ends. The
    lease is equal in both instances."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._pulls: dict[str, _Pull] = {}
        self._came: dict[Source, tuple[str, float]] = {}  # first request for it, and when the lease is over
        self._waits_for: dict[str, str] = {}  # later requests for the same KV, and the first one
        self._last_step = time.monotonic()

    def __len__(self) -> int:
        """Number of requests with state here."""
        return len(self._pulls) + len(self._waits_for)

    def until(self) -> float:
        """Unix time by which a decode instance must start pulling KV that is offered now."""
        return time.time() + self._lease_s * _ARRIVAL

    def add(self, request: Request, rows: HandedRows, source: Source, until: float, is_first: bool) -> bool:
        """Adds a request that is to pull KV, with the KV's rows from position 0 on.

        Returns whether it may pull: False if it is too late, and for all but the first request for this KV. `until` is
        that of the prefill instance. `is_first` says whether it is the first choice of its prompt; other choices may be
        in other engines (data parallelism).
        """
        now = time.monotonic()
        left = until - time.time()
        if left < 0:
            return False
        self._forget_sources(now)
        if source in self._came:
            self._waits_for[request.request_id] = self._came[source][0]
            return False
        if not is_first:
            return False
        left = min(left, self._lease_s * _ARRIVAL)  # whatever a client sends
        self._came[source] = request.request_id, now + self._lease_s
        self._pulls[request.request_id] = _Pull(request, rows, now, now + left + self._lease_s * (1 - _ARRIVAL))
        return True

    def _forget_sources(self, now: float) -> None:
        """Drops sources whose lease is over. They are in the order of its end."""
        while self._came:
            source, (_, until) = next(iter(self._came.items()))
            if until > now:
                return
            del self._came[source]

    def step(self) -> None:
        """Called in every step. Without steps, as during a pause, there are no heartbeats."""
        now, before = time.monotonic(), self._last_step
        self._last_step = now
        self._forget_sources(now)
        if now - before <= self._lease_s * _SILENCE:
            return
        for pull in self._pulls.values():
            if pull.rows is not None:
                pull.is_lost |= now - max(before, pull.arrived) > self._lease_s * _SILENCE

    def must_wait(self, request_id: str) -> bool:
        """Whether another request is about to load the same KV into the prefix cache."""
        first = self._pulls.get(self._waits_for.get(request_id, ""))
        return first is not None and first.request.status < RequestStatus.RUNNING

    def is_lost(self, request_id: str) -> bool:
        """Whether, as of the last step, the blocks may hold another prompt's KV."""
        pull = self._pulls.get(request_id)
        return pull is not None and pull.is_lost

    def begin(self, request_id: str) -> HandedRows | None:
        """Called when a pull begins. Returns the rows, or None if they may not belong to the KV."""
        pull = self._pulls.get(request_id)
        if pull is None or pull.is_lost:
            return None
        now = time.monotonic()
        if now - pull.arrived >= self._lease_s * (1 - _ARRIVAL):  # by now, heartbeats have extended the lease
            pull.kept_until = max(pull.kept_until, now + self._lease_s * _PULL)
        rows, pull.rows = pull.rows, None
        return rows

    def end(self, request_id: str) -> bool:
        """Called when a load has ended. Returns whether it is a pull that may have read the blocks after the lease. A
        request pulls once: what it loads later, perhaps in place of a late pull, has no lease."""
        pull = self._pulls.get(request_id)
        if pull is None or pull.rows is not None:
            return False
        is_late = time.monotonic() > pull.kept_until
        pull.kept_until = math.inf
        return is_late

    def forget(self, request_id: str) -> None:
        """Called if a request pulls nothing, and when it ends."""
        self._pulls.pop(request_id, None)
        self._waits_for.pop(request_id, None)
