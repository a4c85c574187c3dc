"""Offloading as vLLM does it, with its own copies between the GPU and the host: each row against the oracle."""

import asyncio
from pathlib import Path

import pytest

from tests.conftest import SERVER_FLAGS
from tests.e2e.harness import Oracle, prompt_of, serving
from tests.gpu.test_engines import GPUS, load, one

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("flags", [("--no-async-scheduling",), (), ("--block-size", "32")], ids=["sync", "async", "32"])
def test_every_row_is_exact(flags: tuple[str, ...], tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """A KV cache for one or two of the requests, and space for many outside it."""
    offload = ("--num-gpu-blocks-override", "20", "--kv-offloading-size", "0.05")
    with serving(tiny_model, tmp_path / "log", *SERVER_FLAGS, *offload, *flags) as server:
        for _ in range(3):
            for seed in range(4):
                one(server, oracle, prompt=prompt_of(150, seed), max_tokens=9)
        rows = asyncio.run(load(server, oracle, requests=96))
        assert server.metric("vllm:external_prefix_cache_hits_total") > 500
        print(f"{rows} rows exact")
