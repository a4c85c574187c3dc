"""Rows in the form of vLLM's own capture: an array on each finished output of an engine in a
program."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire.message import OptIn
from routed_experts.capture.wire.rows import captures_weights, ids_of, row_shape, weights_of
from routed_experts.capture.wire.vllm_rows import in_vllms_form
from routed_experts.protocol.batch import has_dense_layers, spread_layers
from routed_experts.protocol.codec import Rows
from routed_experts.server.inprocess.input_check import InputCheck
from routed_experts.server.outputs.processor import (
    BufferedRequestState,
    RowBuffers,
    opt_in,
)
from routed_experts.server.outputs.row_buffer import RowBuffer, is_complete
from routed_experts.server.settings import Settings
from routed_experts.server.vllm_api import (
    AsyncLLM,
    CompletionOutput,
    EngineCoreRequest,
    LLMEngine,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
    get_logger,
)

logger = get_logger(__name__)

Array = NDArray[np.integer[Any]]
"""[n, H, K] for the H decoder layers of the model: uint8 up to 256 experts, else uint16."""

Weights = NDArray[np.float32]
"""[n, H, K], zeros in layers without experts, NaN where they are unknown."""


class ArrayForm:
    """Converts rows to the layout of vLLM's own capture: all decoder layers, zeros in dense
    layers."""

    def __init__(self, model: Any, has_weights: bool = False) -> None:
        self.has_weights = has_weights  # whether rows have weights
        self._num_experts = int(model.get_num_experts())
        self._num_layers = int(model.get_total_num_hidden_layers())
        self._layer_ids: list[int] | None = None
        self.shape = (0, 0)  # (L, K) of the workers' rows, (3L, K) with weights; (0, 0) until known

    @property
    def is_known(self) -> bool:
        return self._layer_ids is not None

    def learn(self, worker: dict[str, Any]) -> None:
        """Stores the dimensions that a worker reported."""
        self.shape = row_shape(worker["num_layers"], worker["top_k"], self.has_weights)
        self._layer_ids = worker["layer_ids"]

    def array(self, arrays: list[Rows]) -> tuple[Array, Weights | None]:
        """Joins `arrays` into a new array, and their weights into another. Unknown rows make that
        of ids int16, because vLLM's dtype cannot hold -1."""
        assert self._layer_ids is not None
        rows = np.concatenate([np.empty((0, *self.shape), np.int16), *arrays])
        weights = weights_of(rows) if self.has_weights else None
        ids = np.ascontiguousarray(ids_of(rows)) if self.has_weights else rows
        array = in_vllms_form(
            ids, self._layer_ids, num_layers=self._num_layers, num_experts=self._num_experts
        )
        if weights is not None and has_dense_layers(self._layer_ids, self._num_layers):
            weights = spread_layers(weights, self._layer_ids, self._num_layers)
        return array, weights


class ArrayBuffer(RowBuffer):
    """The rows of one choice, which become arrays on its outputs."""

    def __init__(
        self,
        form: ArrayForm,
        request_id: str,
        *,
        start: int,  # position of the first row to return
        prompt_len: int,
        kind: RequestOutputKind,  # of the outputs
    ) -> None:
        super().__init__(request_id)
        self._form = form
        self._next_row = start
        self._prompt_len = prompt_len
        self._kind = kind
        self._num_tokens = 0

    def arrays_of(self, choice: CompletionOutput) -> tuple[Array | None, Weights | None]:
        """The arrays for an output, and their weights: with `DELTA`, the rows that became known
        with its tokens; otherwise all rows of a finished choice. None before the end, and for a
        choice that ended without rows."""
        self._count_tokens(choice)
        if not self._are_due(choice):
            return None, None
        first = self._next_row
        rows = self._take_rows(choice)
        if self.end < 0 and not rows:
            return None, None
        array, weights = self._form.array(rows)
        if array.dtype == np.int16:
            logger.error(
                "Request %r: some rows from position %d on are unknown (-1). Their array is int16.",
                self._request_id,
                first,
            )
        return array, weights

    def _count_tokens(self, choice: CompletionOutput) -> None:
        """An output with `DELTA` has the new tokens; others have all."""
        if self._kind == RequestOutputKind.DELTA:
            self._num_tokens += len(choice.token_ids)
        else:
            self._num_tokens = len(choice.token_ids)

    def _are_due(self, choice: CompletionOutput) -> bool:
        return choice.finish_reason is not None or self._kind == RequestOutputKind.DELTA

    def _take_rows(self, choice: CompletionOutput) -> list[Rows]:
        # The last token has no row.
        end = max(self._prompt_len + self._num_tokens - 1, self._next_row)
        shape = self._form.shape if is_complete(choice.finish_reason) else None
        rows = self.take(self._next_row, end, shape)
        self._next_row += sum(map(len, rows))
        return rows


