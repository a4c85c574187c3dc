"""`replayed` in every family of transformers that has routers, against the same model whose top k
is replaced."""

from typing import Any

import pytest
import torch

from routed_experts.replay import ReplayError, replayed
from routed_experts.replay.finding import routers_of
from tests.clients import families
from tests.clients.families import BEGIN, END, EXPERTS, REFUSED, TOP_K
from tests.clients.test_replay import ByHand, check_same

BATCH, TOKENS, MAX_LAYERS = 2, 6, 8
INSTALLED = families.installed()


class Recorded(ByHand):
    """Keeps the experts that live routers choose."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(torch.full((BATCH, TOKENS, MAX_LAYERS, TOP_K), -1), num_experts)
        self.ids: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = self.layer
        result = super().__torch_function__(func, types, args, kwargs)
        if self.layer > layer:
            self.ids.append(result[1])
        return result


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, families.VOCABULARY, (BATCH, TOKENS), generator=generator)


def output(model: Any) -> torch.Tensor:
    """Logits, or hidden states of a model without a head."""
    inputs = {"input_ids": tokens()}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens()
    return model(**inputs, use_cache=False)[0]


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output, and the gradients of all parameters."""
    model.zero_grad()
    result = output(model)
    result.logsumexp(dim=-1).sum().backward()
    gradients = {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
    return result.detach(), gradients


def random_rows(num_layers: int, num_experts: int) -> torch.Tensor:
    """[B, S, L, K], one of them unknown."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(BATCH, TOKENS, num_layers, num_experts, generator=generator)
    rows = scores.argsort(dim=-1)[..., :TOP_K]
    rows[0, 2] = -1
    return rows


@pytest.mark.parametrize("family", [name for name in INSTALLED if name not in REFUSED])
def test_a_family_that_is_replayed(family: str) -> None:
    """Its own choice gives its own output bit for bit. Other rows give what its own code makes of
    them, and the same gradients."""
    model = families.tiny_model(family)
    num_experts = families.NUM_EXPERTS.get(family, EXPERTS)
    with Recorded(num_experts) as own:
        live = output(model).detach()
    own_rows = torch.stack(own.ids, dim=1).unflatten(0, (BATCH, TOKENS))
    with replayed(model, own_rows) as replaying:
        assert torch.equal(output(model), live)
    assert replaying.replayed == BATCH * TOKENS * own.layer

    rows = random_rows(own.layer, num_experts)
    with ByHand(rows, num_experts):
        expected = step(model)
    assert not torch.allclose(expected[0], live, rtol=1e-3)
    with replayed(model, rows):
        check_same(step(model), expected)
    routers = [name for name, _, _ in routers_of(model)]
    for router in routers[:1]:
        of_router = [grad for name, grad in expected[1].items() if name.startswith(f"{router}.")]
        assert any(grad.abs().max() > 0 for grad in of_router)


@pytest.mark.parametrize("family", ["cohere2_moe", "deepseek_v4", "inkling2", "mixtral"])
def test_one_expert_per_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normalised, its weight is 1, whatever the formula is, and no gradient reaches the router."""
    if family not in INSTALLED:
        pytest.skip("this version of transformers does not have the family")
    monkeypatch.setitem(families.SHARED, "num_experts_per_tok", 1)
    model = families.tiny_model(family)
    num_layers = len(routers_of(model))
    rows = random_rows(num_layers, EXPERTS)[..., :1]
    with ByHand(rows, EXPERTS):
        expected = step(model)
    for _ in range(2):
        with replayed(model, rows) as replaying:
            check_same(step(model), expected)
    assert replaying.replayed == (BATCH * TOKENS - 1) * num_layers


@pytest.mark.parametrize("family", [name for name in INSTALLED if name in REFUSED])
def test_a_family_that_is_refused(family: str) -> None:
    model = families.tiny_model(family)
    _, message = REFUSED[family]
    num_layers = len({layer for _, layer, _ in routers_of(model)})
    top_k = families.OPTIONS.get(family, {}).get("num_experts_per_tok", TOP_K)
    rows = random_rows(num_layers, EXPERTS)[..., :top_k]
    with pytest.raises(ReplayError, match=message), replayed(model, rows):
        output(model)


def test_the_page_lists_them() -> None:
    """Written by `python -m tests.clients.families`. A new version of transformers may have others:
    each is replayed or refused, and listed."""
    assert set(REFUSED) <= set(families.FAMILIES)
    text = families.PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == families.block()
