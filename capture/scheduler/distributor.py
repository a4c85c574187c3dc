"""Selects the rows that each request is sent after a step."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.scheduler.output_queue import OutputQueue
from routed_experts.capture.scheduler.pending_rows import PendingRows
from routed_experts.capture.scheduler.recomputed_rows import RecomputedRows
from routed_experts.capture.scheduler.request_rows import Phase, RequestIndexes, RequestRows
from routed_experts.capture.scheduler.row_source import RowSource
from routed_experts.capture.scheduler.step import BlockTable, Step
from routed_experts.capture.wire.envelope import SingleRows
from routed_experts.capture.wire.message import OptIn
from routed_experts.capture.wire.rows import ids_of
from routed_experts.protocol.codec import Rows

_SENT_PROMPTS = 8192
"""Limit of remembered sent prompts that have several requests."""


class RowDistributor:
    """Sends requests that opted in their rows, each row once.

    The rows of a prompt are sent before the first token of its requests. A generated row is sent
    with the token that was sampled with it or, where a request needs its rows when it ends, with
    its last output. `request_rows` has the phases of a request; this class decides when it goes
    from one to another.

    With drafts no row is parked: a later step may compute a known token again, whose row is then
    not the one that the next token was sampled with.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        source: RowSource,
        *,
        has_drafts: bool,
        replays_on_recompute: bool = False,
    ) -> None:
        self.source = source
        self.recomputed = RecomputedRows(source, is_on=replays_on_recompute)
        self.queue = OutputQueue()
        self.requests = RequestIndexes()
        self.num_again = 0  # tokens that were computed again after their rows had been sent
        self._scheduler = scheduler
        self._has_drafts = has_drafts
        # by `prompt_id`, those with several requests, oldest first
        self._sent_prompts: dict[object, None] = {}
        self._weights_epoch = 0  # raised when weights may have changed
        self._has_steps = False  # whether a request has asked for steps so far

    # ---- what happens to requests ----

    def add(self, request: Request, opt_in: OptIn | None) -> None:
        """Called when vLLM has accepted a request."""
        self.requests.forget_ended()  # one of them may have had this id
        if opt_in is None:
            return
        self._has_steps |= opt_in.steps
        state = RequestRows(
            request.request_id,
            request.client_index,
            opt_in,
            request.num_prompt_tokens,
            weights_epoch=self._weights_epoch,
            rows_at_end=opt_in.final_only and not self._has_drafts,
            # The row of the prompt's last token comes with the first generated token. It is the
            # prompt's, so it is not sent with that.
            next_row=request.num_prompt_tokens - 1,
        )
        self.requests.move(state, Phase.PREFILL)

    def weights_may_differ(self) -> None:
        """Called when later steps may use other weights. Requests without a token then get prompt
        rows of their own, and KV that was lost is computed again as other weights route it."""
        self._weights_epoch += 1
        self.recomputed.forget_all()

    def prefill_again(self, request: Request) -> None:
        """Called when a request is preempted."""
        state = self.requests.running.get(request.request_id)
        if state is None:
            return
        if state.phase is Phase.PARKED:
            self._rescue(request, state)
        # In `PREFILL` too: a step in flight may end what was lost before, and this loses it again.
        if not state.is_prompt_due and state.weights_epoch == self._weights_epoch:
            self.recomputed.lose(state.request_id, state.next_row)
        if state.phase is not Phase.PREFILL:
            self.requests.move(state, Phase.PREFILL)

    def end_request(self, request: Request) -> None:
        """Called when a request ends, while it has its blocks."""
        state = self.requests.running.get(request.request_id)
        if state is None:
            return
        if state.phase is Phase.PARKED:
            state.last_rows = self._parked_rows(request, state)
        self.recomputed.forget(state.request_id)
        self.requests.end(state)

    def end_aborted(self, requests: Iterable[Request], *, is_asked: bool) -> list[Request]:
        """Called when requests were aborted. Queues an end for those whose outputs or rows are
        still to be sent, and returns the others. An API process that did not ask for the abort is
        told of it, as vLLM does at a pause."""
        others = []
        for request in requests:
            state = self.requests.ended.get(request.request_id)
            reason = RequestStatus.get_finished_reason(request.status)
            if state is None or reason is None or not self._is_owed_an_end(state, is_asked):
                others.append(request)
            else:
                self.queue.send_end(state, reason, self._pop_last_rows(state))
        self.requests.forget_ended()
        return others

    def _is_owed_an_end(self, state: RequestRows, is_asked: bool) -> bool:
        """Whether something is to be sent to the API process of a request that was aborted."""
        if state.opt_in.final_only:
            return True  # it waits for the rows of the tokens that it has
        return not is_asked and self.queue.is_waiting(state)

    def leave(self, request_id: str) -> None:
        """Called when an API process has aborted a request, also one that has ended and whose
        outputs wait here. Its id may be another request's from now on."""
        prompt = self.queue.leave(request_id)
        if prompt is not None:
            # What was sent of it went with this request. Another of the prompt's requests sends it
            # again.
            self._sent_prompts.pop(prompt, None)

    # ---- steps ----

    def schedule(
        self, scheduled: SchedulerOutput, requests: Mapping[str, Request]
    ) -> dict[str, BlockTable]:
        """The block tables of requests whose prefill ends in this step, and of whose rows some are
        to be read from the host cache. Called before the step's requests are advanced."""
        tables = {}
        num_scheduled = scheduled.num_scheduled_tokens
        # Walks through the smaller of the two.
        for request_id in num_scheduled.keys() & self.requests.prefilling.keys():
            request = requests[request_id]
            state = self.requests.prefilling[request_id]
            end = request.num_computed_tokens + num_scheduled[request_id]
            if not state.is_prompt_due:
                self.num_again += max(0, min(end, state.next_row) - request.num_computed_tokens)
            if end < request.num_tokens:
                continue
            self.requests.move(state, Phase.ALONE)
            if self.recomputed.is_on or state.first_needed < request.num_computed_tokens:
                tables[request_id] = self.source.block_table(request_id)
        return tables

    def distribute(
        self, step: Step, messages: dict[int, EngineCoreOutputs]
    ) -> dict[int, list[SingleRows]]:
        """Puts a step's rows on its outputs, or into the queue. Returns single rows of outputs, by
        API process."""
        self.recomputed.arrive(step.recomputing.ends)
        singles = {}
        taken_alone: list[RequestRows] = []
        for client, message in messages.items():
            if self.requests.streams:
                singles[client] = self._take_streams(step, message.outputs)
            if self.requests.alone:
                taken_alone += self._take_alone(step, message.outputs)
            if self.requests.ended:
                self._queue_last_rows(message.outputs)
        self.requests.forget_ended()
        self.queue.fill(messages)
        # Not before: most of them waited for nothing but what this message brings.
        for state in taken_alone:
            self._move_on(state)
        return singles

    def _take_streams(self, step: Step, outputs: Sequence[EngineCoreOutput]) -> list[SingleRows]:
        """Takes the rows of streams, in one pass. Outputs that bring more or less than the next row
        are taken one by one."""
        streams = self.requests.streams
        outputs = [
            output for output in outputs if output.request_id in streams and output.new_token_ids
        ]
        if not outputs:
            return []
        ids = [output.request_id for output in outputs]
        states = [streams[request_id] for request_id in ids]
        starts = step.starts_of(ids)
        first_index, num_rows = step.extents_of(ids)
        next_rows = np.fromiter([state.next_row for state in states], np.int64, len(ids))
        # A step with one token of a request, and without drafts, gives it one token.
        is_single = (starts == next_rows) & (num_rows == 1)
        for index in np.flatnonzero(~is_single).tolist():
            self._take(states[index], step, int(starts[index]), outputs[index])
        for state in compress(states, is_single.tolist()):
            state.next_row += 1
        return [
            SingleRows(
                list(compress(outputs, chosen.tolist())),
                starts[chosen],
                rows,
                first_index[chosen],
                number,
            )
            for rows, number, chosen in self._as_asked(step, states, is_single)
            if chosen.any()
        ]

    def _as_asked(
        self, step: Step, states: Sequence[RequestRows], is_single: NDArray[np.bool_]
    ) -> list[tuple[Rows, int | None, NDArray[np.bool_]]]:
        """The step's rows in each form, its number if that has steps, and which of `states` ([n])
        that have single rows get that."""
        rows = step.captured.rows
        forms = [(rows, is_single)]
        if self.source.cache.has_weights:
            weights = np.fromiter([state.opt_in.weights for state in states], np.bool_, len(states))
            forms = [(ids_of(rows), is_single & ~weights), (rows, is_single & weights)]
        if not self._has_steps:
            return [(rows, None, chosen) for rows, chosen in forms]
        steps = np.fromiter([state.opt_in.steps for state in states], np.bool_, len(states))
        return [
            (rows, number, chosen & has_number)
            for rows, chosen in forms
            for number, has_number in ((None, ~steps), (step.number, steps))
        ]

    def _take_alone(self, step: Step, outputs: Sequence[EngineCoreOutput]) -> list[RequestRows]:
        """Takes the outputs of requests that are looked at one by one; gives those requests."""
        taken = []
        for output in outputs:
            state = self.requests.alone.get(output.request_id)
            if state is not None and output.new_token_ids:
                self._take(state, step, step.starts[output.request_id], output)
                taken.append(state)
        return taken

    def _take(self, state: RequestRows, step: Step, start: int, output: EngineCoreOutput) -> None:
        """Takes the rows of one output of a step that began at position `start`."""
        if self._has_drafts:
            # The step was scheduled as if all drafts in flight were accepted. It began at the last
            # token that was.
            start = min(start, state.next_row)
        if state.is_prompt_due:
            state.is_prompt_due = False
            self._send_prompt(state, step, start)
        if state.phase is Phase.PREFILL or state.request_id in self.recomputed:
            self._add_to_recomputed(state, step, start, len(output.new_token_ids))
        first = max(state.next_row, state.num_prompt_tokens)
        end = state.next_row + len(output.new_token_ids)
        state.next_row = end
        # Of the first token, an array of no rows: it says where generated rows begin.
        rows = self.source.of_step(
            state, step, start=start, first=first, end=end, as_captured=state.rows_at_end
        ).take()
        if state.rows_at_end:
            state.unsent.append(rows.rows.copy())
            if rows.steps is not None:
                state.unsent_steps.append(rows.steps)
        else:
            output.routed_experts = rows

    def _add_to_recomputed(self, state: RequestRows, step: Step, start: int, num_rows: int) -> None:
        """Called when a request that has lost KV is sent its next `num_rows` rows, of a step that
        ran then and began at position `start`."""
        if state.weights_epoch != self._weights_epoch:
            return
        ids = self.source.cache.ids(step.rows_of(state.request_id))
        self.recomputed.add(
            state.request_id,
            state.next_row,
            ids[state.next_row - start :][:num_rows],
            step.block_tables.get(state.request_id, ()),
        )

    def _move_on(self, state: RequestRows) -> None:
        """Moves a request on whose output was taken alone, if its next one need not be."""
        # In `PREFILL`, the output is of a step that was scheduled before it was preempted. It is
        # not scheduled again before the output of all earlier steps has come, or is dropped.
        if state.phase is not Phase.ALONE:
            return
        if state.rows_at_end:
            self.requests.move(state, Phase.PARKED)
        elif not self.queue.is_waiting(state):
            self.requests.move(state, Phase.STREAM)

    def _send_prompt(self, state: RequestRows, step: Step, start: int) -> None:
        """Sends a prompt's rows, unless those of another of its requests were sent for all."""
        first = min(state.opt_in.prompt_start, state.num_prompt_tokens)
        if first == state.num_prompt_tokens:
            return
        key: object = state  # for this request alone
        sends_own = state.opt_in.own_prompt or state.weights_epoch != self._weights_epoch
        if state.opt_in.shared and not sends_own:
            key = state.opt_in.prompt_id
            if key in self._sent_prompts:
                self.queue.follow(state, key)
                return
            self._remember_sent(key)
        rows = self.source.of_step(
            state, step, start=start, first=first, end=state.num_prompt_tokens
        )
        self.queue.send_prompt(state, key, rows)

    def _remember_sent(self, prompt: object) -> None:
        self._sent_prompts[prompt] = None
        if len(self._sent_prompts) > _SENT_PROMPTS:
            oldest = next(iter(self._sent_prompts))
            del self._sent_prompts[oldest]

    def _queue_last_rows(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Queues the rows that requests get with their last outputs."""
        for output in outputs:
            state = self.requests.ended.get(output.request_id)
            if state is not None and output.finish_reason is not None:
                self.queue.send_last(state, self._pop_last_rows(state))

    # ---- rows that are sent at the end ----

    def _parked_rows(
        self, request: Request, state: RequestRows, *, as_captured: bool = False
    ) -> PendingRows:
        """All generated rows of a request that is parked, and has its blocks."""
        num_parked = max(request.num_tokens - 1 - state.next_row, 0)
        table = self.source.block_table(state.request_id) if num_parked else ()
        pieces = [*state.unsent, num_parked]
        return self.source.pending(
            state,
            state.first_unsent,
            pieces,
            table,
            steps=state.unsent_steps,
            as_captured=as_captured,
        )

    def _rescue(self, request: Request, state: RequestRows) -> None:
        """Reads the rows of a request that is parked, while it has its blocks."""
        rows = self._parked_rows(request, state, as_captured=True).take()
        state.unsent = [rows.rows]
        state.unsent_steps = [] if rows.steps is None else [rows.steps]
        state.next_row = max(request.num_tokens - 1, state.next_row)

    def _pop_last_rows(self, state: RequestRows) -> PendingRows | None:
        """Takes the generated rows that a request which has ended was not sent."""
        rows = state.last_rows
        # They refer to it: so no cycle keeps them until it is collected.
        state.last_rows = None
        if rows is None and state.unsent:
            rows = self.source.pending(
                state, state.first_unsent, [*state.unsent], steps=state.unsent_steps
            )
        return rows or None
