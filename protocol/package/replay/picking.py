"""Which formula a router has: the one that gives its own weights in a forward pass."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from routed_experts.replay.errors import ReplayError
from routed_experts.replay.formulas import SCORES, Formula

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
TOLERANCE_IN_16_BITS = 0.02


@dataclass(eq=False)
class Candidates:
    """Formulas that may be those of a class of routers."""

    formulas: list[Formula]
    sure: list[Formula] = field(default_factory=list)
    """Those that other routers of the class surely have. They decide where several are exact."""


def candidates_of(router: Any) -> Candidates:
    """Numbers of the router are read, but no tensors, which may be offloaded."""
    numbers = _numbers_of(router)
    constants = (*_constants_of(type(router)), *numbers.values())
    epsilons = [number for number in constants if 0 < number <= 1e-3]
    formulas = [
        Formula(score, epsilon, scale, in_logits_dtype)
        for score in SCORES
        for epsilon in dict.fromkeys((*epsilons, 0.0, None))
        for scale in dict.fromkeys((*_scales(numbers), 1.0))
        for in_logits_dtype in (False, True)
        # the sum of which is 1 already
        if score != "softmax of chosen" or epsilon is None
    ]
    return Candidates(formulas)


def _numbers_of(router: Any) -> dict[str, float]:
    """A router's attributes that are numbers."""
    return {
        name: float(value)
        for name, value in vars(router).items()
        if isinstance(value, float | int) and not isinstance(value, bool)
    }


def _scales(numbers: dict[str, float]) -> list[float]:
    """What weights may be multiplied by."""
    scales = [number for name, number in numbers.items() if "scal" in name]
    if "top_k" in numbers:
        scales.append(1 / numbers["top_k"])
    return scales


def _constants_of(of: type[Module]) -> list[float]:
    """Those in the methods of a class."""
    constants: list[float] = []
    for base in of.__mro__:
        if base.__module__.startswith("torch."):
            break
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None:
                constants += [value for value in code.co_consts if isinstance(value, float)]
    return constants


@dataclass(frozen=True)
class Picked:
    """The formula of a router.

    Attributes:
        is_sure: it is exact, and no other formula that was tried is, but those that give equal
            weights for any logits, save for rounding.
    """

    formula: Formula
    is_sure: bool


def pick(
    name: str, own: Sequence[Tensor], ids: Tensor, factor: Tensor | None, candidates: Candidates
) -> Picked:
    """The formula that computes a router's own weights best. It looks at the device for each that
    it tries.

    Args:
        own: logits, weights and ids of the router.
        ids: those of the rows.
        candidates: a formula that a router surely has is added to `candidates.sure`.

    Raises:
        ReplayError: no formula computes these weights, or several do that are not the same for the
            rows.
    """
    logits, weights, own_ids = own
    errors = _errors_of(candidates.formulas, own, factor)
    least = min(errors.values())
    if least > tolerance_of(logits, weights):
        cause = "computes weights in another way than is known"
        if weights.isinf().any():
            cause = "has other chosen experts than K of those of its logits"
        raise ReplayError(f"{name} {cause}, and cannot be replayed")
    best = [formula for formula, error in errors.items() if error == least]
    top_k = own_ids.shape[-1]
    picked = _first_sure(best, candidates, top_k)
    others = [formula for formula in best if formula != picked]
    unlike = [formula for formula in others if not _are_equal(picked, formula, logits.dtype, top_k)]
    if picked not in candidates.sure:
        _check_doubt(name, own, ids, factor, picked=picked, others=unlike)
        # Of a single expert, any formula that normalises gives 1.
        if least == 0 and not unlike and top_k > 1:
            candidates.sure.append(picked)
    return Picked(picked, is_sure=least == 0 and not unlike)


def _first_sure(best: Sequence[Formula], candidates: Candidates, top_k: int) -> Formula:
    """Which of the formulas that are as good is taken.

    A formula that is worse by one rounding is not among them: that tells a softmax from one that is
    normalised where the chosen experts have nearly all of the probability. Several are as good where
    these experts have all of it, or where no token counts.
    """
    if top_k > 1:
        # Where it is as good, it is the router's: a softmax of all experts rounds otherwise, and is 0
        # for experts that are improbable.
        best = sorted(best, key=lambda formula: formula.score != "softmax of chosen")
    for formula in best:
        if formula in candidates.sure:
            return formula
    return best[0]


