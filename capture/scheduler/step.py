"""A step of the engine, from when it is scheduled until its rows are distributed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput

from routed_experts.capture.scheduler.expected_routing import ExpectedRouting
from routed_experts.capture.scheduler.kv.children import Load
from routed_experts.capture.scheduler.kv.offloading import OffloadStore
from routed_experts.capture.wire.message import PlacedRows
from routed_experts.capture.wire.transport import StepRows
from routed_experts.protocol.codec import Rows

BlockTable = Sequence[Any]
"""The KV blocks of a sequence: vLLM's `KVCacheBlock`s. Objects, since few callers need the ids."""


class _OfStep(dict[str, int]):
    """A number for each request of a step."""

    def __missing__(self, request_id: str) -> int:
        raise AssertionError(
            f"request {request_id!r}: expected in the step, which actually has {list(self)}"
        )


@dataclass(eq=False)
class LostKV:
    """KV that a request has lost, until all of it is computed again."""

    rows: Rows  # the ids [n, L, K] that positions 0 to n had; the last is that of the last row sent


@dataclass
class Recomputing:
    """Lost KV that a step computes again; both by request."""

    rows: dict[str, PlacedRows] = field(default_factory=dict)  # of the step's tokens
    ends: dict[str, LostKV] = field(default_factory=dict)  # what is computed when it has arrived


@dataclass
class Step:
    """A step, and what happens to rows with it."""

    number: int  # which no other step of any data-parallel engine has
    scheduled: SchedulerOutput
    # of requests whose rows before the step's are needed, by their ids
    block_tables: Mapping[str, BlockTable]
    loads: Sequence[Load] = ()  # before or during it
    stores: Sequence[OffloadStore] = ()  # before or after it runs
    # Ids that are other requests' by now: the requests that it ran were aborted, and the ids have
    # come again.
    reused_ids: set[str] = field(default_factory=set)
    # of requests that say something about their experts, by their ids
    inputs: Mapping[str, ExpectedRouting] = field(default_factory=dict)
    recomputing: Recomputing = field(default_factory=Recomputing)
    _captured: StepRows | None = None
    _batch_index: _OfStep = field(default_factory=_OfStep)  # of each request

    def arrive(self, captured: StepRows, batch_index: Mapping[str, int]) -> None:
        """Called with the rows of the step's output, and the index of each request in the batch."""
        self._captured = captured
        self._batch_index = _OfStep(batch_index)

    @cached_property
    def starts(self) -> Mapping[str, int]:
        """Tokens that each request had computed when the step was scheduled."""
        cached = self.scheduled.scheduled_cached_reqs
        starts = _OfStep(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in self.scheduled.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
        return starts

    @property
    def captured(self) -> StepRows:
        assert self._captured is not None, (
            f"a step of requests {list(self.scheduled.num_scheduled_tokens)}: expected rows with "
            "its output, actually there are none"
        )
        return self._captured

    def rows_of(self, request_id: str) -> Rows:
        """The rows [n, L, K] (with weights [n, 3L, K]) of a request, from the position on at which
        the step began; a view."""
        return self.part_of(request_id, self.captured.rows)

    def part_of(self, request_id: str, of_step: Rows) -> Rows:
        """A request's part of an array that has a row for each token of the step; a view."""
        index = self._batch_index[request_id]
        offsets = self.captured.offsets
        return of_step[offsets[index] : offsets[index + 1]]

    def starts_of(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        """`starts` of these requests: [n]."""
        starts = map(self.starts.__getitem__, request_ids)
        return np.fromiter(starts, np.int64, len(request_ids))

    def extents_of(self, request_ids: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the rows of these requests are in the step's: the index of each one's first row
        [n], and the number of its rows [n]."""
        batch_indexes = map(self._batch_index.__getitem__, request_ids)
        index = np.fromiter(batch_indexes, np.int64, len(request_ids))
        offsets = self.captured.offsets
        first = offsets[index]
        return first, offsets[index + 1] - first
