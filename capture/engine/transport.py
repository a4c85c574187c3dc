"""Carries a step's rows from the worker to the scheduler, in `ModelRunnerOutput`, with every executor."""

from vllm.v1.outputs import ModelRunnerOutput

from routed_experts.capture.pipeline import StepRows
from routed_experts.capture.seams.engine import step_rows

AuxOutputs = dict[str, StepRows]

# vLLM's type maps request ids to outputs, and its Ray executor copies the `rows` of each. Here one key stands for all
# requests of a step: one array is cheaper than one per request.
_STEP = "step"


def as_aux_outputs(rows: StepRows) -> AuxOutputs:
    """`rows` in the form of `ModelRunnerOutput.aux_output_connector_output`."""
    return {_STEP: rows}


def attach(output: ModelRunnerOutput, rows: StepRows) -> None:
    """Puts a step's rows on its output."""
    output.aux_output_connector_output = as_aux_outputs(rows)


def detach(output: ModelRunnerOutput) -> StepRows | None:
    """The rows on `output`; None if the step was empty."""
    outputs = step_rows(output)
    return outputs[_STEP] if outputs else None
