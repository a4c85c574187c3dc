"""Two pipeline stages in one process: what the first sends on, the last packs with its own."""

import numpy as np
import pytest
import torch

from routed_experts.capture.capturer import Capturer, RowShape

CPU = torch.device("cpu")
STAGES = [RowShape((1, 2), 16, 4), RowShape((), 0, 0), RowShape((5, 6, 7), 16, 4)]


def capturer(stage: int) -> Capturer:
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


def test_rows_of_earlier_stages_come_first() -> None:
    """Through a stage without MoE layers; padding tokens (5 and 6) go no further."""
    first, middle, last = (capturer(stage) for stage in range(3))
    for stage, base in ((first, 0), (last, 2)):
        for row in range(stage.cache.num_layers):
            stage.sink(row)(ids(base + row, tokens=7))
    upstream = middle.downstream(5, first.downstream(5, None))
    assert (upstream.shape, upstream.dtype) == ((5, 2, 4), torch.int32)
    assert upstream.is_contiguous()
    slots = torch.arange(100, 107)
    step = last.submit(slots, np.array([0, 2, 5]), upstream).result()
    assert step.slots.tolist() == [100, 101, 102, 103, 104]
    for row in range(5):
        assert np.array_equal(step.rows[:, row], ids(row, 5)[:, :4].numpy())


def test_a_step_without_the_rows_of_earlier_stages_is_an_error() -> None:
    with pytest.raises(ValueError, match="earlier pipeline stages"):
        capturer(2).submit(torch.arange(3), np.array([0, 3]))


def test_only_this_ranks_tokens_are_stored() -> None:
    first = capturer(0)
    first.sink(0, own_tokens=lambda rows: (1, rows[2:5]))(ids(0, tokens=7))
    first.sink(1)(ids(1, tokens=4))
    step = first.submit(torch.arange(4), np.array([0, 4])).result()
    assert (step.rows[0, 0] == -1).all()
    assert np.array_equal(step.rows[1:, 0], ids(0, 7)[2:5, :4].numpy())


@pytest.mark.parametrize("skipping", [0, 1])
def test_a_layer_that_skips_a_step_leaves_unknown_rows(skipping: int) -> None:
    """And padding tokens that it wrote in an earlier, smaller step do not come up in a larger one."""
    first = capturer(0)
    first.reset_rows(2)
    for row in range(2):
        first.sink(row)(ids(row, tokens=8))  # padded
    first.submit(torch.arange(2), np.array([0, 2]))
    first.reset_rows(6)
    first.sink(1 - skipping)(ids(1 - skipping, tokens=8))
    step = first.submit(torch.arange(6), np.array([0, 6])).result()
    assert (step.rows[:, skipping] == -1).all()
    assert np.array_equal(step.rows[:, 1 - skipping], ids(1 - skipping, 6)[:, :4].numpy())


@pytest.mark.parametrize("layers", [[1, 2], [2, 2]])
def test_rows_for_the_next_stage_are_a_copy(layers: list[int]) -> None:
    """They are still being sent when the next step, or a dummy one, writes into the device cache."""
    shape = RowShape(tuple(range(sum(layers))), 16, 4)
    first = Capturer(shape, layers, 0, max_tokens=8, max_steps_in_flight=2, device=CPU)
    for row in range(layers[0]):
        first.sink(row)(ids(row, tokens=8))
    sent = first.downstream(8, None)
    first.cache.ids.fill_(0)
    for row in range(layers[0]):
        assert torch.equal(sent[:, row], ids(row, 8)[:, :4])


@pytest.mark.parametrize("held", [[0, 1], [1], []])
def test_ids_that_are_held_are_stored_at_the_end(held: list[int]) -> None:
    """Whichever layers have a sink; others are written directly."""
    first = capturer(0)
    first.defer_stores()
    for layer in held:
        first.sink(layer, may_defer=True)(ids(layer, tokens=3))
    assert (first.cache.ids == -1).all()
    first.flush_stores()
    for layer in range(2):
        expected = ids(layer, 3)[:, :4] if layer in held else -1
        assert (first.cache.view(layer)[:3] == expected).all()
    assert (first.cache.ids[:, 3:] == -1).all()
    first.sink(0, may_defer=True)(ids(9, tokens=2))
    assert torch.equal(first.cache.view(0)[:2], ids(9, 2)[:, :4])


def test_ids_whose_memory_others_get_are_stored_at_once() -> None:
    first = capturer(0)
    first.defer_stores()
    memory = ids(0, tokens=3)
    first.sink(0)(memory)
    first.sink(1, may_defer=True)(ids(1, tokens=3))
    memory.fill_(7)
    first.flush_stores()
    for layer in range(2):
        assert torch.equal(first.cache.view(layer)[:3], ids(layer, 3)[:, :4])


def test_a_part_of_the_tokens_is_stored_at_once() -> None:
    """Whose it is, the step's metadata says, which nothing keeps."""
    first = capturer(0)
    first.defer_stores()
    first.sink(0, own_tokens=lambda rows: (1, rows[2:5]), may_defer=True)(ids(0, tokens=7))
    assert torch.equal(first.cache.view(0)[1:4], ids(0, 7)[2:5, :4])
    first.flush_stores()
