"""Offloading in a real engine on a CPU, whose every part is vLLM's but what copies KV."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import ON_GPU

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(ON_GPU, reason="the runner for CUDA keeps its numbers elsewhere")
def test_every_row_is_of_the_computation_whose_kv_was_read(tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.numbered", str(tiny_model)],
        cwd=Path(__file__).parents[2],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["wrong"] == 0
    assert counts["rows"] > 5000
    assert counts["loaded"] > 20
