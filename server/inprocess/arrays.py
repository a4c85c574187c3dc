"""Rows in the form of vLLM's own capture: an array on each finished output of an engine in a
program."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire.message import OptIn
from routed_experts.capture.wire.rows import captures_weights, ids_of, row_shape, weights_of
from routed_experts.capture.wire.vllm_rows import in_vllms_form
from routed_experts.protocol.batch import has_dense_layers, spread_layers
from routed_experts.protocol.codec import Rows, count_missing
from routed_experts.protocol.fetch import ArrayReference
from routed_experts.protocol.models import DELIVERY, Delivery
from routed_experts.server.inprocess.input_check import InputCheck
from routed_experts.server.outputs.array_store import ArrayStore, StoreError, store_with
from routed_experts.server.outputs.folders import default_folder
from routed_experts.server.outputs.processor import (
    BufferedRequestState,
    RowBuffers,
    opt_in,
    refuse_if_streamed_in,
    refuse_used_ids,
)
from routed_experts.server.outputs.row_buffer import RowBuffer, is_complete
from routed_experts.server.settings import KINDS, Settings
from routed_experts.server.vllm_api import (
    AsyncLLM,
    CompletionOutput,
    EngineCoreRequest,
    LLMEngine,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
    SamplingParams,
    VLLMValidationError,
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
    """The rows of one choice, which become arrays on its outputs, or references to arrays on its
    last output."""

    def __init__(
        self,
        form: ArrayForm,
        request_id: str,
        *,
        start: int,  # position of the first row to return
        prompt_len: int,
        kind: RequestOutputKind,  # of the outputs
        store: ArrayStore | None = None,
    ) -> None:
        super().__init__(request_id)
        self._store = store  # of a request that asks for references
        self._form = form
        self._next_row = start
        self._prompt_len = prompt_len
        self._kind = kind
        self._num_tokens = 0

    @property
    def is_stored_at_end(self) -> bool:
        """Whether its request asks for references."""
        return self._store is not None

    def arrays_of(self, choice: CompletionOutput) -> tuple[Array | ArrayReference | None, Any]:
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
        if self._store is None:
            return array, weights
        return self._references(self._store, array, weights, first)

    def _count_tokens(self, choice: CompletionOutput) -> None:
        """An output with `DELTA` has the new tokens; others have all."""
        if self._kind == RequestOutputKind.DELTA:
            self._num_tokens += len(choice.token_ids)
        else:
            self._num_tokens = len(choice.token_ids)

    def _are_due(self, choice: CompletionOutput) -> bool:
        if choice.finish_reason is not None:
            return True
        return self._kind == RequestOutputKind.DELTA and self._store is None

    def _take_rows(self, choice: CompletionOutput) -> list[Rows]:
        # The last token has no row.
        end = max(self._prompt_len + self._num_tokens - 1, self._next_row)
        shape = self._form.shape if is_complete(choice.finish_reason) else None
        rows = self.take(self._next_row, end, shape)
        self._next_row += sum(map(len, rows))
        return rows

    def _references(
        self, store: ArrayStore, array: Array, weights: Weights | None, start: int
    ) -> tuple[Array | ArrayReference, Any]:
        """References to both arrays, or both arrays if the store cannot take them."""
        stored = None
        try:
            stored = _stored(store, array, start)
            if weights is None:
                return stored, None
            return stored, _stored(store, weights, start)
        except StoreError as error:
            store.warnings.log(
                "Request %r has arrays instead of references: %s", self._request_id, error
            )
            if stored is not None:
                store.discard(stored.reference["id"])
            return array, weights


def _stored(store: ArrayStore, array: NDArray[Any], start: int) -> ArrayReference:
    layers_first = array.swapaxes(0, 1)
    stored = store.put(layers_first)
    # unsigned integers have no -1
    missing = 0 if array.dtype.kind == "u" else count_missing(array)
    where = {"path": stored.place}
    if stored.url is not None:
        where = {"uri": stored.place, "url": stored.url}
    return ArrayReference(stored.reference(layers_first, start, missing, part="joined", **where))


def _is_to_be_stored(output: Any) -> bool:
    """Whether an output has a choice that has ended and gets references. Other choices of its
    request get references too, and nothing is taken of those that go on."""
    if not isinstance(output, RequestOutput):
        return False
    return any(
        choice.finish_reason is not None
        and isinstance(choice.routed_experts, ArrayBuffer)
        and choice.routed_experts.is_stored_at_end
        for choice in output.outputs
    )


class ArrayCollector(RequestOutputCollector):
    """vLLM's queue between the engine and the task that reads a request. Outputs get their arrays
    when they are read.

    vLLM merges the outputs of a slow reader before that, while they still carry the buffer of their
    choice.
    """

    arrays: "InProcessCapture"
    _filling: asyncio.Future[Any] | None = None
    """The next output, whose arrays a thread stores, so that other requests go on meanwhile."""

    async def get(self) -> Any:
        if self._filling is None:
            await self.arrays.ready()
            output = await super().get()
            if (filling := self.arrays.fill_soon(output)) is None:
                return output
            self._filling = filling
        await asyncio.wait([self._filling])
        return self._filled()

    def get_nowait(self) -> Any:
        if self._filling is None:
            if not (self.arrays.is_ready() or isinstance(self.output, Exception)):
                return None
            output = super().get_nowait()
            if output is None or (filling := self.arrays.fill_soon(output)) is None:
                return output
            self._filling = filling
        return self._filled() if self._filling.done() else None

    def _filled(self) -> Any:
        filling = self._filling
        assert filling is not None
        self._filling = None
        return filling.result()


class InProcessCapture:
    """Opts in every request of an engine, and puts arrays on the outputs."""

    def __init__(self, engine: LLMEngine | AsyncLLM) -> None:
        processor = engine.output_processor
        self.is_on = True  # False over HTTP, where each request opts in by itself
        self.form = ArrayForm(engine.model_config, captures_weights(engine.vllm_config))
        self._settings = Settings.of(engine.vllm_config.additional_config)
        self._input_check = InputCheck(self._settings.enable_routed_experts_input)
        self._store: ArrayStore | None = None  # made for the first request that needs it
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
        refuse_used_ids(engine)
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
        by_reference = self._is_by_reference(params)
        prompt_id = None  # the same for all requests of one prompt with `n` > 1
        if parent_req is not None:
            prompt_id = vars(parent_req).setdefault("routed_experts_prompt_id", os.urandom(16))
        opt_in(
            params,
            start,
            weights=self.form.has_weights,
            at_end=by_reference,
            own_prompt=True,
            prompt_id=prompt_id,
        )
        # Before a store is made for it. And that may fail: vLLM must not know the request then.
        refuse_if_streamed_in(request)
        store = self._store_of_engine() if by_reference else None
        self._add(request, prompt, parent_req, request_index, queue)
        state = self._states[request.request_id]
        buffer = ArrayBuffer(
            self.form,
            request.request_id,
            start=start,
            prompt_len=state.prompt_len,
            kind=params.output_kind,
            store=store,
        )
        BufferedRequestState.give(state, buffer)
        if queue is not None:
            queue.__class__ = ArrayCollector
            queue.arrays = self

    def _is_by_reference(self, params: SamplingParams) -> bool:
        """Whether a request asks for references, by itself (`DELIVERY` in
        `SamplingParams.extra_args`) or by the default of the engine."""
        delivery = (params.extra_args or {}).get(DELIVERY, self._settings.routed_experts_delivery)
        if delivery not in get_args(Delivery):
            raise VLLMValidationError(
                f"{DELIVERY} must be {KINDS[DELIVERY].expected}, not {delivery!r}",
                parameter=DELIVERY,
            )
        return bool(delivery == "reference")

    def _store_of_engine(self) -> ArrayStore:
        if self._store is None:
            self._store = store_with(self._settings, default_folder("programs"))
        return self._store

    def fill_soon(self, output: Any) -> asyncio.Future[Any] | None:
        """As `fill`: at once, or in the store's thread if an array is to be stored.

        What is not stored may not be taken there: the event loop gives rows to a choice that goes
        on, and an output may have one beside a choice that has ended.
        """
        if self._store is not None and _is_to_be_stored(output):
            return asyncio.wrap_future(self._store.writer.submit(self.fill, output))
        self.fill(output)
        return None

    def fill(self, output: Any) -> Any:
        """`output` with arrays in place of buffers."""
        for choice in output.outputs if isinstance(output, RequestOutput) else ():
            if isinstance(choice.routed_experts, ArrayBuffer):
                choice.routed_experts, weights = choice.routed_experts.arrays_of(choice)
                if self.form.has_weights:
                    choice.routed_expert_weights = weights
        return output
