"""The capture of two pipeline stages in one process: what the first sends on, the last packs with
its own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from routed_experts.capture.wire.rows import ids_of, weights_of
from routed_experts.capture.wire.transport import StepRows
from routed_experts.capture.worker.capturer import Capturer, RowShape

K = 4
STAGES = [RowShape((1, 2), 400, K), RowShape((), 0, 0), RowShape((5, 6, 7), 400, K)]
LAYERS = [len(shape.layer_ids) for shape in STAGES]
ODD = np.array(
    [-1, 0x0000FFFF, -65536, 0x7FC00001, 0x80000000 - (1 << 32), 1, 0x3F800000], dtype=np.int32
)
"""Bits of weights whose words are -1 or below, and that are NaN, -0.0 or the least above 0."""


@pytest.fixture(params=[False, True], ids=["ids", "weights"])
def weights(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def capturer(stage: int = 0, weights: bool = False, layers: Sequence[int] = LAYERS) -> Capturer:
    return Capturer(
        RowShape.of_stages(STAGES),
        stage_layers=layers,
        stage=stage,
        max_tokens=9,
        max_steps_in_flight=2,
        device=torch.device("cpu"),
        with_weights=weights,
    )


def choice(layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a router chooses, [tokens, K + 1] each: the last column is a fused shared expert's."""
    ids = torch.arange(tokens * (K + 1), dtype=torch.int32).reshape(tokens, K + 1) + 50 * layer
    bits = np.random.default_rng(layer).choice(ODD, size=(tokens, K + 1))
    return ids, torch.from_numpy(bits).view(torch.float32)


def run(
    one: Capturer, tokens: int, first_layer: int = 0, skipping: int | None = None, **options: Any
) -> None:
    for row in range(one.cache.num_layers):
        if row != skipping:
            one.sink(row, **options)(*choice(first_layer + row, tokens))


def submit(one: Capturer, tokens: int, upstream: torch.Tensor | None = None) -> StepRows:
    return one.pipeline.submit(
        torch.arange(100, 100 + tokens), np.array([0, 2, tokens]), upstream
    )()


def check(step: StepRows, layers: range, weights: bool, unknown: int | None = None) -> None:
    """That rows are what the routers chose, bit for bit, whatever the bits."""
    tokens = len(step.rows)
    assert step.slots.tolist() == [*range(100, 100 + tokens)]
    assert step.rows.shape == (tokens, (3 if weights else 1) * len(layers), K)
    ids = ids_of(step.rows) if weights else step.rows
    for row, layer in enumerate(layers):
        expected_ids, expected_bits = bits_of_choice(layer, tokens, is_unknown=row == unknown)
        assert np.array_equal(ids[:, row], expected_ids)
        if weights:
            assert np.array_equal(weights_of(step.rows)[:, row].view(np.int32), expected_bits)
    if weights and unknown is not None:
        assert np.isnan(weights_of(step.rows)[:, unknown]).all()


def bits_of_choice(layer: int, tokens: int, is_unknown: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids, and the bits of weights, both [tokens, K], without the shared expert."""
    if is_unknown:
        unknown = np.full((tokens, K), -1, np.int32)
        return unknown, unknown
    ids, weights = choice(layer, tokens)
    return ids[:, :K].numpy(), weights[:, :K].view(torch.int32).numpy()


def test_the_shape_of_the_whole_model() -> None:
    assert RowShape.of_stages(STAGES) == RowShape((1, 2, 5, 6, 7), 400, K)
    with pytest.raises(ValueError, match="agree in experts and top-k"):
        RowShape.of_stages([RowShape((1,), 16, 4), RowShape((2,), 16, 2)])
    with pytest.raises(ValueError, match="no MoE layer"):
        RowShape.of_stages([RowShape((), 0, 0)])
    with pytest.raises(ValueError, match=r"share a decoder layer, but these are \[1, 2, 2, 3\]"):
        RowShape.of_stages([RowShape((1, 2), 16, K), RowShape((2, 3), 16, K)])


def test_memory_without_weights_is_that_of_the_ids() -> None:
    one, with_weights = capturer(), capturer(weights=True)
    assert one.cache.weights is one.cache.views(0)[1] is None
    assert one.cache.planes.nbytes == one.pipeline.device_bytes == 2 * 9 * K * 4
    assert with_weights.pipeline.device_bytes == 2 * one.pipeline.device_bytes


@pytest.mark.parametrize("layers", [LAYERS, [1, 0, 4]])
def test_rows_of_earlier_stages_come_first(layers: list[int], weights: bool) -> None:
    """Through a stage without MoE layers; padding tokens (5 and 6) go no further."""
    first, middle, last = (capturer(stage, weights, layers) for stage in range(3))
    run(first, 7)
    run(last, 7, first_layer=layers[0])
    upstream = middle.downstream(5, first.downstream(5, None))
    assert (upstream.shape, upstream.dtype) == (
        (5, layers[0], (2 if weights else 1) * K),
        torch.int32,
    )
    assert upstream.is_contiguous()
    first.cache.planes.fill_(0)  # the next step writes while these are still being sent
    check(submit(last, 5, upstream), range(5), weights)
    with pytest.raises(ValueError, match="earlier pipeline stages"):
        submit(last, 3)


@pytest.mark.parametrize("skipping", [0, 1])
def test_a_layer_that_skips_a_step_leaves_unknown_rows(skipping: int, weights: bool) -> None:
    """Padding tokens that it wrote in an earlier, smaller step do not come up in a larger one."""
    first = capturer(weights=weights)
    first.cache.reset_rows(2)
    run(first, 8)  # padded
    submit(first, 2)
    first.cache.reset_rows(6)
    run(first, 8, skipping=skipping)
    check(submit(first, 6), range(2), weights, unknown=skipping)


@pytest.mark.parametrize("deferred", [[0, 1], [1], []])
def test_deferred_stores(deferred: list[int], weights: bool) -> None:
    """Only what keeps its memory, and is of all tokens, is held until the stores are flushed;
    others may be written."""
    first = capturer(weights=weights)
    first.defer_stores()
    for layer in range(2):
        own = choice(layer, 9)
        first.sink(layer, may_defer=layer in deferred)(*own)
        assert (first.cache.ids[layer][0, 0] == -1) == (layer in deferred)
        for layer_ids in own if layer not in deferred else ():
            layer_ids.fill_(7)
    first.flush_stores()
    check(submit(first, 7), range(2), weights)
    first.cache.reset_rows(9)
    first.flush_stores()  # nothing is stored twice
    assert (first.cache.planes == -1).all()
    run(first, 5, may_defer=True)
    check(submit(first, 5), range(2), weights)


@pytest.mark.parametrize("deferring", [False, True])
def test_only_this_ranks_tokens_are_stored(deferring: bool, weights: bool) -> None:
    """Which of a router's tokens are its own is asked once: it counts the microbatches of a
    step."""
    first, num_tokens = capturer(weights=weights), []
    if deferring:
        first.defer_stores()

    def own_tokens(ids: torch.Tensor) -> tuple[int, torch.Tensor]:
        num_tokens.append(len(ids))
        return 1, ids[2:5]

    chosen = choice(0, 7)
    first.sink(0, own_tokens, may_defer=True)(*chosen)
    assert num_tokens == [7]
    for view, chosen_of_layer in zip(first.cache.views(0), chosen, strict=True):
        if view is not None:
            assert torch.equal(
                view[1:4].view(torch.int32), chosen_of_layer[2:5, :K].view(torch.int32)
            )
    first.flush_stores()
    first.cache.planes[:, 0, 1:4] = -1
    assert (first.cache.planes == -1).all()
