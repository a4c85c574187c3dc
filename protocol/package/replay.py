"""Hands rows to a trainer's routers: `replayed` to those of transformers, `MegatronReplay` to
Megatron-core's.

Needs torch (the extra `torch`). A replayed router takes the experts of the rows instead of its own
top k. Its weights are those that it computes for these experts from its own scores, so gradients
reach it. Where a row has a -1, it chooses by itself.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import MethodType
from typing import Any

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
        """Raises `ReplayError` if a router was never asked, or for more than one forward pass."""
        if silent := [layer.decoder_layer for layer in self._layers if not layer.asked]:
            raise ReplayError(
                f"the routers of decoder layers {silent} were never asked: nothing was replayed there"
            )
        _check_one_pass(self._layers)


@contextmanager
def replayed(
    model: Module, rows: Any, weights: Any = None, *, layer_ids: Sequence[int] | None = None
) -> Iterator[Replay]:
    """Within, the routers of a model of transformers take the experts of `rows`.

    A block is for one forward pass, as rows are for its tokens, and its backward pass, because
    gradient checkpointing asks the routers again. A backward pass elsewhere makes it ask for other
    experts, not always with an error. The model may be compiled, before or within.

    Args:
        rows: [..., L, K] ids, an array or tensor, in the order of the model's tokens: [B, S, L, K]
            or [T, L, K].
        weights: like `rows`, the server's weights of the ids, times the factors of `batch.scaled`.
            They take the place of the router's own, but not of their gradients. Where they are NaN,
            the router's own stay.
        layer_ids: decoder layer of each of the L layers, from `GET /v1/routed_experts`; `range(L)`
            for rows that were requested with all layers. By default the L layers are those of the
            routers, in their order.

    Raises:
        ReplayError: the model has no known routers, or other layers, experts or tokens than `rows`,
            or weighs experts in another way than is known; a row has an expert twice; a router was
            asked in a second forward pass; or, at the end, was never asked.
    """
    # On a GPU, the checks below take a thousandth of the time that they take on its host.
    device = next((weight.device for weight in model.parameters() if not weight.is_meta), None)
    ids = _flat_rows(rows, device)
    recorded_weights = _flat_weights(weights, ids, device)
    routers = _routers(model)
    index_of_layer = _layer_indices(
        list(dict.fromkeys(layer for _, layer, _ in routers)), ids, layer_ids
    )
    _check_other_layers(ids, index_of_layer, layer_ids)
    _check_experts_exist(ids, [router for _, _, router in routers])
    _check_distinct(ids[:, sorted(index_of_layer.values())])
    if any("_replay" in vars(router) for _, _, router in routers):
        raise ReplayError("the model is being replayed already")
    layers = {
        layer: _Layer(
            decoder_layer=layer,
            ids=ids[:, index].clone(),
            is_unknown=(ids[:, index] < 0).any(dim=1, keepdim=True),
            weights=None if recorded_weights is None else recorded_weights[:, index],
        )
        for layer, index in index_of_layer.items()
    }
    num_known = [int((~layer.is_unknown).sum()) for layer in layers.values()]
    replay = Replay(list(layers), num_known, list(layers.values()))
    with ExitStack() as stack:
        for name, layer, router in routers:
            stack.enter_context(_replaced(router, _Router(name, layers[layer])))
        yield replay
        replay.check()


def _flat_weights(weights: Any, ids: Tensor, device: torch.device | None) -> Tensor | None:
    """Weights [T, L, K] of `ids`."""
    if weights is None:
        return None
    tensor = torch.as_tensor(weights, device=device)
    if tensor.shape[-2:] != ids.shape[-2:] or tensor.numel() != ids.numel():
        raise ReplayError(f"weights of shape {[*tensor.shape]} for rows of shape {[*ids.shape]}")
    return tensor.reshape(ids.shape)


def _check_experts_exist(ids: Tensor, routers: Sequence[Any]) -> None:
    num_experts = min(
        getattr(router, "num_experts", None) or router.config.num_experts for router in routers
    )
    highest_id = int(ids.max()) if ids.numel() else -1
    if highest_id >= num_experts:
        raise ReplayError(f"expert {highest_id} in the rows of a model with {num_experts}")


@contextmanager
def _replaced(router: Any, replaying: "_Router") -> Iterator[None]:
    """Within, `replaying` is asked for what the router returns."""
    own_class: type[Module] = type(router)
    family = _family(own_class)
    assert family is not None
    # of accelerate or of parallelism; it hides the class's method
    hook = vars(router).get(family.method)
    _check_hook(hook)
    replaying_class = _replaying(own_class, family)  # type: ignore[arg-type]
    methods: dict[str, Any] = {}
    if hook is not None:
        methods = _replaying_methods(router, family, hook, replaying_class, replaying)
    before = {name: vars(router)[name] for name in methods}
    router._replay = replaying
    try:
        if hook is None:
            router.__class__ = replaying_class
        vars(router).update(methods)
        yield
    finally:
        del router._replay
        router.__class__ = own_class
        vars(router).update(before)


def _check_hook(hook: Any) -> None:
    closure = getattr(hook, "__closure__", None) or ()
    if any(type(cell.cell_contents).__name__ == "EpRouterParallel" for cell in closure):
        raise ReplayError(
            "with ep_router, each rank has ids of its own: replay needs an ep_plan without it"
        )


def _replaying_methods(
    router: Any, family: "_Family", hook: Any, replaying_class: type[Any], replaying: "_Router"
) -> dict[str, Any]:
    """What takes the place of a router's own attributes, by their names, where a hook hides the
    method of its class."""
    # accelerate keeps the class's method on the router, and calls it while the router's offloaded
    # weights are there.
    original = getattr(type(router), family.method)
    inner = [
        name for name, value in vars(router).items() if getattr(value, "__func__", None) is original
    ]
    if inner:
        return dict.fromkeys(inner, MethodType(getattr(replaying_class, family.method), router))

    def around(*args: Any, **kwargs: Any) -> Any:
        return replaying.route(router, family, args, hook(*args, **kwargs))

    return {family.method: around}


def _flat_rows(rows: Any, device: torch.device | None = None) -> Tensor:
    """Ids [T, L, K], in a type that has -1."""
    ids = torch.as_tensor(rows, device=device)
    if ids.dim() < 3 or ids.is_floating_point():
        raise ReplayError(f"rows must be integers [..., L, K], not {ids.dtype} {[*ids.shape]}")
    ids = ids.flatten(0, -3)
    # The router's own choice takes the place of unknown rows, so the type has room for it.
    is_narrow = ids.dtype in (torch.uint8, torch.int8)
    return ids.to(torch.int32) if is_narrow or not ids.dtype.is_signed else ids


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
    ids: Tensor, index_of_layer: dict[int, int], layer_ids: Sequence[int] | None
) -> None:
    """Refuses rows with experts for layers that the model does not have. Zeros are those of layers
    without experts."""
    others = sorted(set(range(ids.shape[1])) - set(index_of_layer.values()))
    if (ids[:, others] > 0).any():
        lacking = others if layer_ids is None else [int(layer_ids[index]) for index in others]
        raise ReplayError(
            f"the rows have experts of decoder layers {lacking} too, but the model has routers of "
            f"{sorted(index_of_layer)} alone. If it is one stage of a pipeline, give it the rows and `layer_ids` "
            "of its own layers, as from `protocol.ranks.stage_layers`; if not, the rows are of another model"
        )


def _is_recomputed() -> bool:
    """Whether this forward pass is a part of a backward pass, as gradient checkpointing has it."""
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("routed_experts::choose", mutates_args=())
def _choose(rows: Tensor, own: Tensor, asked: Tensor) -> Tensor:
    """The experts of `rows`. Unknown ones become the router's own, which a recomputed pass then
    gets again.

    It counts the forward pass in `asked`, too. Both are changed by way of `data`, where autograd
    does not see it: checkpointing within compiled code keeps them for the recomputed pass, and
    refuses what has been changed since. An operator, as compiled code would not ask
    `_is_recomputed` when it is run.
    """
    if not _is_recomputed():
        asked.data.add_(1)
        is_unknown = (rows < 0).any(dim=-1, keepdim=True)
        rows.data.copy_(torch.where(is_unknown, own.to(rows.device, rows.dtype), rows))
    return rows.to(own.device, own.dtype, copy=True)


@_choose.register_fake
def _(rows: Tensor, own: Tensor, asked: Tensor) -> Tensor:
    return torch.empty_like(own)


@dataclass(frozen=True)
class _Family:
    """How routers of some classes compute weights [T, K] for ids [T, K], and what they return."""

    weigh: Callable[[Any, Tensor, Tensor], Tensor]
    method: str = "forward"

    def read(self, router: Any, args: tuple[Any, ...], output: Any) -> Sequence[Tensor]:
        """Logits [T, E], weights and ids."""
        first, weights, last = output
        return (first, weights, last) if first.is_floating_point() else (last, weights, first)

    def write(self, output: Any, weights: Tensor, ids: Tensor) -> Any:
        """`output` with these."""
        first, _, last = output
        return (first, weights, ids) if first.is_floating_point() else (ids, weights, last)


class _JambaBlock(_Family):
    """In older versions of transformers, Jamba's MoE block routes by a method that gets logits."""

    def read(self, router: Any, args: tuple[Any, ...], output: Any) -> Sequence[Tensor]:
        ids, weights = output
        return args[1], weights, ids

    def write(self, output: Any, weights: Tensor, ids: Tensor) -> Any:
        return ids, weights


