"""`replayed`: a block in which the routers of a model of transformers take the experts of rows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from routed_experts.replay.errors import ReplayError
from routed_experts.replay.finding import experts_of, routers_of
from routed_experts.replay.loss import replayed_loss
from routed_experts.replay.recomputation import ForwardPass, naming
from routed_experts.replay.replacing import is_replaced, replaced, replacements
from routed_experts.replay.router import Layer, check_errors, check_one_pass
from routed_experts.replay.rows import (
    RowFacts,
    as_tensor,
    check_distinct,
    check_order,
    check_other_layers,
    flat_rows,
    flat_weights,
    layer_indices,
)


@dataclass(eq=False)
class Replay:
    """What is replayed within a block.

    Attributes:
        layer_ids: decoder layers of the replayed routers.
        known: rows that each of them has.
    """

    layer_ids: list[int]
    known: list[int]
    _layers: "list[Layer]"

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
        check_one_pass(self._layers)
        check_errors(self._layers)


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

    A block is for one forward pass, as rows are for its tokens. Its backward pass may be within, or
    later: what torch.utils.checkpoint computes again takes the rows of its own forward pass, also
    where one backward pass is of several blocks. With other checkpointing, it has to be within. The
    model may be compiled, before or within. What a router computed otherwise than in earlier blocks
    is an error at the block's end: step optimizers after it.

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
    block = Block(model, rows, weights, layer_ids=layer_ids)
    counting = replayed_loss(model, block.layers) if aux_loss else nullcontext()
    with block.forward_pass(), counting as loss:
        yield block.replay
        block.replay.check()
        if loss is not None:
            loss.check()


class Block:
    """Rows in the routers of a model, for one forward pass and all that is recomputed of it.

    The arguments and errors are those of `replayed`.
    """

    def __init__(
        self,
        model: Module,
        rows: Any,
        weights: Any = None,
        *,
        layer_ids: Sequence[int] | None = None,
    ) -> None:
        device = _device_of(model)
        rows = as_tensor(rows, device)
        ids = flat_rows(rows)
        recorded_weights = None
        if weights is not None:
            recorded_weights = flat_weights(as_tensor(weights, device), rows)
        routers = routers_of(model)
        decoder_layers = list(dict.fromkeys(layer for _, layer, _ in routers))
        index_of_layer = layer_indices(decoder_layers, ids, layer_ids)
        facts = RowFacts.of(ids)
        check_other_layers(facts.highest, index_of_layer, layer_ids)
        if facts.has_twice:
            check_distinct(ids[:, sorted(index_of_layer.values())])
        if any(is_replaced(router) for _, _, router in routers):
            raise ReplayError("the model is being replayed already")
        self._model = model
        self._shape = rows.shape
        self._pass = ForwardPass()
        layers = _layers_of(self._pass, ids, recorded_weights, facts, index_of_layer)
        self.layers = list(layers.values())
        self._routers = replacements(routers, layers)
        self._experts = [experts_of(model, name) for name, _, _ in routers]
        num_known = [facts.num_known[index] for index in index_of_layer.values()]
        self.replay = Replay(list(layers), num_known, self.layers)

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Within, the routers take the rows. What torch's checkpointing keeps of a forward pass takes
        them in its backward pass, too, wherever that is."""
        with ExitStack() as stack:
            if len(self._shape) == 4:
                hook = self._model.register_forward_pre_hook(self._check_order, with_kwargs=True)
                stack.callback(hook.remove)
            for (_, router), experts in zip(self._routers, self._experts, strict=True):
                if experts is not None:
                    see = router.see_experts
                    hook = experts.register_forward_pre_hook(see, with_kwargs=True)
                    stack.callback(hook.remove)
            stack.enter_context(self._installed())
            stack.enter_context(naming(self._pass, self._installed))
            yield

    def _check_order(self, _: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            check_order(self._shape, (*args, *kwargs.values()))

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for router, replaying in self._routers:
                stack.enter_context(replaced(router, replaying))
            yield


def _device_of(model: Module) -> torch.device | None:
    """Where rows are checked: on a GPU, that takes a thousandth of the time that it takes on its
    host."""
    return next((weight.device for weight in model.parameters() if not weight.is_meta), None)


def _layers_of(
    forward_pass: ForwardPass,
    ids: Tensor,
    recorded_weights: Tensor | None,
    facts: "RowFacts",
    index_of_layer: Mapping[int, int],
) -> "dict[int, Layer]":
    """What each decoder layer replays of the rows `ids` [T, L, K], and of their weights."""
    if recorded_weights is not None:
        recorded_weights = recorded_weights.masked_fill(facts.is_unknown, torch.nan)
    return {
        layer: Layer(
            decoder_layer=layer,
            forward_pass=forward_pass,
            ids=ids[:, index].clone(),
            is_unknown=facts.is_unknown[:, index],
            has_unknown=facts.num_known[index] < len(ids),
            weights=None if recorded_weights is None else recorded_weights[:, index],
            highest_id=facts.highest[index],
        )
        for layer, index in index_of_layer.items()
    }
