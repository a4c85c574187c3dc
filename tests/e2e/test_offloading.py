"""Offloading in a real engine on a CPU, whose every part is vLLM's but what copies KV."""

from pathlib import Path

import pytest

from tests.e2e.harness import ON_GPU, counts_of

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(ON_GPU, reason="the runner for CUDA keeps its numbers elsewhere")
def test_every_row_is_of_the_computation_whose_kv_was_read(tiny_model: Path) -> None:
    counts = counts_of("tests.e2e.numbered", str(tiny_model))
    assert counts["wrong"] == 0
    assert counts["rows"] > 5000
    assert counts["loaded"] > 20
