"""The scheduler given to vLLM as `scheduler_cls`: it owns the host cache and tracks each request's
rows."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.engine.config import check_engine_config, full_attention_group
from routed_experts.capture.engine.versions import check_vllm_has
from routed_experts.capture.scheduler.bare_rows import BareRows
from routed_experts.capture.scheduler.distributor import RowDistributor
from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.input_decoder import read_inputs
from routed_experts.capture.scheduler.kv.tracker import ExternalKVTracker, LocalHit, NoExternalKV
from routed_experts.capture.scheduler.prefill_exchange import PrefillRowsExchange
from routed_experts.capture.scheduler.router_inputs import RouterInputs, check_told
from routed_experts.capture.scheduler.row_source import RowSource
from routed_experts.capture.scheduler.step import Step
from routed_experts.capture.seams.aux_output import AuxOutputHooks
from routed_experts.capture.seams.engine import HookedScheduler
from routed_experts.capture.seams.required import SCHEDULER
from routed_experts.capture.wire.envelope import ENVELOPE_ID, Notes, pack
from routed_experts.capture.wire.message import OptIn
from routed_experts.capture.wire.rows import captures_weights, replays_on_recompute, takes_input
from routed_experts.capture.wire.stats import StatsRecorder
from routed_experts.capture.wire.step_tag import StepTag, tag_of
from routed_experts.capture.wire.transport import TOLD_NOTHING, StepRows, detach
from routed_experts.capture.wire.vllm_rows import sends_bare_rows
from routed_experts.protocol.codec import UNKNOWN_STEP

# `__name__` begins with "routed_experts". A child of vLLM's logger, which is configured.
logger = init_logger(f"vllm.{__name__}")


class SchedulerHooks(AuxOutputHooks):
    """In vLLM's `scheduler.aux_output_connector`, whose methods vLLM calls in each step. Keeps the
    rows of every request: a later one may hit them."""

    def __init__(
        self, scheduler: Scheduler, config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        kv_group = full_attention_group(kv_cache_config)
        block_size = kv_cache_config.kv_cache_groups[kv_group].kv_cache_spec.block_size
        self.cache = HostCache(kv_cache_config.num_blocks, block_size, captures_weights(config))
        source = RowSource(scheduler, kv_group, self.cache)
        self.distributor = RowDistributor(
            scheduler,
            source,
            has_drafts=config.speculative_config is not None,
            replays_on_recompute=replays_on_recompute(config),
        )
        self.output_queue = self.distributor.queue
        self.router_inputs = RouterInputs(is_on=takes_input(config))
        self.bare_rows: BareRows | None = None  # for a front end that is not ours
        if sends_bare_rows(config):
            self.bare_rows = BareRows(config.model_config, self.output_queue)
        self._stats = StatsRecorder(config.parallel_config.data_parallel_index)
        self._steps: dict[int, Step] = {}  # in flight
        self._num_steps = 0
        self._parallel = config.parallel_config
        self.external_kv: ExternalKVTracker | NoExternalKV = NoExternalKV()
        if config.kv_transfer_config is not None:
            self.external_kv = ExternalKVTracker(
                scheduler,
                config.kv_transfer_config,
                self.cache,
                kv_group=kv_group,
                tracked=self.distributor.requests.running,
                on_unexpected=self._on_unexpected,
            )
        self.prefill_rows = PrefillRowsExchange(source, self.external_kv.pulls)

    def _on_unexpected(self, action: str, num_rows: int) -> None:
        self._stats.totals.rows_forgotten += num_rows
        logger.warning_once(
            "The KV connector %s. The rows of this KV are not known and are sent as -1. Please report this message.",
            action,
        )

    def add(self, request: Request) -> None:
        """Called when vLLM has accepted a request."""
        for step in self._steps.values():
            if request.request_id in step.scheduled.num_scheduled_tokens:
                step.reused_ids.add(request.request_id)
        params = request.sampling_params
        opt_in = OptIn.of(params) if self.bare_rows is None else self.bare_rows.opt_in(params)
        self.distributor.add(request, opt_in)
        self.router_inputs.add(request)

    def request_finished(self, request: Request, *more: Any, **options: Any) -> None:
        """Called when a request ends, and when it is preempted, which restarts its prefill."""
        if request.is_finished():
            self.distributor.end_request(request)
            self.router_inputs.forget(request.request_id)
            self.prefill_rows.pulls.forget(request.request_id)
        else:
            self.distributor.prefill_again(request)

    def reset(self, *more: Any, **options: Any) -> None:
        """Called when the prefix cache was reset, as when weights change: no earlier row is hit
        then."""
        self.distributor.weights_may_differ()

    def build_connector_meta(
        self,
        scheduler_output: SchedulerOutput,
        requests: Mapping[str, Request],
        *more: Any,
        **options: Any,
    ) -> StepTag:
        """Called when a step has been scheduled, before its requests are advanced. Its tag comes
        with its output."""
        recomputing = self.distributor.recomputed.schedule(scheduler_output, requests)
        self._num_steps += 1
        number = step_number(
            self._num_steps, self._parallel.data_parallel_index, self._parallel.data_parallel_size
        )
        tables = self.distributor.schedule(scheduler_output, requests)
        step = Step(number, scheduler_output, tables)
        step.loads = self.external_kv.pop_loads(scheduler_output, requests)
        step.stores = self.external_kv.pop_stores(scheduler_output)
        self.router_inputs.complete(recomputing.rows)
        step.recomputing = recomputing
        step.inputs = self.router_inputs.of_requests(
            scheduler_output.num_scheduled_tokens, recomputing.rows
        )
        self._stats.count_recomputed(recomputing.rows, self.distributor.num_again)
        self._steps[self._num_steps] = step
        return StepTag(self._num_steps, recomputing.rows)

    def receive(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> Step:
        """Takes the rows of a step's output, before vLLM passes it to requests.

        Rows move in the order in which their KV did, so that a slot's row is always of the same
        computation as its KV. Each of these actions reads or overwrites rows of others, so none may
        change its place.
        """
        step = self._pop_step(scheduler_output)
        captured = _detach_rows(scheduler_output, output)
        # 1. Stores of KV that is copied out before the step runs: it reuses their blocks, so the
        #    actions below overwrite these rows.
        self._apply_stores(step, before_step=True)
        # 2. Loads: they put KV below the tokens that the step computes. Steps before it, which may
        #    have written into the same slots, have arrived; the step itself has not.
        for load in step.loads:
            load.apply(self.cache)
        # 3. Copies of blocks: the worker makes them before the forward pass, whose tokens go into
        #    the copies.
        if scheduler_output.kv_cache_block_copies:
            self.cache.copy_blocks(scheduler_output.kv_cache_block_copies)
        if captured is not None:
            # 4. The step's own rows: it computed its tokens on top of all of the above.
            self._take_own_rows(step, captured, output.req_id_to_index)
        # 5. Stores of KV that is copied out after the step: they take what it wrote.
        self._apply_stores(step, before_step=False)
        return step

    def _take_own_rows(
        self, step: Step, captured: StepRows, batch_index: Mapping[str, int]
    ) -> None:
        """Takes what the step's forward pass routed. `batch_index` has the index of each request in
        its batch."""
        self.cache.write(captured.slots, captured.rows, step.number)
        step.arrive(captured, batch_index)
        if self.bare_rows is not None:
            self.bare_rows.learn(captured)
        ids = self.cache.ids(captured.rows)
        # Also where no request has an input: the worker may have steered one that has none.
        if step.inputs or captured.told != TOLD_NOTHING:
            check_told(step, ids)
        self._stats.count_step(ids, captured.waited_s)

    def _pop_step(self, scheduler_output: SchedulerOutput) -> Step:
        tag = tag_of(scheduler_output)
        number = None if tag is None else tag.number
        step = None if number is None else self._steps.pop(number, None)
        assert step is not None, (
            f"an output of step {number} arrives, of requests "
            f"{list(scheduler_output.num_scheduled_tokens)}: expected one of the steps in flight, "
            f"which actually are {list(self._steps)}"
        )
        return step

    def _apply_stores(self, step: Step, *, before_step: bool) -> None:
        for store in step.stores:
            if store.runs_before_step == before_step:
                store.apply(self.cache)

    def distribute(self, step: Step, messages: dict[int, EngineCoreOutputs], is_idle: bool) -> None:
        """Adds envelopes to a step's messages, by API process: with rows, causes of unknown rows
        and counters. `is_idle`: whether no request is left."""
        singles = self.distributor.distribute(step, messages)
        if self.bare_rows is not None:
            for client, message in messages.items():
                message.outputs = self.bare_rows.place(message.outputs, singles.get(client, ()))
            return
        notes = self._notes(is_idle)
        for client in {**messages, **notes}:
            message = messages.setdefault(client, EngineCoreOutputs())
            rows = pack(message.outputs, singles.get(client, ()))
            if rows is None and client not in notes:
                continue
            envelope = EngineCoreOutput(
                ENVELOPE_ID, [], stop_reason=ENVELOPE_ID, routed_experts=rows
            )
            if client in notes:
                envelope.kv_transfer_params = notes[client].encode()
            message.outputs.insert(0, envelope)

    def _notes(self, is_idle: bool) -> dict[int, Notes]:
        """What is to be said besides rows, by API process."""
        notes: defaultdict[int, Notes] = defaultdict(Notes)
        for client, unknown in self.distributor.source.pop_unknown():
            notes[client].unknown.append(unknown)
        stats = self._stats.report(
            is_idle,
            len(self.distributor.requests.running),
            lambda: self.external_kv.used_bytes + self.cache.used_bytes,
        )
        if stats is not None:
            notes[0].stats = stats  # for one process, because metrics are summed over processes
        return notes


def step_number(count: int, rank: int, num_ranks: int) -> int:
    """Of the step `count` of an engine: the steps of data-parallel engines take turns, so that each
    number is of one engine. Counts anew before it would be `UNKNOWN_STEP`."""
    return count % (UNKNOWN_STEP // num_ranks) * num_ranks + rank


def _detach_rows(scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> StepRows | None:
    """The rows on a step's output; None if the step was empty. Raises `RuntimeError` if they are
    missing."""
    captured = detach(output)
    if captured is None and scheduler_output.total_num_scheduled_tokens:
        # No assertion, which `python -O` removes: slots would keep the rows of other tokens.
        raise RuntimeError(
            f"a step of requests {list(scheduler_output.num_scheduled_tokens)}: expected rows "
            "with its output, actually the worker sent none"
        )
    return captured


class SchedulerCapture(HookedScheduler):
    """Adds the capture to vLLM's schedulers, or to a program's own."""

    aux_output_connector: SchedulerHooks

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        check_engine_config(vllm_config)
        check_vllm_has(SCHEDULER)
        if takes_input(vllm_config):
            read_inputs()
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.aux_output_connector = SchedulerHooks(self, vllm_config, kv_cache_config)

    # Since vLLM 0.33 with a limit.
    def _get_local_prefix_cache_hit(self, request: Request, *limit: int | None) -> LocalHit:
        hit = super()._get_local_prefix_cache_hit(request, *limit)
        return self.aux_output_connector.external_kv.truncate_prefix_hit(request, hit)

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        delay_free, params = super()._connector_finished(request)
        return delay_free, self.aux_output_connector.prefill_rows.export(request, params)

    def add_request(self, request: Request) -> None:
        hooks = self.aux_output_connector
        running = self.requests.get(request.request_id)
        continues_prompt = running is not None and _continues(running, request)
        if continues_prompt and not request.resumable:
            super().add_request(request)  # which says that no chunk comes any more
            return
        if self._is_refused(request, is_used=running is not None and not continues_prompt):
            self._refuse(request)
            return
        hooks.router_inputs.salt(request)
        taken_params = hooks.prefill_rows.receive(request, self.vllm_config.kv_transfer_config)
        super().add_request(request)
        # Not before, as vLLM may refuse it.
        if not continues_prompt:
            hooks.prefill_rows.add(request, taken_params)
            hooks.add(request)

    def _is_refused(self, request: Request, *, is_used: bool) -> bool:
        """Whether a request cannot run, of which the log says why. `is_used`: whether another has
        its id."""
        hooks = self.aux_output_connector
        if is_used:
            # vLLM would raise, and so end, or take it for a chunk of the other's prompt. An API
            # process refuses an id that runs there, but does not know what runs in others.
            logger.error(
                "The request id %r of API process %d is in use: the new request ends with an error.",
                request.request_id,
                request.client_index,
            )
            return True
        unserved_field = hooks.bare_rows and hooks.bare_rows.unserved_field(request.sampling_params)
        if unserved_field is not None:
            logger.error(
                "Request %r has the field %r, which vLLM's front end in Rust does not serve: it ends with an error. "
                "`routed-experts serve` does, without VLLM_USE_RUST_FRONTEND.",
                request.request_id,
                unserved_field,
            )
            return True
        reason = hooks.router_inputs.refusal(request)
        if reason is not None:
            logger.error(
                "Request %r says which experts its tokens take, which cannot be done, as %s: it ends with an error.",
                request.request_id,
                reason,
            )
            return True
        return False

    def _refuse(self, request: Request) -> None:
        """Ends a request that was not accepted with an error.

        With data parallelism an API process counts what runs in each engine, and sends what has an
        id that it knows to the same one, until an engine says that the id has ended. It has not
        where the process has another request of this id, or may stream in more of the prompt.
        """
        self.aux_output_connector.output_queue.refuse(request.request_id, request.client_index)
        running = self.requests.get(request.request_id)
        is_clients = running is not None and running.client_index == request.client_index
        if self.finished_req_ids_dict is not None and not (is_clients or request.resumable):
            self.finished_req_ids_dict[request.client_index].add(request.request_id)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        ids: list[str] | None = None  # of all requests
        if isinstance(request_ids, str):
            ids = [request_ids]
        elif request_ids is not None:
            ids = list(request_ids)  # walked through twice
        finished = super().finish_requests(ids, finished_status)
        if finished_status is not RequestStatus.FINISHED_ABORTED:
            return finished  # vLLM tells the API process of an error with the step's outputs
        distributor = self.aux_output_connector.distributor
        others = distributor.end_aborted(finished, is_asked=ids is not None)
        if ids is None:
            # At a pause or the engine's end vLLM tells clients at once that the requests returned
            # here have ended.
            return others
        for request_id in ids:
            distributor.leave(request_id)
        return finished

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state == PauseState.UNPAUSED:
            self.aux_output_connector.distributor.weights_may_differ()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        hooks = self.aux_output_connector
        step = hooks.receive(scheduler_output, model_runner_output)
        self._end_unfit(step)
        kv_output = model_runner_output.kv_connector_output
        if kv_output is not None:
            hooks.prefill_rows.fail_late_pulls(kv_output)
        for request_id in step.reused_ids:
            # vLLM would give the tokens of the request that was aborted to the one that has its id
            # now, or fail. Needed as long as VLLM_DISABLE_REQUEST_ID_RANDOMIZATION exists.
            del scheduler_output.num_scheduled_tokens[request_id]
        messages = super().update_from_output(scheduler_output, model_runner_output)
        hooks.distribute(step, messages, is_idle=not self.requests)
        return messages

    def _end_unfit(self, step: Step) -> None:
        """Ends requests whose input the workers could not follow: no API process had checked it."""
        if not step.inputs or not step.captured.told.unfit:
            return
        running = [
            request_id
            for request_id in step.captured.told.unfit
            if request_id in self.requests and request_id not in step.reused_ids
        ]
        for request in self.finish_requests(running, RequestStatus.FINISHED_ERROR):
            self.aux_output_connector.output_queue.refuse(request.request_id, request.client_index)

    def has_requests(self) -> bool:
        """True also while rows are pending, so that vLLM runs another step, even an empty one, to
        send them."""
        return super().has_requests() or len(self.aux_output_connector.output_queue) > 0


def _continues(running: Request, request: Request) -> bool:
    """Whether a request is a chunk of the prompt of `running`, or its end, from the API process that
    streams it in. vLLM looks at the id alone."""
    return (
        running.streaming_queue is not None
        and not running.is_finished()
        and running.client_index == request.client_index
    )


class CaptureScheduler(SchedulerCapture, Scheduler):
    """For synchronous scheduling."""


class CaptureAsyncScheduler(SchedulerCapture, AsyncScheduler):
    """For asynchronous scheduling."""


def make_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Scheduler:
    """`scheduler_cls`; a function, as vLLM disables asynchronous scheduling for a class that does
    not match."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (CaptureAsyncScheduler if is_async else CaptureScheduler)(vllm_config, *args, **kwargs)
