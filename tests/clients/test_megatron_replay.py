"""`MegatronReplay` with Megatron-core's own routers, against the same routers whose top k is
replaced."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from routed_experts.protocol.collect import Routing
from routed_experts.protocol.ranks import stage_layers
from routed_experts.replay import MegatronReplay, ReplayError
from routed_experts.replay.megatron import _AUXILIARY_LOSSES
from tests.clients.test_replay import CHECKPOINTING, ByHand
from tests.protocol.answers import rows_of

pytest.importorskip("megatron.core")

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 2, 16, 6
LAYER_IDS = [1, 2, 3]  # layer 0 is dense
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax": {"moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    "groups, bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        **GROUPS,
    },
}


GROUPS_OF_RANKS: dict[str, Any] = dict.fromkeys(("tp", "cp", "tp_cp", "tp_dp_cp"))
COEFFICIENT = 0.5  # of auxiliary losses
REENTRANT = CHECKPOINTING["reentrant"]


class Layer(torch.nn.Module):
    """One of Megatron's routers, and experts that are a vector each."""

    def __init__(self, config: TransformerConfig, number: int) -> None:
        super().__init__()
        self.router = TopKRouter(config, ProcessGroupCollection(**GROUPS_OF_RANKS))
        self.router.set_layer_number(number)
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.seen: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        probs, routing_map = self.router(hidden)
        self.seen.append(routing_map)
        return hidden + (probs @ self.experts).reshape(hidden.shape)


class Chunk(torch.nn.Module):
    """The layers of a stage, and a layer of multi-token prediction, whose number is one of
    theirs."""

    def __init__(
        self, config: TransformerConfig, numbers: list[int], recompute: dict[str, Any] | None
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(config, number) for number in numbers)
        self.mtp = torch.nn.ModuleList([Layer(config, numbers[0])])
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.mtp):
            hidden = (
                checkpoint(layer, hidden, **self.recompute) if self.recompute else layer(hidden)
            )
        return hidden.tanh().sum()


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its routers move themselves to the current GPU, and ask for a name that is there with
    TransformerEngine only."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    torch.manual_seed(3)
    with torch.compiler.set_stance("force_eager"):  # it compiles parts of them for seconds
        yield
    RouterReplay.clear_global_router_replay_instances()


def chunk_of(numbers: list[int], recompute: dict[str, Any] | None = None, **options: Any) -> Chunk:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        **{
            "moe_enable_routing_replay": True,
            "moe_router_load_balancing_type": "none",
            "init_method": torch.nn.init.normal_,
            **options,
        },
    )
    chunk = Chunk(config, numbers, recompute)
    for name, tensor in chunk.named_buffers():
        if name.endswith("expert_bias"):
            tensor.normal_(0, 0.3)
    return chunk


def rows_for(seed: int) -> torch.Tensor:
    rows = torch.from_numpy(rows_of(TOKENS, seed, EXPERTS, len(LAYER_IDS), TOP_K))
    rows[1] = rows[-1] = -1
    return rows


