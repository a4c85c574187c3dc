"""`routed-experts` with an MoE layer that goes around its router in all but small batches, as some kernels do.

    python -m tests.e2e.skipping_layer serve ...

Not part of the server.
"""

import sys
from collections.abc import Callable

import torch
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from routed_experts.server.cli.main import main

MOST_TOKENS = 7
_set_capture_fn = BaseRouter.set_capture_fn


def _set_for_small_batches(router: BaseRouter, capture: Callable[[torch.Tensor], None]) -> None:
    def capture_small(ids: torch.Tensor) -> None:
        if len(ids) <= MOST_TOKENS:
            capture(ids)

    _set_capture_fn(router, capture_small)


# At import, because the workers are processes of their own that import this module again.
BaseRouter.set_capture_fn = _set_for_small_batches

if __name__ == "__main__":
    sys.exit(main())