class _Llama4(_Family):
    """Its router returns weights of all experts, which are 0 for those that it did not choose."""

    def read(self, router: Any, args: tuple[Any, ...], output: Any) -> Sequence[Tensor]:
        weights, logits = output
        ids = logits.topk(router.top_k, dim=-1).indices
        return logits, weights.gather(1, ids), ids

    def write(self, output: Any, weights: Tensor, ids: Tensor) -> Any:
        return torch.zeros_like(output[0]).scatter(1, ids, weights), output[1]


def _softmax(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    chosen = logits.float().softmax(dim=-1).gather(1, ids)
    if getattr(router, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return chosen


def _plain_softmax(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Of all groups. DeepSeek-V2's own sets the scores of groups that it does not choose to 0,
    without a gradient."""
    return logits.float().softmax(dim=-1).gather(1, ids) * _scale(router)


def _softmax_of_chosen(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(1, ids).softmax(dim=-1)


def _sigmoid(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    chosen = logits.float().sigmoid().gather(1, ids)
    if getattr(router, "norm_topk_prob", True):
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen * _scale(router)


def _lfm2(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    chosen = logits.sigmoid().gather(1, ids)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-6)
    return chosen * _scale(router)


def _llama4(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(1, ids).float().sigmoid()


def _gemma4(router: Any, probabilities: Tensor, ids: Tensor) -> Tensor:
    chosen = probabilities.gather(1, ids)
    return torch.mul(chosen / chosen.sum(dim=-1, keepdim=True), router.per_expert_scale[ids])


def _scale(router: Any) -> float:
    return float(getattr(router, "routed_scaling_factor", 1.0))


_SOFTMAX = _Family(_softmax)
_SIGMOID = _Family(_sigmoid)
_FAMILIES = {
    **dict.fromkeys(("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter"), _SOFTMAX),
    **dict.fromkeys(
        ("Qwen3_5MoeTopKRouter", "MixtralTopKRouter", "MiniMaxTopKRouter", "OlmoeTopKRouter"),
        _SOFTMAX,
    ),
    **dict.fromkeys(
        ("DeepseekV3TopkRouter", "DeepseekV32TopkRouter", "Glm4MoeTopkRouter"), _SIGMOID
    ),
    **dict.fromkeys(
        ("GlmMoeDsaTopkRouter", "MiniMaxM2TopKRouter", "NemotronHTopkRouter"), _SIGMOID
    ),
    "DeepseekV2TopkRouter": _Family(_plain_softmax),
    "Gemma4TextRouter": _Family(_gemma4),
    "GptOssTopKRouter": _Family(_softmax_of_chosen),
    "GraniteMoeHybridTopKRouter": _Family(_softmax_of_chosen),
    "JambaSparseMoeBlock": _JambaBlock(_plain_softmax, method="route_tokens_to_experts"),
    "JambaTopKRouter": _Family(_plain_softmax),
    "Lfm2MoeTopKRouter": _Family(_lfm2),
    "Llama4Router": _Llama4(_llama4),
}
"""By the names of classes, so that transformers need not be imported, nor have them all."""


@dataclass(eq=False)
class _Layer:
    """What the routers of a decoder layer replay. Of several, one is asked."""

    decoder_layer: int
    ids: Tensor  # [T, K]; unknown rows become those that the forward pass chose
    is_unknown: Tensor  # [T, 1]
    weights: Tensor | None
    routers: "list[_Router]" = field(default_factory=list)

    @property
    def asked(self) -> int:
        """Forward passes so far; recomputed ones do not count."""
        return sum(int(router.asked) for router in self.routers)


def _check_one_pass(layers: "Sequence[_Layer]") -> None:
    for layer in layers:
        names = [router.name for router in layer.routers if router.asked]
        if len(names) > 1:
            raise ReplayError(_BOTH.format(layer.decoder_layer, " and ".join(names)))
    if often := [layer.decoder_layer for layer in layers if layer.asked > 1]:
        raise ReplayError(_TWICE.format(often))


class _Router:
    """What is asked in place of one router."""

    def __init__(self, name: str, layer: _Layer) -> None:
        self.name = name
        self.layer = layer
        # for an int, torch.compile would compile anew
        self.asked = torch.zeros((), dtype=torch.int64, device="cpu")
        layer.routers.append(self)

    def route(self, router: Any, family: _Family, args: tuple[Any, ...], output: Any) -> Any:
        """`output` with the layer's experts.

        A recomputed pass does what the first one did, operation by operation: selective
        checkpointing hands it results by the number of the call that they are of.
        """
        logits, own_weights, own_ids = family.read(router, args, output)
        self.check_shape(own_ids)
        ids = _choose(self.layer.ids, own_ids, self.asked)
        if not torch.compiler.is_compiling():  # `Replay.check` finds compiled second passes
            _check_one_pass([self.layer])
            _check_weights(router, family, logits, own_weights, own_ids)
        is_unknown = self.layer.is_unknown.to(ids.device)
        weights = family.weigh(router, logits, ids)
        if self.layer.weights is not None:
            recorded = self.layer.weights.to(weights.device, weights.dtype)
            recorded = torch.where(recorded.isnan() | is_unknown, weights.detach(), recorded)
            weights = recorded + (weights - weights.detach())
        is_own = is_unknown & (ids == own_ids).all(dim=-1, keepdim=True)
        return family.write(
            output, torch.where(is_own, own_weights, weights.to(own_weights.dtype)), ids
        )

    def check_shape(self, own_ids: Tensor) -> None:
        if self.layer.ids.shape == own_ids.shape:
            return
        if not torch.compiler.is_compiling() and not _is_recomputed():
            self.asked.add_(1)
            _check_one_pass([self.layer])  # the cause, if it is the second one
        raise ReplayError(
            f"rows [T, K] of {[*self.layer.ids.shape]}, but the router has {[*own_ids.shape]}"
        )


def _check_weights(
    router: Any, family: _Family, logits: Tensor, weights: Tensor, ids: Tensor
) -> None:
    """Whether the router's own weights are what `family` makes of its logits: other versions of
    transformers return probabilities in place of logits."""
    with torch.no_grad():
        computed = family.weigh(router, logits, ids).to(weights.dtype)
    if not torch.allclose(computed, weights, rtol=0.02, atol=1e-3, equal_nan=True):
        name = type(router).__name__.removeprefix("Replaying")
        raise ReplayError(
            f"this version of transformers has another {name} than is known: take transformers 5.19 to 5.24"
        )


@cache
def _replaying(of: type[Module], family: _Family) -> type[Module]:
    """A class whose routers replay. torch.compile notices another class, unlike a hook, and
    compiles for it."""
    original = getattr(of, family.method)

    def route(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._replay.route(self, family, args, original(self, *args, **kwargs))

    return type(f"Replaying{of.__name__}", (of,), {family.method: route})


def _family(of: type[Module]) -> _Family | None:
    families = (_FAMILIES[base.__name__] for base in of.__mro__ if base.__name__ in _FAMILIES)
    return next((family for family in families if hasattr(of, family.method)), None)


def _routers(model: Module) -> list[tuple[str, int, Any]]:
    """With their names and decoder layers. Of several in a layer one is asked: PEFT's copy that is
    trained, or the original."""
    routers: list[tuple[str, int, Any]] = []
    for name, module in model.named_modules():
        if _family(type(module)) is not None:
            numbers = _DECODER_LAYER.search(f"{name}.")
            layer = int(numbers[1]) if numbers else len(routers)
            routers.append((name, layer, module))
    if not routers:
        raise ReplayError(f"{type(model).__name__} has none of the routers {sorted(_FAMILIES)}")
    return routers


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

    Raises:
        ReplayError: a router has no `RouterReplay`, or two are of one layer; or, at the end, a
            router was never asked, or only some microbatches were recomputed.
    """

    def __init__(self, chunks: Module | Sequence[Module]) -> None:
        self.replayed = 0
        modules = [chunks] if isinstance(chunks, Module) else chunks
        self._chunks = [_megatron_routers(module) for module in modules]
        self._devices = [
            next((weight.device for weight in module.parameters()), None) for module in modules
        ]
        self._fed: list[int] = []  # microbatches of each chunk; none outside of the block

    def __enter__(self) -> "MegatronReplay":
        if any("get_replay_topk" in vars(router) for router in self._all()):
            raise ReplayError("the model is being replayed already")
        self.replayed = 0
        self._fed = [0] * len(self._chunks)
        for router in self._all():
            router.clear_indices()
            router.get_replay_topk = _choosing(router)
        return self

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
            router.set_target_indices(of_layer)
            self.replayed += int((of_layer >= 0).all(dim=1).sum())

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            for chunk, fed in enumerate(self._fed if kind is None else []):
                self._check_asked(chunk)
                for layer, router in self._chunks[chunk].items():
                    if 0 < (left := len(router.replay_backward_list)) < fed:
                        raise ReplayError(
                            f"decoder layer {layer} recomputed {fed - left} of {fed} microbatches"
                        )
        finally:
            self._fed = []
            for router in self._all():
                router.clear_indices()
                del router.get_replay_topk

    def _all(self) -> Iterator[Any]:
        return (router for routers in self._chunks for router in routers.values())

    def _check_asked(self, chunk: int) -> None:
        silent = [
            layer
            for layer, router in self._chunks[chunk].items()
            if router.target_topk_idx is not None
        ]
        if silent:
            raise ReplayError(
                f"the routers of decoder layers {silent} were never asked: nothing was replayed there"
            )


def _choosing(router: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """In place of the method that asks a `RouterReplay` for experts. It replays all rows, as they
    are.

    A recomputed pass does what the first one did, operation by operation, as checkpointing without
    `use_reentrant` counts the tensors that autograd keeps, and selective checkpointing all
    operators.
    """
    peaks: list[NDArray[np.float32]] = []  # largest scores of tokens, of each pass to be recomputed

    def get_replay_topk(
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        is_recomputed = _is_recomputed()
        fed = router.replay_backward_list
        peak = scores.detach().amax(dim=1).float().cpu().numpy()
        if is_recomputed:
            if not _is_first_of(peaks, peak):
                raise ReplayError(
                    "a microbatch is recomputed that is not the next of those fed within this block"
                )
            peaks.pop(0)
            rows = fed.pop(0)
        else:
            rows = router.target_topk_idx
        _check_rows_fit(rows, scores, topk)
        rows = rows.to(scores.device)
        _, own = choose(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
        ids = torch.where((rows < 0).any(dim=1, keepdim=True), own, rows)
        if not is_recomputed:
            router.target_topk_idx = None  # one forward pass per microbatch
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


def _megatron_routers(chunk: Module) -> dict[int, Any]:
    """The `RouterReplay` of each decoder layer."""
    routers: dict[int, Any] = {}
    for name, module in chunk.named_modules():
        if hasattr(module, "router_replay") and "mtp" not in name.split("."):
            if module.router_replay is None:
                raise ReplayError(f"{name} has no RouterReplay: set moe_enable_routing_replay")
            layer = int(module.layer_number) - 1
            if layer in routers:
                raise ReplayError(
                    f"two routers in decoder layer {layer}: give the part of the model that has one"
                )
            routers[layer] = module.router_replay
    return routers
