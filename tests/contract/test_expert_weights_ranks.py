"""Weights of tokens that tensor-parallel ranks route apart, joined bit for bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
import torch.multiprocessing

from routed_experts.capture.engine import stage

LAYERS, TOKENS, PART, TOP_K = 3, 7, 4, 4


def what_was_routed() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and bits of weights, [layers, tokens, K]; in the last layer nobody wrote the second token."""
    ids = torch.arange(LAYERS * TOKENS * TOP_K).reshape(LAYERS, TOKENS, TOP_K).int()
    odd = torch.tensor([-0.0, -1.5, 0.25, torch.nan, 3e38, 1e-45, 0.0]).view(torch.int32)
    bits = odd[ids.long() % len(odd)]
    ids[-1, 1] = bits[-1, 1] = -1
    return ids, bits


def join_as(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = SimpleNamespace(device_group=torch.distributed.group.WORLD)
    planes = torch.full((2, LAYERS, TOKENS + 2, TOP_K), -1, dtype=torch.int32)
    own = slice(rank * PART, min((rank + 1) * PART, TOKENS))
    for plane, routed in zip(planes, what_was_routed(), strict=True):
        plane[:, own] = routed[:, own]
    planes[:, :, TOKENS:] = 50 + rank  # of an earlier step
    with patch.object(stage, "get_tp_group", lambda: group):
        cache: Any = SimpleNamespace(planes=planes, weights=planes[1])
        stage.join_cache(cache, TOKENS)
    for plane, routed in zip(planes, what_was_routed(), strict=True):
        assert torch.equal(plane[:, :TOKENS], routed)
        assert (plane[:, TOKENS:] == 50 + rank).all()


def test_each_rank_gets_the_weights_of_the_other(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(join_as, (str(tmp_path),), nprocs=2, start_method="fork")
