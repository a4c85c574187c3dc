"""The capture of two pipeline stages in one process: what the first sends on, the last packs with its own.

With the routers' weights beside the ids and without, bit for bit, whatever the bits.
"""

import numpy as np
import pytest
import torch

from routed_experts.capture.capturer import Capturer, RowShape
from routed_experts.capture.rows import ids_of, weights_of
from routed_experts.protocol.codec import Rows

CPU = torch.device("cpu")
STAGES = [RowShape((1, 2), 16, 4), RowShape((), 0, 0), RowShape((5, 6, 7), 16, 4)]
ODD = torch.tensor([-0.0, -1.5, torch.nan, 3e38, 1e-45, 1.0, 0.0])


@pytest.fixture(params=[False, True], ids=["ids", "weights"])
def with_weights(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def capturer(stage: int = 0, with_weights: bool = False) -> Capturer:
    layers = [len(shape.layer_ids) for shape in STAGES]
    return Capturer(RowShape.of_stages(STAGES), layers, stage, 8, 2, CPU, with_weights)


def chosen(layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights [tokens, K + 1], ids distinct for each layer, token and column; the last column is a fused shared
    expert's. A capture of ids alone is given weights all the same."""
    ids = layer * 1000 + torch.arange(tokens * 5, dtype=torch.int32).reshape(tokens, 5)
    return ids, ODD[ids.long() % len(ODD)]


def stored(of: Capturer, layer: int, tokens: int) -> torch.Tensor:
    """[planes, tokens, K] as the device cache has what was chosen."""
    ids, weights = chosen(layer, tokens)
    return torch.stack([ids, weights.view(torch.int32)])[: len(of.cache.planes), :, :4]


def check(rows: Rows, row: int, layer: int, with_weights: bool) -> None:
    ids, weights = (both[:, :4].numpy() for both in chosen(layer, len(rows)))
    assert np.array_equal((ids_of(rows) if with_weights else rows)[:, row], ids)
    assert not with_weights or weights_of(rows)[:, row].tobytes() == weights.tobytes()


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


def test_rows_of_earlier_stages_come_first(with_weights: bool) -> None:
    """Through a stage without MoE layers; padding tokens (5 and 6) go no further."""
    first, middle, last = (capturer(stage, with_weights) for stage in range(3))
    for stage, base in ((first, 0), (last, 2)):
        for row in range(stage.cache.num_layers):
            stage.sink(row)(*chosen(base + row, tokens=7))
    upstream = middle.downstream(5, first.downstream(5, None))
    assert (upstream.shape, upstream.dtype) == ((5, 2, 8 if with_weights else 4), torch.int32)
    assert upstream.is_contiguous()
    step = last.submit(torch.arange(100, 107), np.array([0, 2, 5]), upstream).result()
    assert step.slots.tolist() == [100, 101, 102, 103, 104]
    assert step.rows.shape == (5, 15 if with_weights else 5, 4)
    for row in range(5):
        check(step.rows, row, row, with_weights)
    with pytest.raises(ValueError, match="earlier pipeline stages"):
        last.submit(torch.arange(3), np.array([0, 3]))


@pytest.mark.parametrize("layers", [[1, 2], [2, 2]])
def test_rows_for_the_next_stage_are_a_copy(layers: list[int]) -> None:
    """They are still being sent when the next step, or a dummy one, writes into the device cache."""
    shape = RowShape(tuple(range(sum(layers))), 16, 4)
    first = Capturer(shape, layers, 0, max_tokens=8, max_steps_in_flight=2, device=CPU)
    for row in range(layers[0]):
        first.sink(row)(*chosen(row, tokens=8))
    sent = first.downstream(8, None)
    first.cache.ids.fill_(0)
    assert all(torch.equal(sent[:, row], stored(first, row, 8)[0]) for row in range(layers[0]))


@pytest.mark.parametrize("skipping", [0, 1])
def test_a_layer_that_skips_a_step_leaves_unknown_rows(skipping: int, with_weights: bool) -> None:
    """Padding tokens that it wrote in an earlier, smaller step do not come up in a larger one."""
    one = Capturer(RowShape((1, 2), 16, 4), [2], 0, 8, 2, CPU, with_weights)
    one.reset_rows(2)
    for row in range(2):
        one.sink(row)(*chosen(row, tokens=8))  # padded
    one.submit(torch.arange(2), np.array([0, 2]))
    one.reset_rows(6)
    one.sink(1 - skipping)(*chosen(1 - skipping, tokens=8))
    rows = one.submit(torch.arange(6), np.array([0, 6])).result().rows
    assert ((ids_of(rows) if with_weights else rows)[:, skipping] == -1).all()
    assert not with_weights or np.isnan(weights_of(rows)[:, skipping]).all()
    check(rows, 1 - skipping, 1 - skipping, with_weights)


@pytest.mark.parametrize("deferred", [[0, 1], [1], []])
def test_deferred_stores(deferred: list[int], with_weights: bool) -> None:
    """Only what was chosen for all tokens, in memory that stays as it is, is held until the stores are flushed."""
    first = capturer(0, with_weights)
    first.defer_stores()
    for layer in range(2):
        own = chosen(layer, tokens=3)
        first.sink(layer, may_defer=layer in deferred)(*own)
        assert (first.cache.view(layer)[0, 0] == -1) == (layer in deferred)
        if layer not in deferred:
            for each in own:  # as some kernels do
                each.fill_(7)
    first.flush_stores()
    for layer in range(2):
        assert torch.equal(first.cache.planes[:, layer, :3], stored(first, layer, 3))
    assert (first.cache.planes[:, :, 3:] == -1).all()
    first.sink(0, may_defer=True)(*chosen(9, tokens=2))
    assert torch.equal(first.cache.planes[:, 0, :2], stored(first, 9, 2))


@pytest.mark.parametrize("deferring", [False, True])
def test_only_this_ranks_tokens_are_stored(deferring: bool, with_weights: bool) -> None:
    """Which of a router's tokens are its own is asked once: it counts the microbatches of a step."""
    first, asked = capturer(0, with_weights), list[int]()

    def own_tokens(ids: torch.Tensor) -> tuple[int, torch.Tensor]:
        asked.append(len(ids))
        return 1, ids[2:5]

    if deferring:
        first.defer_stores()
        first.flush_stores()  # flushing nothing stores nothing
        assert (first.cache.planes == -1).all()
        first.defer_stores()
    first.sink(0, own_tokens, may_defer=True)(*chosen(0, tokens=7))
    assert asked == [7]
    assert torch.equal(first.cache.planes[:, 0, 1:4], stored(first, 0, 7)[:, 2:5])
    first.flush_stores()
    assert (first.cache.planes[:, 0, [0, 4, 5, 6, 7]] == -1).all()


def test_without_weights_the_memory_is_that_of_the_ids_alone() -> None:
    alone, beside = (capturer(0, with_weights) for with_weights in (False, True))
    assert alone.cache.weights is alone.cache.weights_view(0) is None
    assert alone.cache.planes.nbytes == alone.pipeline.device_bytes == 2 * 8 * 4 * 4
    assert beside.pipeline.device_bytes == 2 * alone.pipeline.device_bytes
