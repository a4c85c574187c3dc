"""Which requests pull a prompt's KV from a prefill instance, and until when the rows that came with
it are valid.

Rows are valid if their KV's pull ended before `until`, a time that the prefill instance sends. It
keeps the KV for `kv_lease_duration`, unless a request pulls it or gives it up before. Later the
blocks belong to other prompts, and a pull reads those without an error. So

- only the first request for some KV pulls it;
- a request that has not begun to pull by `until` computes its prompt;
- a pull that ends after `until` counts as a failed load.

Heartbeats of the decode instance only make the lease longer, so they do not matter here. (vLLM
0.32, `nixl/`.)
"""

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.wire.prefill_rows import PrefillRows

_LEASE_SHARE = 0.9
"""Share of the lease in which rows are valid. The rest is for clocks of the two instances that
differ."""

Source = tuple[str | None, str | None]
"""The instance that keeps the KV, and that instance's request id."""


@dataclass(eq=False)
class Pull:
    """Of a request, whose id may be another's after it has ended."""

    request: Request
    rows: PrefillRows | None  # of the KV; None once the pull has begun
    until: float  # of `time.monotonic`; no limit once the pull has ended

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.until


class Arrival(NamedTuple):
    """A request that came with rows of KV."""

    source: Source
    pull: Pull | None = None  # if it may pull the KV
    after: Pull | None = None  # that of the request that came first for this KV, if another did


class _FirstPull(NamedTuple):
    """The pull of the request that came first for some KV."""

    pull: Pull
    forget_at: float  # of `time.monotonic`


class Pulls:
    """State of requests until they end. Which request came first for some KV is remembered for a
    lease."""

    def __init__(self, lease_s: float | None) -> None:
        self.lease_s = lease_s  # equal in both instances; None if unknown: then no rows come
        self._pulls: dict[str, Pull] = {}  # by request id
        self._first_pulls: dict[Source, _FirstPull] = {}  # oldest first
        self._waits_for: dict[str, Pull] = {}  # by the ids of later requests for the same KV

    def __len__(self) -> int:
        return len(self._pulls) + len(self._waits_for)

    def until(self) -> float:
        """Unix time before which a pull of KV that is offered now must end."""
        assert self.lease_s is not None
        return time.time() + self.lease_s * _LEASE_SHARE

    def arrival(
        self, request: Request, rows: PrefillRows, source: Source, is_first: bool
    ) -> Arrival:
        """What a request that came with rows of KV may do. Nothing of it is remembered before
        `add`.

        `is_first`: whether it is the first of its prompt's choices in all engines. The others pull
        nothing.
        """
        assert self.lease_s is not None
        left_s = rows.until - time.time()
        if not 0 <= left_s <= self.lease_s:  # more is left only where clocks or leases differ
            return Arrival(source)
        now = time.monotonic()
        self._forget_first_pulls(now)
        if source in self._first_pulls:
            return Arrival(source, after=self._first_pulls[source].pull)
        if not is_first:
            return Arrival(source)
        return Arrival(source, pull=Pull(request, rows, until=now + left_s))

    def _forget_first_pulls(self, now: float) -> None:
        """Forgets those whose time has come."""
        while self._first_pulls:
            source, oldest = next(iter(self._first_pulls.items()))
            if oldest.forget_at > now:
                return
            del self._first_pulls[source]

    def add(self, request: Request, arrival: Arrival) -> None:
        """Called when vLLM has accepted the request."""
        assert self.lease_s is not None
        if arrival.after is not None:
            self._waits_for[request.request_id] = arrival.after
        if arrival.pull is not None:
            forget_at = time.monotonic() + self.lease_s
            self._first_pulls[arrival.source] = _FirstPull(arrival.pull, forget_at)
            self._pulls[request.request_id] = arrival.pull

    def must_wait(self, request_id: str) -> bool:
        """Whether another request is about to load the same KV into the prefix cache."""
        first = self._waits_for.get(request_id)
        if first is None:
            return False
        has_ended = self._pulls.get(first.request.request_id) is not first
        return not has_ended and first.request.status < RequestStatus.RUNNING

    def is_late(self, request_id: str) -> bool:
        """Whether a request that came with rows can pull no more."""
        pull = self._pulls.get(request_id)
        return pull is not None and pull.is_late

    def begin(self, request_id: str) -> PrefillRows | None:
        """Called when a pull begins. Returns the rows that came with the KV, if any did."""
        pull = self._pulls.get(request_id)
        if pull is None:
            return None
        rows = pull.rows
        pull.rows = None
        return rows

    def end(self, request_id: str) -> bool:
        """Called when a load has ended. Returns whether it is a pull that ended too late. A request
        pulls once: what it loads later, perhaps in place of a late pull, has no lease."""
        pull = self._pulls.get(request_id)
        if pull is None or pull.rows is not None:
            return False
        is_late = pull.is_late
        pull.until = math.inf
        return is_late

    def forget(self, request_id: str) -> None:
        """Called if a request pulls nothing, and when it ends."""
        self._pulls.pop(request_id, None)
        self._waits_for.pop(request_id, None)
