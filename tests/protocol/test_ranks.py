"""Rows cut for the ranks of a trainer, against the trainer's own cut of token numbers and decoder
layers."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.protocol.batch import align, align_weights
from routed_experts.protocol.collect import Routing, RoutingError
from routed_experts.protocol.ranks import Packed, pack, stage_layers, take, token_spans

TOP_K = 2
PADDING = -1


@dataclass
class Trainer:
    """How a trainer splits its model and its batch. `tp` cuts tokens only with sequence
    parallelism."""

    tp: int
    pp: int
    vpp: int
    cp: int
    sequence_parallel: bool
    packed: bool
    counts: list[int]  # decoder layers of each virtual stage, in the model's order
    spare: int  # tokens of padding beyond what the split needs

    @property
    def multiple(self) -> int:
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    def layers(self) -> dict[tuple[int, int], list[int]]:
        """The decoder layers of each (pipeline rank, virtual stage)."""
        layers, following = {}, itertools.count()
        for stage, count in enumerate(self.counts):
            layers[stage % self.pp, stage // self.pp] = [next(following) for _ in range(count)]
        return layers

    def tokens(self, tokens: np.ndarray, bounds: list[int]) -> dict[tuple[int, int], np.ndarray]:
        """What each (context, tensor) rank has of `tokens`, as TransformerEngine and Megatron
        define it."""
        tokens_of_rank = {}
        for c, t in itertools.product(range(self.cp), range(self.tp)):
            own = []
            for first, end in itertools.pairwise(bounds):
                chunks = (
                    np.split(tokens[first:end], 2 * self.cp) if self.cp > 1 else [tokens[first:end]]
                )
                own += [chunks[c], chunks[-1 - c]] if self.cp > 1 else chunks
            whole = np.concatenate(own)
            tokens_of_rank[c, t] = np.split(whole, self.tp)[t] if self.sequence_parallel else whole
        return tokens_of_rank


@dataclass
class Batch:
    """Sequences whose rows say which token and decoder layer they are of."""

    lengths: list[int]
    moe_layers: list[int]
    unknown: set[int]  # tokens, counted over all sequences

    def ids(self, token: int, layer: int) -> list[int]:
        return [(token * 16 + layer) * TOP_K + k for k in range(TOP_K)]

    def row(self, token: int, layers: list[int]) -> list[list[int]]:
        """[L, K], the row that a token must have: none for padding, unknown ones and the last of a
        sequence."""
        lasts = {end - 1 for end in itertools.accumulate(self.lengths)}
        has_none = token == PADDING or token in self.unknown | lasts
        return [[-1] * TOP_K if has_none else self.ids(token, layer) for layer in layers]

    def rows_of(self, tokens: np.ndarray, layers: list[int]) -> np.ndarray:
        """[..., L, K], the rows of `tokens`."""
        rows = np.array([self.row(token, layers) for token in tokens.ravel()], np.int16)
        return rows.reshape(*tokens.shape, len(layers), TOP_K)

    def routings(self) -> list[Routing]:
        routings = []
        for numbers in self.numbers():
            rows = self.rows_of(np.array(numbers[:-1]), self.moe_layers)
            routings.append(Routing(rows, weights=weights_of(rows)))
        return routings

    def numbers(self) -> list[list[int]]:
        """Of the tokens of each sequence."""
        following = itertools.count()
        return [[next(following) for _ in range(length)] for length in self.lengths]


def weights_of(rows: np.ndarray) -> np.ndarray:
    return np.where(rows < 0, np.nan, rows / 4).astype(np.float32)


@st.composite
def trainers(draw: Any) -> tuple[Trainer, Batch]:
    tp, pp, vpp, cp = (draw(st.integers(1, most)) for most in (3, 3, 2, 3))
    is_even = draw(st.booleans())
    sizes = (
        [draw(st.integers(1, 2))] * (pp * vpp)
        if is_even
        else [draw(st.integers(0, 2)) for _ in range(pp * vpp)]
    )
    total = sum(sizes)
    batch = Batch(
        lengths=draw(st.lists(st.integers(2, 9), min_size=1, max_size=4)),
        moe_layers=sorted(draw(st.sets(st.integers(0, total - 1)))) if total else [],
        unknown=draw(st.sets(st.integers(0, 20))),
    )
    return Trainer(
        tp, pp, vpp, cp, draw(st.booleans()), draw(st.booleans()), sizes, draw(st.integers(0, 2))
    ), batch


def padded(values: list[int], length: int) -> list[int]:
    return values + [PADDING] * (length - len(values))


@dataclass
class WholeBatch:
    """What all ranks have together: the rows and weights of all layers."""

    tokens: np.ndarray  # their numbers, in the order of the rows
    bounds: list[int]  # where sequences begin and end, with their padding
    rows: Any
    weights: Any


def packed_batch(trainer: Trainer, batch: Batch) -> WholeBatch:
    step = trainer.multiple
    sizes = [-(-length // step) * step for length in batch.lengths]
    sizes[-1] += trainer.spare * step
    tokens = np.concatenate([padded(*pair) for pair in zip(batch.numbers(), sizes, strict=True)])
    bounds = [0, *itertools.accumulate(sizes)]
    packed = pack(batch.routings(), multiple=step, length=bounds[-1])
    assert packed.cu_seqlens.tolist() == bounds
    assert packed.num_tokens.tolist() == batch.lengths
    known = [np.min(batch.row(token, [0])) >= 0 for token in tokens]
    assert packed.known.tolist() == known or not batch.moe_layers
    return WholeBatch(tokens, bounds, packed.rows, packed.weights)


def padded_batch(trainer: Trainer, batch: Batch) -> WholeBatch:
    step = trainer.multiple
    length = (-(-max(batch.lengths) // step) + trainer.spare) * step
    routings = batch.routings()
    return WholeBatch(
        tokens=np.array([padded(numbers, length) for numbers in batch.numbers()]).T,
        bounds=[0, length],
        rows=align(routings, length).swapaxes(0, 1),
        weights=align_weights(routings, length).swapaxes(0, 1),
    )


@settings(deadline=None, max_examples=150)
@given(trainers())
def test_what_the_ranks_have_is_what_came_in(case: tuple[Trainer, Batch]) -> None:
    """Each row at its token and layer, padding and unknown rows as -1, and nothing else."""
    trainer, batch = case
    whole = packed_batch(trainer, batch) if trainer.packed else padded_batch(trainer, batch)
    seen: list[tuple[int, int]] = []  # tokens and layers
    for stage, layers in trainer.layers().items():
        of_stage = layers_of(stage, trainer, batch)
        moe_layers = [layer for layer in layers if layer in batch.moe_layers]
        for rank, own_tokens in trainer.tokens(whole.tokens, whole.bounds).items():
            spans = spans_of(rank, trainer, whole.bounds)
            expected = batch.rows_of(own_tokens, moe_layers)
            assert np.array_equal(take(whole.rows[..., of_stage, :], spans), expected)
            weights = take(whole.weights[..., of_stage, :], spans)
            assert np.array_equal(weights, weights_of(expected), equal_nan=True)
            if trainer.sequence_parallel or rank[1] == 0:  # else tensor ranks have the same tokens
                real = [int(token) for token in own_tokens.ravel() if token != PADDING]
                seen += itertools.product(real, moe_layers)
    assert sorted(seen) == sorted(itertools.product(range(sum(batch.lengths)), batch.moe_layers))


def layers_of(stage: tuple[int, int], trainer: Trainer, batch: Batch) -> slice:
    """Which of the L layers a pipeline rank has in a virtual stage."""
    rank, virtual_stage = stage
    is_even = len(set(trainer.counts)) == 1
    return stage_layers(
        batch.moe_layers,
        sum(trainer.counts),
        pipeline=(rank, trainer.pp),
        virtual=(virtual_stage, trainer.vpp),
        counts=None if is_even else trainer.counts,
    )


def spans_of(rank: tuple[int, int], trainer: Trainer, bounds: list[int]) -> Any:
    """Which tokens a (context, tensor) rank has."""
    context_rank, tensor_rank = rank
    sequence = (tensor_rank, trainer.tp) if trainer.sequence_parallel else (0, 1)
    return token_spans(bounds, context=(context_rank, trainer.cp), sequence=sequence)


@pytest.mark.parametrize(
    ("pp", "vpp", "first_and_last"),
    [(1, 1, None), (2, 1, None), (4, 3, None), (3, 2, None), (3, 1, (3, 5))],
)
def test_stages_are_megatrons(pp: int, vpp: int, first_and_last: tuple[int, int] | None) -> None:
    """Its functions, called for each stage."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = megatron_config(pp, vpp, *(first_and_last or (None, None)))
    # A stage and a virtual stage, which Megatron knows only where there are several.
    stages = [(p, v, v if vpp > 1 else None) for v, p in itertools.product(range(vpp), range(pp))]
    sizes = [get_num_layers_to_build(config, virtual, p) for p, _, virtual in stages]
    counts = None if first_and_last is None else sizes
    layer_ids = [3, 4, 6, 7, 8, 11]
    for (p, v, virtual), size in zip(stages, sizes, strict=True):
        first = get_transformer_layer_offset(config, virtual, p)
        own_layers = stage_layers(layer_ids, 12, pipeline=(p, pp), virtual=(v, vpp), counts=counts)
        theirs = [layer for layer in layer_ids if first <= layer < first + size]
        assert layer_ids[own_layers] == theirs


