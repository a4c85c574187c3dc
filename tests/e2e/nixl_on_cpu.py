"""NIXL whose progress threads sleep while nothing arrives, for machines with few cores.

    --worker-extension-cls tests.e2e.nixl_on_cpu.Patient

vLLM has NIXL poll without a pause, which takes a core of each worker. Not part of the
server.
"""

import sys
from typing import Any

from nixl._api import nixl_agent

_POLL_US = 1000

_bindings = sys.modules[nixl_agent.__module__].nixlBind
_make = _bindings.nixlAgent


def _agent(name: str, config: Any) -> Any:
    config.pthrDelay = _POLL_US
    return _make(name, config)


# At import, which is before a worker makes its connector.
_bindings.nixlAgent = _agent


class Patient:
    """An extension of vLLM's worker that adds nothing."""
