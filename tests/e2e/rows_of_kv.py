"""The experts of the KV that an engine has, whatever was computed before it."""

from collections import defaultdict
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from routed_experts.capture.wire.step_tag import tag_of
from routed_experts.capture.wire.transport import detach
from tests.e2e.steered import Answered, Program


class RowsOfKV:
    """Sees each step of an engine in this process, whose first requests are to come."""

    def __init__(self, running: Program) -> None:
        core: Any = running.llm.llm_engine.engine_core
        self._scheduler = core.engine_core.scheduler
        self._update = self._scheduler.update_from_output
        self._scheduler.update_from_output = self._see
        # by request and position, the row [L, K] that was computed last
        self._rows: defaultdict[int, dict[int, np.ndarray]] = defaultdict(dict)
        self.num_again = 0  # tokens at positions that a request had computed before
        self.num_given = 0  # tokens that were told which experts they had

    def _see(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        tag = tag_of(scheduled)
        captured = detach(output)
        if tag is not None and captured is not None:
            self.num_given += sum(len(placed.rows) for placed in tag.recomputed.values())
            step = self._scheduler.aux_output_connector._steps[tag.number]
            for name, index in output.req_id_to_index.items():
                rows = captured.rows[captured.offsets[index] : captured.offsets[index + 1]]
                own = self._rows[number_of(name)]
                computed = dict(enumerate(rows.copy(), step.starts[name]))
                self.num_again += len(own.keys() & computed.keys())
                own.update(computed)
        return self._update(scheduled, output)

    def num_changed(self, answers: list[Answered]) -> int:
        """Of how many tokens the KV is of other experts than the rows that were returned."""
        return sum(
            not np.array_equal(row, answer.rows[position])
            for number, answer in enumerate(answers)
            for position, row in self._rows[number].items()
            if position < len(answer.rows)
        )


def number_of(request_id: str) -> int:
    """Of a request, in the order of prompts. vLLM's ids have a random end."""
    return int(request_id.split("-")[0])
