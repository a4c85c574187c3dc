"""Replaces a method of a class of vLLM's once."""

import functools
from typing import Any

_REPLACED = "_routed_experts"


def replace_once(owner: type, name: str, replacement: Any) -> None:
    """Makes `owner.name(…)` call `replacement` with the function that it was, in front of its
    arguments; once only."""
    original = getattr(owner, name)
    if hasattr(original, _REPLACED):
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(replaced, _REPLACED, True)
    setattr(owner, name, replaced)
