"""Carries a step's rows from the worker to the scheduler, in `ModelRunnerOutput`, with every
executor."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.outputs import ModelRunnerOutput

_STEP = "step"
"""vLLM's type maps request ids to outputs, and its Ray executor copies the `rows` of each. Here one
key stands for all requests of a step: one array is cheaper than one per request."""


class Told(NamedTuple):
    """What the routers were told in one forward pass."""

    num_rows: int = 0  # tokens whose experts their requests give
    num_steered: int = 0  # requests that have a bias
    unfit: tuple[str, ...] = ()  # requests whose input does not fit the model


TOLD_NOTHING = Told()


@dataclass
class StepRows:
    """What one forward pass routed, on the host. Padding tokens are not in it."""

    # [n, L, K] logical expert ids, in the order of the batch; [n, 3L, K] with weights (`rows.py`).
    rows: NDArray[np.int16]
    # [n], the KV slot (block id x block size + offset) that each token's KV was written to
    slots: NDArray[np.int64]
    # [requests + 1], where each request's rows begin, in the order of the batch
    offsets: NDArray[np.int64]
    waited_s: float = 0.0  # seconds that the step's output waited for them
    told: Told = TOLD_NOTHING
    # Decoder layers of the L layers, for a scheduler that sends rows to a front end that is not
    # ours (`vllm_rows.py`).
    layer_ids: tuple[int, ...] = ()


def as_connector_output(step: StepRows) -> dict[str, StepRows]:
    """What vLLM carries as the `aux_output_connector_output` of a step's output."""
    return {_STEP: step}


def attach(output: ModelRunnerOutput, step: StepRows) -> None:
    """Puts the rows of a step on its output."""
    output.aux_output_connector_output = as_connector_output(step)


def detach(output: ModelRunnerOutput) -> StepRows | None:
    """The rows on the output of a step; None if the step was empty."""
    # Until 0.31 the class has no such field, but takes the attribute.
    carried: dict[str, StepRows] | None = getattr(output, "aux_output_connector_output", None)
    return carried.get(_STEP) if carried else None
