"""How a replacement of something of vLLM's at run time is written down."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Replacement:
    """Something of vLLM's that is replaced on its instances at run time.

    Attributes:
        owner, attribute: what is replaced.
        why: why no subclass or plugin entry point can do it.
        until: when it can go.
    """

    owner: type
    attribute: str
    why: str
    until: str
