"""The scheduler given to vLLM as `scheduler_cls`: it owns the host cache and knows what each request is owed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from routed_experts.capture.engine.config import check_engine_config, full_attention_group
from routed_experts.capture.engine.transport import detach
from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.message import PROMPT_START_ARG, is_large, pack
from routed_experts.capture.pipeline import StepRows
from routed_experts.capture.rows import UNKNOWN
from routed_experts.capture.split import RequestRows, StepPart, step_start, take_rows

logger = init_logger(f"vllm.routed_experts.{__name__}")  # below vLLM's, which is the one that is configured


@dataclass(frozen=True)
class StepTag:
    """Travels with a step to the workers: which step it is, and how many requests are tracked (for inspection)."""

    step: int
    tracked_requests: int


@dataclass
class ScheduledStep:
    """What has to be remembered from scheduling a step until its output arrives.

    Attributes:
        starts: for each request with the opt-in, the absolute position of its first token in the step.
        block_ids: its block table, if the step brings the first tokens after a prefill whose rows lie in the host
            cache.
    """

    starts: dict[str, int] = field(default_factory=dict)
    block_ids: dict[str, NDArray[np.int64]] = field(default_factory=dict)


@dataclass
class ArrivedStep:
    """A step whose output is being handed to the requests.

    Attributes:
        offsets: where each request's rows begin in `rows`, in the order of the batch.
        index: of each request in the batch.
    """

    scheduled: ScheduledStep
    rows: NDArray[np.int16]
    offsets: list[int]
    index: Mapping[str, int]
    cache: HostCache

    def part(self, req_id: str) -> StepPart | None:
        """A request's share; None if it was not in the step, or has not opted in."""
        start = self.scheduled.starts.get(req_id)
        if start is None:
            return None
        index = self.index[req_id]
        rows = self.rows[self.offsets[index] : self.offsets[index + 1]]
        return StepPart(start, rows, self.scheduled.block_ids.get(req_id))


class Messages(dict[int, EngineCoreOutputs]):
    """A step's message to each API process, and after them the messages with large arrays.

    An API process reads a message as a whole. If a prompt's rows, which can be megabytes, came in the same one, the
    tokens of all other requests would wait for them. vLLM sends what `items` gives, in that order.
    """

    def __init__(self, messages: Mapping[int, EngineCoreOutputs]) -> None:
        super().__init__(messages)
        self._large: list[tuple[int, EngineCoreOutputs]] = []
        for client, message in messages.items():
            large = [output for output in message.outputs if is_large(output)]
            if 0 < len(large) < len(message.outputs):
                message.outputs = [output for output in message.outputs if not is_large(output)]
                self._large.append((client, EngineCoreOutputs(outputs=large)))
            pack(message.outputs)

    def items(self) -> Any:
        return [*super().items(), *self._large]

    def values(self) -> Any:
        return [message for _, message in self.items()]


