"""Rows on their way from the engine's outputs to the streams that send them."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.message import Unpacker
from routed_experts.server.vllm_api import (
    EngineCoreOutput,
    OutputProcessor,
    OutputProcessorOutput,
    RequestOutputKind,
    RequestState,
)


class RowFeed:
    """The rows of one streamed choice that arrived from the engine and were not sent yet.

    It rides on the choice's outputs as `CompletionOutput.routed_experts`, so it lives as long as they do, and
    merged outputs lose nothing: they carry the same feed.
    """

    def __init__(self) -> None:
        self._chunks: list[NDArray[np.int16]] = []
        self._empty: NDArray[np.int16] | None = None
        self._taken = 0

    def push(self, rows: NDArray[np.int16]) -> None:
        if self._empty is None:
            self._empty = np.empty_like(rows, shape=(0, *rows.shape[1:]))
        self._chunks.append(rows)

    def take_until(self, total: int) -> NDArray[np.int16] | None:
        """The rows that bring what was taken so far to `total`, or fewer if they have not arrived.

        None if there has not been anything, not even an empty array to tell the shape.
        """
        if self._empty is None:
            return None
        wanted = max(total - self._taken, 0)
        if len(self._chunks) == 1 and len(self._chunks[0]) <= wanted:  # nearly always
            rows = self._chunks.pop()
        else:
            arrived = np.concatenate([self._empty, *self._chunks])
            rows, rest = arrived[:wanted], arrived[wanted:]
            self._chunks = [rest.copy()] if len(rest) else []  # a view would keep the rows that were taken
        self._taken += len(rows)
        return rows


class RowFeeds:
    """Takes the rows of streamed requests off the engine's outputs.

    Requests that are not streamed keep vLLM's way: it collects their rows and puts them on the last output.
    """

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor
        self._process: Callable[..., OutputProcessorOutput] = processor.process_outputs
        self._feeds: WeakKeyDictionary[RequestState, RowFeed] = WeakKeyDictionary()
        self._unpacker = Unpacker()

    @classmethod
    def install(cls, processor: OutputProcessor) -> "RowFeeds":
        """Replaces `processor.process_outputs`, once for each processor.

        vLLM would collect the rows until the request finishes, and keep the last ones only when outputs merge for a
        slow reader. AsyncLLM makes its OutputProcessor itself, so it cannot be given a subclass. Until vLLM streams
        routed experts.
        """
        installed = vars(processor).get("process_outputs")
        if installed is not None:
            return installed.__self__
        feeds = cls(processor)
        processor.process_outputs = feeds.process_outputs
        return feeds

    def __len__(self) -> int:
        return len(self._feeds)

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], engine_core_timestamp: Any = None, *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        """vLLM's `process_outputs`, with the rows of streamed requests on their outputs."""
        self._unpacker.unpack(engine_core_outputs, message=engine_core_timestamp)
        states: list[RequestState] = []
        feeds: list[RowFeed] = []  # two lists: a pair for each output would make the garbage collector run each step
        for output in engine_core_outputs:
            if output.routed_experts is None:
                continue
            state = self._processor.request_states.get(output.request_id)
            if state is None or state.output_kind is not RequestOutputKind.DELTA:
                continue
            feed = self._feeds.get(state)
            if feed is None:
                feed = self._feeds[state] = RowFeed()
            feed.push(output.routed_experts)
            output.routed_experts = None
            states.append(state)
            feeds.append(feed)
        processed = self._process(engine_core_outputs, engine_core_timestamp, *args, **kwargs)
        for state, feed in zip(states, feeds, strict=True):
            queued = state.queue.output if state.queue is not None else None
            for choice in getattr(queued, "outputs", ()):
                if choice.index == state.request_index:
                    choice.routed_experts = feed
        return processed
