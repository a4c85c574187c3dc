"""KV that is lost and computed again in engines with one worker, and with several: under the experts
of the rows that were sent, whatever the routers choose then."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ON_GPU, run_program
from tests.e2e.recomputed import MODES, WITHOUT_FLAG

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_input.py has these on GPUs"),
]

NOISE = 1e-4
"""What log-probabilities differ by from those of transformers with the same experts."""


def found(mode: str, model: Path) -> dict[str, Any]:
    output = run_program("tests.e2e.recomputed", str(model), mode)
    (line,) = [line for line in output.splitlines() if line.startswith("FOUND ")]
    findings: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    print(findings)
    assert findings["rows as given"]
    assert findings["banned"] == 0
    assert findings["computed again"] > 50
    assert findings["vllm:num_preemptions"] > 0 or "load" in mode
    return findings


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in WITHOUT_FLAG])
def test_tokens_keep_the_experts_of_their_rows(mode: str, tiny_model: Path) -> None:
    findings = found(mode, tiny_model)
    assert findings["given"] > 50
    assert findings["changed"] == 0
    assert findings["off"] < NOISE


@pytest.mark.parametrize("mode", WITHOUT_FLAG)
def test_without_the_flag_they_do_not(mode: str, tiny_model: Path) -> None:
    """So the test above would see it."""
    findings = found(mode, tiny_model)
    assert findings["given"] == 0
    assert findings["changed"] > 50
    assert findings["off"] > NOISE
