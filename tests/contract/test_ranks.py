"""Which of the ids that a router has chosen are those of this rank's tokens."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from vllm.forward_context import (
    DPMetadata,
    ForwardContext,
    get_forward_context,
    override_forward_context,
)
from vllm.v1.worker import ubatching
from vllm.v1.worker.gpu import ubatch_utils
from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner, UBatchState
from vllm.v1.worker.ubatch_utils import UBatchSlice

from routed_experts.capture.worker import stage
from routed_experts.capture.worker.capturer import LocalTokenSlice
from routed_experts.capture.worker.token_slices import local_token_slice

TOP_K = 4


@contextmanager
def step_of(counts: list[int]) -> Iterator[DPMetadata]:
    """vLLM's context of a step with so many tokens of each data-parallel rank."""
    metadata = DPMetadata(torch.tensor(counts, dtype=torch.int32))
    with override_forward_context(ForwardContext({}, {}, {}, dp_metadata=metadata)):
        yield metadata


def parts_of(ids: torch.Tensor, size: int) -> list[torch.Tensor]:
    """What each tensor-parallel rank routes: equal parts of the tokens, and of padding, which has
    ids too."""
    padding = torch.full((-len(ids) % size, TOP_K), 99)
    return list(torch.cat([ids, padding]).chunk(size))


def put(view: torch.Tensor, own_tokens: LocalTokenSlice, ids: torch.Tensor) -> torch.Tensor:
    first, own = own_tokens(ids)
    view[first : first + len(own)] = own
    return view


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("counts", [[5, 3], [1, 8], [4, 4], [2, 1, 6], [1, 1]], ids=str)
def test_the_rows_of_all_ranks_are_whole(counts: list[int], size: int) -> None:
    """Whether each rank routes its own, or all have been gathered: as one tensor-parallel rank
    would have them."""
    ids = [torch.randint(0, 90, (count, TOP_K)) for count in counts]
    parts_of_ranks = [parts_of(own, size) for own in ids]
    all_parts = [part for parts in parts_of_ranks for part in parts]
    gathered = torch.cat(all_parts)
    with step_of(counts) as metadata:
        with metadata.sp_local_sizes(size) as sizes:
            assert sizes == [len(part) for part in all_parts]
        for rank, own in enumerate(ids):
            check_written_once(rank, own, parts_of_ranks[rank])
            check_written_once(rank, own, [gathered] * size)


def check_written_once(rank: int, own: torch.Tensor, seen: list[torch.Tensor]) -> None:
    """A data-parallel rank's tensor-parallel ranks, which have `seen` these tokens, together write
    each of its own once."""
    written = []
    for tp_rank, tokens in enumerate(seen):
        view = torch.full((len(own), TOP_K), -1)
        written.append(put(view, local_token_slice(rank, tp_rank, len(seen)), tokens))
    assert torch.equal(torch.stack(written).amax(0), own)
    assert sum(int((view >= 0).all(1).sum()) for view in written) == len(own)


def test_steps_of_which_nobody_says_whose_the_tokens_are() -> None:
    with override_forward_context(ForwardContext({}, {}, {})):
        assert local_token_slice(0)(torch.zeros(6, TOP_K))[1].shape[0] == 6
        with pytest.raises(RuntimeError, match="does not say how"):
            local_token_slice(0, 0, 2)(torch.zeros(6, TOP_K))
    with step_of([5, 3]), pytest.raises(RuntimeError, match="a router saw 6 tokens"):
        local_token_slice(0)(torch.zeros(6, TOP_K))


# ---- dual-batch overlap ----


