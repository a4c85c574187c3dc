"""Forward passes that a backward pass makes again, and whose rows they take.

A backward pass may be of several forward passes, and of any of them when their blocks have been
left: losses are added up, or a trainer's own code calls `backward`. So what gradient checkpointing
keeps of a forward pass names its block.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import RLock
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

_ONE_AT_A_TIME = RLock()
"""Each device has a thread for its part of a backward pass, but a router has one block at a time."""


def in_recomputed_pass() -> bool:
    """Whether this forward pass is a part of a backward pass, as gradient checkpointing has it."""
    return torch._C._current_graph_task_id() != -1


@dataclass(eq=False)
class ForwardPass:
    """That of a block.

    Attributes:
        first_node: the number that autograd gives its next node. Those of a thread count up.
        num_recomputed: recomputed passes under way that are known to be of this one.
    """

    first_node: int = field(default_factory=torch._C._autograd._get_sequence_nr)
    num_recomputed: int = 0

    def may_be_recomputed_now(self) -> bool:
        """False where what is recomputed is of an earlier forward pass. Checkpointing that is not
        torch's names no block, but its nodes have numbers."""
        node = torch._C._current_autograd_node()
        return self.num_recomputed > 0 or node is None or node._sequence_nr() >= self.first_node


@contextmanager
def naming(
    forward_pass: ForwardPass, installed: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Within, torch's checkpointing calls `installed` around what it will compute again of
    `forward_pass`.

    It hands a function to one of these two, and calls that again in the backward pass. There is no
    argument or hook for it: `context_fn` is the model's, and does not exist with `use_reentrant`.
    """

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not in_recomputed_pass():
                return function(*args, **kwargs)
            with _ONE_AT_A_TIME, installed(), naming(forward_pass, installed):
                forward_pass.num_recomputed += 1
                try:
                    return function(*args, **kwargs)
                finally:
                    forward_pass.num_recomputed -= 1

        return run

    reentrant: Any = torch_checkpoint.CheckpointFunction
    other = torch_checkpoint._checkpoint_without_reentrant_generator
    torch_checkpoint.CheckpointFunction = SimpleNamespace(  # type: ignore[assignment,misc]
        apply=lambda function, *args: reentrant.apply(named(function), *args)
    )
    torch_checkpoint._checkpoint_without_reentrant_generator = lambda function, *args, **kwargs: (
        other(named(function), *args, **kwargs)
    )
    try:
        yield
    finally:
        torch_checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]
        torch_checkpoint._checkpoint_without_reentrant_generator = other
