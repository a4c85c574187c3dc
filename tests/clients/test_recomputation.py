"""Recomputed passes take the rows of their own forward pass, wherever the backward pass is.

The oracle is what each layer's experts were called with.
"""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from routed_experts.replay import ReplayError, replayed
from tests.clients.conftest import QWEN3, Load
from tests.clients.experts import ExpertsThatRan, OtherCheckpoint, seeing_experts
from tests.clients.test_replay import (
    BATCH,
    CHECKPOINTING,
    TOKENS,
    check_same,
    given_rows,
)
from tests.e2e.harness import prompt_of

KINDS = {
    **CHECKPOINTING,
    "nested": {"use_reentrant": False},
    "nested, reentrant": {"use_reentrant": True},
}


def batch(seed: int) -> torch.Tensor:
    return torch.tensor([prompt_of(TOKENS, 10 * seed + line) for line in range(BATCH)])


def checkpointed(model: Any, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss of a batch, of which `kind` of checkpointing keeps little."""
    model.train().gradient_checkpointing_enable(KINDS[kind])
    model.enable_input_require_grads()

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, use_cache=False).logits.logsumexp(dim=-1).sum()

    if not kind.startswith("nested"):
        return loss_of
    needs_gradient = torch.ones((), requires_grad=True)
    return lambda tokens: checkpoint(
        lambda factor: factor * loss_of(tokens), needs_gradient, **KINDS[kind]
    )


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


def check_ran(ran: ExpertsThatRan, given: list[torch.Tensor]) -> None:
    """The experts of `given` [B, S, L, K], where they are known, in all passes."""
    for ids, rows in zip(ran.forward_passes(), given, strict=True):
        flat = rows.flatten(0, 1)
        assert torch.equal(torch.where(flat < 0, ids, flat), ids)
    ran.check_recomputed(len(given))


@pytest.mark.parametrize("where", ["in the last block", "after the blocks"])
@pytest.mark.parametrize("kind", KINDS)
def test_backward_passes_of_several_blocks(kind: str, where: str, load: Load) -> None:
    """In the last block: one of each forward pass, the first one's last. After the blocks: one of
    all."""
    model = load()
    given = [given_rows(QWEN3, seed) for seed in range(3)]
    for seed, rows in enumerate(given):
        with replayed(model, rows):
            model(input_ids=batch(seed), use_cache=False).logits.logsumexp(dim=-1).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    loss_of = checkpointed(model, kind)
    losses = []
    with seeing_experts(model) as ran:
        for seed, rows in enumerate(given):
            with replayed(model, rows) as replay:
                losses.append(loss_of(batch(seed)))
                if where == "in the last block" and seed == 2:
                    for index in (1, 2, 0):
                        losses[index].backward()
        if where == "after the blocks":
            sum(losses).backward()
    assert replay.asked == [1] * 3
    check_ran(ran, given)
    check_same((losses[0].detach(), gradients(model)), (losses[0].detach(), expected))


def test_a_backward_pass_that_is_repeated_after_the_block(
    load: Load,
) -> None:
    model, rows = load(), given_rows(QWEN3)
    loss_of = checkpointed(model, "not reentrant")
    with seeing_experts(model) as ran:
        with replayed(model, rows):
            loss = loss_of(batch(0))
            loss.backward(retain_graph=True)
        loss.backward()
    check_ran(ran, [rows])
    ran.check_recomputed(2)


def test_the_live_router_is_back_after_a_recomputed_pass(
    load: Load,
) -> None:
    model = load()
    loss_of = checkpointed(model, "reentrant")
    with seeing_experts(model) as live:
        loss_of(batch(1)).backward()
    with replayed(model, given_rows(QWEN3)):
        loss = loss_of(batch(0))
    with seeing_experts(model) as ran:
        loss.backward()
        loss_of(batch(1)).backward()
    assert torch.equal(ran.forward_passes()[0], live.forward_passes()[0])
    assert not any("_replay" in vars(module) for module in model.modules())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_rows_go_with_what_keeps_the_forward_pass(use_reentrant: bool, load: Load) -> None:
    model = load()
    loss_of = checkpointed(model, "reentrant" if use_reentrant else "not reentrant")
    with replayed(model, given_rows(QWEN3)) as replay:
        loss = loss_of(batch(0))
    layer = weakref.ref(replay._layers[0])
    del replay
    gc.collect()
    assert layer() is not None
    loss.backward()
    del loss
    gc.collect()
    assert layer() is None


def test_other_checkpointing(load: Load) -> None:
    """It names no block: its backward pass has to be in its own."""
    model = load()
    loss_of = checkpointed(model, "reentrant")
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = lambda function, *args: OtherCheckpoint.apply(
            partial(function), *args
        )
    given = [given_rows(QWEN3, seed) for seed in range(2)]
    with seeing_experts(model) as ran:
        for seed, rows in enumerate(given):
            with replayed(model, rows):
                loss_of(batch(seed)).backward()
    check_ran(ran, given)

    def both_in_the_second() -> None:
        with replayed(model, given[0]):
            first = loss_of(batch(0))
        with replayed(model, given[1]):
            (first + loss_of(batch(1))).backward()

    with pytest.raises(
        ReplayError, match=r"layers.2.mlp.gate is recomputed in another block.*own block"
    ):
        both_in_the_second()
