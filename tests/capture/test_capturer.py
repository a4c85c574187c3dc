"""The capture of two pipeline stages in one process: what the first sends on, the last packs with its own."""

import numpy as np
import pytest
import torch

from routed_experts.capture.capturer import Capturer, RowShape

CPU = torch.device("cpu")
STAGES = [RowShape((1, 2), 16, 4), RowShape((), 0, 0), RowShape((5, 6, 7), 16, 4)]


def capturer(stage: int = 0) -> Capturer:
    layers = [len(shape.layer_ids) for shape in STAGES]
    return Capturer(RowShape.of_stages(STAGES), layers, stage, max_tokens=8, max_steps_in_flight=2, device=CPU)


def ids(layer: int, tokens: int) -> torch.Tensor:
    """[tokens, K + 1], distinct for each layer, token and column; the last column is a fused shared expert's."""
    return layer * 1000 + torch.arange(tokens * 5, dtype=torch.int32).reshape(tokens, 5)


def test_the_shape_of_the_whole_model() -> None:
    assert RowShape.of_stages(STAGES) == RowShape((1, 2, 5, 6, 7), 16, 4)
    with pytest.raises(ValueError, match="agree in experts and top-k"):
        RowShape.of_stages([RowShape((1,), 16, 4), RowShape((2,), 16, 2)])
    with pytest.raises(ValueError, match="no MoE layer"):
        RowShape.of_stages([RowShape((), 0, 0)])


def test_the_device_cache() -> None:
    """Contiguous views at fixed addresses, as CUDA graphs need them, of the dtype that vLLM's kernels write."""
    cache = capturer().cache
    assert (cache.num_layers, cache.max_tokens, cache.top_k, cache.ids.dtype) == (2, 8, 4, torch.int32)
    assert (cache.ids == -1).all(), "a layer that never writes must not look like expert 0"
    views = [cache.view(layer) for layer in range(2)]
    for layer, view in enumerate(views):
        assert view.is_contiguous()
        view[:7] = layer
    assert [cache.ids[layer].unique().tolist() for layer in range(2)] == [[-1, 0], [-1, 1]]
    cache.reset_rows(6)
    assert (cache.ids[:, :6] == -1).all()
    assert cache.ids[:, 6].tolist() == [[0] * 4, [1] * 4]
    assert [cache.view(layer).data_ptr() for layer in range(2)] == [view.data_ptr() for view in views]


def test_rows_of_earlier_stages_come_first() -> None:
    """Through a stage without MoE layers; padding tokens (5 and 6) go no further."""
    first, middle, last = (capturer(stage) for stage in range(3))
    for stage, base in ((first, 0), (last, 2)):
        for row in range(stage.cache.num_layers):
            stage.sink(row)(ids(base + row, tokens=7))
    upstream = middle.downstream(5, first.downstream(5, None))
    assert (upstream.shape, upstream.dtype) == ((5, 2, 4), torch.int32)
    assert upstream.is_contiguous()
    step = last.submit(torch.arange(100, 107), np.array([0, 2, 5]), upstream).result()
    assert step.slots.tolist() == [100, 101, 102, 103, 104]
    for row in range(5):
        assert np.array_equal(step.rows[:, row], ids(row, 5)[:, :4].numpy())
    with pytest.raises(ValueError, match="earlier pipeline stages"):
        last.submit(torch.arange(3), np.array([0, 3]))


@pytest.mark.parametrize("layers", [[1, 2], [2, 2]])
def test_rows_for_the_next_stage_are_a_copy(layers: list[int]) -> None:
    """They are still being sent when the next step, or a dummy one, writes into the device cache."""
    shape = RowShape(tuple(range(sum(layers))), 16, 4)
    first = Capturer(shape, layers, 0, max_tokens=8, max_steps_in_flight=2, device=CPU)
    for row in range(layers[0]):
        first.sink(row)(ids(row, tokens=8))
    sent = first.downstream(8, None)
    first.cache.ids.fill_(0)
    assert all(torch.equal(sent[:, row], ids(row, 8)[:, :4]) for row in range(layers[0]))


@pytest.mark.parametrize("skipping", [0, 1])
def test_a_layer_that_skips_a_step_leaves_unknown_rows(skipping: int) -> None:
    """Padding tokens that it wrote in an earlier, smaller step do not come up in a larger one."""
    first = capturer()
    first.reset_rows(2)
    for row in range(2):
        first.sink(row)(ids(row, tokens=8))  # padded
    first.submit(torch.arange(2), np.array([0, 2]))
    first.reset_rows(6)
    first.sink(1 - skipping)(ids(1 - skipping, tokens=8))
    step = first.submit(torch.arange(6), np.array([0, 6])).result()
    assert (step.rows[:, skipping] == -1).all()
    assert np.array_equal(step.rows[:, 1 - skipping], ids(1 - skipping, 6)[:, :4].numpy())


@pytest.mark.parametrize("deferred", [[0, 1], [1], []])
def test_deferred_stores(deferred: list[int]) -> None:
    """Only ids whose memory stays theirs, and which are of all tokens, are held until the stores are flushed."""
    first = capturer()
    first.defer_stores()
    for layer in range(2):
        own = ids(layer, tokens=3)
        first.sink(layer, may_defer=layer in deferred)(own)
        assert (first.cache.view(layer)[0, 0] == -1) == (layer in deferred)
        if layer not in deferred:
            own.fill_(7)
    first.flush_stores()
    for layer in range(2):
        assert torch.equal(first.cache.view(layer)[:3], ids(layer, 3)[:, :4])
    assert (first.cache.ids[:, 3:] == -1).all()
    first.sink(0, may_defer=True)(ids(9, tokens=2))
    assert torch.equal(first.cache.view(0)[:2], ids(9, 2)[:, :4])


@pytest.mark.parametrize("deferring", [False, True])
def test_only_this_ranks_tokens_are_stored(deferring: bool) -> None:
    first = capturer()
    if deferring:
        first.defer_stores()
        first.flush_stores()  # flushing nothing stores nothing
        assert (first.cache.ids == -1).all()
        first.defer_stores()
    first.sink(0, own_tokens=lambda rows: (1, rows[2:5]), may_defer=True)(ids(0, tokens=7))
    assert torch.equal(first.cache.view(0)[1:4], ids(0, 7)[2:5, :4])
    first.flush_stores()
    assert (first.cache.view(0)[[0, 4, 5, 6, 7]] == -1).all()