def _check_doubt(
    name: str,
    own: Sequence[Tensor],
    ids: Tensor,
    factor: Tensor | None,
    *,
    picked: Formula,
    others: Sequence[Formula],
) -> None:
    """Refuses the rows `ids` if another formula gives them other weights or gradients than the
    picked one."""
    logits, weights, _ = own
    tolerance = tolerance_of(logits, weights)
    if _are_unlike(picked, others, logits, ids, factor, tolerance=tolerance):
        raise ReplayError(
            f"the weights of {name} fit several formulas in this forward pass, and cannot be replayed: "
            "its scores, or its experts, are all the same, or the chosen experts have all of the probability. "
            "Give the router random weights, or train it without rows until its scores differ"
        )


def _errors_of(
    formulas: Sequence[Formula], own: Sequence[Tensor], factor: Tensor | None
) -> dict[Formula, float]:
    """The largest difference of a router's own weights from those of each formula."""
    logits, weights, own_ids = own
    errors: dict[Formula, float] = {}
    are_probabilities = not ((logits < 0) | (logits > 1)).any()
    for formula in formulas:
        if formula.in_logits_dtype and logits.dtype == torch.float32:
            continue  # as the one in float32
        if formula.score == "probabilities" and not are_probabilities:
            continue
        computed = formula.weigh(logits, own_ids, factor).to(weights.dtype)
        errors[formula] = float(difference(computed, weights))
    return errors


@lru_cache(maxsize=256)
def _are_equal(formula: Formula, other: Formula, dtype: torch.dtype, top_k: int) -> bool:
    """Whether two formulas give K experts equal weights and gradients for any logits of a type, save
    for rounding, as of those that add 0 or 1e-20. On the host, without a look at the device."""
    generator = torch.Generator().manual_seed(0)
    num_experts = max(16, 2 * top_k)
    logits = torch.randn(64, num_experts, generator=generator, device="cpu").to(dtype)
    ids = torch.rand(64, num_experts, generator=generator, device="cpu").argsort(dim=-1)[:, :top_k]
    return not _are_unlike(formula, [other], logits, ids, None, tolerance=tolerance_of(logits))


def tolerance_of(*tensors: Tensor) -> float:
    """The largest difference that rounding makes of weights that are computed from these."""
    return max(TOLERANCE.get(tensor.dtype, TOLERANCE_IN_16_BITS) for tensor in tensors)


def _are_unlike(
    formula: Formula,
    others: Sequence[Formula],
    logits: Tensor,
    ids: Tensor,
    factor: Tensor | None,
    *,
    tolerance: float,
) -> bool:
    """Whether another formula gives the experts `ids` other weights than `formula` does, or the
    logits other gradients: of equal logits, softmax and sigmoid can give equal weights, but
    sigmoid half the gradient. Gradients of `factor` are like the weights."""
    if not others:
        return False
    weights = formula.weigh(logits, ids, factor)
    # a generator of its own, on the host: the random state of training stays as it is
    generator = torch.Generator().manual_seed(0)
    of_weights = torch.randn(weights.shape, generator=generator, device="cpu").to(weights.device)
    gradient, _ = formula.gradients(of_weights, logits, ids, factor)
    # Of a single weight that is normalised, the gradient is 0 but for rounding; of probabilities
    # that are almost 0, it is large.
    size_of_weights = weights.abs().amax(dim=-1) * of_weights.abs().amax(dim=-1)
    scale = torch.maximum(size_of_weights, gradient.abs().amax(dim=-1))
    for other in others:
        if difference(other.weigh(logits, ids, factor), weights) > tolerance:
            return True
        other_gradient, _ = other.gradients(of_weights, logits, ids, factor)
        if difference(other_gradient, gradient, scale) > tolerance:
            return True
    return False


def difference(computed: Tensor, expected: Tensor, scale: Tensor | None = None) -> Tensor:
    """The largest one, 0-d on the device, relative to the `scale` of a token, or to the largest
    value that is expected. Tokens with NaN have none."""
    expected = expected.float()
    if not expected.numel():
        return expected.new_zeros(())
    apart = _largest(computed.float() - expected)
    size = _largest(expected)
    apart /= (size if scale is None else scale).clamp(min=1e-30)
    return apart.nan_to_num_(nan=float("inf")).masked_fill_(size.isnan(), 0).amax()


def _largest(values: Tensor) -> Tensor:
    """The largest size of each row, by one operator; NaN if one is NaN."""
    size: Tensor = torch.linalg.vector_norm(values, ord=float("inf"), dim=-1)
    return size
