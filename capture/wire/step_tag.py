"""What the scheduler says to the workers with each step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from routed_experts.capture.wire.message import PlacedRows


@dataclass(frozen=True)
class StepTag:
    """In a step's `aux_output_connector_metadata`, which vLLM brings to every worker."""

    number: int
    # By request: the experts that tokens of the step had before, as their KV is computed again.
    recomputed: Mapping[str, PlacedRows] = field(default_factory=dict)


def tag_of(scheduler_output: Any) -> StepTag | None:
    """The tag of a step; None of one that no scheduler made, as when a worker warms up."""
    tag: StepTag | None = scheduler_output.aux_output_connector_metadata
    return tag