@pytest.mark.parametrize(
    ("counts", "size"), [([4, 4], 2), ([4, 5], 1), ([3, 3, 4], 2), ([1, 7], 1)], ids=str
)
def test_microbatches(counts: list[int], size: int) -> None:
    """vLLM's own threads, which wait for each other in the middle of a layer."""
    layers = 3
    ids = torch.randint(0, 90, (layers, sum(counts), TOP_K))
    view = torch.full((size, layers, sum(counts), TOP_K), -1)
    own_tokens = [[local_token_slice(0, at, size) for _ in range(layers)] for at in range(size)]
    order: list[tuple[int, int]] = []

    def model(part: slice) -> torch.Tensor:
        for layer in range(layers):
            order.append((layer, part.start))
            for at, seen in enumerate(parts_of(ids[layer, part], size)):
                put(view[at, layer], own_tokens[at][layer], seen)
            ubatching.dbo_yield()
        return torch.empty(0)

    for _ in range(2):  # the next step begins anew
        view.fill_(-1)
        order.clear()
        run_in_microbatches(model, counts)
        assert torch.equal(view.amax(0), ids)
        assert ((view >= 0).all(3).sum(0) == 1).all()
        assert order == sorted(order)
    with step_of([5, 5]):  # and one that runs whole is whole
        first, own = own_tokens[0][0](ids[0, : -(-5 // size)])
        assert (first, len(own)) == (0, -(-5 // size))


def run_in_microbatches(model: Callable[[slice], torch.Tensor], counts: list[int]) -> None:
    """A step of V2's model runner, of whose microbatches all ranks' have as many tokens each."""
    stream = object()  # there is one only
    runner = object.__new__(UBatchRunner)
    runner.num_ubatches, runner.device = len(counts), torch.device("cpu", 0)
    runner.comm_stream, runner.sm_control = stream, nullcontext()
    runner.ready_barrier = threading.Barrier(len(counts) + 1)
    pairs = zip(accumulate(counts), counts, strict=True)
    slices = [UBatchSlice(slice(0, 1), slice(end - count, end)) for end, count in pairs]
    contexts = []
    for count in counts:
        with step_of([count, count]):
            contexts.append(get_forward_context())
    with (
        patch.object(torch.accelerator, "set_device_index"),
        patch.object(ubatching, "current_stream", lambda: stream),
        patch.object(ubatch_utils, "current_stream", lambda: stream),
        patch.object(ubatch_utils, "slice_model_inputs", lambda inputs, part: {"part": part}),
    ):
        runner.run(model, {}, UBatchState(slices, contexts))


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_microbatch_without_the_one_in_front(steps_before: int) -> None:
    """Its place is not known: not by the step before it either."""
    own_tokens = local_token_slice(0)
    is_last = False

    def model(part: slice) -> torch.Tensor:
        if part.start or not is_last:
            own_tokens(torch.zeros(part.stop - part.start, TOP_K))
        return torch.empty(0)

    for _ in range(steps_before):
        run_in_microbatches(model, [4, 4])
    is_last = True
    with pytest.raises(RuntimeError, match="Microbatch 1 of 2 failed") as raised:
        run_in_microbatches(model, [6, 6])
    assert "microbatch 1 of a step came to a router as number 0" in str(raised.value.__cause__)


# ---- two ranks ----

ODD = torch.tensor([-0.0, -1.5, 0.25, torch.nan, 3e38, 1e-45, 0.0]).view(torch.int32)


def join_as(rank: int, folder: str) -> None:
    """[planes, layers, tokens, K], ids alone and ids with weights' bits, of which each rank has
    routed a part; in the last layer nobody wrote the second token."""
    layers, tokens, part = 3, 7, 4
    ids = torch.arange(layers * tokens * TOP_K).reshape(layers, tokens, TOP_K).int()
    routed = torch.stack([ids, ODD[ids.long() % len(ODD)]])
    routed[:, -1, 1] = -1
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    group = SimpleNamespace(device_group=torch.distributed.group.WORLD)
    own = slice(rank * part, min((rank + 1) * part, tokens))
    for count in (1, 2):
        planes = torch.full((count, layers, tokens + 2, TOP_K), -1, dtype=torch.int32)
        planes[:, :, own] = routed[:count, :, own]
        planes[:, :, tokens:] = 50 + rank  # of an earlier step
        cache: Any = SimpleNamespace(planes=planes, weights=planes[1] if count == 2 else None)
        with patch.object(stage, "get_tp_group", lambda: group):
            stage.join_cache(cache, tokens)
        assert torch.equal(planes[:, :, :tokens], routed[:count])
        assert (planes[:, :, tokens:] == 50 + rank).all()


def test_each_rank_gets_what_the_other_has_routed(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(join_as, (str(tmp_path),), nprocs=2, start_method="fork")
