"""Routers that no family of transformers has: `replayed` has exactly the experts of the rows run,
with the weights that the router's own code gives them, or refuses. Experts are caught where they run.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from routed_experts.replay import ReplayError, replayed

TOKENS, HIDDEN, EXPERTS, TOP_K = 24, 16, 8, 2
Output = Any
Route = Callable[["Router", Tensor, Tensor | None], Output]


class Router(torch.nn.Module):
    """`route` gets its logits, and the ids that it is to weigh in place of its own choice."""

    def __init__(self, route: Route, top_k: int) -> None:
        super().__init__()
        self.route = route
        self.top_k = top_k
        self.num_experts = EXPERTS
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 2)

    def forward(self, hidden: Tensor, ids: Tensor | None = None) -> Output:
        return self.route(self, hidden, ids)


class Experts(torch.nn.Module):
    """Keeps what it gets."""

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.ids, self.weights = ids, weights
        return hidden * weights.sum(dim=-1, keepdim=True)


class Block(torch.nn.Module):
    def __init__(self, route: Route, top_k: int = TOP_K) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = Router(route, top_k)
        self.experts = Experts()
        self.hidden = torch.randn(TOKENS, HIDDEN)

    def choose(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What the experts get."""
        return ids, weights

    def forward(self, ids: Tensor | None = None) -> Tensor:
        output = self.gate(self.hidden) if ids is None else self.gate(self.hidden, ids)
        if isinstance(output, tuple) and len(output) == 2 and output[1].is_floating_point():
            weights, _ = output  # of all experts
            every = torch.arange(weights.shape[1]).expand_as(weights)
            return self.experts(self.hidden, every, weights)
        ids = next(part for part in output if not part.is_floating_point())
        weights = next(part for part in output if part.shape == ids.shape and part is not ids)
        return self.experts(self.hidden, *self.choose(ids, weights))

    def ran(self) -> Tensor:
        """The weight of each expert [T, E] in the last pass."""
        weights = torch.zeros(TOKENS, EXPERTS)
        return weights.scatter_add(1, self.experts.ids, self.experts.weights.detach())


def rows_of(top_k: int = TOP_K) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(TOKENS, EXPERTS, generator=generator).argsort(dim=-1)[:, :top_k]


def logits_of(router: Router, hidden: Tensor) -> Tensor:
    return hidden @ router.weight.T


def best(router: Router, scores: Tensor, ids: Tensor | None) -> Tensor:
    return scores.topk(router.top_k, dim=-1).indices if ids is None else ids


