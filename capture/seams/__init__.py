"""What differs between the supported versions of vLLM; all other code is written for the newest.

A seam looks at what vLLM has, never at its version. `engine` and `arguments` are for every engine, `cpu_kernels` for
CPUs, `http` for servers. A test fails when the oldest supported version no longer needs a seam: then delete it.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """One difference."""

    what: str  # that older versions do not have
    until: str  # the first version that has it
    is_needed: Callable[[], bool]  # whether the installed version lacks it
