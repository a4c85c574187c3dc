"""Hands rows to a trainer's routers: `replayed` to those of transformers, `MegatronReplay` to
Megatron-core's.

Needs torch (the extra `torch`). A replayed router takes the experts of the rows instead of its own
top k. Its weights are those that it computes for these experts from its own scores, so gradients
reach it. Where a row has a -1, it chooses by itself.
"""

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

_DECODER_LAYER = re.compile(r"\blayers\.(\d+)\.")
_TWICE = (
    "the routers of decoder layers {} were asked in a second forward pass, whose tokens may be others: "
    "a block is for one forward pass and its backward pass"
)
_BOTH = (
    "the module has several routers in decoder layer {}, and {} were both asked, as those of a policy and of its "
    "reference are: take a block for each forward pass, and give `replayed` the model that runs in it, with its rows"
)


class ReplayError(RuntimeError):
    """Rows were not replayed, or do not fit the model."""


@dataclass(eq=False)
class Replay:
    """What is replayed within a block.

    Attributes:
        layer_ids: decoder layers of the replayed routers.
        known: rows that each of them has.
    """

    layer_ids: list[int]
    known: list[int]
    _layers: "list[_Layer]"

    @property
    def asked(self) -> list[int]:
        """Forward passes of each layer's routers so far; recomputed ones do not count."""
        return [layer.asked for layer in self._layers]

    @property
    def replayed(self) -> int:
        """Rows that were replayed so far, counted in each layer."""
        return sum(asked * known for asked, known in zip(self.asked, self.known, strict=True))

    def check(self) -> None:
        """Raises `ReplayError` if a router was never asked, or for more than one forward pass, or does
        not weigh experts as it did in earlier blocks. It waits for the device."""
        if silent := [layer.decoder_layer for layer in self._layers if not layer.asked]:
            raise ReplayError(
                f"the routers of decoder layers {silent} were never asked: nothing was replayed there"
            )
        _check_one_pass(self._layers)
        _check_errors(self._layers)


@contextmanager
def replayed(
    model: Module,
    rows: Any,
    weights: Any = None,
    *,
    layer_ids: Sequence[int] | None = None,
    aux_loss: bool = False,
) -> Iterator[Replay]:
    """Within, the routers of a model of transformers take the experts of `rows`.

    A block is for one forward pass, as rows are for its tokens, and its backward pass, because
    gradient checkpointing asks the routers again. A backward pass elsewhere makes it ask for other
    experts, not always with an error. The model may be compiled, before or within. What a router
    computed otherwise than in earlier blocks is an error at the block's end: step optimizers after it.

    Args:
        rows: [..., L, K] ids, an array or tensor, in the order of the model's tokens: [B, S, L, K]
            or [T, L, K].
        weights: like `rows`, the server's weights of the ids, times the factors of `batch.scaled`.
            They take the place of the router's own, but not of their gradients. Where they are NaN,
            the router's own stay.
        layer_ids: decoder layer of each of the L layers, from `GET /v1/routed_experts`; `range(L)`
            for rows that were requested with all layers. By default the L layers are those of the
            routers, in their order.
        aux_loss: the model's load-balancing loss, which it computes with `output_router_logits`,
            counts the replayed experts, not those that the live router would choose. A compiled
            model is compiled again for each block then.

    Raises:
        ReplayError: the model has no known routers, or other layers, experts or tokens than `rows`,
            or weighs experts in another way than is known; a row has an expert twice; a router was
            asked in a second forward pass; or, at the end, was never asked. With `aux_loss`, the model
            has no such loss, or did not compute it.
    """
    device = _device_of(model)
    ids = _flat_rows(rows, device)
    recorded_weights = _flat_weights(weights, ids, device)
    routers = _routers(model)
    decoder_layers = list(dict.fromkeys(layer for _, layer, _ in routers))
    index_of_layer = _layer_indices(decoder_layers, ids, layer_ids)
    facts = _RowFacts.of(ids)
    _check_other_layers(facts.highest, index_of_layer, layer_ids)
    if facts.has_twice:
        _check_distinct(ids[:, sorted(index_of_layer.values())])
    if any("_replay" in vars(router) for _, _, router in routers):
        raise ReplayError("the model is being replayed already")
    layers = _layers_of(ids, recorded_weights, facts, index_of_layer)
    num_known = [facts.num_known[index] for index in index_of_layer.values()]
    replay = Replay(list(layers), num_known, list(layers.values()))
    with ExitStack() as stack:
        _replace_all(routers, layers, stack)
        loss = stack.enter_context(_replayed_loss(model, replay._layers)) if aux_loss else None
        yield replay
        replay.check()
        if loss is not None:
            loss.check()


def _device_of(model: Module) -> torch.device | None:
    """Where rows are checked: on a GPU, that takes a thousandth of the time that it takes on its
    host."""
    return next((weight.device for weight in model.parameters() if not weight.is_meta), None)


def _layers_of(
    ids: Tensor,
    recorded_weights: Tensor | None,
    facts: "_RowFacts",
    index_of_layer: Mapping[int, int],
) -> "dict[int, _Layer]":
    """What each decoder layer replays of the rows `ids` [T, L, K], and of their weights."""
    if recorded_weights is not None:
        recorded_weights = recorded_weights.masked_fill(facts.is_unknown, torch.nan)
    return {
        layer: _Layer(
            decoder_layer=layer,
            ids=ids[:, index].clone(),
            is_unknown=facts.is_unknown[:, index],
            has_unknown=facts.num_known[index] < len(ids),
            weights=None if recorded_weights is None else recorded_weights[:, index],
            highest_id=facts.highest[index],
        )
        for layer, index in index_of_layer.items()
    }


def _replace_all(
    routers: Sequence[tuple[str, int, Any]], layers: "Mapping[int, _Layer]", stack: ExitStack
) -> None:
    """Has the routers replay until the `stack` is closed."""
    candidates: dict[type[Module], _Candidates] = {}
    for name, layer, router in routers:
        own_class = type(router)
        if own_class not in candidates:
            candidates[own_class] = _candidates(router)
        replaying = _Router(name, router, layers[layer], candidates[own_class])
        stack.enter_context(_replaced(router, replaying))


