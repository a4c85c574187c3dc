"""What is asked in place of a router, in forward, recomputed and backward passes."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.nn import Module

from routed_experts.replay.choice import Choice, choice_of
from routed_experts.replay.errors import ReplayError
from routed_experts.replay.finding import method_of, name_of
from routed_experts.replay.formulas import Formula
from routed_experts.replay.picking import Candidates, difference, pick, tolerance_of
from routed_experts.replay.recomputation import ForwardPass, in_recomputed_pass

_ROUTERS: "WeakValueDictionary[int, Router]" = WeakValueDictionary()
"""By the numbers that operators get."""
_NUMBERS = itertools.count()


@torch.library.custom_op("routed_experts::replay", mutates_args=())
def _replay(
    logits: Tensor, weights: Tensor, own_ids: Tensor, factor: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a router's weights [T, K] and ids [T, K] become, and whether a token's weights stay
    [T, 1].

    It is an operator for two reasons. Code that is compiled knows no values, and asks
    `in_recomputed_pass` once, when it is compiled. Selective checkpointing gives a recomputed pass the
    results of the first pass, by the numbers of their calls: so it must not see calls that only the
    first pass makes.

    Args:
        state: `Router.state`.
    """
    number, *_ = state.tolist()
    router = _ROUTERS.get(int(number))
    if router is None:
        raise ReplayError("a compiled layer is recomputed after the block of its forward pass")
    return router.replay(logits, weights, own_ids, factor)