def hidden_of(seed: int) -> torch.Tensor:
    """[S, B, H]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS // 2, 2, HIDDEN, generator=generator).requires_grad_()


def gradients(chunk: Chunk) -> dict[str, torch.Tensor]:
    grads = {
        name: parameter.grad.clone()
        for name, parameter in chunk.named_parameters()
        if parameter.grad is not None
    }
    chunk.zero_grad()
    return grads


@pytest.mark.parametrize(
    ("router", "kind"),
    [
        *((router, "none") for router in ROUTERS),
        *(("groups, bias", kind) for kind in CHECKPOINTING),
    ],
)
def test_a_stage_replays_each_microbatch(router: str, kind: str) -> None:
    """Two are under way at once, as in a pipeline. Its decoder layers 2 and 3 are 3 and 4 for
    Megatron."""
    chunk, recompute = chunk_of([3, 4], **ROUTERS[router]), CHECKPOINTING.get(kind)
    for seed in (0, 1):
        with ByHand(rows_for(seed)[:, 1:], EXPERTS) as by_hand:
            # that of mtp
            by_hand.rows = torch.cat([by_hand.rows, torch.full((TOKENS, 1, TOP_K), -1)], dim=1)
            chunk(hidden_of(seed)).backward()
    chunk.recompute = recompute
    expected = gradients(chunk)
    for layer in chunk.layers:
        layer.seen.clear()
    with MegatronReplay(chunk) as replay:
        losses = []
        for seed in (0, 1):
            replay.feed(rows_for(seed), LAYER_IDS)
            losses.append(chunk(hidden_of(seed)))
        for loss in losses:
            loss.backward()
    actual = gradients(chunk)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, rtol=1e-4, atol=1e-6), name
    for index, layer in enumerate(chunk.layers, 1):
        assert len(layer.seen) == (4 if recompute else 2)
        for seed, routing_map in zip((0, 1, 0, 1), layer.seen, strict=False):
            rows = rows_for(seed)[:, index].long()
            is_known = (rows >= 0).all(dim=1)
            assert routing_map.sum(dim=1).eq(TOP_K).all()
            assert routing_map.gather(1, rows.clamp(min=0))[is_known].all()
    assert replay.replayed == 2 * 2 * (TOKENS - 2)
    untouched = vars(RouterReplay())
    assert all(
        vars(instance) == untouched for instance in RouterReplay.global_router_replay_instances
    ), "something is left"


def test_the_page(documented: list[str]) -> None:
    """A rank's rows of a packed batch that is cut by layers, context and sequence parallelism, of
    two microbatches."""
    routings = [Routing(rows_of(count, count, EXPERTS, len(LAYER_IDS), TOP_K)) for count in (6, 3)]
    chunk = chunk_of([3, 4])
    ranks = {
        "cp": 2,
        "cp_rank": 1,
        "tp": 2,
        "tp_rank": 1,
        "pp": 2,
        "pp_rank": 1,
        "chunks": [chunk],
        "routings": routings,
    }
    names: dict[str, Any] = {**ranks, "info": {"layer_ids": LAYER_IDS, "num_hidden_layers": 4}}
    names["forward_and_backward"] = lambda: chunk(torch.randn(4, 1, HIDDEN)).backward()
    exec("\n".join(documented), names)
    # The second half of chunks 1 and 2 of four: the second sequence's tokens 2 and 3, and padding.
    rows = np.full((4, 2, TOP_K), -1)
    rows[0] = routings[1].rows[2, 1:]
    for index, layer in enumerate(chunk.layers):
        (routing_map,) = layer.seen
        assert routing_map[0].nonzero()[:, 0].tolist() == sorted(rows[0, index])
        assert routing_map.sum(dim=1).tolist() == [TOP_K] * 4
    assert names["replay"].replayed == 2


def test_virtual_stages() -> None:
    """Each chunk of a rank is fed for itself: of four virtual stages, those of the second rank."""
    chunks, rows = [chunk_of([2]), chunk_of([4])], rows_for(0)
    with MegatronReplay(chunks) as replay:
        for v in range(2):
            layers = stage_layers(LAYER_IDS, 4, pipeline=(1, 2), virtual=(v, 2))
            replay.feed(rows[:, layers], LAYER_IDS[layers], chunk=v)
        for v, chunk in enumerate(chunks):
            chunk(hidden_of(v))
            (routing_map,) = chunk.layers[0].seen
            rows_of_layer = rows[:, 2 * v].long()
            is_known = (rows_of_layer >= 0).all(dim=1)
            assert routing_map.gather(1, rows_of_layer.clamp(min=0))[is_known].all()


def test_again_and_again() -> None:
    """One object for all steps, whether layers are recomputed or not."""
    chunk = chunk_of([3, 4])
    replay = MegatronReplay(chunk)
    for recompute in (None, REENTRANT, None):
        chunk.recompute = recompute
        with pytest.raises(ReplayError, match="within `with MegatronReplay"):
            replay.feed(rows_for(0), LAYER_IDS)
        with replay:
            with pytest.raises(ReplayError, match="already"), replay:
                pass
            with pytest.raises(ReplayError, match="already"), MegatronReplay(chunk):
                pass
            for seed in (0, 1):
                replay.feed(rows_for(seed), LAYER_IDS)
                chunk(hidden_of(seed)).backward()
        assert replay.replayed == 2 * 2 * (TOKENS - 2)


def test_a_stage_without_routers() -> None:
    """Its layers are dense: no layer of the rows is its own."""
    layers = stage_layers(LAYER_IDS, 4, pipeline=(0, 4))
    for rows in (rows_for(0), rows_for(0)[:, None], rows_for(0)[:0]):
        with MegatronReplay(torch.nn.Linear(2, 2)) as replay:
            replay.feed(rows[..., layers, :], LAYER_IDS[layers])
        assert replay.replayed == 0


def test_a_microbatch_of_before_the_block() -> None:
    """Its layers are not recomputed with other rows."""
    chunk, generator = chunk_of([3, 4], REENTRANT), torch.Generator().manual_seed(5)
    shorter = torch.randn(TOKENS - 1, 1, HIDDEN, generator=generator).requires_grad_()

    def step(before: torch.Tensor, is_first: bool) -> None:
        with MegatronReplay(chunk) as replay:
            replay.feed(rows_for(0), LAYER_IDS)
            losses = [before, chunk(hidden_of(0))]
            for loss in losses if is_first else losses[::-1]:
                loss.backward()

    for hidden, is_first in ((shorter, True), (hidden_of(1), False), (hidden_of(1), True)):
        before = chunk(hidden)
        with pytest.raises(ReplayError, match="not the next of those fed"):
            step(before, is_first)


def test_microbatches_that_are_recomputed_in_another_order() -> None:
    """As in the backward pass of a sum of losses: the tokens, as many, are those of another
    microbatch."""
    chunk = chunk_of([3, 4], REENTRANT)

    def step(seeds: tuple[int, ...], order: slice) -> None:
        losses = []
        with MegatronReplay(chunk) as replay:
            for seed in seeds:
                replay.feed(rows_for(seed), LAYER_IDS)
                losses.append(chunk(hidden_of(seed)))
            for loss in losses[order]:
                loss.backward()

    for seeds in ((0, 1), (0, 0, 1)):
        with pytest.raises(ReplayError, match="not the next of those fed"):
            step(seeds, slice(None, None, -1))
        step(seeds, slice(None))
    step((0, 0), slice(None, None, -1))  # which is which makes no difference
    generator = torch.Generator().manual_seed(5)
    for layer in chunk.layers:
        layer.router.register_forward_pre_hook(
            lambda module, args: (
                args[0] + 1e-6 * torch.randn(args[0].shape, generator=generator),
                *args[1:],
            )
        )
    step((0,) * 8, slice(None))  # what is recomputed is rounded in another way
    with pytest.raises(ReplayError, match="not the next of those fed"):
        step((0, 1), slice(None, None, -1))


def test_what_cannot_be_replayed() -> None:
    chunk, rows = chunk_of([3, 4]), rows_for(0)
    many = rows.clone()
    many[0, :, 0] = EXPERTS
    with pytest.raises(ReplayError, match="set moe_enable_routing_replay"):
        MegatronReplay(chunk_of([3], moe_enable_routing_replay=False))

    with pytest.raises(ReplayError, match="leave moe_expert_capacity_factor unset"):
        MegatronReplay(chunk_of([3], moe_expert_capacity_factor=0.5))

    with pytest.raises(ReplayError, match="two routers in decoder layer 2"):
        MegatronReplay(chunk_of([3, 3]))

    def run(wrong_rows: Any, layer_ids: list[int], seeds: tuple[int, ...] = (0,)) -> None:
        with MegatronReplay(chunk) as replay:
            for seed in seeds:
                replay.feed(wrong_rows, layer_ids)
                loss = chunk(hidden_of(seed))
            loss.backward()

    for unfit, layer_ids, message in (
        (rows, [0, 1, 2], r"no layer for the routers of decoder layers \[3\]"),
        (rows[:-1], LAYER_IDS, r"rows for \[6, 2\] of 8 experts are needed, they are \[5, 2\]"),
        (rows[:0], LAYER_IDS, r"they are \[0, 2\] up to expert -1"),
        (many, LAYER_IDS, "up to expert 8"),
        (rows.clamp(min=0), LAYER_IDS, r"the row \[0, 0\] of token 1 has an expert twice"),
        ([*rows], LAYER_IDS, "a list is not one array of numbers: .* `protocol.ranks.pack`"),
        (
            rows.unflatten(0, (2, 3)),
            LAYER_IDS,
            "rows of .2, 3. tokens for inputs of .3, 2.: .*pack",
        ),
    ):
        with pytest.raises(ReplayError, match=message):
            run(unfit, layer_ids)
    with pytest.raises(ReplayError, match="none are fed"), MegatronReplay(chunk):
        chunk(hidden_of(0))
    for times in (1, 2):  # a second microbatch does not take the place of one that was not replayed
        silent = pytest.raises(ReplayError, match=r"decoder layers \[2, 3\] were never asked")
        with silent, MegatronReplay(chunk) as replay:
            for _ in range(times):
                replay.feed(rows, LAYER_IDS)
            if times > 1:
                chunk(hidden_of(0))
    chunk.recompute = REENTRANT
    with pytest.raises(ReplayError, match="decoder layer 2 recomputed 1 of 2 microbatches"):
        run(rows, LAYER_IDS, (0, 0))
    chunk(hidden_of(0)).backward()  # as before


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The group that losses are summed over. An engine that ran in this process has left one."""
    is_left = dist.is_initialized()
    if not is_left:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_world_size() == 1
    monkeypatch.setattr(
        "tests.clients.test_megatron_replay.GROUPS_OF_RANKS",
        dict.fromkeys(GROUPS_OF_RANKS, dist.group.WORLD),
    )
    yield
    if not is_left:
        dist.destroy_process_group()