class SchedulerConnector:
    """What `scheduler.aux_output_connector` is expected to be.

    Every step's rows are written into the host cache, whoever they belong to: a later request may hit them as a
    prefix. Only requests with the opt-in are sent anything, and only what is new.
    """

    def __init__(self, scheduler: Scheduler, kv_cache_config: KVCacheConfig, has_drafts: bool) -> None:
        self._scheduler = scheduler
        self._has_drafts = has_drafts
        self._kv_group = full_attention_group(kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._block_size = kv_cache_config.kv_cache_groups[self._kv_group].kv_cache_spec.block_size
        self._cache: HostCache | None = None  # made with the first rows, which say L and K
        self._tracked: dict[str, RequestRows] = {}
        self._steps: dict[int, ScheduledStep] = {}
        self._step = 0
        self._arrived: ArrivedStep | None = None

    def add_request(self, request: Request) -> None:
        """Starts tracking a request that opted in."""
        params = request.sampling_params
        prompt_start = params.extra_args.get(PROMPT_START_ARG) if params and params.extra_args else None
        # Our endpoints set it; at others, whose `extra_args` clients may set, anything can be in it.
        if isinstance(prompt_start, int) and prompt_start >= 0:
            self._tracked[request.request_id] = RequestRows(next_row=min(prompt_start, request.num_prompt_tokens))

    def request_finished(self, request: Request) -> None:
        """Called when a request ends, and also when it is preempted: then its prefill starts again."""
        if request.is_finished():
            self._tracked.pop(request.request_id, None)
        elif (state := self._tracked.get(request.request_id)) is not None:
            state.prefilling = True

    def reset(self) -> None:
        """Called when the prefix cache was reset. No block can be hit any more, so nothing stale can be read."""

    # vLLM 0.33: asks for these three too. The last two are called with a KV connector only, which is refused.

    def max_cache_hit(self, request: Request) -> int | None:
        """How many tokens a prefix hit may cover; None is no limit: rows are there as long as the KV is."""
        return None

    def cap_external_hit(self, request: Request, num_local: int, num_external: int) -> int:
        """How many tokens may come from another engine's KV: none, as their rows do not come with it."""
        return 0

    def request_loading(self, request: Request, num_tokens: int) -> None:
        """Called when KV of another engine is about to be loaded."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput, requests: Mapping[str, Request]) -> StepTag:
        """Called when a step has been scheduled, before its requests are advanced."""
        step = ScheduledStep()
        scheduled = scheduler_output.num_scheduled_tokens
        for req_id, state in self._tracked.items():
            count = scheduled.get(req_id)
            if count is None:
                continue
            request = requests[req_id]
            start = request.num_computed_tokens
            step.starts[req_id] = start
            if state.prefilling and start + count >= request.num_tokens:
                state.prefilling = False
                if state.next_row < start:
                    step.block_ids[req_id] = self._block_ids(req_id)
        self._step += 1
        self._steps[self._step] = step
        return StepTag(self._step, len(self._tracked))

    def receive(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, requests: Mapping[str, Request]
    ) -> None:
        """Takes the rows of a step whose output has arrived, before the output is handed to the requests.

        Raises:
            RuntimeError: the step ran, but its rows did not come with it.
        """
        tag = scheduler_output.aux_output_connector_metadata
        assert isinstance(tag, StepTag)
        scheduled = self._steps.pop(tag.step)
        self._arrived = None
        step = detach(output)
        if self._cache is not None and scheduler_output.kv_cache_block_copies:
            self._cache.copy_blocks(scheduler_output.kv_cache_block_copies)
        if step is None:
            if scheduler_output.total_num_scheduled_tokens:
                raise RuntimeError("a step ran, but the worker sent no rows with its output")
            return
        cache = self._host_cache(step)
        cache.write(step.slots, step.rows)
        if self._has_drafts:  # else a step begins where it was scheduled, and no request needs a look
            for req_id, start in scheduled.starts.items():
                if (request := requests.get(req_id)) is not None:
                    scheduled.starts[req_id] = step_start(start, request.num_tokens)
        self._arrived = ArrivedStep(scheduled, step.rows, step.offsets.tolist(), output.req_id_to_index, cache)

    def take_output(self, request: Request, output: Any) -> NDArray[np.int16] | None:
        """Called for each request that a step brought tokens to, after they were appended.

        Returns [n, L, K], the rows that became known with those tokens; None without the opt-in.
        """
        state = self._tracked.get(request.request_id)
        if state is None or self._arrived is None or (part := self._arrived.part(request.request_id)) is None:
            return None
        first = state.next_row
        rows = take_rows(state, part, end=request.num_tokens - 1, cache=self._arrived.cache)
        if first < part.start and (rows[:, 0, 0] == UNKNOWN).any():
            logger.error("Request %s: some of its rows are not known and are sent as -1.", request.request_id)
        return rows

    def _block_ids(self, req_id: str) -> NDArray[np.int64]:
        manager = self._scheduler.kv_cache_manager.coordinator.single_type_managers[self._kv_group]
        return np.fromiter((block.block_id for block in manager.req_to_blocks[req_id]), dtype=np.int64)

    def _host_cache(self, step: StepRows) -> HostCache:
        if self._cache is None:
            _, num_layers, top_k = step.rows.shape
            self._cache = HostCache(self._num_blocks, self._block_size, num_layers, top_k)
        return self._cache


class _Capture(Scheduler):
    """What both schedulers add to vLLM's."""

    aux_output_connector: SchedulerConnector

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        check_engine_config(vllm_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.aux_output_connector = SchedulerConnector(
            self, kv_cache_config, has_drafts=vllm_config.speculative_config is not None
        )

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.aux_output_connector.add_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.aux_output_connector.receive(scheduler_output, model_runner_output, self.requests)
        return Messages(super().update_from_output(scheduler_output, model_runner_output))


class CaptureScheduler(_Capture, Scheduler):
    """For synchronous scheduling."""


class CaptureAsyncScheduler(_Capture, AsyncScheduler):
    """For asynchronous scheduling."""


def make_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Scheduler:
    """`scheduler_cls`: vLLM decides on asynchronous scheduling after it has been given the class, and switches it
    off without a word for a class that does not match."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (CaptureAsyncScheduler if is_async else CaptureScheduler)(vllm_config, *args, **kwargs)
