"""How a router makes scores of logits, a choice of scores, and weights of the chosen scores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.protocol.routing_input import ONE_GROUP, Groups

UNSCORED = -1e19
"""In place of a score that is not a number, of logits that overflowed: above experts that are never
chosen, so that none of them is taken instead."""

NEVER = -1e20
"""In place of the score of an expert that is never chosen. Finite, as groups add two scores, and
above that of experts outside the chosen groups."""

ALWAYS = 1e30
"""In place of the score of an expert that is always chosen."""

OUTSIDE = float("-inf")
"""In place of the score of an expert outside the chosen groups."""

MARGIN = 0.01
"""By how much the logit of an expert that is always chosen is above the greatest of all, as in
SteerMoE."""


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=1)


def _sigmoid(logits: Tensor) -> Tensor:
    return logits.sigmoid()


def _sqrt_softplus(logits: Tensor) -> Tensor:
    return torch.nn.functional.softplus(logits).sqrt()


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}


@dataclass(frozen=True, eq=False)
class Family:
    """Routers that differ in sizes only. E experts, of which K are chosen for each of n tokens."""

    scoring: str
    top_k: int
    renormalize: bool = False
    """Whether the weights of a token are divided by their sum."""
    scale: float = 1.0
    """What weights are multiplied by."""
    correction: Tensor | None = None
    """[E], added to scores for the choice only. The router's own parameter, and not its `data`, for
    which a loader of weights may put another tensor."""
    groups: Groups = ONE_GROUP

    def scores(self, logits: Tensor) -> Tensor:
        """[n, E] float32."""
        return _SCORES[self.scoring](logits.float())

    def preferences(self, scores: Tensor) -> Tensor:
        """[n, E]: the router chooses the K greatest, inside the chosen groups."""
        if self.correction is None:
            return scores
        return scores + self.correction.float()

    def choose(self, preferences: Tensor) -> Tensor:
        """[n, K] ids, the best first."""
        if self.groups.count > 1:
            preferences = self._inside_chosen_groups(preferences)
        return preferences.topk(self.top_k, dim=1).indices

    def _inside_chosen_groups(self, preferences: Tensor) -> Tensor:
        num_tokens, num_experts = preferences.shape
        size = num_experts // self.groups.count
        grouped = preferences.view(num_tokens, self.groups.count, size)
        of_group = grouped.topk(self.groups.summed, dim=2).values.sum(dim=2)
        chosen = of_group.topk(self.groups.chosen, dim=1).indices
        is_chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, chosen, True)
        return grouped.masked_fill(~is_chosen[:, :, None], OUTSIDE).flatten(1)

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """[n, K] float32, the weights of the experts `ids` ([n, K] int64)."""
        weights = scores.gather(1, ids)
        # Of a score that is no number: as vLLM's kernels for GPUs do since vllm#39391.
        weights = weights.masked_fill(weights.isnan(), 0.0)
        if self.renormalize:
            total = weights.sum(dim=1, keepdim=True)
            weights = weights / torch.where(total > 0, total, 1.0)  # as vLLM's kernels do
        return weights * self.scale


def family_of(router: Any, num_experts: int, top_k: int) -> Family:
    """The family of a router of vLLM's, from its attributes. `prove` shows whether it is right.

    Raises `UnsupportedConfig` for a router whose formula is not known.
    """
    name = type(router).__name__
    scoring = getattr(router, "scoring_func", None)
    if scoring not in _SCORES or getattr(router, "custom_routing_function", None) is not None:
        raise UnsupportedConfig(f"The router {name} has a formula of its own for weights")
    if getattr(router, "_hash_indices_table", None) is not None:
        raise UnsupportedConfig(f"The router {name} chooses by the id of a token")
    if getattr(router, "bias_vl", None) is not None:
        raise UnsupportedConfig(f"The router {name} chooses for pictures in another way")
    correction = getattr(router, "e_score_correction_bias", None)
    groups = _groups_of(router, num_experts, correction is not None)
    has_scale = _is_grouped(router) or correction is not None
    scale = float(router.routed_scaling_factor) if has_scale else 1.0
    return Family(scoring, top_k, bool(router.renormalize), scale, correction, groups)


def _is_grouped(router: Any) -> bool:
    """vLLM's router for CPUs says so, on GPUs the class does."""
    return bool(getattr(router, "use_grouped_topk", hasattr(router, "topk_group")))


def _groups_of(router: Any, num_experts: int, is_corrected: bool) -> Groups:
    if not _is_grouped(router):
        return ONE_GROUP
    count = int(router.num_expert_group)
    if num_experts <= count or num_experts % count:  # as vLLM's router decides for each step
        return ONE_GROUP
    return Groups(count, int(router.topk_group), summed=2 if is_corrected else 1)


_NUM_PROOF_TOKENS = 64
_SPREAD = 2.0  # of the logits
# Of the router's weights from the formula's. In 16 bits, routers round logits, scores, and on CPUs
# the logarithm of their sum: by up to 3 %.
_TOLERANCE = {torch.float32: (1e-4, 1e-6)}
_TOLERANCE_16_BITS = (6e-2, 1e-3)
_LEAST_EQUAL = 0.9  # of the tokens: where scores are equal in 16 bits, routers differ


def prove(family: Family, route: Callable[..., Any], logits: Tensor) -> bool:
    """Whether a router chooses, and weighs, as its family says.

    `route` is the router's own method; it is given random logits of the type and width of `logits`
    ([n, E]), because those of a first, made-up forward pass may all be equal.
    """
    generator = torch.Generator().manual_seed(0)
    # no more than the forward pass has: a router may look at its padding
    num_tokens = min(_NUM_PROOF_TOKENS, len(logits))
    random = _SPREAD * torch.randn(num_tokens, logits.shape[1], generator=generator)
    random = random.to(device=logits.device, dtype=logits.dtype)
    hidden = random.new_zeros(num_tokens, 8)  # routers look at its length only
    weights, ids = route(hidden, random, None)
    weights = weights[:, : family.top_k].float()
    ids = ids[:, : family.top_k].long()
    scores = family.scores(random)
    rtol, atol = _TOLERANCE.get(logits.dtype, _TOLERANCE_16_BITS)
    if not torch.allclose(family.weigh(scores, ids), weights, rtol=rtol, atol=atol * family.scale):
        return False
    preferences = family.preferences(scores)
    own = preferences.gather(1, ids).sort(dim=1).values
    expected = preferences.gather(1, family.choose(preferences)).sort(dim=1).values
    is_equal = torch.isclose(own, expected, rtol=rtol, atol=atol).all(dim=1)
    return bool(is_equal.float().mean() >= _LEAST_EQUAL)
