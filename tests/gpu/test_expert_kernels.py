"""Expert-parallel kernels, whose ranks route their own tokens only; and dual-batch overlap, for
which vLLM needs them.

With NIXL's, which come with its Python package. Two ranks with a GPU each, in 16 bits, by the
scores that the routers were given.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.harness import ROOT, free_port
from tests.e2e.shapes import Shape, make_model

GPUS = torch.cuda.device_count()

SHAPE = Shape(
    "experts for NIXL's kernels",
    "qwen3_moe",
    {
        # A hidden size that the kernels were compiled for.
        **{"hidden_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
        **{"intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 3},
        **{"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True},
    },
    (0, 1, 2),
    router_std=0.2,
)
OVERLAP = {"enable_dbo": True, "dbo_decode_token_threshold": 4, "dbo_prefill_token_threshold": 8}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@dataclass(frozen=True)
class Mode:
    name: str
    options: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)


MODES = (
    Mode("eager", {"enforce_eager": True}),
    Mode("graphs", {}),
    Mode("overlap, eager", {**OVERLAP, "enforce_eager": True}, V2),
    Mode("overlap, graphs", OVERLAP, V2),
)


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.skipif(
    find_spec("nixl_ep") is None,
    reason="NIXL's expert-parallel kernels (nixl_ep) are not installed",
)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_own_tokens_only(mode: Mode, tmp_path: Path) -> None:
    make_model(SHAPE, tmp_path / "model")
    options = {
        "enable_expert_parallel": True,
        "all2all_backend": "nixl_ep",
        "block_size": 32,
        **mode.options,
    }
    for counts in of_ranks(2, tmp_path, options, mode.env):
        print(counts)
        assert counts["wrong"] == counts["not recorded"] == counts["wrong weights"] == 0
        assert counts["weights"] == counts["rows"]
        assert counts["rows"] > 2000
        assert counts["right at the next position"] < 0.2 * counts["rows"]
        assert counts["right in the next layer"] < 0.2 * counts["rows"]
        assert counts["hits"] > 100
        if "enable_dbo" in mode.options:
            assert 0 < counts["steps in microbatches"] < counts["steps"]
        if "enforce_eager" not in mode.options:
            assert (
                counts["steps of both" if "enable_dbo" in mode.options else "steps in full graphs"]
                > 10
            )


def of_ranks(
    ranks: int, folder: Path, options: Mapping[str, Any], env: Mapping[str, str]
) -> Iterator[dict[str, int]]:
    """What each data-parallel rank counted, in a program of its own."""
    command = [
        sys.executable,
        "-m",
        "tests.gpu.recorded",
        str(folder / "model"),
        json.dumps(options),
    ]
    group = {
        "VLLM_DP_SIZE": str(ranks),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(free_port()),
    }
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            log = stack.enter_context((folder / f"rank{rank}").open("w"))
            own = {
                **os.environ,
                **env,
                **group,
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
            }
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": log,
                "text": True,
            }
            process = subprocess.Popen(command, cwd=ROOT, env=own, **pipes)
            stack.callback(process.kill)
            processes.append(process)
        for rank, process in enumerate(processes):
            assert process.stdout is not None
            said: list[str] = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("{"):
                    break
            else:
                pytest.fail("".join(said)[-9000:] + (folder / f"rank{rank}").read_text()[-3000:])
            yield json.loads(said[-1])
        for process in processes:
            process.communicate(timeout=60)
