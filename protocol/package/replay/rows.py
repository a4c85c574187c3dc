"""Rows as a caller gives them: their shapes, what is in them, and which layer each is of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from routed_experts.replay.errors import ReplayError

_AS_TOKENS = (
    "rows are in the order of the model's tokens: `protocol.batch.align` makes them of responses for a padded batch, "
    "and `protocol.ranks.pack` for a packed one"
)


def as_tensor(values: Any, device: torch.device | None = None) -> Tensor:
    """Refuses what has an order of its own: lists, and ragged or nested arrays."""
    if isinstance(values, list | tuple) or getattr(values, "dtype", None) == np.dtype(object):
        raise ReplayError(f"a {type(values).__name__} is not one array of numbers: {_AS_TOKENS}")
    tensor = torch.as_tensor(values, device=device)
    if tensor.is_nested or tensor.layout != torch.strided:
        raise ReplayError(f"nested and sparse tensors are not replayed: {_AS_TOKENS}")
    return tensor


def check_order(shape: Sequence[int], inputs: Iterable[Any]) -> None:
    """Refuses rows [S, B, L, K] for a model's inputs [B, S], and the other way about.

    Args:
        shape: of rows.
        inputs: of a forward pass; tensors [B, S, ...] are looked at.
    """
    sizes = [tuple(value.shape[:2]) for value in inputs if isinstance(value, Tensor)]
    first, second = shape[:2]
    if (first, second) not in sizes and (second, first) in sizes:
        raise ReplayError(
            f"rows of [{first}, {second}] tokens for inputs of [{second}, {first}]: {_AS_TOKENS}"
        )


def flat_weights(weights: Tensor, rows: Tensor) -> Tensor:
    """Weights [T, L, K] of `rows`, which have their shape."""
    if weights.shape != rows.shape:
        raise ReplayError(f"weights of shape {[*weights.shape]} for rows of shape {[*rows.shape]}")
    weights = weights if weights.is_floating_point() else weights.float()
    return weights.flatten(0, -3)


def flat_rows(ids: Tensor) -> Tensor:
    """Ids [T, L, K], in a type that has -1."""
    if ids.dim() < 3 or ids.is_floating_point():
        raise ReplayError(f"rows must be integers [..., L, K], not {ids.dtype} {[*ids.shape]}")
    ids = ids.flatten(0, -3)
    # The router's own choice takes the place of unknown rows, so the type has room for it.
    is_narrow = ids.dtype in (torch.uint8, torch.int8)
    return ids.to(torch.int32) if is_narrow or not ids.dtype.is_signed else ids


@dataclass(frozen=True)
class RowFacts:
    """What is in rows [T, L, K], read from the device at once."""

    is_unknown: Tensor  # [T, L, 1], on the device
    num_known: list[int]  # rows of each layer
    highest: list[int]  # the highest id of each layer
    has_twice: bool  # whether a row has an expert twice

    @classmethod
    def of(cls, ids: Tensor) -> "RowFacts":
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


def check_distinct(ids: Tensor) -> None:
    """Refuses rows that no server has, such as 0 for unknown ones."""
    for apart in range(1, ids.shape[2]):
        twice = (ids[..., apart:] == ids[..., :-apart]) & (ids[..., apart:] >= 0)
        if twice.any():
            token, layer, _ = twice.nonzero()[0].tolist()
            row = f"row {ids[token, layer].tolist()} of token {token}"
            raise ReplayError(f"the {row} has an expert twice: an unknown row has -1 everywhere")


def layer_indices(
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


def check_other_layers(
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
