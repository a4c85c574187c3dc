"""Rows that came with `kv_transfer_params`, valid as long as the prefill instance surely keeps their KV.

NIXL's prefill instance gives a prompt's KV up when its lease ends, when a request has pulled it, or when one that was
to pull it is aborted. A later pull reads whatever is in those blocks by then, without an error. The decode
instance extends the lease: with its steps it sends heartbeats for all requests that wait, at most one in a sixth of a
lease, each of which extends it to two thirds of its length. The first to an instance may be spent on the handshake.
(vLLM 0.32, `kv_connector/v1/nixl/`: `kv_lease_duration`, `_send_heartbeats`, `_get_new_notifs`.)

So a request has to arrive within a third of the lease, and there must be a step in every sixth of it; then its KV is
kept for another third when its pull begins. A pull that ends later is a failed load: the heartbeats of its time may
have come too late on a busy machine.
"""

import time
from dataclasses import dataclass

from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.handoff import WireRows

_ARRIVAL = 1 / 3
"""The part of a lease within which a request is to arrive."""
_SILENCE = 1 / 6
"""The part of a lease for which there may be no step."""
_PULL = 1 / 3
"""The part of a lease that a pull may take."""

Source = tuple[str | None, str | None]
"""The instance that keeps the KV, and its name for it."""


@dataclass
class _Pull:
    """A request that comes for KV. Times are seconds of `time.monotonic`.

    Attributes:
        rows: of the KV, from position 0 on; None once the pull has begun.
        kept_until: the end of the lease without heartbeats; once the pull has begun, when it has to be over.
        is_lost: whether the KV may be another prompt's by now.
    """

    request: Request
    rows: WireRows | None
    arrived: float
    kept_until: float
    is_lost: bool = False


class RemotePrefillRows:
    """Tracks pulls. The state of a request is dropped when it ends; pulled KV is remembered until its lease ends.

    Args:
        lease_s: of this instance's connector, which is that of the other, in seconds.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._pulls: dict[str, _Pull] = {}
        self._came: dict[Source, tuple[str, float]] = {}  # the request that came for it, and until when others may
        self._waits_for: dict[str, str] = {}  # requests that came for the same KV later, and who was first
        self._last_step = time.monotonic()

    def __len__(self) -> int:
        """Requests that there is state of."""
        return len(self._pulls) + len(self._waits_for)

    def until(self) -> float:
        """Unix time by which a decode instance must start pulling KV that is offered now."""
        return time.time() + self._lease_s * _ARRIVAL

    def add(self, request: Request, rows: WireRows, source: Source, until: float, is_first: bool) -> bool:
        """Takes the rows [n, L, K] of the KV that a request is to pull, from position 0 on.

        Args:
            until: as `until` of the prefill instance gave it.
            is_first: whether it is the first choice of its prompt; others may be in other engines (data parallelism).

        Returns whether the KV is still there: False if it is too late, and for all but the first that came for it.
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
        """Those whose lease is over; they are in the order of its end."""
        while self._came:
            source, (_, until) = next(iter(self._came.items()))
            if until > now:
                return
            del self._came[source]

    def step(self) -> None:
        """Called in every step. While there was none, as during a pause, there were no heartbeats."""
        now, before = time.monotonic(), self._last_step
        self._last_step = now
        self._forget_sources(now)
        if now - before <= self._lease_s * _SILENCE:
            return
        for pull in self._pulls.values():
            if pull.rows is not None:
                pull.is_lost |= now - max(before, pull.arrived) > self._lease_s * _SILENCE

    def must_wait(self, request_id: str) -> bool:
        """Whether another request is about to bring the KV into the prefix cache."""
        first = self._pulls.get(self._waits_for.get(request_id, ""))
        return first is not None and first.request.status < RequestStatus.RUNNING

    def is_lost(self, request_id: str) -> bool:
        """Whether the KV may be another prompt's by now, as of the last step."""
        pull = self._pulls.get(request_id)
        return pull is not None and pull.is_lost

    def begin(self, request_id: str) -> WireRows | None:
        """Called when a pull begins: the rows, if the KV is surely theirs."""
        pull = self._pulls.get(request_id)
        if pull is None or pull.is_lost:
            return None
        now = time.monotonic()
        if now - pull.arrived >= self._lease_s * (1 - _ARRIVAL):  # by now, heartbeats have extended the lease
            pull.kept_until = max(pull.kept_until, now + self._lease_s * _PULL)
        rows, pull.rows = pull.rows, None
        return rows

    def came_too_late(self, request_id: str) -> bool:
        """Called when a pull has ended: whether it may have read what was in those blocks after the lease."""
        pull = self._pulls.get(request_id)
        return pull is not None and pull.rows is None and time.monotonic() > pull.kept_until

    def forget(self, request_id: str) -> None:
        """Called when a request pulls nothing, or has ended."""
        self._pulls.pop(request_id, None)
        self._waits_for.pop(request_id, None)
