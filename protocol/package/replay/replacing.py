"""Has the routers of a model replay, and takes that back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

from torch.nn import Module

from routed_experts.replay.errors import ReplayError
from routed_experts.replay.finding import method_of
from routed_experts.replay.picking import Candidates, candidates_of
from routed_experts.replay.router import Layer, Router


def replacements(
    routers: Sequence[tuple[str, int, Any]], layers: "Mapping[int, Layer]"
) -> list[tuple[Any, Router]]:
    """The routers, and what is asked in place of each."""
    candidates: dict[type[Module], Candidates] = {}
    pairs: list[tuple[Any, Router]] = []
    for name, layer, router in routers:
        own_class = type(router)
        if own_class not in candidates:
            candidates[own_class] = candidates_of(router)
        replaying = Router(name, router, layers[layer], candidates[own_class])
        pairs.append((router, replaying))
    return pairs


def is_replaced(router: Module) -> bool:
    return "_replay" in vars(router)


@contextmanager
def replaced(router: Any, replaying: "Router") -> Iterator[None]:
    """Within, `replaying` is asked for what the router returns."""
    if is_replaced(router):  # in another block, in which a pass of this one is computed again
        before = router._replay
        router._replay = replaying
        try:
            yield
        finally:
            router._replay = before
        return
    own_class: type[Module] = type(router)
    method = method_of(own_class)
    # of accelerate or of parallelism; it hides the class's method
    hook = vars(router).get(method)
    _check_hook(hook)
    replaying_class = _replaying(own_class, method, getattr(own_class, method))  # type: ignore[arg-type]
    methods: dict[str, Any] = {}
    if hook is not None:
        methods = _replaying_methods(router, method, hook, replaying_class)
    hidden = {name: vars(router)[name] for name in methods}
    router._replay = replaying
    try:
        if hook is None:
            router.__class__ = replaying_class
        vars(router).update(methods)
        yield
    finally:
        del router._replay
        router.__class__ = own_class
        vars(router).update(hidden)


def _check_hook(hook: Any) -> None:
    closure = getattr(hook, "__closure__", None) or ()
    if any(type(cell.cell_contents).__name__ == "EpRouterParallel" for cell in closure):
        raise ReplayError(
            "with ep_router, each rank has ids of its own: replay needs an ep_plan without it"
        )


def _replaying_methods(
    router: Any, method: str, hook: Any, replaying_class: type[Any]
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
        return router._replay.route(router, args, hook(*args, **kwargs))

    return {method: around}


@cache
def _replaying(of: type[Module], method: str, original: Callable[..., Any]) -> type[Module]:
    """A class whose routers replay, made of the method `original` that it has now. torch.compile
    notices another class, unlike a hook, and compiles for it."""

    def route(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._replay.route(self, args, original(self, *args, **kwargs))

    return type(f"Replaying{of.__name__}", (of,), {method: route})
