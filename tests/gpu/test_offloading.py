"""Offloading as vLLM does it, with its own copies between the GPU and the host: each row against
the oracle."""

import json
from pathlib import Path

import pytest

from tests.e2e.harness import SERVER_FLAGS, Oracle, prompt_of, serving
from tests.e2e.offload_on_cpu import kv_transfer_config
from tests.gpu.test_engines import GPUS, load, one

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA GPU")]


CHUNKS = ("--kv-transfer-config", json.dumps(kv_transfer_config(50 << 20, blocks_per_chunk=3)))
FLAGS = {
    "asynchronous": ("--kv-offloading-size", "0.05"),
    "synchronous": ("--kv-offloading-size", "0.05", "--no-async-scheduling"),
    "several blocks to a chunk, answers too": CHUNKS,
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_every_row_is_exact(
    flags: tuple[str, ...], tiny_model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    few = ("--num-gpu-blocks-override", "20")
    with serving(tiny_model, tmp_path / "log", *SERVER_FLAGS, *few, *flags) as server:
        for _ in range(3):
            for seed in range(12):
                one(server, oracle, prompt=prompt_of(150, seed), max_tokens=9)
        rows, _ = load(server, oracle, requests=96)
        assert server.metric("vllm:external_prefix_cache_hits_total") > 500
        print(f"{rows} rows exact")
