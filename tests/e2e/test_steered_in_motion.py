"""Requests that say which experts they take, beside others, where steps are chunked, preempted,
drafted, asynchronous, compiled or spread over ranks."""

import json
from pathlib import Path

import pytest

from tests.e2e.harness import ON_GPU, run_program
from tests.e2e.steered_in_motion import MODES

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_input.py has these on GPUs"),
]

NOISE = 1e-4
_PROVOKES = {
    "preemption": "vllm:num_preemptions",
    "preemption, replay on recomputation": "vllm:num_preemptions",
    "drafts": "vllm:spec_decode_num_accepted_tokens",
}


@pytest.mark.parametrize("mode", MODES)
def test_every_request_takes_the_experts_that_it_says(mode: str, tiny_model: Path) -> None:
    output = run_program("tests.e2e.steered_in_motion", str(tiny_model), mode)
    (line,) = [line for line in output.splitlines() if line.startswith("FOUND ")]
    findings = json.loads(line.removeprefix("FOUND "))
    assert findings["rows as given"]
    assert findings["banned"] == 0
    assert findings["always"]
    assert findings["off"] < NOISE
    assert findings["asynchronous"] == (mode == "asynchronous scheduling")
    if mode in _PROVOKES:
        assert findings[_PROVOKES[mode]] > 0