def megatron_config(pp: int, vpp: int, first: int | None, last: int | None) -> Any:
    """Of 12 layers, of which the first and the last stage have as many as is said."""
    return SimpleNamespace(
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        num_layers=12,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )


@pytest.mark.parametrize(
    ("rank", "size"), [(rank, size) for size in (1, 2, 3) for rank in range(size)]
)
def test_context_parallelism_is_megatrons(
    rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its function, called for each rank."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: size)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: rank)
    tokens = torch.arange(2 * 24).reshape(2, 24)
    theirs = get_batch_on_this_cp_rank({"tokens": tokens})["tokens"]
    own = take(tokens.numpy().T, token_spans([0, 24], context=(rank, size))).T
    assert np.array_equal(own, theirs)


def test_one_span_and_one_stage_are_views() -> None:
    rows = np.zeros((16, 4, 2), np.int16)
    view = take(
        rows[:, stage_layers(range(4), 4, pipeline=(1, 2))],
        token_spans([0, 8, 16], sequence=(1, 2)),
    )
    assert view.base is rows
    assert view.shape == (8, 2, 2)


def test_what_cannot_be_cut() -> None:
    routing = Routing(np.zeros((4, 3, 2), np.int16))
    later = Routing(np.zeros((4, 3, 2), np.int16), start=2)
    weighted = Routing(routing.rows, weights=np.zeros((4, 3, 2), np.float32))
    for wrong, message in (
        (lambda: pack([later]), "join the turns first"),
        (lambda: pack([routing, Routing(np.zeros((4, 2, 2), np.int16))]), "rows of shapes"),
        (
            lambda: pack([routing], multiple=4, length=7),
            "8 tokens with padding do not fit length 7",
        ),
        (lambda: pack([routing, weighted]), "some responses have weights"),
        (lambda: pack([routing], num_tokens=[6]), "rows up to 4 for 6 tokens"),
    ):
        with pytest.raises(RoutingError, match=message):
            wrong()
    with pytest.raises(ValueError, match="spans up to token 16 of an array of 12"):
        take(np.zeros((12, 3, 2)), token_spans([0, 8, 16], context=(0, 2)))
    assert isinstance(pack([routing], num_tokens=[3]), Packed)
    assert pack([routing], num_tokens=[3]).known.all(), "the last token that is left has a row"
