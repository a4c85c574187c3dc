"""What a router returns: logits of all experts, weights and ids of the chosen ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from routed_experts.replay.errors import ReplayError
from routed_experts.replay.finding import name_of


@dataclass(frozen=True)
class Choice:
    """What a router returned."""

    logits: Tensor  # [T, E]
    weights: Tensor  # [T, K]
    ids: Tensor  # [T, K]
    write: Callable[[Tensor, Tensor], Any]
    """The router's output with other weights and ids."""


def choice_of(router: Any, args: tuple[Any, ...], output: Any) -> Choice:
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
) -> Choice:
    """Of a router that returns ids, and weights of these alone. `floats` are the weights and the
    logits, in the order in which the router has them."""
    # If all experts are chosen, both have the shape of the ids. The weights are beside the ids.
    nearest_first = floats if parts[0] is ids else floats[::-1]
    weights_and_logits = _weights_and_logits(nearest_first, ids)
    if weights_and_logits is None:
        raise ReplayError(_unlike(router, parts))
    weights, logits = weights_and_logits
    top_k = ids.shape[-1]
    return Choice(
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


def _dense_choice(router: Any, weights: Tensor, logits: Tensor) -> Choice:
    """Of a router that returns weights of all experts, 0 for those that it did not choose, as that
    of Llama 4 does."""
    if weights.shape != logits.shape or logits.dim() != 2 or not hasattr(router, "top_k"):
        raise ReplayError(_unlike(router, (weights, logits)))
    ids = logits.topk(router.top_k, dim=-1).indices

    def write(weights_of_ids: Tensor, ids: Tensor) -> Any:
        return torch.zeros_like(weights).scatter(1, ids, weights_of_ids), logits

    return Choice(logits, weights.gather(1, ids), ids, write)


def _unlike(router: Any, parts: Sequence[Any]) -> str:
    shapes = [
        f"{str(part.dtype).removeprefix('torch.')} {[*part.shape]}"
        if isinstance(part, Tensor)
        else type(part).__name__
        for part in parts
    ]
    return (
        f"{name_of(router)} returns {', '.join(shapes)}: it cannot be replayed, as that needs logits of all experts, "
        "and weights and ids of the chosen ones"
    )