class ArrayCollector(RequestOutputCollector):
    """vLLM's queue between the engine and the task that reads a request. Outputs get their arrays
    when they are read.

    vLLM merges the outputs of a slow reader before that, while they still carry the buffer of their
    choice.
    """

    arrays: "InProcessCapture"

    async def get(self) -> Any:
        await self.arrays.ready()
        return self.arrays.fill(await super().get())

    def get_nowait(self) -> Any:
        if not (self.arrays.is_ready() or isinstance(self.output, Exception)):
            return None
        return self.arrays.fill(super().get_nowait())


class InProcessCapture:
    """Opts in every request of an engine, and puts arrays on the outputs."""

    def __init__(self, engine: LLMEngine | AsyncLLM) -> None:
        processor = engine.output_processor
        self.is_on = True  # False over HTTP, where each request opts in by itself
        self.form = ArrayForm(engine.model_config, captures_weights(engine.vllm_config))
        settings = Settings.of(engine.vllm_config.additional_config)
        self._input_check = InputCheck(settings)
        self._states = processor.request_states
        self._add: Callable[..., None] = processor.add_request
        self._ask: Callable[[], Awaitable[list[Any]]] | None = None
        self._learning: asyncio.Future[None] | None = None
        if isinstance(engine, AsyncLLM):
            core = engine.engine_core  # a reference to the engine would keep it alive
            self._ask = lambda: core.collective_rpc_async("routed_experts_info")
        else:
            self._take_info(engine.collective_rpc("routed_experts_info")[0])

    @classmethod
    def install(cls, engine: LLMEngine | AsyncLLM) -> "InProcessCapture":
        """Replaces the output processor's `add_request`, which each request passes on its way to
        the engine."""
        processor = engine.output_processor
        buffers = RowBuffers.install(processor)
        every = cls(engine)  # after the buffers, whose `add_request` it calls
        buffers.every_request = every
        processor.add_request = every.add_request
        return every

    async def ready(self) -> None:
        """Waits until the workers have reported the dimensions of rows."""
        while not self.is_ready():
            assert self._learning is not None
            await asyncio.wait([self._learning])  # other readers wait for it too

    def is_ready(self) -> bool:
        """Whether the workers have reported the dimensions of rows. Asks them if nobody has. A
        question that failed is an error of one reader; the others ask again."""
        if self._learning is not None and self._learning.done():
            learned = self._learning
            self._learning = None
            learned.result()  # raises its exception
        if not self.form.is_known and self._learning is None:
            self._learning = asyncio.ensure_future(self._learn())
        return self.form.is_known

    async def _learn(self) -> None:
        assert self._ask is not None
        worker, *_ = await self._ask()
        self._take_info(worker)
        self._ask = None

    def _take_info(self, worker: dict[str, Any]) -> None:
        self.form.learn(worker)
        self._input_check.learn(worker)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """vLLM's `add_request`, with the opt-in."""
        params = request.sampling_params
        if self.is_on:  # over HTTP its fields were checked
            self._input_check.check(request)
        if not self.is_on or params is None or OptIn.of(params) is not None:
            self._add(request, prompt, parent_req, request_index, queue)
            return
        start: int = params.routed_experts_prompt_start
        # A copy, because other requests and the program may use the same object.
        request.sampling_params = params = copy(params)
        prompt_id = None  # the same for all requests of one prompt with `n` > 1
        if parent_req is not None:
            prompt_id = vars(parent_req).setdefault("routed_experts_prompt_id", os.urandom(16))
        opt_in(
            params,
            start,
            weights=self.form.has_weights,
            own_prompt=True,
            prompt_id=prompt_id,
        )
        self._add(request, prompt, parent_req, request_index, queue)
        state = self._states[request.request_id]
        buffer = ArrayBuffer(
            self.form,
            request.request_id,
            start=start,
            prompt_len=state.prompt_len,
            kind=params.output_kind,
        )
        BufferedRequestState.give(state, buffer)
        if queue is not None:
            queue.__class__ = ArrayCollector
            queue.arrays = self

    def fill(self, output: Any) -> Any:
        """`output` with arrays in place of buffers."""
        for choice in output.outputs if isinstance(output, RequestOutput) else ():
            if isinstance(choice.routed_experts, ArrayBuffer):
                choice.routed_experts, weights = choice.routed_experts.arrays_of(choice)
                if self.form.has_weights:
                    choice.routed_expert_weights = weights
        return output
