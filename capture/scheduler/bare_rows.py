"""Rows for a front end that is not ours: vLLM's in Rust, which returns what is in the
`routed_experts` of a request's outputs, one after the other."""

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.engine import EngineCoreOutput

from routed_experts.capture.scheduler.output_queue import OutputQueue
from routed_experts.capture.wire.envelope import SingleRows
from routed_experts.capture.wire.message import OptIn, PlacedRows, RowsOutput
from routed_experts.capture.wire.transport import StepRows
from routed_experts.capture.wire.vllm_rows import in_vllms_form
from routed_experts.protocol.codec import Rows
from routed_experts.protocol.models import PREFIXES

_LONGEST_NAME = 64  # characters of a client's that the log shows


class BareRows:
    """Opts in every request, and puts rows on the outputs of their requests."""

    def __init__(self, model: Any, queue: OutputQueue) -> None:
        self._num_layers = int(model.get_total_num_hidden_layers())
        self._num_experts = int(model.get_num_experts())
        # both known with the first step
        self._layer_ids: tuple[int, ...] = ()
        self._no_rows: Rows | None = None
        queue.part_bytes = sys.maxsize  # a prompt's rows are on one output

    def learn(self, captured: StepRows) -> None:
        """Called with what each step captured, before its rows are distributed."""
        if self._no_rows is None:
            self._layer_ids = captured.layer_ids
            self._no_rows = captured.rows[:0].copy()

    def opt_in(self, params: Any) -> OptIn | None:
        """For a request with these `SamplingParams`; None if it generates nothing."""
        if params is None:
            return None
        # The front end checks it, but no rows come before a sequence, whatever a request holds.
        prompt_start = max(params.routed_experts_prompt_start, 0)
        # Nobody reads rows before the end. Each choice has the rows of its prompt, as in vLLM.
        return OptIn(prompt_start, os.urandom(16), shared=False, final_only=True)

    def unserved_field(self, params: Any) -> str | None:
        """The name, cut, of a routing field in the extra arguments of these `SamplingParams`: the
        front end passes them on, and nobody would do what they say. None if there is none."""
        extra_args = (params and params.extra_args) or ()
        named = (name for name in extra_args if name.startswith(PREFIXES))
        name = next(named, None)
        return None if name is None else name[:_LONGEST_NAME]

    def place(
        self,
        outputs: Sequence[EngineCoreOutput],
        singles: Iterable[SingleRows] = (),
    ) -> list[EngineCoreOutput]:
        """A message's outputs that are of requests, each with all rows of the message that are
        its request's."""
        on_outputs: dict[int, list[Rows]] = defaultdict(list)  # by the `id` of each
        for single in singles:
            for output, index in zip(single.outputs, single.indexes, strict=True):
                on_outputs[id(output)].append(single.step_rows[index : index + 1])
        # By request id. They go with the next output of this id: a later request may have it too.
        before_outputs: dict[str, list[Rows]] = defaultdict(list)
        of_requests: list[EngineCoreOutput] = []
        for output in outputs:
            placed = output.routed_experts
            rows = [placed.rows] if isinstance(placed, PlacedRows) else []
            brings = RowsOutput.of(output)
            if brings is not None:
                before_outputs[brings.request_id] += rows
                continue
            rows = [*before_outputs.pop(output.request_id, ()), *rows, *on_outputs[id(output)]]
            output.routed_experts = self._in_vllms_form(rows, output.finish_reason is not None)
            of_requests.append(output)
        assert not before_outputs, (
            f"rows come for {list(before_outputs)}: expected outputs of these requests behind them, "
            "actually there are none"
        )
        return of_requests

    def _in_vllms_form(self, rows: list[Rows], is_last: bool) -> NDArray[np.integer[Any]] | None:
        """At a request's end an array also of no rows: none would mean that nothing was
        captured."""
        if self._no_rows is None or not (rows or is_last):
            return None
        return in_vllms_form(
            np.concatenate([self._no_rows, *rows]),
            self._layer_ids,
            num_layers=self._num_layers,
            num_experts=self._num_experts,
        )
