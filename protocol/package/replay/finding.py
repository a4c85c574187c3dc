"""The routers of a model of transformers: which modules are asked for experts, and of which layers."""

import re
from collections.abc import Mapping
from typing import Any

from torch.nn import Module

from routed_experts.replay.errors import ReplayError

_DECODER_LAYER = re.compile(r"\blayers\.(\d+)\.")
_BLOCK_METHOD = "route_tokens_to_experts"


def method_of(of: type[Module]) -> str:
    """What is asked for the experts: a router, or a method of a block, which gets the logits."""
    return _BLOCK_METHOD if hasattr(of, _BLOCK_METHOD) else "forward"


def is_block(router: Module) -> bool:
    """Whether it is a block with a method that is asked, in place of a router."""
    return method_of(type(router)) == _BLOCK_METHOD


def experts_of(model: Module, name: str) -> Module | None:
    """The module `experts` of the block that a router is in or is, by the router's name."""
    router = model.get_submodule(name)
    block = router if is_block(router) else model.get_submodule(name.rpartition(".")[0])
    experts = getattr(block, "experts", None)
    return experts if isinstance(experts, Module) else None


def _is_router(module: Module) -> bool:
    """Whether it chooses experts, or has a part that does."""
    has_experts = hasattr(module, "num_experts") or hasattr(module, "per_expert_scale")
    is_named_so = type(module).__name__.endswith("Router") and has_experts
    return hasattr(module, "top_k") or is_named_so or hasattr(type(module), _BLOCK_METHOD)


def routers_of(model: Module) -> list[tuple[str, int, Any]]:
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
    blocks = [name for name, module in choosing.items() if is_block(module)]
    parts_of_blocks = {name for name in choosing for block in blocks if _is_within(name, block)}
    outer = {name for name in choosing for other in choosing if _is_within(other, name)}
    not_asked = (parts_of_blocks | outer) - set(blocks)
    return [name for name in choosing if name not in not_asked]


def _is_within(name: str, outer: str) -> bool:
    """Whether a module, by its name, is a part of another."""
    return name.startswith(f"{outer}.") if outer else bool(name)


def name_of(router: Any) -> str:
    return type(router).__name__.removeprefix("Replaying")