@_replay.register_fake
def _(
    logits: Tensor, weights: Tensor, own_ids: Tensor, factor: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    is_own = own_ids.new_empty((own_ids.shape[0], 1), dtype=torch.bool)
    return torch.empty_like(weights), torch.empty_like(own_ids), is_own


@torch.library.custom_op("routed_experts::replay_backward", mutates_args=())
def _replay_backward(
    gradient: Tensor, saved: Sequence[Tensor], factor: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the logits, of the router's own weights, and of `factor`.

    Args:
        saved: the logits, the ids, and whether a token's weights are the router's own.
        state: `Router.state`.
    """
    logits, ids, is_own = saved
    nothing = gradient.new_zeros(())
    of_own = torch.where(is_own, gradient, nothing)
    of_computed = torch.where(is_own, nothing, gradient)
    _, *numbers = state.tolist()
    formula = Formula.of_numbers(numbers)
    of_logits, of_factor = formula.gradients(of_computed, logits, ids, factor)
    if factor is None or of_factor is None:
        return of_logits.to(logits.dtype), of_own, gradient.new_zeros(0)
    return of_logits.to(logits.dtype), of_own, of_factor.to(factor.dtype)


@_replay_backward.register_fake
def _(
    gradient: Tensor, saved: Sequence[Tensor], factor: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits, _, _ = saved
    of_factor = gradient.new_zeros(0) if factor is None else torch.empty_like(factor)
    return torch.empty_like(logits), torch.empty_like(gradient), of_factor


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, _, _, factor, state = inputs
    _, ids, is_own = output
    ctx.save_for_backward(logits, ids, is_own, factor, state)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None, None, None
    *saved, factor, state = ctx.saved_tensors
    of_logits, of_own, of_factor = _replay_backward(gradient, saved, factor, state)
    return of_logits, of_own, None, None if factor is None else of_factor, None


_replay.register_autograd(_backward, setup_context=_keep_for_backward)


@dataclass(eq=False)
class Layer:
    """What the routers of a decoder layer replay. Of several, one is asked."""

    decoder_layer: int
    forward_pass: ForwardPass
    ids: Tensor  # [T, K]; unknown rows become those that the forward pass chose
    is_unknown: Tensor  # [T, 1]
    has_unknown: bool
    weights: Tensor | None  # [T, K], NaN where the router's own are taken
    highest_id: int  # of `ids`
    routers: "list[Router]" = field(default_factory=list)
    keeps_logits: bool = False
    logits: Tensor | None = None
    """Of the forward pass, for the auxiliary loss."""

    @property
    def asked(self) -> int:
        """Forward passes so far; recomputed ones do not count."""
        return sum(router.asked for router in self.routers)


def check_one_pass(layers: "Sequence[Layer]") -> None:
    often = [layer for layer in layers if layer.asked > 1]
    if often:
        names = [router.name for layer in often for router in layer.routers if router.asked]
        raise ReplayError(
            f"{names} were asked in a second forward pass, whose tokens may be others: a block is for one forward pass "
            "and its backward pass. Where a module has a policy and its reference, give `replayed` the one that runs"
        )


def check_errors(layers: "Sequence[Layer]") -> None:
    """Whether the formulas of earlier blocks are still those of the routers. One look at the device
    for all."""
    routers = [router for layer in layers for router in layer.routers]
    compared = [router.compared for router in routers if router.compared is not None]
    if not compared:
        return
    device = compared[0].error.device
    errors = torch.stack([comparison.error.to(device) for comparison in compared]).tolist()
    wrong: list[str] = []
    for comparison, error in zip(compared, errors, strict=True):
        if error > comparison.tolerance:
            comparison.known.is_wrong = True
            wrong.append(comparison.name)
    if wrong:
        raise ReplayError(
            f"the routers {wrong} computed weights in another way than in the blocks "
            "before: what this block computed is wrong. Other blocks look for their formula again"
        )


_TOLERANCE_OF_KNOWN = 1e-5
"""Of weights in float32 by a formula that gave those of an earlier block bit for bit. In other blocks
those of transformers' routers differ by 1.4e-7."""

_Key = tuple[bool, torch.dtype, torch.dtype]
"""Whether a router is trained, and the types of its logits and weights: in float32 it does not show
whether a formula is in the type of the logits."""


@dataclass(eq=False)
class _Known:
    """The formula of a router, as long as it has these settings. It was exact when it was found."""

    settings: tuple[Any, ...]
    formula: Formula
    is_wrong: bool = False  # what a block computed with it was wrong


@dataclass(frozen=True)
class _Compared:
    """A formula of earlier blocks in a forward pass."""

    name: str  # of the router
    known: _Known
    error: Tensor  # the largest difference of the router's own weights, 0-d on the device
    tolerance: float


_KNOWN: "WeakKeyDictionary[Module, dict[_Key, _Known]]" = WeakKeyDictionary()
"""Formulas that were found in earlier blocks, which are taken without a look at the device."""


def _settings(router: Any) -> tuple[Any, ...]:
    """What decides for a router's formula, beside its configuration: its class, the method that is
    asked, and plain attributes."""
    plain = [
        (name, value)
        for name, value in vars(router).items()
        if name != "training" and isinstance(value, bool | int | float | str)
    ]
    return (type(router), getattr(type(router), method_of(type(router))), *plain)


class Router:
    """What is asked in place of one router."""

    def __init__(self, name: str, module: Module, layer: Layer, candidates: Candidates) -> None:
        self.name = name
        self.module = ref(module)  # a `Replay` that is kept does not keep the model
        self.class_name = name_of(module)
        # What holds a router holds its layer, too. A circle of both would keep rows on the device.
        self._layer = ref(layer)
        self.candidates = candidates
        self.settings = _settings(module)
        self.known = _KNOWN.setdefault(module, {})
        self.asked = 0
        self.formula: Formula | None = None  # once it is known
        self.compared: _Compared | None = None
        self.handed: Tensor | None = None  # ids that the experts have not got yet
        self.number = next(_NUMBERS)
        # This object's number, and the numbers of its formula. A tensor, because torch.compile would
        # compile anew for each value of an int. Not one of inference mode: autograd saves none.
        with torch.inference_mode(False):
            self.state = torch.zeros(5, dtype=torch.float64, device="cpu")
            self.state[0] = self.number
        layer.routers.append(self)
        _ROUTERS[self.number] = self

    @property
    def layer(self) -> Layer:
        layer = self._layer()
        assert layer is not None
        return layer

    def __reduce_ex__(self, _: Any) -> Any:
        raise ReplayError("a model is not copied or saved as a whole while it is replayed")

    def route(self, router: Any, args: tuple[Any, ...], output: Any) -> Any:
        """`output` with the layer's experts."""
        own = choice_of(router, args, output)
        # asked in compiled code, `in_recomputed_pass` would break the graph
        if self.layer.keeps_logits and (torch.compiler.is_compiling() or not in_recomputed_pass()):
            self.layer.logits = own.logits.detach()
        # what Gemma 4 multiplies an expert's weight by
        factor = getattr(router, "per_expert_scale", None)
        weights, ids, _ = _replay(own.logits, own.weights, own.ids, factor, self.state)
        self._check_gradients(own, factor)
        replayed = own.write(weights, ids)
        if not torch.compiler.is_compiling():
            self.handed = next((part for part in replayed if part.dtype == ids.dtype), None)
        return replayed

    def _check_gradients(self, own: Choice, factor: Tensor | None) -> None:
        """Whether a gradient of the weights is one of the logits, as that of a formula is."""
        if not torch.is_grad_enabled():
            return
        of_factor = factor is not None and factor.requires_grad
        if own.weights.requires_grad != (own.logits.requires_grad or of_factor):
            without = "logits" if own.weights.requires_grad else "weights"
            raise ReplayError(
                f"{self.class_name} returns {without} without a gradient, and cannot be replayed: a formula takes that "
                "of the weights to the logits"
            )

    def see_experts(
        self, experts: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Whether the experts get the ids that the router returned last. A block may drop some, or
        choose by itself."""
        if torch.compiler.is_compiling() or self.handed is None:
            return
        handed = self.handed
        self.handed = None
        values = (*args, *kwargs.values())
        given = [
            value for value in values if isinstance(value, Tensor) and value.dtype == handed.dtype
        ]
        if len(given) == 1 and not _are_same(given[0], handed):
            raise ReplayError(
                f"the experts beside {self.name} get other ids than it returns: nothing was replayed there"
            )

    def replay(
        self, logits: Tensor, own_weights: Tensor, own_ids: Tensor, factor: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `_replay`."""
        is_recomputed = in_recomputed_pass()
        if not is_recomputed:
            self.asked += 1
            check_one_pass([self.layer])
        elif not self.asked or not self.layer.forward_pass.may_be_recomputed_now():
            raise ReplayError(
                f"{self.name} is recomputed in another block than that of its forward pass: run the backward pass in "
                "its own block, or use torch.utils.checkpoint, whose recomputed passes find their rows"
            )
        self._check_shape(logits, own_ids)
        # No formula has a weight of an expert that has no logit, such as a shared one's.
        inside = own_ids.clamp(0, logits.shape[-1] - 1)
        own_weights = own_weights.masked_fill(inside != own_ids, torch.inf)
        own_ids = inside
        ids = self._choose(own_ids, is_recomputed)
        own = [logits, own_weights, own_ids]
        weights = self._weigh(own, ids, factor, is_recomputed).to(own_weights.dtype)
        is_own = (ids == own_ids).all(dim=-1, keepdim=True)
        if self.layer.weights is not None:
            recorded = self.layer.weights.to(weights.device)
            weights = torch.where(recorded.isnan(), weights, recorded).to(own_weights.dtype)
            is_own = is_own & self.layer.is_unknown.to(ids.device)
        # Where the router chose the same, its own weights stay, bit for bit.
        return torch.where(is_own, own_weights, weights), ids, is_own

    def _check_shape(self, logits: Tensor, own_ids: Tensor) -> None:
        if self.layer.ids.shape != own_ids.shape:
            raise ReplayError(
                f"rows [T, K] of {[*self.layer.ids.shape]}, but the router has {[*own_ids.shape]}"
            )
        if self.layer.highest_id >= logits.shape[-1]:
            raise ReplayError(
                f"expert {self.layer.highest_id} in the rows of a model with {logits.shape[-1]}"
            )

    def _choose(self, own_ids: Tensor, is_recomputed: bool) -> Tensor:
        """The experts of the rows. Unknown ones become the router's own, which a recomputed pass
        then gets again."""
        rows = self.layer.ids.to(own_ids.device)
        if is_recomputed or not self.layer.has_unknown:
            return rows.to(own_ids.dtype, copy=True)
        # The operator promises ids of the type of `own_ids`; `where` would take the wider of two.
        rows_of_type = rows.to(own_ids.dtype)
        ids = torch.where(self.layer.is_unknown.to(rows.device), own_ids, rows_of_type)
        self.layer.ids = ids.to(rows.dtype, copy=True)
        return ids

    def _weigh(
        self, own: Sequence[Tensor], ids: Tensor, factor: Tensor | None, is_recomputed: bool
    ) -> Tensor:
        """Weights of `ids` by the router's formula, which the first forward pass decides."""
        logits, own_weights, own_ids = own
        if is_recomputed and self.formula is not None:
            return self.formula.weigh(logits, ids, factor)
        module = self.module()
        assert module is not None
        key = (module.training, logits.dtype, own_weights.dtype)
        known = self.known.get(key)
        if known is None or known.is_wrong or known.settings != self.settings:
            self.known.pop(key, None)
            picked = pick(self.class_name, own, ids, factor, self.candidates)
            self._take(picked.formula)
            if picked.is_sure:
                self.known[key] = _Known(self.settings, picked.formula)
            return picked.formula.weigh(logits, ids, factor)
        self._take(known.formula)
        both = torch.stack([ids, own_ids], dim=1)
        weights, of_own = known.formula.weigh(logits, both, factor).unbind(dim=1)
        error = difference(of_own.to(own_weights.dtype), own_weights)
        tolerance = tolerance_of(logits, own_weights)
        if own_weights.dtype == torch.float32:
            tolerance = min(tolerance, _TOLERANCE_OF_KNOWN)
        self.compared = _Compared(self.name, known, error, tolerance)
        return weights

    def _take(self, formula: Formula) -> None:
        """Takes a formula, and tells the operators."""
        self.formula = formula
        self.state.data[1:] = torch.tensor(formula.numbers, dtype=torch.float64, device="cpu")


def _are_same(given: Tensor, handed: Tensor) -> bool:
    """Whether experts got the ids that a router returned, [T, K] or [B, S, K]. Mostly it is the same
    tensor, which takes no look at the device."""
    if given.numel() != handed.numel() or given.shape[-1] != handed.shape[-1]:
        return False
    if given.data_ptr() == handed.data_ptr():
        return True
    return bool((given.reshape(handed.shape) == handed).all())
