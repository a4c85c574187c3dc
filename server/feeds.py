"""Rows on their way from the engine's outputs to the streams that send them."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from server.vllm_api import EngineCoreOutput, OutputProcessor, OutputProcessorOutput, RequestOutputKind, RequestState

SMALL_ARRAY_BYTES = 16 << 10
"""Up to this size, rows travel inside the engine's message; see `server.launch.keep_small_arrays_in_messages`."""


class RowFeed:
    """The rows of one streamed choice that arrived from the engine and were not sent yet.

    It rides on the choice's outputs as `CompletionOutput.routed_experts`, so it lives as long as they do, and
    merged outputs lose nothing: they carry the same feed.
    """

    def __init__(self) -> None:
        self._chunks: list[NDArray[np.int16]] = []
        self._taken = 0

    def push(self, rows: NDArray[np.int16]) -> None:
        self._chunks.append(rows)

    def take_until(self, total: int) -> NDArray[np.int16] | None:
        """The rows that bring what was taken so far to `total`, or fewer if they have not arrived.

        None if there has not been anything, not even an empty array to tell the shape.
        """
        if not self._chunks:
            return None
        rows = self._chunks[0] if len(self._chunks) == 1 else np.concatenate(self._chunks)
        count = min(max(total - self._taken, 0), len(rows))
        self._taken += count
        self._chunks = [rows[count:].copy()]  # a view would keep the rows that were taken
        return rows[:count]


class RowFeeds:
    """Takes the rows of streamed requests off the engine's outputs.

    Requests that are not streamed keep vLLM's way: it collects their rows and puts them on the last output.
    """

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor
        self._process: Callable[..., OutputProcessorOutput] = processor.process_outputs
        self._feeds: WeakKeyDictionary[RequestState, RowFeed] = WeakKeyDictionary()

    @classmethod
    def install(cls, processor: OutputProcessor) -> "RowFeeds":
        """Replaces `processor.process_outputs`, once for each processor. See `server.vllm_api.REPLACED`."""
        installed = vars(processor).get("process_outputs")
        if installed is not None:
            return installed.__self__
        feeds = cls(processor)
        processor.process_outputs = feeds.process_outputs
        return feeds

    def __len__(self) -> int:
        return len(self._feeds)

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        """vLLM's `process_outputs`, with the rows of streamed requests on their outputs."""
        fed: list[tuple[RequestState, RowFeed]] = []
        for output in engine_core_outputs:
            rows = output.routed_experts
            if rows is None:
                continue
            if rows.base is not None and rows.nbytes <= SMALL_ARRAY_BYTES:
                # It lies in the engine's message, and would keep the rows of all other requests in memory.
                output.routed_experts = rows = rows.copy()
            state = self._processor.request_states.get(output.request_id)
            if state is None or state.output_kind is not RequestOutputKind.DELTA:
                continue
            feed = self._feeds.setdefault(state, RowFeed())
            feed.push(rows)
            output.routed_experts = None
            fed.append((state, feed))
        processed = self._process(engine_core_outputs, *args, **kwargs)
        for state, feed in fed:
            queued = state.queue.output if state.queue is not None else None
            for choice in getattr(queued, "outputs", ()):
                if choice.index == state.request_index:
                    choice.routed_experts = feed
        return processed