_LOSS = "load_balancing_loss_func"
"""The name of the function in each of transformers' modules whose models have the loss."""


@contextmanager
def _replayed_loss(model: Module, layers: "Sequence[_Layer]") -> "Iterator[_LoadBalancingLoss]":
    """Within, the load-balancing loss of the model counts what the `layers` replay.

    The loss of transformers takes logits alone, and chooses experts from them by itself. A model
    looks it up in the module of its class, when it computes it.
    """
    names = {type(module).__module__ for module in model.modules()}
    modules = [sys.modules[name] for name in names if hasattr(sys.modules[name], _LOSS)]
    if not modules:
        raise ReplayError(
            f"{type(model).__name__} has no load-balancing loss of transformers: leave out aux_loss"
        )
    originals = [vars(module)[_LOSS] for module in modules]
    loss = _LoadBalancingLoss(originals[0], layers)
    for layer in layers:
        layer.keeps_logits = True
    try:
        for module in modules:
            setattr(module, _LOSS, loss)
        yield loss
    finally:
        for module, original in zip(modules, originals, strict=True):
            setattr(module, _LOSS, original)
        for layer in layers:
            layer.logits = None


@dataclass(eq=False)
class _LoadBalancingLoss:
    """What is called in place of `load_balancing_loss_func`."""

    original: Callable[..., Any]
    layers: "Sequence[_Layer]"
    is_computed: bool = False

    def __call__(
        self,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Any:
        live = self.original(gate_logits, num_experts, top_k, attention_mask)
        if not isinstance(gate_logits, tuple) or num_experts is None:
            return live
        layers = [self._layer_of(logits) for logits in gate_logits]
        if layers == [None] * len(layers):
            return live  # of another model
        if None in layers or len(layers) < len(self.layers):
            raise ReplayError("the auxiliary loss is not of the layers that are replayed")
        live_ids = [logits.topk(top_k, dim=-1).indices for logits in gate_logits]
        known = _load_balancing_loss(gate_logits, live_ids, num_experts, attention_mask)
        tolerance = _TOLERANCE.get(gate_logits[0].dtype, _TOLERANCE_IN_16_BITS)
        if not torch.isclose(known, live.to(known.dtype), rtol=tolerance, equal_nan=True):
            raise ReplayError(
                "the model computes its auxiliary loss in another way than is known: leave out aux_loss"
            )
        self.is_computed = True
        ids = [layer.ids for layer in layers if layer is not None]
        return _load_balancing_loss(gate_logits, ids, num_experts, attention_mask)

    def _layer_of(self, logits: Tensor) -> "_Layer | None":
        """The layer whose router returned these logits."""
        for layer in self.layers:
            if layer.logits is not None and layer.logits.data_ptr() == logits.data_ptr():
                return layer
        return None

    def check(self) -> None:
        if not self.is_computed:
            raise ReplayError(
                "the model computed no auxiliary loss: set output_router_logits, or leave out aux_loss"
            )


def _load_balancing_loss(
    gate_logits: Sequence[Tensor],
    ids: Sequence[Tensor],
    num_experts: int,
    attention_mask: Tensor | None,
) -> Tensor:
    """The auxiliary loss of Switch Transformer for the experts `ids` [T, K] of each layer, over the
    tokens of `attention_mask` [B, S]: experts, times the sum over them of how often each is chosen
    and how probable it is."""
    device = gate_logits[0].device
    num_chosen = torch.zeros(num_experts, device=device)
    probability = torch.zeros(num_experts, device=device)
    num_tokens = torch.zeros((), device=device)
    for logits, of_layer in zip(gate_logits, ids, strict=True):
        scores = logits.to(device).softmax(dim=-1).float()
        if attention_mask is None:
            counts = torch.ones(len(scores), device=device)
        else:
            counts = attention_mask.reshape(-1).to(device, torch.float32)
        chosen = torch.zeros_like(scores).scatter(1, of_layer.to(device, torch.int64), 1.0)
        num_chosen = num_chosen + (chosen * counts[:, None]).sum(dim=0)
        probability = probability + (scores * counts[:, None]).sum(dim=0)
        num_tokens = num_tokens + counts.sum()
    return num_experts * (num_chosen / num_tokens * probability / num_tokens).sum()


def _flat_weights(weights: Any, ids: Tensor, device: torch.device | None) -> Tensor | None:
    """Weights [T, L, K] of `ids`."""
    if weights is None:
        return None
    tensor = torch.as_tensor(weights, device=device)
    if tensor.shape[-2:] != ids.shape[-2:] or tensor.numel() != ids.numel():
        raise ReplayError(f"weights of shape {[*tensor.shape]} for rows of shape {[*ids.shape]}")
    tensor = tensor if tensor.is_floating_point() else tensor.float()
    return tensor.reshape(ids.shape)


@contextmanager
def _replaced(router: Any, replaying: "_Router") -> Iterator[None]:
    """Within, `replaying` is asked for what the router returns."""
    own_class: type[Module] = type(router)
    method = _method(own_class)
    # of accelerate or of parallelism; it hides the class's method
    hook = vars(router).get(method)
    _check_hook(hook)
    replaying_class = _replaying(own_class, method, getattr(own_class, method))  # type: ignore[arg-type]
    methods: dict[str, Any] = {}
    if hook is not None:
        methods = _replaying_methods(router, method, hook, replaying_class, replaying)
    before = {name: vars(router)[name] for name in methods}
    router._replay = replaying
    _ROUTERS[replaying.number] = replaying
    try:
        if hook is None:
            router.__class__ = replaying_class
        vars(router).update(methods)
        yield
    finally:
        del router._replay
        del _ROUTERS[replaying.number]
        router.__class__ = own_class
        vars(router).update(before)


def _check_hook(hook: Any) -> None:
    closure = getattr(hook, "__closure__", None) or ()
    if any(type(cell.cell_contents).__name__ == "EpRouterParallel" for cell in closure):
        raise ReplayError(
            "with ep_router, each rank has ids of its own: replay needs an ep_plan without it"
        )


def _replaying_methods(
    router: Any, method: str, hook: Any, replaying_class: type[Any], replaying: "_Router"
) -> dict[str, Any]:
    """What takes the place of a router's own attributes, by their names, where a hook hides the
    method of its class."""
    # accelerate keeps the class's method on the router, and calls it while the router's offloaded
    # weights are there.
    original = getattr(type(router), method)
    inner = [
        name for name, value in vars(router).items() if getattr(value, "__func__", None) is original
    ]
    if inner:
        return dict.fromkeys(inner, MethodType(getattr(replaying_class, method), router))

    def around(*args: Any, **kwargs: Any) -> Any:
        return replaying.route(router, args, hook(*args, **kwargs))

    return {method: around}


def _flat_rows(rows: Any, device: torch.device | None = None) -> Tensor:
    """Ids [T, L, K], in a type that has -1."""
    ids = torch.as_tensor(rows, device=device)
    if ids.dim() < 3 or ids.is_floating_point():
        raise ReplayError(f"rows must be integers [..., L, K], not {ids.dtype} {[*ids.shape]}")
    ids = ids.flatten(0, -3)
    # The router's own choice takes the place of unknown rows, so the type has room for it.
    is_narrow = ids.dtype in (torch.uint8, torch.int8)
    return ids.to(torch.int32) if is_narrow or not ids.dtype.is_signed else ids


@dataclass(frozen=True)
class _RowFacts:
    """What is in rows [T, L, K], read from the device at once."""

    is_unknown: Tensor  # [T, L, 1], on the device
    num_known: list[int]  # rows of each layer
    highest: list[int]  # the highest id of each layer
    has_twice: bool  # whether a row has an expert twice

    @classmethod
    def of(cls, ids: Tensor) -> "_RowFacts":
        is_unknown = (ids < 0).any(dim=2, keepdim=True)
        num_layers = ids.shape[1]
        if not ids.numel():
            return cls(is_unknown, [0] * num_layers, [-1] * num_layers, has_twice=False)
        numbers = torch.cat(
            [
                (~is_unknown).sum(dim=(0, 2)),
                ids.amax(dim=(0, 2)).to(torch.int64),
                _num_twice(ids)[None],
            ]
        ).tolist()
        return cls(
            is_unknown, numbers[:num_layers], numbers[num_layers:-1], has_twice=numbers[-1] > 0
        )


def _num_twice(ids: Tensor) -> Tensor:
    """0-d, without a look at the device: 0 if no row has an expert twice."""
    top_k = ids.shape[2]
    # unknown ones become unlike
    numbered = -1 - torch.arange(top_k, dtype=ids.dtype, device=ids.device)
    unlike = torch.where(ids < 0, numbered, ids)
    none_twice = torch.zeros_like(ids[0, 0, 0], dtype=torch.bool)  # for K = 1
    are_twice = [(unlike[..., apart:] == unlike[..., :-apart]).any() for apart in range(1, top_k)]
    return torch.stack([none_twice, *are_twice]).sum()


def _check_distinct(ids: Tensor) -> None:
    """Refuses rows that no server has, such as 0 for unknown ones."""
    for apart in range(1, ids.shape[2]):
        twice = (ids[..., apart:] == ids[..., :-apart]) & (ids[..., apart:] >= 0)
        if twice.any():
            token, layer, _ = twice.nonzero()[0].tolist()
            row = f"row {ids[token, layer].tolist()} of token {token}"
            raise ReplayError(f"the {row} has an expert twice: an unknown row has -1 everywhere")


def _layer_indices(
    layers: Sequence[int], ids: Tensor, layer_ids: Sequence[int] | None
) -> dict[int, int]:
    """Which of the L layers of `ids` each of the decoder layers `layers` is."""
    named = layers if layer_ids is None else [int(layer) for layer in layer_ids]
    if not len(named) == len(set(named)) == ids.shape[1]:
        expected = f"layer_ids {named}"
        if layer_ids is None:
            expected = f"{len(layers)} routers: give layer_ids"
        raise ReplayError(f"rows of {ids.shape[1]} layers for {expected}")
    if lacking := sorted(set(layers) - set(named)):
        raise ReplayError(f"the rows have no layer for the routers of decoder layers {lacking}")
    return {layer: named.index(layer) for layer in layers}


def _check_other_layers(
    highest: Sequence[int], index_of_layer: dict[int, int], layer_ids: Sequence[int] | None
) -> None:
    """Refuses rows with experts for layers that the model does not have. Zeros are those of layers
    without experts."""
    others = sorted(set(range(len(highest))) - set(index_of_layer.values()))
    if any(highest[index] > 0 for index in others):
        lacking = others if layer_ids is None else [int(layer_ids[index]) for index in others]
        raise ReplayError(
            f"the rows have experts of decoder layers {lacking} too, but the model has routers of "
            f"{sorted(index_of_layer)} alone. If it is one stage of a pipeline, give it the rows and `layer_ids` "
            "of its own layers, as from `protocol.ranks.stage_layers`; if not, the rows are of another model"
        )


def _is_recomputed() -> bool:
    """Whether this forward pass is a part of a backward pass, as gradient checkpointing has it."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class _Choice:
    """What a router returned."""

    logits: Tensor  # [T, E]
    weights: Tensor  # [T, K]
    ids: Tensor  # [T, K]
    write: Callable[[Tensor, Tensor], Any]
    """The router's output with other weights and ids."""


def _choice(router: Any, args: tuple[Any, ...], output: Any) -> _Choice:
    """Finds logits, weights and ids in a router's output, in any order."""
    parts = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(part, Tensor) for part in parts):
        raise ReplayError(_unlike(router, parts))
    floats = _floats(parts)
    integers = [part for part in parts if not part.is_floating_point()]
    if not integers and len(floats) == 2:
        return _dense_choice(router, *floats)
    if len(floats) == 1:
        floats += _floats(args)[-1:]  # a method that gets the logits
    if len(integers) != 1 or len(floats) != 2:
        raise ReplayError(_unlike(router, parts))
    return _sparse_choice(router, parts, floats, integers[0])


