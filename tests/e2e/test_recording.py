"""Recorded routing of a real server with two API processes."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from routed_experts.protocol.saved import ModelInfo, read
from routed_experts.server.tools.saved import opened
from tests.e2e.harness import SMALL_KV, Oracle, prompt_of, run_program, serving, wait_until

pytestmark = pytest.mark.e2e


def test_a_real_server(tiny_model: Path, tmp_path: Path, documented: list[str]) -> None:
    folder = tmp_path / "recorded"
    (block,) = [block for block in documented if "--routed-experts-record" in block]
    export = shlex.split(block.splitlines()[1])[1]
    flags = [str(folder) if flag == "FOLDER" else flag for flag in shlex.split(block.splitlines()[0])[3:]]
    with serving(
        tiny_model, tmp_path / "log", *SMALL_KV, "--max-model-len", "512", "--api-server-count", "2", *flags
    ) as server:
        for index in range(12):
            server.complete(prompt=prompt_of(20, index), max_tokens=4)
        recorded = "routed_experts_recorded_requests_total"  # a server that stops waits for a few seconds only
        wait_until(lambda: server.metric(recorded) >= 12, lambda: f"{server.metric(recorded)} of 12 are recorded")
    files = sorted(map(str, folder.iterdir()))
    assert all(file.endswith(".jsonl") for file in files)
    pids = {re.split("[-.]", Path(file).name)[1] for file in files}
    assert len(pids) == len(files) <= 2
    oracle, found = Oracle(tiny_model), list(read(opened(files), ModelInfo()))
    assert len(found) == 12
    for answer in found:
        (routing,) = answer.routings()
        tokens = [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())][:-1]
        assert np.array_equal(np.sort(routing.rows, axis=2), oracle.rows(tokens))
    assert "12 responses" in run_program("routed_experts.server.cli", export, *files, "-o", str(tmp_path / "out.npz"))
