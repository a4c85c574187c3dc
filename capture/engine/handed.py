"""Rows of KV that another instance keeps for a request here, for as long as it surely keeps it.

NIXL's prefill instance gives a prompt's KV up when its lease ends, when a request has pulled it, or when one that was
to pull it is aborted. Whoever pulls afterwards gets what is in those blocks by then, without a word. The decode
instance extends the lease: with its steps it sends heartbeats for all requests that have arrived, one in a sixth of a
lease at most, each of which extends it to two thirds of its length. The first to an instance may be spent on getting to
know it. (vLLM 0.32, `kv_connector/v1/nixl/`: `kv_lease_duration`, `_send_heartbeats`, `_get_new_notifs`.)
"""

import time
from dataclasses import dataclass

from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.handoff import WireRows

_ARRIVAL = 1 / 3
"""The part of a lease within which a request is to arrive: two heartbeats, a silence and a sixth to spare follow."""
_SILENCE = 1 / 6
"""The part of a lease for which there may be no step."""

_LONGEST_LEASE_S = 600
"""Where it is not known."""

Source = tuple[object, object]
"""The instance that keeps the KV, and its name for it."""


@dataclass
class _Held:
    rows: WireRows
    arrived: float
    is_lost: bool = False


class HandedRows:
    """Args:
    lease_s: of this instance's connector, which is that of the other; None if it is not known.
    """

    def __init__(self, lease_s: float | None) -> None:
        self._lease_s = lease_s
        self._held: dict[str, _Held] = {}
        self._pulls: dict[Source, tuple[Request, float]] = {}  # who came for it, and until when another may
        self._second: dict[str, Request] = {}  # by another that came, that one
        self._last_step = time.monotonic()

    def __len__(self) -> int:
        return len(self._held) + len(self._second)

    def until(self) -> float | None:
        """Until when who is to pull KV that is offered now is to come, in seconds since 1970; None if nobody knows."""
        return None if self._lease_s is None else time.time() + self._lease_s * _ARRIVAL

    def add(self, request: Request, rows: WireRows, source: Source, until: float | None, is_first: bool) -> bool:
        """Takes the rows [n, L, K] of the KV that a request is to pull, from position 0 on.

        Args:
            until: when it is too late to come, in seconds since 1970; None if nobody knows.
            is_first: of the choices of its prompt, others of which may be in other engines (data parallelism).

        Returns whether the KV is still there: False if it is too late, and for all but the first that came for it.
        """
        if until is not None:
            now = time.time()
            self._forget_pulls(now)
            if now > until:
                return False
            if source in self._pulls:
                self._second[request.request_id] = self._pulls[source][0]
                return False
            if not is_first:
                return False
            latest = now + (self._lease_s or _LONGEST_LEASE_S)  # whatever a client says
            self._pulls[source] = request, min(until, latest)
        self._held[request.request_id] = _Held(rows, time.monotonic())
        return True

    def _forget_pulls(self, now: float) -> None:
        """Those that ended before now, the oldest first: one that ends before an older one waits for it."""
        while self._pulls:
            source, (_, until) = next(iter(self._pulls.items()))
            if until > now:
                return
            del self._pulls[source]

    def step(self) -> None:
        """Called in every step. While there was none, as during a pause, there were no heartbeats."""
        now, before = time.monotonic(), self._last_step
        self._last_step = now
        if self._lease_s is None or now - before <= self._lease_s * _SILENCE:
            return
        for held in self._held.values():
            held.is_lost |= now - max(before, held.arrived) > self._lease_s * _SILENCE

    def must_wait(self, request_id: str) -> bool:
        """Whether another request is about to bring the KV into the prefix cache."""
        first = self._second.get(request_id)
        return first is not None and first.status < RequestStatus.RUNNING

    def is_lost(self, request_id: str) -> bool:
        """Whether the KV may be another prompt's by now, as of the last step."""
        held = self._held.get(request_id)
        return held is not None and held.is_lost

    def take(self, request_id: str) -> WireRows | None:
        """The rows, if the KV is surely theirs; they are forgotten."""
        held = self._held.pop(request_id, None)
        return None if held is None or held.is_lost else held.rows

    def forget(self, request_id: str) -> None:
        """Called when a request pulls nothing, or has ended."""
        self._held.pop(request_id, None)
        self._second.pop(request_id, None)
