"""Carries a step's rows from the worker to the scheduler, in `ModelRunnerOutput`, with every executor."""

from vllm.v1.outputs import ModelRunnerOutput

from routed_experts.capture.pipeline import StepRows

STEP = "step"
"""vLLM's type maps request ids to outputs, and its Ray executor copies the `rows` of each. Here one key stands for all
requests of a step: one array is cheaper than one per request."""


def attach(output: ModelRunnerOutput, rows: StepRows) -> None:
    output.aux_output_connector_output = {STEP: rows}


def detach(output: ModelRunnerOutput) -> StepRows | None:
    """The rows on `output`; None if the step was empty."""
    # Until 0.31 the class has no such field, but takes the attribute.
    return (getattr(output, "aux_output_connector_output", None) or {}).get(STEP)
