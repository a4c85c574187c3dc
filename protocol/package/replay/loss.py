"""The load-balancing loss of transformers for the experts that are replayed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from routed_experts.replay.errors import ReplayError
from routed_experts.replay.picking import TOLERANCE, TOLERANCE_IN_16_BITS
from routed_experts.replay.router import Layer

_LOSS = "load_balancing_loss_func"
"""The name of the function in each of transformers' modules whose models have the loss."""
_MIXTRAL = "transformers.models.mixtral.modeling_mixtral"


@contextmanager
def replayed_loss(model: Module, layers: "Sequence[Layer]") -> "Iterator[_LoadBalancingLoss]":
    """Within, the load-balancing loss of the model counts what the `layers` replay.

    The loss of transformers takes logits alone, and chooses experts from them by itself. A model
    looks it up in the module of its class, when it computes it; TRL's head, in Mixtral's.
    """
    names = {type(module).__module__ for module in model.modules()}
    modules = [sys.modules[name] for name in names if hasattr(sys.modules[name], _LOSS)]
    if not modules:
        raise ReplayError(
            f"{type(model).__name__} has no load-balancing loss of transformers: leave out aux_loss"
        )
    mixtral = import_module(_MIXTRAL)
    if mixtral not in modules:
        modules.append(mixtral)
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
    layers: "Sequence[Layer]"
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
        tolerance = TOLERANCE.get(gate_logits[0].dtype, TOLERANCE_IN_16_BITS)
        if not torch.isclose(known, live.to(known.dtype), rtol=tolerance, equal_nan=True):
            raise ReplayError(
                "the model computes its auxiliary loss in another way than is known: leave out aux_loss"
            )
        self.is_computed = True
        ids = [layer.ids for layer in layers if layer is not None]
        return _load_balancing_loss(gate_logits, ids, num_experts, attention_mask)

    def _layer_of(self, logits: Tensor) -> "Layer | None":
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
