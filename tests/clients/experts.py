"""The experts that really ran, in forward and recomputed passes: what replay is compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """Of a layer's experts."""

    layer: int
    hidden: torch.Tensor  # [T, H]
    ids: torch.Tensor  # [T, K]
    is_recomputed: bool


class ExpertsThatRan:
    """What the experts of a model were called with.

    Attributes:
        calls: in their order.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def see(self, layer: int, args: tuple[torch.Tensor, ...]) -> None:
        hidden, ids = args[0].detach(), args[1].detach()
        is_recomputed = torch._C._current_graph_task_id() != -1
        self.calls.append(Call(layer, hidden.flatten(0, -2).clone(), ids.clone(), is_recomputed))

    def forward_passes(self) -> list[torch.Tensor]:
        """Ids [T, L, K] of each."""
        of_layers = [
            [call.ids for call in self.calls if call.layer == layer and not call.is_recomputed]
            for layer in sorted({call.layer for call in self.calls})
        ]
        return [torch.stack(ids, dim=1) for ids in zip(*of_layers, strict=True)]

    def check_recomputed(self, passes: int) -> None:
        """Each layer of that many passes was computed again, with the experts that had these tokens
        before."""
        recomputed = [call for call in self.calls if call.is_recomputed]
        num_layers = len({call.layer for call in self.calls})
        assert len(recomputed) >= passes * num_layers
        for call in recomputed:
            first = next(
                other
                for other in self.calls
                if not other.is_recomputed
                and other.layer == call.layer
                and torch.equal(other.hidden, call.hidden)
            )
            assert torch.equal(first.ids, call.ids)


@contextmanager
def seeing_experts(model: torch.nn.Module) -> Iterator[ExpertsThatRan]:
    ran = ExpertsThatRan()
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    handles: list[Any] = [
        module.register_forward_pre_hook(lambda _, args, layer=layer: ran.see(layer, args))
        for layer, module in enumerate(experts)
    ]
    yield ran
    for handle in handles:
        handle.remove()


class OtherCheckpoint(torch.autograd.Function):
    """Checkpointing that is not torch's, as some trainers have it."""

    @staticmethod
    def forward(ctx: Any, function: Any, hidden: torch.Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(hidden)
        return function(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (saved,) = ctx.saved_tensors
        hidden = saved.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(hidden)
        torch.autograd.backward(output, *gradients)
        return None, hidden.grad
