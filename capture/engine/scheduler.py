"""The scheduler given to vLLM as `scheduler_cls`: it owns the host cache and tracks each request's rows."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.config import KVTransferConfig, VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture import handoff
from routed_experts.capture.engine.config import check_engine_config, full_attention_group
from routed_experts.capture.engine.kv_transfer import transfer_params
from routed_experts.capture.engine.kv_transfer.connectors import describe, on_load
from routed_experts.capture.engine.kv_transfer.offloading import OffloadLoad, OffloadStore
from routed_experts.capture.engine.kv_transfer.remote_prefill import RemotePrefillRows
from routed_experts.capture.engine.kv_transfer.tracker import ExternalKVTracker, KVLoad, LocalHit
from routed_experts.capture.engine.output_queue import OutputQueue
from routed_experts.capture.engine.slot import ConnectorSlot
from routed_experts.capture.engine.transport import detach
from routed_experts.capture.host_cache import Cause, HostCache
from routed_experts.capture.message import CAUSES_OUTPUT_ID, OPT_IN_ARG, OptIn, PlacedRows, UnknownRows
from routed_experts.capture.pipeline import StepRows
from routed_experts.capture.prompt_reader import PromptReader
from routed_experts.capture.rows import captures_weights, ids_of, ids_shape
from routed_experts.capture.seams.engine import ConnectedScheduler
from routed_experts.capture.split import RequestRows, StepPart, rows_between, step_start, take_rows
from routed_experts.capture.stats import STATS_OUTPUT_ID, StatsRecorder
from routed_experts.protocol.codec import UNKNOWN, Rows

logger = init_logger(f"vllm.routed_experts.{__name__}")  # a child of vLLM's logger, which is configured

_PROMPT_READ_WAIT_S = 1e-3
"""Seconds that a step waits for a thread to read prompt rows. Most reads take less; other requests barely notice."""

_TRANSFER_PARAMS = "kv_transfer_params"  # in `SamplingParams.extra_args`
_AT_ONCE_BYTES = 4 << 20
"""Bytes of prompt rows that a step reads itself, in about a millisecond; a thread reads the rest."""

_GROUP_ROWS = 64
"""Rows that are sent together, if a request needs them at its end only. An array costs both processes more than its
contents."""

_SENT_PROMPTS = 8192
"""Limit of remembered sent prompts that have several requests."""


@dataclass(frozen=True)
class StepTag:
    """Identifies a step. Travels to the workers and back."""

    step: int


@dataclass
class ScheduledStep:
    """State kept from scheduling a step until its output arrives.

    Attributes:
        starts: for each tracked request, the absolute position of its first token in the step.
        blocks: for requests whose prefill ends in this step and has rows in the host cache: the block table (vLLM's
            objects).
        loads: KV that a connector loads before or during the step.
        keeps: KV that the connector stores, before or after the step runs.
    """

    starts: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, Sequence[Any]] = field(default_factory=dict)
    loads: list[KVLoad | OffloadLoad] = field(default_factory=list)
    keeps: list[OffloadStore] = field(default_factory=list)


@dataclass
class StepResult:
    """A step whose output is being distributed to requests.

    Attributes:
        offsets: first row of each request in `rows`, in batch order.
        index: index of each request in the batch.
    """

    scheduled: ScheduledStep
    rows: Rows
    offsets: list[int]
    index: Mapping[str, int]

    def part(self, req_id: str) -> StepPart | None:
        """A request's share; None if it was not in the step, or has not opted in."""
        start = self.scheduled.starts.get(req_id)
        if start is None:
            return None
        index = self.index[req_id]
        rows = self.rows[self.offsets[index] : self.offsets[index + 1]]
        blocks = self.scheduled.blocks.get(req_id)
        return StepPart(start, rows, partial(_block_ids, blocks) if blocks is not None else None)


def _block_ids(blocks: Sequence[Any], first: int = 0) -> NDArray[np.int64]:
    """The ids of `blocks` from index `first` on; 0 before it."""
    ids = np.zeros(len(blocks), dtype=np.int64)
    ids[first:] = [block.block_id for block in blocks[first:]]
    return ids


