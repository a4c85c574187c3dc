"""What a router returns: logits of all experts, weights and ids of the chosen ones.

A table in `docs/replay.md` has the forms that are known. Others are refused. What has such a form,
but other values in it, fits no formula, or has other shapes than the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from routed_experts.replay.errors import ReplayError
from routed_experts.replay.finding import is_block, name_of


@dataclass(frozen=True)
class Choice:
    """What a router returned."""

    logits: Tensor  # [T, E]
    weights: Tensor  # [T, K]; infinite for a token in which other experts have weight, too
    ids: Tensor  # [T, K]
    write: Callable[[Tensor, Tensor], Any]
    """The router's output with other weights and ids."""


def choice_of(router: Any, args: tuple[Any, ...], output: Any) -> Choice:
    """Finds logits, weights and ids in what a router returned for `args`."""
    parts = output if isinstance(output, tuple) else (output,)
    kinds = [_kind(part) for part in parts]
    if is_block(router) and sorted(kinds) == ["float", "int"]:
        floats = [value for value in args if _kind(value) == "float"]
        if not floats:
            raise ReplayError(_unlike(router, parts))
        return _sparse_choice(router, parts, floats[-1], parts)
    if kinds in (["float", "float", "int"], ["float", "int", "float"]):
        return _sparse_choice(router, parts, parts[0], parts[1:])
    if kinds == ["int", "float", "float"]:
        return _sparse_choice(router, parts, parts[2], parts[:2])
    if kinds == ["float", "float"]:
        return _dense_choice(router, parts[0], parts[1])
    raise ReplayError(_unlike(router, parts))


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "other"
    if value.is_floating_point():
        return "float"
    return "int" if value.dtype in (torch.int32, torch.int64) else "other"


def _sparse_choice(
    router: Any, parts: Sequence[Tensor], logits: Tensor, chosen: Sequence[Tensor]
) -> Choice:
    """Of a router that returns ids, and weights of these alone, which are `chosen`."""
    weights, ids = sorted(chosen, key=_kind)
    is_matrix = ids.dim() >= 2 and logits.dim() >= 2
    if weights.shape != ids.shape or not is_matrix or not _is_of_all_experts(router, logits):
        raise ReplayError(_unlike(router, parts))
    top_k = ids.shape[-1]

    def write(new_weights: Tensor, new_ids: Tensor) -> Any:
        replaced = {id(ids): new_ids.reshape(ids.shape)}
        replaced[id(weights)] = new_weights.reshape(weights.shape)
        return tuple(replaced.get(id(part), part) for part in parts)

    return Choice(
        logits.reshape(-1, logits.shape[-1]),
        weights.reshape(-1, top_k),
        ids.reshape(-1, top_k),
        write,
    )


def _dense_choice(router: Any, weights: Tensor, logits: Tensor) -> Choice:
    """Of a router that returns weights of all experts, 0 for those that it did not choose."""
    top_k = getattr(router, "top_k", 0)
    is_matrix = weights.shape == logits.shape and logits.dim() == 2
    is_known = is_matrix and _is_of_all_experts(router, logits)
    if not is_known or top_k not in range(1, logits.shape[1] + 1):
        raise ReplayError(_unlike(router, (weights, logits)))
    ids = logits.topk(top_k, dim=-1).indices
    of_others = weights.detach().scatter(1, ids, 0.0).abs().amax(dim=-1, keepdim=True)
    of_ids = weights.gather(1, ids).masked_fill(of_others > 0, torch.inf)

    def write(weights_of_ids: Tensor, ids: Tensor) -> Any:
        return torch.zeros_like(weights).scatter(1, ids, weights_of_ids), logits

    return Choice(logits, of_ids, ids, write)


def _is_of_all_experts(router: Any, logits: Tensor) -> bool:
    """Whether the last size is the number of experts. A router need not say how many it has. A block
    must, as it may get more than logits."""
    experts = getattr(router, "experts", None)
    numbers = [
        getattr(of, name, None)
        for of in (router, experts)
        for name in ("num_experts", "n_routed_experts", "num_local_experts")
    ]
    if isinstance(experts, ModuleList):
        numbers.append(len(experts))
    known = [number for number in numbers if isinstance(number, int)]
    return logits.shape[-1] in known or not (known or is_block(router))


def _unlike(router: Module, parts: Sequence[Any]) -> str:
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
