"""Selects the rows that each request is sent after a step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.kv.children import Load
from routed_experts.capture.scheduler.kv.offloading import OffloadStore
from routed_experts.capture.scheduler.output_queue import OutputQueue
from routed_experts.capture.scheduler.pending_rows import PendingRows, Piece
from routed_experts.capture.scheduler.request_rows import RequestRows
from routed_experts.capture.wire.envelope import SingleRows
from routed_experts.capture.wire.message import Cause, OptIn, UnknownRows
from routed_experts.capture.wire.rows import ids_of
from routed_experts.protocol.codec import UNKNOWN, Rows

# a child of vLLM's logger, which is configured
logger = init_logger(f"vllm.routed_experts.{__name__}")

_SENT_PROMPTS = 8192
"""Limit of remembered sent prompts that have several requests."""


@dataclass
class Step:
    """A step, from when it is scheduled until its rows are distributed."""

    scheduled: SchedulerOutput
    # block tables (vLLM's objects), where rows before the step's are needed
    blocks: Mapping[str, Sequence[Any]]
    loads: Sequence[Load] = ()  # before or during it
    stores: Sequence[OffloadStore] = ()  # before or after it runs
    # Ids that are other requests' by now: the requests that it ran were aborted, and the ids have
    # come again.
    reused_ids: set[str] = field(default_factory=set)
    # Set when its output arrives.
    rows: Rows = field(init=False)
    # first row of each request in `rows`, in batch order
    offsets: NDArray[np.int64] = field(init=False)
    index: Mapping[str, int] = field(init=False)  # of each request in the batch

    @cached_property
    def starts(self) -> dict[str, int]:
        """Tokens that each request had computed when the step was scheduled."""
        cached = self.scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update(
            (new.req_id, new.num_computed_tokens) for new in self.scheduled.scheduled_new_reqs
        )
        return starts

    def rows_of(self, request_id: str) -> Rows:
        index = self.index[request_id]
        return self.rows[self.offsets[index] : self.offsets[index + 1]]


def block_ids(blocks: Sequence[Any], first: int = 0) -> NDArray[np.int64]:
    """The ids of `blocks` from index `first` on; 0 before it."""
    ids = np.zeros(len(blocks), dtype=np.int64)
    ids[first:] = [block.block_id for block in blocks[first:]]
    return ids


class RowSource:
    """Where rows come from: steps and the host cache. Says why rows that are read there are
    unknown."""

    def __init__(self, scheduler: Scheduler, kv_group: int, cache: HostCache) -> None:
        self.cache = cache
        # whether KV may be loaded without rows
        self._knows_causes = scheduler.connector is not None
        self._scheduler = scheduler
        self._kv_group = kv_group
        # to be reported, and to which API process
        self._unknown: list[tuple[int, UnknownRows]] = []

    def of_step(
        self,
        state: RequestRows,
        step: Step,
        start: int,
        first: int,
        end: int,
        as_captured: bool = False,
    ) -> PendingRows:
        """Rows of positions `first` to `end` as of a step that began at `start`: its own, and
        before them those of the host cache. Rows that neither has are -1."""
        rows, blocks = step.rows_of(state.request_id), step.blocks.get(state.request_id)
        split = min(max(start, first), end)
        own = rows[max(split - start, 0) : max(end - start, 0)]
        pieces: list[Piece] = [split - first, own]
        if blocks is None and first < split:
            pieces[0] = _unknown(split - first, own)
        if missing := end - split - len(own):
            pieces.append(_unknown(missing, own))
        return self.pending(state, first, pieces, blocks or (), as_captured)

    def pending(
        self,
        state: RequestRows,
        first: int,
        pieces: list[Piece],
        blocks: Sequence[Any] = (),
        as_captured: bool = False,
    ) -> PendingRows:
        """Rows from position `first` on. `blocks` is the sequence's block table, if some are in the
        host cache."""
        ids_only = self.cache.has_weights and not (state.opt_in.weights or as_captured)
        # a long table takes longer than its rows
        ids = block_ids(blocks, first // self.cache.block_size)
        return PendingRows(
            self.cache, first, pieces, ids, partial(self._report_unknown, state), ids_only
        )

    def _report_unknown(
        self, state: RequestRows, blocks: NDArray[np.int64], first: int, rows: Rows
    ) -> None:
        """Reports why some of `rows`, which were read from position `first` on, are unknown."""
        if not self._knows_causes:
            logger.error(
                "Request %r: some of its rows are not known and are sent as -1.", state.request_id
            )
            return
        causes = self.cache.causes(blocks, np.flatnonzero(rows[:, 0, 0] == UNKNOWN) + first)
        if state.opt_in.allow_missing:
            causes[causes == Cause.COMPUTED_IF_ASKED] = Cause.KV_STORE
        for cause in (Cause.KV_STORE, Cause.KV_TRANSFER):
            if num_rows := int(np.count_nonzero(causes == cause)):
                is_prompt = first < state.num_prompt
                unknown = UnknownRows(
                    state.opt_in.prompt_id, state.request_id, is_prompt, int(cause), num_rows
                )
                self._unknown.append((state.client, unknown))

    def pop_unknown(self) -> list[tuple[int, UnknownRows]]:
        """Why rows are unknown that were read since the last call, and the API processes to
        tell."""
        unknown, self._unknown = self._unknown, []
        return unknown

    def block_table(self, request_id: str) -> Sequence[Any]:
        manager = self._scheduler.kv_cache_manager.coordinator.single_type_managers[self._kv_group]
        return tuple(manager.req_to_blocks[request_id])  # objects, since few callers need the ids


def _unknown(count: int, like: Rows) -> Rows:
    return np.full((count, *like.shape[1:]), UNKNOWN, dtype=np.int16)


class RowDistributor:
    """Sends requests with the opt-in their rows, each row once.

    Before its first token, with which it is sent its prompt's rows, a request is *open*: its
    outputs are looked at one by one. After that it is

    - a *stream*: its steps bring one row each, as a rule, and the rows of all streams are taken at
      once; or
    - *closed*, if it needs its rows when it ends: they stay in the host cache until then. If its
      blocks are about to be lost, they are read and held, and it is open again, until the next
      output after its prefill.

    With drafts no request is closed: a later step may compute a known token again, whose row is
    then not the one that the next token was sampled with.
    """

    def __init__(self, scheduler: Scheduler, source: RowSource, has_drafts: bool) -> None:
        self.source = source
        self.queue = OutputQueue()
        self.tracked: dict[str, RequestRows] = {}
        self._scheduler = scheduler
        self._has_drafts = has_drafts
        self._open: dict[str, RequestRows] = {}
        self._streams: dict[str, RequestRows] = {}
        # rows before their next sampling step are in the host cache
        self._prefilling: dict[str, RequestRows] = {}
        self._ended: dict[str, RequestRows] = {}  # in this step, or since
        # by `prompt_id`, those with several requests, oldest first
        self._sent_prompts: dict[object, None] = {}
        self._weights_epoch = 0  # raised when weights may have changed

    # ---- what happens to requests ----

    def add(self, request: Request, opt_in: OptIn | None) -> None:
        self._forget_ended()  # one of them may have had this id
        if opt_in is None:
            return
        state = RequestRows(
            request.request_id,
            request.client_index,
            opt_in,
            request.num_prompt_tokens,
            self._weights_epoch,
            is_last_only=opt_in.final_only and not self._has_drafts,
            next_row=request.num_prompt_tokens - 1,
        )
        for requests in (self.tracked, self._open, self._prefilling):
            requests[request.request_id] = state

    def weights_may_differ(self) -> None:
        """Called when later steps may use other weights. Requests without a token then get prompt
        rows of their own."""
        self._weights_epoch += 1

    def prefill_again(self, request: Request) -> None:
        """Called when a request is preempted, or a load of its KV has failed."""
        if (state := self.tracked.get(request.request_id)) is not None:
            self._reopen(request, state)
            self._prefilling[request.request_id] = state

    def before_overwrite(self) -> None:
        """Called when loads may overwrite blocks of any request."""
        for request_id, state in self.tracked.items():
            self._reopen(self._scheduler.requests[request_id], state)

    def finish(self, request: Request) -> None:
        """Called when a request ends, while it has its blocks."""
        state = self.tracked.pop(request.request_id, None)
        if state is None:
            return
        self._prefilling.pop(request.request_id, None)
        self._ended[request.request_id] = state
        if self._is_closed(state):
            state.last_rows = self._cached_rows(request, state)

    def end_aborted(self, requests: Iterable[Request], is_asked: bool) -> list[Request]:
        """Called when requests were aborted. Queues an end for those whose outputs or rows are
        still to be sent, and returns the others. An API process that did not ask for the abort is
        told of it, as vLLM does at a pause."""
        others = []
        for request in requests:
            state = self._ended.get(request.request_id)
            reason = RequestStatus.get_finished_reason(request.status)
            is_owed = state is not None and (
                state.opt_in.final_only or (not is_asked and self.queue.is_waiting(state))
            )
            if state is not None and reason is not None and is_owed:
                self.queue.end(state, reason, self._last_rows(state))
            else:
                others.append(request)
        self._forget_ended()
        return others

    def leave(self, request_id: str) -> None:
        """Called when an API process has aborted a request, also one that has ended and whose
        outputs wait here. Its id may be another request's from now on."""
        if (prompt := self.queue.leave(request_id)) is not None:
            # What was sent of it went with this request. Another of the prompt's requests sends it
            # again.
            self._sent_prompts.pop(prompt, None)

    # ---- steps ----

    def schedule(
        self, scheduled: SchedulerOutput, requests: Mapping[str, Request]
    ) -> dict[str, Sequence[Any]]:
        """The block tables of requests whose prefill ends in this step, and whose rows are in the
        host cache."""
        blocks = {}
        counts = scheduled.num_scheduled_tokens
        # iterates over the smaller of the two
        for request_id in counts.keys() & self._prefilling.keys():
            request = requests[request_id]
            if request.num_computed_tokens + counts[request_id] >= request.num_tokens:
                state = self._prefilling.pop(request_id)
                if state.first_needed < request.num_computed_tokens:
                    blocks[request_id] = self.source.block_table(request_id)
        return blocks

    def distribute(
        self, step: Step, messages: dict[int, EngineCoreOutputs]
    ) -> dict[int, list[SingleRows]]:
        """Puts a step's rows on its outputs, or into the queue. Returns single rows of outputs, by
        API process."""
        singles = {}
        for client, message in messages.items():
            if self._streams:
                singles[client] = self._take_streams(step, message.outputs)
            for output in message.outputs if self._open else ():
                if (
                    opened := self._open.get(output.request_id)
                ) is not None and output.new_token_ids:
                    self._take(opened, step, step.starts[output.request_id], output)
            for output in message.outputs if self._ended else ():
                state = self._ended.get(output.request_id)
                if state is not None and output.finish_reason is not None:
                    self.queue.send_last(state, self._last_rows(state))
        self._forget_ended()
        self.queue.fill(messages)
        return singles

    def _take_streams(self, step: Step, outputs: Sequence[Any]) -> list[SingleRows]:
        """The rows of streams, in one pass. Outputs that bring more or less than the next row go
        the general way."""
        outputs = [
            output
            for output in outputs
            if output.request_id in self._streams and output.new_token_ids
        ]
        if not outputs:
            return []
        ids = [output.request_id for output in outputs]
        states = list(map(self._streams.__getitem__, ids))
        starts = np.fromiter(map(step.starts.__getitem__, ids), np.int64, len(ids))
        due = np.fromiter([state.next_row for state in states], np.int64, len(ids))
        index = np.fromiter(map(step.index.__getitem__, ids), np.int64, len(ids))
        places = step.offsets[index]
        # A step with one token of a request, and without drafts, gives it one token.
        is_single = (starts == due) & (step.offsets[index + 1] - places == 1)
        for at in np.flatnonzero(~is_single).tolist():
            self._take(states[at], step, int(starts[at]), outputs[at])
        groups = [(step.rows, is_single)]
        if self.source.cache.has_weights:
            weights = np.fromiter([state.opt_in.weights for state in states], np.bool_, len(ids))
            groups = [(ids_of(step.rows), is_single & ~weights), (step.rows, is_single & weights)]
        for state in compress(states, is_single.tolist()):
            state.next_row += 1
        return [
            SingleRows(
                list(compress(outputs, chosen.tolist())), starts[chosen], rows, places[chosen]
            )
            for rows, chosen in groups
            if chosen.any()
        ]

    def _take(self, state: RequestRows, step: Step, start: int, output: Any) -> None:
        """Takes the rows of an output in the general way, one request at a time."""
        if self._has_drafts:
            # The step was scheduled as if all drafts in flight were accepted. It began at the last
            # token that was.
            start = min(start, state.next_row)
        if state.is_prompt_due:
            state.is_prompt_due = False
            self._send_prompt(state, step, start)
        first, end = (
            max(state.next_row, state.num_prompt),
            state.next_row + len(output.new_token_ids),
        )
        state.next_row = end
        if first <= end:  # none are told too, with the first token
            rows = self.source.of_step(
                state, step, start, first, end, as_captured=state.is_last_only
            ).take()
            if state.is_last_only:
                state.held.append(rows.rows.copy())
            else:
                output.routed_experts = rows
        if state.is_last_only and state.request_id not in self._prefilling:
            # Once preempted, it is not scheduled again before the output of all earlier steps has
            # come, or is dropped.
            del self._open[state.request_id]
        elif not (state.is_last_only or self.queue.is_waiting(state)):
            self._open.pop(state.request_id, None)
            self._streams[state.request_id] = state

    def _send_prompt(self, state: RequestRows, step: Step, start: int) -> None:
        """Sends a prompt's rows, unless they were sent with another of its requests."""
        first = min(state.opt_in.prompt_start, state.num_prompt)
        key: object = state.opt_in.prompt_id
        if first == state.num_prompt:
            return
        if state.weights_epoch != self._weights_epoch:
            key = state  # for this request alone
        elif state.opt_in.shared:
            if key in self._sent_prompts:
                self.queue.follow(state, key)
                return
            self._sent_prompts[key] = None
            if len(self._sent_prompts) > _SENT_PROMPTS:
                del self._sent_prompts[next(iter(self._sent_prompts))]
        rows = self.source.of_step(state, step, start, first, state.num_prompt)
        self.queue.send_prompt(state, key, rows)

    def _forget_ended(self) -> None:
        for request_id, state in self._ended.items():
            for requests in (self._open, self._streams):
                if requests.get(request_id) is state:  # and not of a later request of this id
                    del requests[request_id]
        self._ended.clear()

    # ---- rows that stay in the host cache ----

    def _is_closed(self, state: RequestRows) -> bool:
        return state.is_last_only and state.request_id not in self._open

    def _cached_rows(
        self, request: Request, state: RequestRows, as_captured: bool = False
    ) -> PendingRows:
        """All known rows of a closed request, which has its blocks."""
        count = max(request.num_tokens - 1 - state.next_row, 0)
        blocks = self.source.block_table(state.request_id) if count else ()
        return self.source.pending(
            state, state.first_held, [*state.held, count], blocks, as_captured
        )

    def _reopen(self, request: Request, state: RequestRows) -> None:
        """Reads the rows of a closed request while it has its blocks."""
        if self._is_closed(state):
            self._open[state.request_id] = state
            state.held = [self._cached_rows(request, state, as_captured=True).take().rows]
            state.next_row = max(request.num_tokens - 1, state.next_row)

    def _last_rows(self, state: RequestRows) -> PendingRows | None:
        """Takes the generated rows that a request which has ended was not sent."""
        # which refer to it: no cycle keeps them until it is collected
        rows, state.last_rows = state.last_rows, None
        if rows is None and state.held:
            rows = self.source.pending(state, state.first_held, [*state.held])
        return rows or None