def plain_loss(layer: Layer, hidden: torch.Tensor, loss_type: str) -> torch.Tensor:
    """For the experts that a layer took first, expert by expert: how often it was chosen, times its
    mean score. Of all tokens together, or the mean over sequences."""
    scores = layer.router.gating(hidden).flatten(0, 1).float().softmax(dim=-1)
    tokens = torch.arange(TOKENS).reshape(-1, 2)  # [S, B]
    groups = [tokens.flatten()] if loss_type == "aux_loss" else [tokens[:, 0], tokens[:, 1]]
    losses = [
        EXPERTS * layer.seen[0][group, expert].float().mean() / TOP_K * scores[group, expert].mean()
        for group in groups
        for expert in range(EXPERTS)
    ]
    return torch.stack(losses).sum() / len(groups)


def step_with_plain_losses(chunk: Chunk, loss_type: str) -> dict[str, torch.Tensor]:
    """Gradients of what a chunk without auxiliary losses returns, and of plain ones."""
    inputs: list[torch.Tensor] = []
    for layer in (*chunk.layers, *chunk.mtp):
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with MegatronReplay(chunk) as replay:
        replay.feed(rows_for(0), LAYER_IDS)
        loss = chunk(hidden_of(0))
    layers = zip((*chunk.layers, *chunk.mtp), inputs, strict=True)
    losses = [plain_loss(layer, hidden, loss_type) for layer, hidden in layers]
    (loss + COEFFICIENT * torch.stack(losses).sum()).backward()
    return gradients(chunk)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("loss_type", "kind"),
    [("seq_aux_loss", "none"), *(("aux_loss", kind) for kind in ["none", *CHECKPOINTING])],
)
def test_auxiliary_losses_count_replayed_experts(loss_type: str, kind: str) -> None:
    """Those of the layer of multi-token prediction, which is not replayed, count its own."""
    chunk = chunk_of(
        [3, 4],
        CHECKPOINTING.get(kind),
        moe_aux_loss_coeff=COEFFICIENT,
        moe_router_load_balancing_type=loss_type,
    )
    without_losses = chunk_of([3, 4])
    without_losses.load_state_dict(chunk.state_dict())
    expected = step_with_plain_losses(without_losses, loss_type)

    def step(aux_loss: bool) -> dict[str, torch.Tensor]:
        with MegatronReplay(chunk, aux_loss=aux_loss) as replay:
            replay.feed(rows_for(0), LAYER_IDS)
            chunk(hidden_of(0)).backward()
        return gradients(chunk)

    live, actual = step(aux_loss=False), step(aux_loss=True)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, rtol=1e-3, atol=1e-5), name
    name = "layers.0.router.weight"
    assert (live[name] - expected[name]).abs().max() > 0.01 * expected[name].abs().max()
    assert not vars(chunk.layers[0].router).keys() & set(_AUXILIARY_LOSSES), "something is left"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["none", "not reentrant"])
def test_auxiliary_losses_of_unknown_rows(kind: str) -> None:
    """As without replay: Megatron counts the largest scores, whatever the bias and the groups let the
    router choose."""
    chunk = chunk_of(
        [3, 4],
        moe_aux_loss_coeff=COEFFICIENT,
        **{**ROUTERS["groups, bias"], "moe_router_load_balancing_type": "aux_loss"},
    )
    chunk(hidden_of(0)).backward()
    expected = gradients(chunk)
    chunk.recompute = CHECKPOINTING.get(kind)
    with MegatronReplay(chunk, aux_loss=True) as replay:
        replay.feed(torch.full_like(rows_for(0), -1), LAYER_IDS)
        chunk(hidden_of(0)).backward()
    actual = gradients(chunk)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, rtol=1e-4, atol=1e-6), name
