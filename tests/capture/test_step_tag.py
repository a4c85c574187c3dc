"""What the scheduler says to the workers."""

import pickle
from types import SimpleNamespace

import numpy as np

from routed_experts.capture.wire.message import PlacedRows
from routed_experts.capture.wire.step_tag import StepTag, tag_of


def test_it_is_the_same_in_another_process() -> None:
    """vLLM pickles steps for workers. Of rows that are a part of more, the part alone travels."""
    rows = np.arange(60_000, dtype=np.int16).reshape(-1, 3, 2)
    sent = pickle.dumps(StepTag(7, {"a": PlacedRows(2, rows[2:5])}))
    tag = pickle.loads(sent)
    assert tag.number == 7
    assert tag.recomputed["a"].start == 2
    assert np.array_equal(tag.recomputed["a"].rows, rows[2:5])
    assert len(sent) < 1000


def test_a_step_that_a_worker_made_up_has_none() -> None:
    assert tag_of(SimpleNamespace(aux_output_connector_metadata=None)) is None