def _floats(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _sparse_choice(
    router: Any, parts: Sequence[Tensor], floats: Sequence[Tensor], ids: Tensor
) -> _Choice:
    """Of a router that returns ids, and weights of these alone. `floats` are the weights and the
    logits, in the order in which the router has them."""
    # If all experts are chosen, both have the shape of the ids. The weights are beside the ids.
    nearest_first = floats if parts[0] is ids else floats[::-1]
    weights_and_logits = _weights_and_logits(nearest_first, ids)
    if weights_and_logits is None:
        raise ReplayError(_unlike(router, parts))
    weights, logits = weights_and_logits
    top_k = ids.shape[-1]
    return _Choice(
        logits.reshape(-1, logits.shape[-1]),
        weights.reshape(-1, top_k),
        ids.reshape(-1, top_k),
        _writer(parts, weights, ids),
    )


def _weights_and_logits(tensors: Sequence[Tensor], ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """Which of two tensors is which: the first of the shape of `ids` has the weights."""
    if ids.dim() < 2:
        return None
    for index, weights in enumerate(tensors):
        logits = tensors[1 - index]
        if weights.shape == ids.shape and logits is not weights and logits.dim() >= 2:
            return weights, logits
    return None


def _writer(
    parts: Sequence[Tensor], own_weights: Tensor, own_ids: Tensor
) -> Callable[[Tensor, Tensor], Any]:
    """Makes a router's output with other weights and ids in place of its own."""

    def write(weights: Tensor, ids: Tensor) -> Any:
        replaced = {id(own_ids): ids.reshape(own_ids.shape)}
        replaced[id(own_weights)] = weights.reshape(own_weights.shape)
        return tuple(replaced.get(id(part), part) for part in parts)

    return write


def _dense_choice(router: Any, weights: Tensor, logits: Tensor) -> _Choice:
    """Of a router that returns weights of all experts, 0 for those that it did not choose, as that
    of Llama 4 does."""
    if weights.shape != logits.shape or logits.dim() != 2 or not hasattr(router, "top_k"):
        raise ReplayError(_unlike(router, (weights, logits)))
    ids = logits.topk(router.top_k, dim=-1).indices

    def write(weights_of_ids: Tensor, ids: Tensor) -> Any:
        return torch.zeros_like(weights).scatter(1, ids, weights_of_ids), logits

    return _Choice(logits, weights.gather(1, ids), ids, write)


def _unlike(router: Any, parts: Sequence[Any]) -> str:
    shapes = [
        f"{str(part.dtype).removeprefix('torch.')} {[*part.shape]}"
        if isinstance(part, Tensor)
        else type(part).__name__
        for part in parts
    ]
    return (
        f"{_name(router)} returns {', '.join(shapes)}: it cannot be replayed, as that needs logits of all experts, "
        "and weights and ids of the chosen ones"
    )


def _name(router: Any) -> str:
    return type(router).__name__.removeprefix("Replaying")


@dataclass(frozen=True)
class _Formula:
    """How a router computes the weights of experts from its logits."""

    score: str  # one of `_SCORES`
    epsilon: float | None  # added to the sum that weights are divided by; None: they are not
    scale: float
    in_logits_dtype: bool  # else in float32

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


_SCORES = {
    "softmax": "softmax",
    "softmax of chosen": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "softplus",
    "probabilities": "probabilities",
}
"""What code that computes them names. Probabilities are returned in place of logits already."""
_LEAST_DIVISOR = 1e-30
"""Of a gradient: divided by scores that are nearly 0, it would be infinite, and then NaN."""
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_TOLERANCE_IN_16_BITS = 0.02
_FORMULAS: list[_Formula] = []
"""All that were candidates; operators name them by their place."""


@dataclass(eq=False)
class _Candidates:
    """Formulas that may be those of a class of routers, by their places in `_FORMULAS`."""

    trusted: list[int]
    """Those with the function that the code names, if it names a single one. If one of them is
    exact, the others are not tried."""
    untrusted: list[int]
    sure: list[int] = field(default_factory=list)
    """Those that other routers of the class surely have. They decide where several are exact."""


def _candidates(router: Any) -> _Candidates:
    """Numbers of the router are read, but no tensors, which may be offloaded."""
    names, constants = _named_in_code(type(router))
    numbers = _numbers_of(router)
    epsilons = [number for number in (*constants, *numbers.values()) if 0 < number <= 1e-3]
    formulas = [
        _Formula(score, epsilon, scale, in_logits_dtype)
        for score in sorted(_SCORES, key=lambda score: _SCORES[score] not in names)
        for epsilon in dict.fromkeys((*epsilons, 0.0, None))
        for scale in dict.fromkeys((*_scales(numbers), 1.0))
        for in_logits_dtype in (False, True)
    ]
    _FORMULAS.extend(formula for formula in formulas if formula not in _FORMULAS)
    places = [_FORMULAS.index(formula) for formula in formulas]
    num_trusted = _num_trusted(formulas, names)
    return _Candidates(trusted=places[:num_trusted], untrusted=places[num_trusted:])


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


def _num_trusted(formulas: Sequence[_Formula], names: set[str]) -> int:
    """How many of `formulas` have the function that the code names, if it names a single one. They
    come first."""
    if len(names & set(_SCORES.values())) != 1:
        return 0
    return sum(_SCORES[formula.score] in names for formula in formulas)


def _named_in_code(of: type[Module]) -> tuple[set[str], list[float]]:
    """Names and constants in the methods of a class."""
    names: set[str] = set()
    constants: list[float] = []
    for base in of.__mro__:
        if base.__module__.startswith("torch."):
            break
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None:
                names.update(code.co_names)
                constants += [value for value in code.co_consts if isinstance(value, float)]
    return names, constants


@dataclass(frozen=True)
class _Picked:
    """The formula of a router.

    Attributes:
        place: in `_FORMULAS`.
        is_alone: no other formula that was tried is as good, but those that give equal weights
            for any logits, save for rounding.
        error: the largest difference of the router's own weights.
    """

    place: int
    is_alone: bool
    error: float


def _pick(
    name: str, own: Sequence[Tensor], ids: Tensor, factor: Tensor | None, candidates: _Candidates
) -> _Picked:
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
    logits, weights, _ = own
    errors = _errors_of_candidates(candidates, own, factor)
    least = min(errors.values())
    if least > _tolerance(logits, weights):
        raise ReplayError(
            f"{name} computes weights in another way than is known, and cannot be replayed"
        )
    best = [place for place, error in errors.items() if error == least]
    picked = _first_sure(best, candidates)
    others = [place for place in best if place != picked]
    unlike = [place for place in others if not _are_equal(picked, place, logits.dtype)]
    if picked not in candidates.sure:
        # Of trusted formulas that are equal, the first is the one in the code.
        doubtful = unlike if picked in candidates.trusted else others
        _check_doubt(name, own, ids, factor, picked=picked, doubtful=doubtful)
        if least == 0 and not unlike:
            candidates.sure.append(picked)
    return _Picked(picked, is_alone=not unlike, error=least)


def _errors_of_candidates(
    candidates: _Candidates, own: Sequence[Tensor], factor: Tensor | None
) -> dict[int, float]:
    """The errors of trusted formulas, and if none of them is exact, those of all."""
    errors = _errors_of(candidates.trusted, own, factor)
    if 0 not in errors.values():
        errors |= _errors_of(candidates.untrusted, own, factor)
    return errors


def _first_sure(best: Sequence[int], candidates: _Candidates) -> int:
    """Which of the formulas that are as good is taken.

    A formula that is worse by one rounding is not among them: that tells a softmax from one that is
    normalised where the chosen experts have nearly all of the probability. Several are as good where
    these experts have all of it, or where no token counts.
    """
    for place in best:
        if place in candidates.sure:
            return place
    return best[0]


def _check_doubt(
    name: str,
    own: Sequence[Tensor],
    ids: Tensor,
    factor: Tensor | None,
    *,
    picked: int,
    doubtful: Sequence[int],
) -> None:
    """Refuses the rows `ids` if a doubtful formula gives them other weights or gradients than the
    picked one."""
    logits, weights, _ = own
    formula = _FORMULAS[picked]
    others = [_FORMULAS[place] for place in doubtful]
    tolerance = _tolerance(logits, weights)
    if _are_unlike(formula, others, logits, ids, factor, tolerance=tolerance):
        raise ReplayError(
            f"the weights of {name} fit several formulas in this forward pass, and cannot be replayed: "
            "its scores, or its experts, are all the same, or the chosen experts have all of the probability. "
            "Give the router random weights, or train it without rows until its scores differ"
        )


def _errors_of(
    places: Sequence[int], own: Sequence[Tensor], factor: Tensor | None
) -> dict[int, float]:
    """The largest difference of a router's own weights from those of each formula."""
    logits, weights, own_ids = own
    errors: dict[int, float] = {}
    for place in places:
        formula = _FORMULAS[place]
        if formula.in_logits_dtype and logits.dtype == torch.float32:
            continue  # as the one in float32
        computed = formula.weigh(logits, own_ids, factor).to(weights.dtype)
        errors[place] = float(_difference(computed, weights))
    return errors


@cache
def _are_equal(place: int, other: int, dtype: torch.dtype) -> bool:
    """Whether two formulas give equal weights and gradients for any logits of a type, save for
    rounding, as of those that add 0 or 1e-20. On the host, without a look at the device."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 16, generator=generator, device="cpu").to(dtype)
    ids = torch.rand(64, 16, generator=generator, device="cpu").argsort(dim=-1)[:, :4]
    formula = _FORMULAS[place]
    others = [_FORMULAS[other]]
    return not _are_unlike(formula, others, logits, ids, None, tolerance=_tolerance(logits))


def _tolerance(*tensors: Tensor) -> float:
    """The largest difference that rounding makes of weights that are computed from these."""
    return max(_TOLERANCE.get(tensor.dtype, _TOLERANCE_IN_16_BITS) for tensor in tensors)


def _are_unlike(
    formula: _Formula,
    others: Sequence[_Formula],
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
        if _difference(other.weigh(logits, ids, factor), weights) > tolerance:
            return True
        other_gradient, _ = other.gradients(of_weights, logits, ids, factor)
        if _difference(other_gradient, gradient, scale) > tolerance:
            return True
    return False


def _difference(computed: Tensor, expected: Tensor, scale: Tensor | None = None) -> Tensor:
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


_ROUTERS: "dict[int, _Router]" = {}
"""Those of the blocks under way, by the numbers that operators get."""
_NUMBERS = itertools.count()


@torch.library.custom_op("routed_experts::replay", mutates_args=())
def _replay(
    logits: Tensor, weights: Tensor, own_ids: Tensor, factor: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a router's weights [T, K] and ids [T, K] become, and whether a token's weights stay
    [T, 1].

    It is an operator for two reasons. Code that is compiled knows no values, and asks
    `_is_recomputed` once, when it is compiled. Selective checkpointing gives a recomputed pass the
    results of the first pass, by the numbers of their calls: so it must not see calls that only the
    first pass makes.

    Args:
        state: `_Router.state`.
    """
    number, _ = state.tolist()
    router = _ROUTERS.get(number)
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
        state: `_Router.state`.
    """
    logits, ids, is_own = saved
    nothing = gradient.new_zeros(())
    of_own = torch.where(is_own, gradient, nothing)
    of_computed = torch.where(is_own, nothing, gradient)
    _, place = state.tolist()
    formula = _FORMULAS[place]
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
class _Layer:
    """What the routers of a decoder layer replay. Of several, one is asked."""

    decoder_layer: int
    ids: Tensor  # [T, K]; unknown rows become those that the forward pass chose
    is_unknown: Tensor  # [T, 1]
    has_unknown: bool
    weights: Tensor | None  # [T, K], NaN where the router's own are taken
    highest_id: int  # of `ids`
    routers: "list[_Router]" = field(default_factory=list)
    keeps_logits: bool = False
    logits: Tensor | None = None
    """Of the forward pass, for the auxiliary loss."""

    @property
    def asked(self) -> int:
        """Forward passes so far; recomputed ones do not count."""
        return sum(router.asked for router in self.routers)


def _check_one_pass(layers: "Sequence[_Layer]") -> None:
    for layer in layers:
        names = [router.name for router in layer.routers if router.asked]
        if len(names) > 1:
            raise ReplayError(_BOTH.format(layer.decoder_layer, " and ".join(names)))
    if often := [layer.decoder_layer for layer in layers if layer.asked > 1]:
        raise ReplayError(_TWICE.format(often))


def _check_errors(layers: "Sequence[_Layer]") -> None:
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
        known = comparison.known
        known.error = max(known.error, error)
        if error > comparison.tolerance:
            known.is_wrong = True
            wrong.append(comparison.name)
    if wrong:
        raise ReplayError(
            f"the routers {wrong} computed weights in another way than in the blocks "
            "before: what this block computed is wrong. Other blocks look for their formula again"
        )


_Key = tuple[bool, torch.dtype, torch.dtype]
"""Whether a router is trained, and the types of its logits and weights: in float32 it does not show
whether a formula is in the type of the logits."""


@dataclass(eq=False)
class _Known:
    """The formula of a router, as long as it has these settings.

    It was exact when it was found. So a difference in a later block is news, even one that rounding
    may make: in 16 bits that is up to 2%, and if the chosen experts have nearly all of the
    probability, other formulas differ by less.

    After news, the next block tries all formulas, which waits for the device. If the same one is
    still the best, or an equal one, the news was rounding. Twice as much is no news from then on. So
    a router whose rounding differs from block to block is tried a few times, and not in each block.
    """

    settings: tuple[Any, ...]
    place: int
    error: float = 0.0  # the largest so far
    allowed: float = 0.0  # the largest that is no news
    is_wrong: bool = False  # what a block computed with it was wrong

    @property
    def is_doubted(self) -> bool:
        """Whether the next block tries all formulas."""
        return self.error > self.allowed


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
    return (type(router), getattr(type(router), _method(type(router))), *plain)


class _Router:
    """What is asked in place of one router."""

    def __init__(self, name: str, module: Module, layer: _Layer, candidates: _Candidates) -> None:
        self.name = name
        self.module = ref(module)  # a `Replay` that is kept does not keep the model
        self.class_name = _name(module)
        self.layer = layer
        self.candidates = candidates
        self.settings = _settings(module)
        self.known = _KNOWN.setdefault(module, {})
        self.asked = 0
        self.place: int | None = None  # of its formula in `_FORMULAS`, once it is known
        self.compared: _Compared | None = None
        self.number = next(_NUMBERS)
        # This object's number, and the place of its formula. A tensor, because torch.compile would
        # compile anew for each value of an int. Not one of inference mode: autograd saves none.
        with torch.inference_mode(False):
            self.state = torch.tensor([self.number, -1], device="cpu")
        layer.routers.append(self)

    def route(self, router: Any, args: tuple[Any, ...], output: Any) -> Any:
        """`output` with the layer's experts."""
        own = _choice(router, args, output)
        # asked in compiled code, `_is_recomputed` would break the graph
        if self.layer.keeps_logits and (torch.compiler.is_compiling() or not _is_recomputed()):
            self.layer.logits = own.logits.detach()
        # what Gemma 4 multiplies an expert's weight by
        factor = getattr(router, "per_expert_scale", None)
        weights, ids, _ = _replay(own.logits, own.weights, own.ids, factor, self.state)
        return own.write(weights, ids)

    def replay(
        self, logits: Tensor, own_weights: Tensor, own_ids: Tensor, factor: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `_replay`."""
        is_recomputed = _is_recomputed()
        if not is_recomputed:
            self.asked += 1
            _check_one_pass([self.layer])
        elif not self.asked:
            raise ReplayError(
                f"{self.name} is recomputed in another block than that of its forward pass"
            )
        self._check_shape(logits, own_ids)
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
        if is_recomputed and self.place is not None:
            return _FORMULAS[self.place].weigh(logits, ids, factor)
        module = self.module()
        assert module is not None
        key = (module.training, logits.dtype, own_weights.dtype)
        known = self.known.pop(key, None)
        if known is not None and (known.settings != self.settings or known.is_wrong):
            known = None
        if known is None or known.is_doubted:
            picked = _pick(self.class_name, own, ids, factor, self.candidates)
            self._take(picked.place)
            if to_know := self._to_know(picked, known, logits.dtype):
                self.known[key] = to_know
            return _FORMULAS[picked.place].weigh(logits, ids, factor)
        self.known[key] = known
        self._take(known.place)
        both = torch.stack([ids, own_ids], dim=1)
        weights, of_own = _FORMULAS[known.place].weigh(logits, both, factor).unbind(dim=1)
        error = _difference(of_own.to(own_weights.dtype), own_weights)
        self.compared = _Compared(self.name, known, error, _tolerance(logits, own_weights))
        return weights

    def _take(self, place: int) -> None:
        """Takes the formula at that place, and tells the operators."""
        self.place = place
        self.state.data[1] = place

    def _to_know(
        self, picked: _Picked, doubted: _Known | None, dtype: torch.dtype
    ) -> _Known | None:
        """What later blocks know, if the formula is sure: it is alone, and is exact or equal to the
        one that was doubted. `dtype` is that of the logits."""
        if not picked.is_alone:
            return None
        if doubted is not None and _are_equal(doubted.place, picked.place, dtype):
            error = max(picked.error, doubted.error)
            return _Known(self.settings, picked.place, error, allowed=2 * error)
        return _Known(self.settings, picked.place) if picked.error == 0 else None


@cache
def _replaying(of: type[Module], method: str, original: Callable[..., Any]) -> type[Module]:
    """A class whose routers replay, made of the method `original` that it has now. torch.compile
    notices another class, unlike a hook, and compiles for it."""

    def route(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._replay.route(self, args, original(self, *args, **kwargs))

    return type(f"Replaying{of.__name__}", (of,), {method: route})


_BLOCK_METHOD = "route_tokens_to_experts"


def _method(of: type[Module]) -> str:
    """What is asked for the experts: a router, or a method of a block, which gets the logits."""
    return _BLOCK_METHOD if hasattr(of, _BLOCK_METHOD) else "forward"


def _is_router(module: Module) -> bool:
    """Whether it chooses experts, or has a part that does."""
    has_experts = hasattr(module, "num_experts") or hasattr(module, "per_expert_scale")
    is_named_so = type(module).__name__.endswith("Router") and has_experts
    return hasattr(module, "top_k") or is_named_so or hasattr(type(module), _BLOCK_METHOD)


def _routers(model: Module) -> list[tuple[str, int, Any]]:
    """With their names and decoder layers: the innermost modules that choose experts. Of several in
    a layer one is asked: PEFT's copy that is trained, or the original."""
    choosing = {name: module for name, module in model.named_modules() if _is_router(module)}
    routers: list[tuple[str, int, Any]] = []
    for name in _asked_names(choosing):
        numbers = _DECODER_LAYER.search(f"{name}.")
        layer = int(numbers[1]) if numbers else len(routers)
        routers.append((name, layer, choosing[name]))
    if not routers:
        raise ReplayError(
            f"{type(model).__name__} has no routers: no module has `top_k`, and none with experts is called a Router"
        )
    return routers


def _asked_names(choosing: Mapping[str, Module]) -> list[str]:
    """Which of the modules that choose experts are asked: blocks with a method for that, and of
    those that are not in a block, the innermost."""
    blocks = [name for name, module in choosing.items() if _method(type(module)) == _BLOCK_METHOD]
    parts_of_blocks = {name for name in choosing for block in blocks if _is_within(name, block)}
    outer = {name for name in choosing for other in choosing if _is_within(other, name)}
    not_asked = (parts_of_blocks | outer) - set(blocks)
    return [name for name in choosing if name not in not_asked]


def _is_within(name: str, outer: str) -> bool:
    """Whether a module, by its name, is a part of another."""
    return name.startswith(f"{outer}.") if outer else bool(name)


class MegatronReplay:
    """Feeds the `RouterReplay` of Megatron-core's routers (`moe_enable_routing_replay`) with rows
    of microbatches.

    A context manager around the forward and backward passes of a step. Each forward step calls
    `feed` first. Layers that are recomputed get the rows of their microbatch again, in the order in
    which they were fed, which is that of Megatron's schedules; another order is an error. In the
    end no rows are left in the routers.

    Layers of multi-token prediction are not touched: no response has rows of them.

    Attributes:
        replayed: rows that were replayed so far, counted in each layer.

    Args:
        chunks: the virtual stages that this rank has of the model, or its only one.
        aux_loss: auxiliary losses count the replayed experts, not those that the live router would
            choose.
        may_drop: whether `moe_expert_capacity_factor` may drop replayed experts. `dropped` counts
            them.

    Raises:
        ReplayError: a router has no `RouterReplay`, or two are of one layer; or, at the end, a
            router was never asked, only some microbatches were recomputed, or experts were dropped
            that may not be.
    """

    def __init__(
        self,
        chunks: Module | Sequence[Module],
        *,
        aux_loss: bool = False,
        may_drop: bool = True,
    ) -> None:
        self.replayed = 0
        self._aux_loss = aux_loss
        self._may_drop = may_drop
        modules = [chunks] if isinstance(chunks, Module) else chunks
        self._chunks = [_megatron_routers(module) for module in modules]
        self._devices = [
            next((weight.device for weight in module.parameters()), None) for module in modules
        ]
        self._fed: list[int] = []  # microbatches of each chunk; none outside of the block

    def __enter__(self) -> "MegatronReplay":
        if any("get_replay_topk" in vars(router.replay) for router in self._routers()):
            raise ReplayError("the model is being replayed already")
        self.replayed = 0
        self._fed = [0] * len(self._chunks)
        for router in self._routers():
            router.start(self._aux_loss)
        return self

    @property
    def dropped(self) -> int:
        """Experts of replayed rows that were dropped so far because they were full, counted in each
        layer."""
        return sum(int(router.num_dropped) for router in self._routers())

    def feed(self, rows: Any, layer_ids: Sequence[int], chunk: int = 0) -> None:
        """Rows of the next microbatch for a stage.

        Args:
            rows: [..., L, K] ids of this rank's tokens in the order of its hidden states: [T, L, K]
                of packed sequences, else [S, B, L, K] (see `protocol.ranks`).
            layer_ids: decoder layer of each of the L layers; other stages' layers may be among
                them.
            chunk: the place of the virtual stage in `chunks`.

        Raises:
            ReplayError: the rows lack layers of the stage, or have an expert twice; the microbatch
                before was not replayed; or this is not within the block.
        """
        if not self._fed:
            raise ReplayError(
                "rows are replayed within `with MegatronReplay(...)` only: feed them there"
            )
        ids = _flat_rows(rows, self._devices[chunk])
        routers = self._chunks[chunk]
        index_of_layer = _layer_indices(list(routers), ids, layer_ids)
        _check_distinct(ids[:, sorted(index_of_layer.values())])
        self._check_asked(chunk)
        self._fed[chunk] += 1
        for layer, router in routers.items():
            of_layer = ids[:, index_of_layer[layer]].to(torch.int64)
            router.replay.set_target_indices(of_layer)
            self.replayed += int((of_layer >= 0).all(dim=1).sum())

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            for chunk, fed in enumerate(self._fed if kind is None else []):
                self._check_asked(chunk)
                for layer, router in self._chunks[chunk].items():
                    if 0 < (left := len(router.replay.replay_backward_list)) < fed:
                        raise ReplayError(
                            f"decoder layer {layer} recomputed {fed - left} of {fed} microbatches"
                        )
            if kind is None and not self._may_drop and self.dropped:
                raise ReplayError(
                    f"{self.dropped} replayed experts were full, and dropped: leave moe_expert_capacity_factor unset"
                )
        finally:
            self._fed = []
            for router in self._routers():
                router.stop()

    def _routers(self) -> "Iterator[_MegatronRouter]":
        return (router for chunk in self._chunks for router in chunk.values())

    def _check_asked(self, chunk: int) -> None:
        silent = [
            layer
            for layer, router in self._chunks[chunk].items()
            if router.replay.target_topk_idx is not None
        ]
        if silent:
            raise ReplayError(
                f"the routers of decoder layers {silent} were never asked: nothing was replayed there"
            )


_AUXILIARY_LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")
"""Methods of Megatron-core's routers that count the experts of a routing map."""


class _MegatronRouter:
    """One of Megatron-core's routers, and what it does with the experts that were replayed in the
    pass under way."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.replay = module.router_replay
        self.ids: Tensor | None = None  # [T, K]
        self.is_known: Tensor | None = None  # [T, 1], of the rows
        self.num_dropped: Tensor | int = 0
        self.handles: list[Any] = []

    def start(self, aux_loss: bool) -> None:
        self.num_dropped = 0
        self.replay.clear_indices()
        self.replay.get_replay_topk = _choosing(self.replay, self)
        if self.module.config.moe_expert_capacity_factor is not None:
            self.handles.append(self.module.register_forward_hook(self._count_dropped))
        for name in _AUXILIARY_LOSSES if aux_loss else ():
            vars(self.module)[name] = self._counting_replayed(getattr(self.module, name))

    def stop(self) -> None:
        self.replay.clear_indices()
        del self.replay.get_replay_topk
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for name in _AUXILIARY_LOSSES:
            vars(self.module).pop(name, None)
        self.ids = self.is_known = None

    def _count_dropped(self, module: Any, args: Any, output: Any) -> None:
        """The same operations in a recomputed pass, for which checkpointing may look."""
        assert self.ids is not None
        _, routing_map = output
        is_dropped = ~routing_map.gather(1, self.ids) & self.is_known
        num_dropped = self.num_dropped + is_dropped.sum()
        if not _is_recomputed():
            self.num_dropped = num_dropped

    def _counting_replayed(self, apply_loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`apply_loss` with the replayed experts in place of those of the live router, which stay
        where a row is not known."""

        def apply(
            probs: Tensor, scores: Tensor, live_map: Tensor, *args: Any, **kwargs: Any
        ) -> Tensor:
            assert self.ids is not None
            assert self.is_known is not None
            replayed_map = torch.zeros_like(live_map, dtype=torch.bool).scatter(1, self.ids, True)
            is_token = live_map.any(dim=1, keepdim=True)  # padding has no experts
            # Megatron counts the largest scores, which with a bias or groups are not what it chooses.
            routing_map = torch.where(self.is_known, replayed_map & is_token, live_map.bool())
            return apply_loss(probs, scores, routing_map, *args, **kwargs)

        return apply


def _choosing(replay: Any, router: _MegatronRouter) -> Callable[..., tuple[Tensor, Tensor]]:
    """What takes the place of `get_replay_topk` of a router's `RouterReplay`. It replays all rows,
    as they are.

    A recomputed pass does what the first one did, operation by operation. Checkpointing without
    `use_reentrant` counts the tensors that autograd saves, and selective checkpointing counts all
    operators.
    """
    # Of each pass that may be recomputed, in the order of the passes.
    peaks: list[NDArray[np.float32]] = []  # the largest score of each token [T]
    known: list[Tensor] = []  # whether each row is known [T, 1]

    def get_replay_topk(
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        is_recomputed = _is_recomputed()
        fed = replay.replay_backward_list
        peak = scores.detach().amax(dim=1).float().cpu().numpy()
        if is_recomputed:
            if not _is_first_of(peaks, peak):
                raise ReplayError(
                    "a microbatch is recomputed that is not the next of those fed within this block"
                )
            peaks.pop(0)
            rows = fed.pop(0)
        else:
            rows = replay.target_topk_idx
        _check_rows_fit(rows, scores, topk)
        rows = rows.to(scores.device)
        _, own = choose(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
        is_unknown = (rows < 0).any(dim=1, keepdim=True)
        ids = torch.where(is_unknown, own, rows)
        router.ids = ids
        is_known = ~is_unknown
        router.is_known = known.pop(0) if is_recomputed else is_known
        if not is_recomputed:
            known.append(is_known)
            replay.target_topk_idx = None  # one forward pass per microbatch
            fed[-1] = ids
            peaks.append(peak)
        return scores.gather(1, ids), ids

    return get_replay_topk


def _check_rows_fit(rows: Tensor | None, scores: Tensor, topk: int) -> None:
    """Raises `ReplayError` if `rows` are not ids [T, K] for scores [T, E]."""
    num_tokens, num_experts = scores.shape
    needed = f"rows for {[num_tokens, topk]} of {num_experts} experts are needed"
    if rows is None:
        raise ReplayError(f"{needed}, none are fed")
    highest_id = int(rows.max()) if rows.numel() else -1
    if rows.shape != (num_tokens, topk) or highest_id >= num_experts:
        raise ReplayError(f"{needed}, they are {[*rows.shape]} up to expert {highest_id}")


def _is_first_of(peaks: Sequence[NDArray[np.float32]], peak: NDArray[np.float32]) -> bool:
    """Whether the microbatch with the scores `peak` is the first of those with `peaks`: none is
    much nearer to it."""
    if not peaks or len(peaks[0]) != len(peak):
        return False
    apart = [float(np.abs(other - peak).sum()) for other in peaks if len(other) == len(peak)]
    return apart[0] <= 4 * min(apart[1:], default=np.inf)


def _megatron_routers(chunk: Module) -> dict[int, _MegatronRouter]:
    """The router of each decoder layer."""
    routers: dict[int, _MegatronRouter] = {}
    for name, module in chunk.named_modules():
        if hasattr(module, "router_replay") and "mtp" not in name.split("."):
            if module.router_replay is None:
                raise ReplayError(f"{name} has no RouterReplay: set moe_enable_routing_replay")
            layer = int(module.layer_number) - 1
            if layer in routers:
                raise ReplayError(
                    f"two routers in decoder layer {layer}: give the part of the model that has one"
                )
            routers[layer] = _MegatronRouter(module)
    return routers
