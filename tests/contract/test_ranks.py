"""Which of the ids that a router has chosen are those of this rank's tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context

from routed_experts.capture.capturer import OwnTokens
from routed_experts.capture.engine import stage
from routed_experts.capture.engine.binding import own_tokens_of

TOP_K = 4


@contextmanager
def step_of(counts: list[int]) -> Iterator[DPMetadata]:
    """vLLM's context of a step with so many tokens of each data-parallel rank."""
    metadata = DPMetadata(torch.tensor(counts, dtype=torch.int32))
    with override_forward_context(ForwardContext({}, {}, {}, dp_metadata=metadata)):
        yield metadata


def parts_of(ids: torch.Tensor, size: int) -> list[torch.Tensor]:
    """What each tensor-parallel rank routes: equal parts of the tokens, and of padding, which has ids too."""
    padding = torch.full((-len(ids) % size, TOP_K), 99)
    return list(torch.cat([ids, padding]).chunk(size))


def stored(own_tokens: OwnTokens, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    view = torch.full((num_tokens, TOP_K), -1)
    first, own = own_tokens(ids)
    view[first : first + len(own)] = own
    return view


@pytest.mark.parametrize("counts", [[5, 3], [1, 8], [4, 4], [2, 1, 6], [1, 1]], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_rows_of_all_ranks_are_whole(counts: list[int], size: int) -> None:
    """Whether each rank routes its own, or all have been gathered: as one tensor-parallel rank would have them."""
    ids = [torch.randint(0, 90, (count, TOP_K)) for count in counts]
    parts = [parts_of(own, size) for own in ids]
    gathered = torch.cat([part for of_rank in parts for part in of_rank])
    with step_of(counts) as metadata:
        with metadata.sp_local_sizes(size) as sizes:
            assert sizes == [len(part) for of_rank in parts for part in of_rank]
        for rank, count in enumerate(counts):
            for seen in (lambda at, of=parts[rank]: of[at], lambda at: gathered):
                rows = [stored(own_tokens_of(rank, at, size), seen(at), count) for at in range(size)]
                assert torch.equal(torch.stack(rows).amax(0), ids[rank])
                assert sum(int((row >= 0).all(1).sum()) for row in rows) == count  # each is written once


def test_a_step_that_vllm_says_nothing_of() -> None:
    with override_forward_context(ForwardContext({}, {}, {})):
        assert own_tokens_of(0)(torch.zeros(6, TOP_K))[1].shape[0] == 6
        with pytest.raises(RuntimeError, match="does not say how"):
            own_tokens_of(0, 0, 2)(torch.zeros(6, TOP_K))


def test_tokens_that_are_nobodys() -> None:
    with step_of([5, 3]), pytest.raises(RuntimeError, match="a router saw 6 tokens"):
        own_tokens_of(0)(torch.zeros(6, TOP_K))


# ---- two ranks ----

LAYERS, TOKENS, PART = 3, 7, 4


def what_was_routed() -> torch.Tensor:
    """[layers, tokens, K]; in the last layer nobody wrote the second token."""
    ids = torch.arange(LAYERS * TOKENS * TOP_K).reshape(LAYERS, TOKENS, TOP_K).int()
    ids[-1, 1] = -1
    return ids


def join_as(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = SimpleNamespace(device_group=torch.distributed.group.WORLD)
    cache = torch.full((LAYERS, TOKENS + 2, TOP_K), -1, dtype=torch.int32)
    own = slice(rank * PART, min((rank + 1) * PART, TOKENS))
    cache[:, own] = what_was_routed()[:, own]
    cache[:, TOKENS:] = 50 + rank  # of an earlier step
    with patch.object(stage, "get_tp_group", lambda: group):
        stage.join_parts(cache[:, :TOKENS])
    assert torch.equal(cache[:, :TOKENS], what_was_routed())
    assert (cache[:, TOKENS:] == 50 + rank).all()


def test_each_rank_gets_what_the_other_has_routed(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(join_as, (str(tmp_path),), nprocs=2, start_method="fork")
