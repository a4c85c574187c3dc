"""`GET /v1/routed_experts/profile`, around a worker with real routers."""

from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.codec import decode, decode_weights
from tests.contract.served import serving_quickly
from tests.e2e.harness import FLOAT32, Server

pytestmark = pytest.mark.e2e

ADDRESS = "http://localhost:8000"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("profile") / "log"
    flags = ("--enable-return-routed-expert-weights", "--no-enable-prefix-caching")
    small = ("--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager")
    with serving_quickly(tiny_model, log, *FLOAT32, *flags, *small) as running:
        yield running


def counted(rows: np.ndarray, weights: np.ndarray, num_experts: int) -> tuple[Any, Any]:
    """[L, experts]: how often each expert stands in `rows`, and the sums of its weights."""
    counts = np.zeros((rows.shape[1], num_experts), np.int64)
    sums = np.zeros(counts.shape)
    for layer in range(rows.shape[1]):
        np.add.at(counts[layer], rows[:, layer].ravel(), 1)
        np.add.at(sums[layer], rows[:, layer].ravel(), weights[:, layer].ravel())
    return counts, sums


def test_the_profile_counts_the_rows_that_are_returned(server: Server) -> None:
    before = server.profile()
    ids, weights = [], []
    for length in (1, 9, 40):
        body = server.complete(
            prompt=list(range(65, 65 + length)),
            max_tokens=6,
            ignore_eos=True,
            return_routed_experts=True,
            return_routed_expert_weights=True,
        )
        choice = body["choices"][0]
        ids += [decode(body["prompt_routed_experts"]), decode(choice["routed_experts"])]
        weights += [
            decode_weights(body["prompt_routed_expert_weights"]),
            decode_weights(choice["routed_expert_weights"]),
        ]
    after = server.profile()
    rows = np.concatenate(ids)
    counts, sums = counted(rows, np.concatenate(weights), server.info()["num_experts"])
    assert after["tokens"] - before["tokens"] == len(rows) == 50 + 3 * 5
    assert np.array_equal(after["counts"] - before["counts"], counts)
    assert np.allclose(after["weights"] - before["weights"], sums, rtol=1e-6)
    assert before["since"] == after["since"]


def test_requests_that_ask_for_nothing_count(server: Server) -> None:
    before = server.profile()
    server.complete(prompt=[70, 71, 72], max_tokens=4, ignore_eos=True)
    after = server.profile()
    assert after["tokens"] - before["tokens"] == 3 + 3
    chosen = (after["counts"] - before["counts"]).sum(axis=1)
    assert (chosen == 6 * server.info()["top_k"]).all()


def test_the_program_of_the_page(server: Server, documented: list[str]) -> None:
    (program,) = documented
    assert ADDRESS in program
    said = StringIO()
    with redirect_stdout(said):
        exec(program.replace(ADDRESS, server.url), {})
    counts = server.profile()["counts"]
    ratios = np.array(said.getvalue().strip("[]\n").split(), float)
    assert np.allclose(ratios, (counts / counts.mean(axis=1, keepdims=True)).max(axis=1))
