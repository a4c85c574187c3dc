"""How routers compute the weights of experts from their logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

import torch
from torch import Tensor


@dataclass(frozen=True)
class Formula:
    """How a router computes the weights of experts from its logits."""

    score: str  # one of `SCORES`
    epsilon: float | None  # added to the sum that weights are divided by; None: they are not
    scale: float
    in_logits_dtype: bool  # else in float32

    @property
    def numbers(self) -> list[float]:
        """For operators, which take tensors alone."""
        return [
            SCORES.index(self.score),
            nan if self.epsilon is None else self.epsilon,
            self.scale,
            self.in_logits_dtype,
        ]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> "Formula":
        score, epsilon, scale, in_logits_dtype = numbers
        return cls(
            score=SCORES[int(score)],
            epsilon=None if isnan(epsilon) else epsilon,
            scale=scale,
            in_logits_dtype=bool(in_logits_dtype),
        )

    def weigh(self, logits: Tensor, ids: Tensor, factor: Tensor | None) -> Tensor:
        """Weights of `ids` [T, K] or [T, N, K], times the `factor` of each expert. In float32."""
        dtype = logits.dtype if self.in_logits_dtype else torch.float32
        chosen = self._scores(self._scores_of_all(logits, dtype), ids)
        weights = chosen / self._divisor(chosen)
        if self.scale != 1:
            weights = weights * self.scale
        return (weights if factor is None else weights * factor[ids]).float()

    def gradients(
        self, gradient: Tensor, logits: Tensor, ids: Tensor, factor: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Of the logits and of `factor`, for the `gradient` of the weights of `ids` [T, K]."""
        gradient = gradient.float()
        if self.scale != 1:
            gradient = gradient * self.scale
        of_all = self._scores_of_all(logits, torch.float32)
        chosen = self._scores(of_all, ids)
        total = self._divisor(chosen)
        shares = chosen / total
        of_factor = None
        if factor is not None:
            of_factor = torch.zeros_like(factor, dtype=torch.float32)
            of_factor.index_add_(0, ids.flatten(), (gradient * shares).flatten())
            gradient = gradient * factor[ids]
        if isinstance(total, Tensor):
            shared = (gradient * shares).sum(dim=-1, keepdim=True)
            gradient = (gradient - shared) / total.clamp(min=_LEAST_DIVISOR)
        return self._gradient_of_logits(gradient, chosen, of_all, ids), of_factor

    def _divisor(self, chosen: Tensor) -> Tensor | float:
        """What the scores `chosen` are divided by. A sum that is 0 is 1, as in vLLM's kernels:
        experts of rows, other than a router's own, may all have a score of 0."""
        if self.epsilon is None:
            return 1.0
        total = chosen.sum(dim=-1, keepdim=True)
        if self.epsilon:
            total += self.epsilon
        return total.masked_fill_(total <= 0, 1.0)

    def _scores_of_all(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """The scores of all experts, if one depends on the others, else their logits."""
        return logits.softmax(dim=-1, dtype=dtype) if self.score == "softmax" else logits.to(dtype)

    def _scores(self, of_all: Tensor, ids: Tensor) -> Tensor:
        """Of the chosen experts."""
        chosen = of_all.gather(1, ids.flatten(1)).reshape(ids.shape)
        if self.score == "softmax of chosen":
            return chosen.softmax(dim=-1)
        if self.score == "sigmoid":
            return chosen.sigmoid()
        if self.score == "sqrtsoftplus":
            return torch.nn.functional.softplus(chosen).sqrt()
        return chosen

    def _gradient_of_logits(
        self, gradient: Tensor, chosen: Tensor, of_all: Tensor, ids: Tensor
    ) -> Tensor:
        """For the `gradient` of the scores `chosen`."""
        if self.score == "softmax":
            gradient = gradient * chosen
            shared = gradient.sum(dim=-1, keepdim=True)
            return (of_all * -shared).scatter_add_(1, ids, gradient)
        if self.score == "softmax of chosen":
            gradient = chosen * (gradient - (gradient * chosen).sum(dim=-1, keepdim=True))
        elif self.score == "sigmoid":
            gradient = gradient * chosen * (1 - chosen)
        elif self.score == "sqrtsoftplus":
            gradient = gradient * of_all.gather(1, ids).sigmoid()
            gradient = gradient / (2 * chosen).clamp(min=_LEAST_DIVISOR)
        return torch.zeros_like(of_all).scatter_add_(1, ids, gradient)


SCORES = ("softmax", "softmax of chosen", "sigmoid", "sqrtsoftplus", "probabilities")
"""Probabilities are returned in place of logits already."""
_LEAST_DIVISOR = 1e-30
"""Of a gradient: divided by scores that are nearly 0, it would be infinite, and then NaN."""