def noise_in_the_choice(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    logits = logits_of(router, hidden)
    ids = best(router, logits + torch.randn_like(logits), ids)
    return logits, logits.softmax(dim=-1).gather(1, ids), ids


def bias_in_the_choice(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    logits = logits_of(router, hidden)
    scores = logits.sigmoid()
    ids = best(router, scores + torch.linspace(0, 1, EXPERTS), ids)
    weights = scores.gather(1, ids)
    return logits, weights / weights.sum(dim=-1, keepdim=True), ids


def duplicates(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    """A token may have its expert twice."""
    logits = logits_of(router, hidden)
    if ids is None:
        ids = logits.argmax(dim=-1, keepdim=True).expand(-1, router.top_k)
    return logits, logits.softmax(dim=-1).gather(1, ids), ids


def ids_before_weights(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    logits, weights, ids = bias_in_the_choice(router, hidden, ids)
    return logits, ids, weights


def logits_last(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    logits, weights, ids = bias_in_the_choice(router, hidden, ids)
    return ids, weights, logits


def weighing(weigh: Callable[[Tensor, Tensor], Tensor]) -> Route:
    """Of the best K, weights that are made of logits and ids."""

    def route(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
        logits = logits_of(router, hidden)
        ids = best(router, logits, ids)
        return logits, weigh(logits, ids), ids

    return route


def noisy(logits: Tensor, ids: Tensor) -> Tensor:
    return (logits + torch.randn_like(logits) / 10).softmax(dim=-1).gather(1, ids)


def dense(weigh: Callable[[Tensor], Tensor]) -> Route:
    """Weights of all experts."""

    def route(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
        logits = logits_of(router, hidden)
        return weigh(logits), logits

    return route


def expert_choice(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    """Each expert takes its best tokens."""
    logits = logits_of(router, hidden)
    weights, tokens = logits.softmax(dim=-1).T.topk(router.top_k, dim=-1)
    return logits, weights, tokens


def shared_as_an_id(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    """The last id is that of an expert that all tokens have."""
    logits = logits_of(router, hidden)
    ids = best(router, logits, ids)
    weights = logits.softmax(dim=-1).gather(1, ids)
    ids = torch.cat([ids[:, 1:], torch.full((len(ids), 1), EXPERTS)], dim=1)
    return logits, weights, ids


def without_logits(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    _, weights, ids = bias_in_the_choice(router, hidden, ids)
    return weights, ids


def dropping(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    """A quarter of the tokens finds its first expert full."""
    logits = logits_of(router, hidden)
    ids = best(router, logits, ids)
    weights = logits.softmax(dim=-1).gather(1, ids)
    is_full = torch.arange(len(ids))[:, None] % 4 == 0
    is_first = torch.arange(router.top_k) == 0
    return logits, weights, ids.where(~(is_full & is_first), -1)


def dropping_one(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    logits, weights, ids = dropping(router, hidden, ids)
    return logits, torch.ones_like(weights), ids


def weights_without_gradients(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    logits, weights, ids = bias_in_the_choice(router, hidden, ids)
    return logits, weights.detach(), ids


def logits_without_gradients(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    logits, weights, ids = bias_in_the_choice(router, hidden, ids)
    return logits.detach(), weights, ids


def a_map(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    logits = logits_of(router, hidden)
    chosen = torch.zeros_like(logits).scatter(1, best(router, logits, ids), 1.0)
    return logits, logits.softmax(dim=-1) * chosen, chosen.bool()


def input_for_logits(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    _, weights, ids = bias_in_the_choice(router, hidden, ids)
    return hidden, weights, ids


def a_list(router: Router, hidden: Tensor, ids: Tensor | None) -> Output:
    return [*bias_in_the_choice(router, hidden, ids)]


@pytest.mark.parametrize(
    "route", [noise_in_the_choice, bias_in_the_choice, duplicates, ids_before_weights, logits_last]
)
def test_an_odd_router_that_is_replayed(route: Route) -> None:
    """In the block that looks for its formula, and in one that has it."""
    model, rows = Block(route), rows_of()
    upstream = torch.randn(TOKENS, HIDDEN)
    model(rows).backward(upstream)
    expected, gradient = model.ran(), model.gate.weight.grad.clone()
    for _ in range(2):
        model.zero_grad()
        with replayed(model, rows[:, None]):
            model().backward(upstream)
        assert torch.equal(model.ran() != 0, torch.zeros_like(expected).scatter(1, rows, 1.0) != 0)
        assert torch.allclose(model.ran(), expected, atol=1e-6)
        assert torch.allclose(model.gate.weight.grad, gradient, atol=1e-4)


IN_ANOTHER_WAY = "Router computes weights in another way than is known"
OTHER_EXPERTS = "Router has other chosen experts than K of those of its logits"
OF_SHAPES = r"Router returns .*: it cannot be replayed"
REFUSED: dict[str, tuple[Route, str]] = {
    "noise in the weights": (weighing(noisy), IN_ANOTHER_WAY),
    "temperature": (
        weighing(lambda logits, ids: (logits / 2).softmax(dim=-1).gather(1, ids)),
        IN_ANOTHER_WAY,
    ),
    "logits as weights": (weighing(lambda logits, ids: logits.gather(1, ids)), IN_ANOTHER_WAY),
    "weights in another order": (
        weighing(lambda logits, ids: logits.softmax(dim=-1).gather(1, ids).flip(1)),
        IN_ANOTHER_WAY,
    ),
    "dense, ReLU": (dense(torch.relu), OTHER_EXPERTS),
    "dense, softmax": (dense(lambda logits: logits.softmax(dim=-1)), OTHER_EXPERTS),
    "experts choose": (expert_choice, r"rows \[T, K\] of \[24, 2\], but the router has \[8"),
    "a shared expert as an id": (shared_as_an_id, OTHER_EXPERTS),
    "no logits": (without_logits, OF_SHAPES),
    "weights without gradients": (weights_without_gradients, "returns weights without a"),
    "logits without gradients": (logits_without_gradients, "returns logits without a"),
    "full experts": (dropping, OTHER_EXPERTS),
    "a map": (a_map, OF_SHAPES),
    "the input in place of logits": (input_for_logits, OF_SHAPES),
    "a list": (a_list, OF_SHAPES),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_odd_router_that_is_refused(kind: str) -> None:
    route, message = REFUSED[kind]
    check_refused(Block(route), rows_of(), message)


def test_full_experts_of_one() -> None:
    """All weights are 1, whatever expert is taken."""
    check_refused(Block(dropping_one, top_k=1), rows_of(top_k=1), OTHER_EXPERTS)


def check_refused(model: Block, rows: Tensor, message: str) -> None:
    with pytest.raises(ReplayError, match=message), replayed(model, rows[:, None]):
        model()


def test_experts_that_are_full_in_a_later_block() -> None:
    """Its formula is known, so values are not looked at before the block's end."""
    model, rows = Block(duplicates), rows_of()
    for _ in range(2):
        with replayed(model, rows[:, None]):
            model()
    model.gate.route = dropping
    rows[::3] = -1  # where the router chooses
    message = "computed weights in another way than in the blocks before"
    with pytest.raises(ReplayError, match=message), replayed(model, rows[:, None]):
        model()


def drop(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return ids.where(torch.arange(len(ids))[:, None] % 4 > 0, 0), weights


def first_only(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return ids[:, :1], weights[:, :1]


@pytest.mark.parametrize("choose", [drop, first_only])
def test_a_block_whose_experts_get_other_ids(
    choose: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router does as the rows say, but what runs does not."""
    model, rows = Block(bias_in_the_choice), rows_of()
    monkeypatch.setattr(model, "choose", choose)
    refused = pytest.raises(ReplayError, match="the experts beside gate get other ids")
    with refused, replayed(model, rows[:, None]):
        model()


def test_experts_that_get_a_copy_of_the_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = Block(bias_in_the_choice), rows_of()
    monkeypatch.setattr(model, "choose", lambda ids, weights: (ids.clone(), weights))
    with replayed(model, rows[:, None]):
        model()
    assert torch.equal(model.experts.ids, rows)
