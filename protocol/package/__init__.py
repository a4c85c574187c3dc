"""The package `routed_experts` itself: installed, its sub-packages are the folders at the top of
the repository."""

from routed_experts.protocol.version import VERSION as __version__

__all__ = ["__version__"]
