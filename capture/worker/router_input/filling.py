"""Fills the tables before each forward pass, with both model runners."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire.transport import TOLD_NOTHING, Told
from routed_experts.capture.worker.router_input.family import Family
from routed_experts.capture.worker.router_input.rewriting import rewrite_behind
from routed_experts.capture.worker.router_input.running import RunningInputs
from routed_experts.capture.worker.router_input.tables import Tables


class RouterInput(Protocol):
    """What the worker does for requests that say something about their experts."""

    device_bytes: int
    pinned_bytes: int

    def rewrite_behind(self, runner: Any, row: int) -> None:
        """Called at start for the layer at an index of a row."""

    def fill_before_forward(self, runner: Any, is_v2: bool) -> None:
        """Called at start with the model runner."""

    def begin_step(self, scheduler_output: Any) -> None:
        """Called with each step, before the model runner."""

    def take_told(self) -> Told:
        """What the forward pass was told that ran last."""


class NoRouterInput:
    """Without the flag: no router is wrapped, and there are no tables."""

    device_bytes = 0
    pinned_bytes = 0

    def rewrite_behind(self, runner: Any, row: int) -> None:
        pass

    def fill_before_forward(self, runner: Any, is_v2: bool) -> None:
        pass

    def begin_step(self, scheduler_output: Any) -> None:
        pass

    def take_told(self) -> Told:
        return TOLD_NOTHING


class RouterInputOfTables:
    """Fills the tables with what the requests of a batch say."""

    def __init__(self, inputs: RunningInputs, tables: Tables, families: Sequence[Family]) -> None:
        self._inputs = inputs
        self._tables = tables
        self._families = families  # of the routers, by the index of their layer in a row
        self._told = TOLD_NOTHING
        self.device_bytes = tables.device_bytes
        self.pinned_bytes = tables.pinned_bytes

    def rewrite_behind(self, runner: Any, row: int) -> None:
        rewrite_behind(runner, self._tables, row, self._families[row])

    def fill_before_forward(self, runner: Any, is_v2: bool) -> None:
        if is_v2:
            self._fill_on_v2(runner)
        else:
            self._fill_on_v1(runner)

    def begin_step(self, scheduler_output: Any) -> None:
        self._told = TOLD_NOTHING  # what is not filled was not told
        for request_id in self._inputs.update(scheduler_output):
            self._tables.forget(request_id)

    def take_told(self) -> Told:
        told = self._told
        self._told = TOLD_NOTHING
        return told

    def fill(
        self,
        request_ids: Sequence[str],
        offsets: NDArray[np.integer[Any]],
        starts: NDArray[np.integer[Any]],
    ) -> None:
        """Called before the forward pass, when the batch is in its order. Request i has the tokens
        `offsets[i]` to `offsets[i + 1]`, the first of which is at position `starts[i]`: how many
        tokens it had computed when the step was scheduled. Exact in its prompt, also where later
        tokens are drafts that may be rejected."""
        if not self._inputs and self._tables.is_clean():
            return
        offsets = offsets[: len(request_ids) + 1]
        rows = self._inputs.rows_of_batch(request_ids, offsets, starts)
        biases = self._inputs.biases_of_batch(request_ids)
        self._tables.fill(rows, biases, offsets)
        self._told = Told(
            num_rows=sum(len(placed.rows) for placed in rows),
            num_steered=len(biases),
            unfit=self._inputs.unfit_of_batch(request_ids),
        )

    def _fill_on_v1(self, runner: Any) -> None:
        """Fills before each forward pass of the V1 model runner."""
        forward = runner._model_forward

        def model_forward(*args: Any, **kwargs: Any) -> Any:
            batch = runner.input_batch
            self.fill(batch.req_ids, runner.query_start_loc.np, batch.num_computed_tokens_cpu)
            return forward(*args, **kwargs)

        # On the instance. Here the batch has its order, and here it also comes where a CUDA graph
        # stands for the model; made-up forward passes do not. Needed until vLLM calls a plugin
        # before a forward pass.
        runner._model_forward = model_forward

    def _fill_on_v2(self, runner: Any) -> None:
        """As `_fill_on_v1`, for the V2 model runner."""
        prepare = runner.prepare_inputs

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            self.fill(batch.req_ids, batch.query_start_loc_np, batch.num_computed_tokens_np)
            return batch

        # On the instance, as above. The runner tells its auxiliary output connector of a step
        # before the step's batch exists.
        runner.prepare_inputs = prepare_inputs
