"""What the running requests say, and what that is for the batch of a step."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire import message
from routed_experts.capture.wire.step_tag import tag_of
from routed_experts.protocol.codec import Rows
from routed_experts.protocol.routing_input import Bias, EncodedInput, Groups, RoutingInput

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, which is configured


class Model(NamedTuple):
    """What an input must fit."""

    num_layers: int
    top_k: int
    num_experts: int
    groups: Groups


class PlacedRows(NamedTuple):
    """Rows that a request gives, and where its tokens are in the batch."""

    first: int  # the token of the batch that the first row is for
    rows: Rows  # [n, L, K]


class RunningInputs:
    """What each running request says, of the layers of this pipeline stage.

    `layers` are those of this stage among the model's. An input that does not fit the model was not
    checked by an API process: it is not followed, and its request ends with an error.
    """

    def __init__(self, model: Model, layers: slice) -> None:
        self._model = model
        self._layers = layers
        self._inputs: dict[str, RoutingInput] = {}
        # of the step: in place of the rows that these requests give
        self._recomputed: Mapping[str, message.PlacedRows] = {}
        self._unfit: set[str] = set()

    def update(self, scheduler_output: Any) -> list[str]:
        """Called with each step, before the model runner updates its batch. Returns the requests
        with an input that have ended."""
        tag = tag_of(scheduler_output)
        self._recomputed = {} if tag is None else tag.recomputed
        ended = []
        if self:
            for request_id in scheduler_output.finished_req_ids:
                self._unfit.discard(request_id)
                if self._inputs.pop(request_id, None) is not None:
                    ended.append(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            encoded = EncodedInput.of(new.sampling_params)
            # The V2 runner is sent a preempted request as a new one, again.
            if encoded is not None and new.req_id not in self._inputs:
                self._add(new.req_id, encoded)
        return ended

    def _add(self, request_id: str, encoded: EncodedInput) -> None:
        try:
            routing_input = RoutingInput.decode(encoded)
            routing_input.check(**self._model._asdict())
        except ValueError as error:
            logger.error("The routing input of request %s is not followed: %s", request_id, error)
            self._unfit.add(request_id)
            return
        self._inputs[request_id] = routing_input

    def __bool__(self) -> bool:
        return bool(self._inputs or self._unfit or self._recomputed)

    def unfit_of_batch(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        """The requests whose input does not fit the model."""
        if not self._unfit:
            return ()
        return tuple(request_id for request_id in request_ids if request_id in self._unfit)

    def biases_of_batch(self, request_ids: Sequence[str]) -> dict[int, tuple[str, Bias]]:
        """The requests that have a bias, by their index in the batch, and their biases [L, E]."""
        biases = {}
        for index, request_id in enumerate(request_ids):
            running = self._inputs.get(request_id)
            if running is not None and running.bias is not None:
                biases[index] = (request_id, running.bias[self._layers])
        return biases

    def rows_of_batch(
        self,
        request_ids: Sequence[str],
        offsets: NDArray[np.integer[Any]],
        starts: NDArray[np.integer[Any]],
    ) -> list[PlacedRows]:
        """The rows for the tokens of a batch, in its order. Request i has the tokens `offsets[i]` to
        `offsets[i + 1]`, the first of which is at position `starts[i]`."""
        placed = []
        for index, request_id in enumerate(request_ids):
            given = self._given(request_id)
            if given is None:
                continue
            first = int(offsets[index])
            start = int(starts[index])
            end = start + int(offsets[index + 1]) - first
            told_from = max(start, given.start)
            told_until = min(end, given.start + len(given.rows))
            if told_from < told_until:
                rows = given.rows[told_from - given.start : told_until - given.start]
                placed.append(PlacedRows(first + told_from - start, rows[:, self._layers]))
        return placed

    def _given(self, request_id: str) -> message.PlacedRows | None:
        """The rows that a request's tokens are given in this step, and the position of the first."""
        recomputed = self._recomputed.get(request_id)
        if recomputed is not None:
            return recomputed
        running = self._inputs.get(request_id)
        if running is None or running.rows is None:
            return None
        return message.PlacedRows(running.start, running.rows)