def _set_transfer_params(request: Request, params: dict[str, Any] | None) -> None:
    """Sets them also in `extra_args`, which go to workers. Copies that object, because a program may own it."""
    request.kv_transfer_params = params
    if (sampling := request.sampling_params) is not None and sampling.extra_args:
        request.sampling_params = sampling = copy(sampling)
        sampling.extra_args = {**(sampling.extra_args or {}), _TRANSFER_PARAMS: params}


def opt_in_of(request: Request) -> OptIn | None:
    """The request's opt-in; None if it did not opt in."""
    params = request.sampling_params
    return OptIn.decode(params.extra_args.get(OPT_IN_ARG)) if params and params.extra_args else None


class SchedulerConnector(ConnectorSlot):
    """The object in vLLM's `scheduler.aux_output_connector`.

    The rows of every request are written into the host cache, because a later request may hit them as a prefix. Only
    requests that opted in are sent rows, each row once.

    Args:
        has_weights: whether rows have weights; only requests that ask for them are sent any.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache_config: KVCacheConfig,
        has_drafts: bool,
        engine: int = 0,
        has_weights: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._has_weights = has_weights
        self._stats = StatsRecorder(engine)
        self._has_drafts = has_drafts
        self._kv_group = full_attention_group(kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._block_size = kv_cache_config.kv_cache_groups[self._kv_group].kv_cache_spec.block_size
        self._cache: HostCache | None = None  # created with the first rows, which determine L and K
        self._prompt_reader = PromptReader(self._num_blocks, self._block_size)
        self._tracked: dict[str, RequestRows] = {}
        self._sent_prompts: dict[bytes, None] = {}  # those with several requests, oldest first
        self._generation = 0  # raised when weights may have changed
        self._steps: dict[int, ScheduledStep] = {}
        self._step = 0
        self._arrived: StepResult | None = None
        self._loads: ExternalKVTracker | None = None
        self.left: dict[str, PlacedRows] = {}  # held rows of requests that just ended without an output
        self._to_export: dict[str, bool] = {}  # requests whose rows go with their KV, and whether with it alone
        # Of requests that end in this step: whether they ask for weights, and what sends their prompt.
        self._unsent: dict[str, tuple[bool, Callable[[], None]]] = {}
        self._unknown: deque[tuple[int, UnknownRows]] = deque()  # to be reported, and to which API process
        self.output_queue = OutputQueue()
        self.at_once_bytes = self._at_once_left = _AT_ONCE_BYTES

    def follow_loads(self, config: KVTransferConfig) -> None:
        """Starts tracking the KV that the scheduler's connector loads."""
        policy = on_load()
        self._loads = ExternalKVTracker(
            self._scheduler.connector,
            config,
            self._scheduler.kv_cache_manager,
            self._kv_group,
            self._block_size,
            self._tracked,
            policy,
            self._forgot,
            self._has_weights,
        )
        logger.info(describe(config, policy, self._loads.keep_rows))

    def _forgot(self, what: str, num_rows: int) -> None:
        """Counts rows that are unknown because the connector did something unexpected, and logs the first time."""
        self._stats.count_forgotten(num_rows)
        logger.warning_once(
            "The KV connector %s. The rows of this KV are not known and are sent as -1. Please report this message.",
            what,
        )

    def truncate_prefix_hit(self, request: Request, hit: LocalHit) -> LocalHit:
        """The part of a prefix hit that a request may use."""
        return hit if self._loads is None else self._loads.truncate_prefix_hit(request, hit)

    def prefill_again(self, request_ids: Iterable[str]) -> None:
        """Called after failed loads, when vLLM sets requests back to the end of their valid KV."""
        for request_id in request_ids:
            if (state := self._tracked.get(request_id)) is not None:
                state.prefilling = True

    def add_request(self, request: Request) -> None:
        """Starts tracking a request that opted in."""
        opt_in = opt_in_of(request)
        if opt_in is not None:
            first = min(opt_in.prompt_start, request.num_prompt_tokens)
            state = self._tracked[request.request_id] = RequestRows(opt_in, first, self._generation)
            state.group_rows = 1 + opt_in.prompt_id[0] % _GROUP_ROWS  # those of requests that come together, in turns

    def request_finished(self, request: Request, *more: Any, **options: Any) -> None:
        """Called when a request ends, and when it is preempted, which restarts its prefill."""
        state = self._tracked.get(request.request_id)
        if state is not None and state.is_cached:
            self._hold_cached(request, state)
        if request.is_finished():
            self._tracked.pop(request.request_id, None)
            if state is not None and (rows := state.take_held()) is not None:
                self.left[request.request_id] = rows
            if self._handed is not None:
                self._handed.forget(request.request_id)
        elif state is not None:
            state.prefilling = True

    def reset(self, *more: Any, **options: Any) -> None:
        """Called when the prefix cache was reset, as it is when weights change and before the engine sleeps.

        No earlier block can be hit afterwards, so no stale row can be read from the host cache.
        """
        self.weights_may_differ()

    def weights_may_differ(self) -> None:
        """Called when later steps may use other weights than earlier ones.

        Tracked requests without a token yet then get prompt rows of their own, even if they share a prompt.
        """
        self._generation += 1

    # The next three are called since vLLM 0.33. `ExternalKVTracker` limits loads earlier, when vLLM asks the connector.

    def max_cache_hit(self, request: Request, *more: Any, **options: Any) -> int | None:
        """Limit of tokens in a prefix hit; None is no limit, since rows live as long as the KV."""
        return None

    def cap_external_hit(self, request: Request, num_local: int, num_external: int, *more: Any, **options: Any) -> int:
        """Limit of tokens to load."""
        return num_external

    def request_loading(self, *args: Any, **options: Any) -> None:
        """Called before an asynchronous load."""

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, requests: Mapping[str, Request], *more: Any, **options: Any
    ) -> StepTag:
        """Called when a step has been scheduled, before its requests are advanced."""
        step = ScheduledStep()
        scheduled = scheduler_output.num_scheduled_tokens
        for req_id in scheduled.keys() & self._tracked.keys():  # iterates over the smaller of the two
            state, request = self._tracked[req_id], requests[req_id]
            start = request.num_computed_tokens
            step.starts[req_id] = start
            if state.prefilling and start + scheduled[req_id] >= request.num_tokens:
                state.prefilling = False
                if state.next_row < start:
                    step.blocks[req_id] = self._block_table(req_id)
        if self._loads is not None:
            step.loads = self._loads.take(scheduler_output, requests)
            step.keeps = self._loads.take_stores(scheduler_output)
        self._step += 1
        self._steps[self._step] = step
        return StepTag(self._step)

    def receive(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, requests: Mapping[str, Request]
    ) -> None:
        """Takes the rows of a step's output, before vLLM passes the output to requests.

        Raises:
            RuntimeError: the step ran, but its rows did not come with it.
        """
        tag = scheduler_output.aux_output_connector_metadata
        assert isinstance(tag, StepTag)
        scheduled = self._steps.pop(tag.step)
        self._arrived, self._at_once_left = None, self.at_once_bytes
        step = detach(output)
        self._follow_blocks(scheduled, scheduler_output)
        if step is not None:
            self._prompt_reader.wait_for_reads(step.slots)
            cache = self._host_cache(step)
            cache.write(step.slots, step.rows)
            for load in scheduled.loads:
                if load.ends_late:
                    load.apply(cache)  # again: `_follow_blocks` has waited for reads
        self._keep(keep for keep in scheduled.keeps if not keep.comes_first)
        if step is None:
            if scheduler_output.total_num_scheduled_tokens:
                raise RuntimeError("a step ran, but the worker sent no rows with its output")
            return
        self._stats.count_step(ids_of(step.rows) if self._has_weights else step.rows, step.waited_s)
        if self._has_drafts:  # without drafts, every step begins where it was scheduled
            for req_id, start in scheduled.starts.items():
                if (request := requests.get(req_id)) is not None:
                    scheduled.starts[req_id] = step_start(start, request.num_tokens)
        self._arrived = StepResult(scheduled, step.rows, step.offsets.tolist(), output.req_id_to_index)

    def _follow_blocks(self, scheduled: ScheduledStep, scheduler_output: SchedulerOutput) -> None:
        """Moves rows as their KV is moved before the step runs. Before the first step there are no rows to move."""
        if self._cache is None:
            return
        self._keep(keep for keep in scheduled.keeps if keep.comes_first)
        if scheduled.loads and self._loads is not None and not self._loads.writes_behind_hit:
            for req_id, state in self._tracked.items():  # whose blocks the loads may overwrite
                if state.is_cached:
                    self._hold_cached(self._scheduler.requests[req_id], state)
        for load in scheduled.loads:
            self._prompt_reader.wait_for_reads(load.slots)
            load.apply(self._cache)
        if copies := scheduler_output.kv_cache_block_copies:
            self._prompt_reader.wait_for_reads(np.array([destination for _, destination in copies]) * self._block_size)
            self._cache.copy_blocks(copies)

    def _keep(self, keeps: Iterable[OffloadStore]) -> None:
        if self._cache is not None:
            for keep in keeps:
                keep.apply(self._cache)

    @property
    def _handed(self) -> RemotePrefillRows | None:
        return None if self._loads is None else self._loads.handed

    def receive_rows(self, request: Request, config: KVTransferConfig | None) -> None:
        """Strips `routed_experts` from `kv_transfer_params` before the connector and the workers see it.

        Ignores params that would end the engine. Over HTTP such params get 400; programs can set any object.
        """
        given = request.kv_transfer_params
        if given is None:
            return
        try:
            transfer_params.check(given, config)
        except transfer_params.TransferParamsError as error:
            logger.warning("Request %r: its kv_transfer_params are ignored: %s.", request.request_id, error)
            _set_transfer_params(request, None)
            return
        if handoff.PARAM not in given:
            return
        params = {key: value for key, value in given.items() if key != handoff.PARAM}
        _set_transfer_params(request, params)
        if self._handed is None:
            return
        if type(wish := given[handoff.PARAM]) in (bool, bytes):
            opt_in = opt_in_of(request)
            if opt_in is not None and not opt_in.best_effort and wish in (True, handoff.ALONE):
                self._to_export[request.request_id] = wish == handoff.ALONE and not request.resumable
        elif params.get("do_remote_prefill") and (handed := handoff.decode(given[handoff.PARAM])) is not None:
            rows, until = handed
            has_weights = handoff.has_weights(given[handoff.PARAM])
            opt_in = opt_in_of(request)
            if self._has_weights and not has_weights and opt_in and opt_in.weights and not opt_in.best_effort:
                _set_transfer_params(request, None)  # so that it computes the prompt, and its weights
                return
            if has_weights and not self._has_weights:
                rows, has_weights = ids_of(rows), False
            self._take_rows(request, params, handoff.HandedRows(rows, has_weights), until)

    def _takes(self, handed: handoff.HandedRows) -> bool:
        """False for rows of another model, and as long as no step has run."""
        if self._cache is None:
            return False
        shape = self._cache.row_shape
        return handed.rows.shape[1:] == (ids_shape(shape) if self._has_weights and not handed.has_weights else shape)

    def _take_rows(self, request: Request, params: dict[str, Any], rows: handoff.HandedRows, until: float) -> None:
        if not self._takes(rows):
            rows = rows._replace(rows=rows.rows[:0])  # unknown
        assert self._handed is not None
        opt_in = opt_in_of(request)
        is_first = opt_in is None or not opt_in.shared or request.request_id.startswith("0_")  # vLLM's name
        source = params.get("remote_engine_id"), params.get("remote_request_id")
        if self._handed.add(request, rows, source, until, is_first):
            return
        logger.info("Request %r: its KV may have been freed, or pulled by another request.", request.request_id)
        if opt_in is not None and not opt_in.best_effort:
            _set_transfer_params(request, None)

    def fail_late_pulls(self, output: KVConnectorOutput) -> None:
        """Marks pulls that ended after the lease as failed, before vLLM processes the step's output."""
        if self._handed is not None:
            late = {request_id for request_id in output.finished_recving or () if self._handed.end(request_id)}
            for request_id in late - output.failed_recving:
                logger.warning("Request %r: its pull outlived the lease of the KV, and counts as failed.", request_id)
            output.failed_recving |= late

    def export_rows(self, request: Request, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """Adds a finished request's rows to `params`, with which another instance pulls its KV. A prompt whose rows do
        not go so after all is sent now.

        Called while the request still has its blocks. Aborted requests get none: some rows may not have arrived.
        """
        is_wanted = self._to_export.pop(request.request_id, None) is not None
        if is_wanted and params and params.get("do_remote_prefill") and (handed := self._rows_to_hand_over(request)):
            params = {**params, handoff.PARAM: handed}
        weights, send = self._unsent.pop(request.request_id, (False, None))
        if send is not None and not handoff.has_all(params, weights):
            send()
        return params

    def _rows_to_hand_over(self, request: Request) -> dict[str, Any] | None:
        if self._cache is None or self._handed is None:
            return None
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return None
        count = min(request.num_prompt_tokens, request.num_computed_tokens)
        handed = self._encoded(request, count, self._handed.until())
        if handed is None:
            logger.warning("Request %r: the rows of %d tokens are too large to hand over.", request.request_id, count)
        return handed

    def _encoded(self, request: Request, count: int, until: float) -> dict[str, Any] | None:
        """The first `count` rows for another instance, with weights if they are asked for and not too many."""
        assert self._cache is not None
        read = partial(self._cache.read, _block_ids(self._block_table(request.request_id)))
        (height, top_k), opt_in = self._cache.row_shape, opt_in_of(request)
        if not self._has_weights:
            return handoff.encode(read, count, (height, top_k), until)
        if opt_in is not None and opt_in.weights:
            handed = handoff.encode(read, count, (height, top_k), until, has_weights=True)
            if handed is not None:
                return handed

        def read_ids(first: int, out: Rows) -> None:
            rows = np.empty((len(out), height, top_k), dtype=out.dtype)
            read(first, rows)
            out[:] = ids_of(rows)

        return handoff.encode(read_ids, count, ids_shape((height, top_k)), until)

    def take_output(self, request: Request, output: Any, *more: Any, **options: Any) -> PlacedRows | None:
        """Called for each request with new tokens, after they were appended.

        Returns the generated rows that became known with those tokens, for `pack`; None if the request did not opt in.
        Prompt rows go into the output queue.
        """
        req_id = request.request_id
        state = self._tracked.get(req_id)
        if state is None or self._arrived is None:
            return None
        is_last = request.is_finished()
        if state.is_cached and not is_last and request.num_tokens - 1 - state.next_row < state.group_rows:
            return None
        if (part := self._arrived.part(req_id)) is None:
            return None
        if state.next_row < request.num_prompt_tokens:
            send = partial(self._send_prompt, request, state, part, state.next_row)
            if is_last and self._to_export.get(req_id):
                self._unsent[req_id] = state.opt_in.weights, send  # `export_rows` comes next
            else:
                send()
            state.next_row = request.num_prompt_tokens
        start = state.next_row
        if not state.opt_in.at_end:
            return PlacedRows(start, self._generated(request, state, part))
        if state.is_cached:
            self._hold_cached(request, state, part)
        else:
            state.hold(self._generated(request, state, part))
        # Once preempted, it is not scheduled again before the output of all earlier steps has come, or is dropped. With
        # drafts, steps in flight may compute a known token again, whose row is then not the one that the next token
        # was sampled with.
        state.is_cached = not (is_last or state.prefilling or self._has_drafts)
        if not is_last and state.group_rows > 0:
            return None
        state.group_rows = _GROUP_ROWS
        return state.take_held()

    def _generated(self, request: Request, state: RequestRows, part: StepPart) -> Rows:
        """The generated rows that are known after a step and were not taken."""
        assert self._cache is not None
        start = state.next_row
        rows = take_rows(state, part, request.num_tokens - 1, self._cache)
        if start < part.start:
            self._report_unknown(request, state, part, start, rows)
        return self._asked_for(state, rows)

    def _hold_cached(self, request: Request, state: RequestRows, part: StepPart | None = None) -> None:
        """Takes the generated rows that are in the host cache, while the request has its blocks.

        Args:
            part: of the step whose output has arrived.
        """
        assert self._cache is not None
        state.is_cached = False
        if part is None:
            part = StepPart(request.num_tokens - 1, np.empty((0, *self._cache.row_shape), np.int16))
        first = state.next_row // self._block_size  # a long table takes longer than its rows
        part.block_ids = partial(_block_ids, self._block_table(request.request_id), first)
        state.hold(self._generated(request, state, part))

    def _asked_for(self, state: RequestRows, rows: Rows) -> Rows:
        """What of `rows` a request is sent: ids alone, unless it asks for weights too."""
        return ids_of(rows) if self._has_weights and not state.opt_in.weights else rows

    def _send_prompt(self, request: Request, state: RequestRows, part: StepPart, first: int) -> None:
        """Sends a prompt's rows from position `first` on, unless they were sent with another of its requests."""
        key = state.opt_in.prompt_id
        if state.generation != self._generation:
            key = request.request_id.encode()  # for this request alone
        elif state.opt_in.shared:
            if key in self._sent_prompts:
                self.output_queue.follow(request.request_id, key)
                return
            self._sent_prompts[key] = None
            if len(self._sent_prompts) > _SENT_PROMPTS:
                del self._sent_prompts[next(iter(self._sent_prompts))]
        rows = self._prompt_rows(request, state, part, first)
        self.output_queue.send(request.client_index, request.request_id, key, first, rows)

    def _prompt_rows(self, request: Request, state: RequestRows, part: StepPart, first: int) -> Rows | Future[Rows]:
        """The rows of a prompt from position `first` on; many rows are read in a thread during later steps."""
        end = request.num_prompt_tokens

        def read() -> Rows:
            assert self._cache is not None
            rows = rows_between(part, first, end, self._cache)
            if first < part.start:
                self._report_unknown(request, state, part, first, rows)
            return np.ascontiguousarray(self._asked_for(state, rows))

        num_bytes = (end - first) * part.rows.itemsize * part.rows.shape[1] * part.rows.shape[2]
        if part.block_ids is None:
            return read()
        if num_bytes <= self._at_once_left:
            self._at_once_left -= num_bytes
            return read()
        return self._prompt_reader.start(read, part.block_ids(), first, min(end, part.start))

    def add_stats(self, messages: dict[int, EngineCoreOutputs], is_idle: bool) -> None:
        """Adds the engine's counters, if due, to the message to the first API process.

        Only one process gets them, because metrics are summed over processes.

        Args:
            messages: a step's messages to the API processes.
            is_idle: whether no request is left.
        """
        stats = self._stats.report(is_idle, len(self._tracked), self._used_bytes)
        if stats is not None:
            output = EngineCoreOutput(STATS_OUTPUT_ID, [], kv_transfer_params=stats.encode())
            messages.setdefault(0, EngineCoreOutputs()).outputs.insert(0, output)

    def _used_bytes(self) -> int:
        kept = self._loads.kept_bytes if self._loads is not None else 0
        return kept + (self._cache.used_bytes if self._cache is not None else 0)

    def add_causes(self, messages: dict[int, EngineCoreOutputs]) -> None:
        """Adds to a step's messages why rows in them are unknown."""
        causes: dict[int, list[UnknownRows]] = {}
        while self._unknown:  # threads add to it
            client, unknown = self._unknown.popleft()
            causes.setdefault(client, []).append(unknown)
        for client, found in causes.items():
            output = EngineCoreOutput(CAUSES_OUTPUT_ID, [], kv_transfer_params={"causes": found})
            messages.setdefault(client, EngineCoreOutputs()).outputs.insert(0, output)

    def _report_unknown(self, request: Request, state: RequestRows, part: StepPart, first: int, rows: Rows) -> None:
        """Reports why some of `rows`, which begin at position `first`, are unknown."""
        unknown = np.flatnonzero(rows[:, 0, 0] == UNKNOWN) + first
        if not len(unknown):
            return
        if self._loads is None:
            logger.error("Request %r: some of its rows are not known and are sent as -1.", request.request_id)
            return
        assert self._cache is not None
        if part.block_ids is None:
            return
        causes = self._cache.causes(part.block_ids(), unknown[unknown < part.start])
        if state.opt_in.best_effort:
            causes[causes == Cause.COMPUTED_IF_ASKED] = Cause.KV_STORE
        is_prompt = first < request.num_prompt_tokens
        for cause in (Cause.KV_STORE, Cause.KV_TRANSFER):
            if num_rows := int(np.count_nonzero(causes == cause)):
                unknown_rows = UnknownRows(request.request_id, is_prompt, int(cause), num_rows)
                self._unknown.append((request.client_index, unknown_rows))

    def _block_table(self, req_id: str) -> Sequence[Any]:
        manager = self._scheduler.kv_cache_manager.coordinator.single_type_managers[self._kv_group]
        return tuple(manager.req_to_blocks[req_id])  # objects, since few callers need the ids

    def _host_cache(self, step: StepRows) -> HostCache:
        if self._cache is None:
            _, num_layers, top_k = step.rows.shape
            self._cache = HostCache(self._num_blocks, self._block_size, num_layers, top_k)
        return self._cache


class SchedulerCapture(ConnectedScheduler):
    """Adds the capture to vLLM's schedulers, or to a program's own."""

    aux_output_connector: SchedulerConnector

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        check_engine_config(vllm_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.aux_output_connector = SchedulerConnector(
            self,
            kv_cache_config,
            has_drafts=vllm_config.speculative_config is not None,
            engine=vllm_config.parallel_config.data_parallel_index,
            has_weights=captures_weights(vllm_config),
        )
        if vllm_config.kv_transfer_config is not None:
            self.aux_output_connector.follow_loads(vllm_config.kv_transfer_config)

    # Since vLLM 0.33 with a limit.
    def _get_local_prefix_cache_hit(self, request: Request, *limit: int | None) -> LocalHit:
        return self.aux_output_connector.truncate_prefix_hit(
            request, super()._get_local_prefix_cache_hit(request, *limit)
        )

    def _update_requests_with_invalid_blocks(self, *args: Any, **kwargs: Any) -> tuple[set[str], int, set[int]]:
        affected = super()._update_requests_with_invalid_blocks(*args, **kwargs)
        self.aux_output_connector.prefill_again(affected[0])
        return affected

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        delay_free, params = super()._connector_finished(request)
        return delay_free, self.aux_output_connector.export_rows(request, params)

    def add_request(self, request: Request) -> None:
        self.aux_output_connector.receive_rows(request, self.vllm_config.kv_transfer_config)
        super().add_request(request)
        self.aux_output_connector.add_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        left, self.aux_output_connector.left = self.aux_output_connector.left, {}
        if request_ids is not None:
            return finished
        # A pause or the engine's end: vLLM tells clients at once that the requests returned here have ended. Outputs
        # that are held back must be sent first.
        queue, reason = self.aux_output_connector.output_queue, RequestStatus.get_finished_reason(finished_status)
        return [
            request
            for request in finished
            if reason is None
            or not queue.end(request.client_index, request.request_id, reason, left.get(request.request_id))
        ]

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state == PauseState.UNPAUSED:
            self.aux_output_connector.weights_may_differ()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.aux_output_connector.receive(scheduler_output, model_runner_output, self.requests)
        if (arrived := model_runner_output.kv_connector_output) is not None:
            self.aux_output_connector.fail_late_pulls(arrived)
        messages = super().update_from_output(scheduler_output, model_runner_output)
        connector = self.aux_output_connector
        queue = connector.output_queue
        must_go_on = scheduler_output.num_scheduled_tokens and self._others_wait(queue)
        queue.fill(messages, _PROMPT_READ_WAIT_S if must_go_on else None)
        connector.add_causes(messages)
        connector.add_stats(messages, is_idle=not self.requests)
        return messages

    def has_requests(self) -> bool:
        """True also while prompt rows are pending, so that vLLM runs another step, even an empty one, to send them."""
        return super().has_requests() or len(self.aux_output_connector.output_queue) > 0

    def _others_wait(self, queue: OutputQueue) -> bool:
        """Whether there are requests other than those whose outputs are held back."""
        return len(queue) > 0 and (
            len(self.waiting) > 0 or any(not queue.keeps(request.request_id) for request in self.running)
        )


class CaptureScheduler(SchedulerCapture, Scheduler):
    """For synchronous scheduling."""


class CaptureAsyncScheduler(SchedulerCapture, AsyncScheduler):
    """For asynchronous scheduling."""


def make_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Scheduler:
    """`scheduler_cls`, as a function: vLLM decides on asynchronous scheduling after it knows the class, and silently
    disables it for a class that does not match."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (CaptureAsyncScheduler if is_async else CaptureScheduler)(vllm_config, *args, **kwargs)
