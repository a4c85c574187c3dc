"""`routed-experts` on CPU with vLLM's asynchronous scheduling, which vLLM switches off there
without a word.

    python -m tests.e2e.async_on_cpu serve ... --async-scheduling

The asynchronous scheduler, two steps in flight, placeholders and the runner's outputs that are
materialised later are vLLM's own. What is put in here, when this module is imported, are only the
CUDA streams and events that they use, as objects that do nothing: on CPU all work is done when it
is called. Not part of the server.
"""

import sys
from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform

from routed_experts.server.cli.main import main


class _Done:
    """Stands for a CUDA stream or event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


_check = CpuPlatform.check_and_update_config


def _check_and_keep_async(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
    is_async = vllm_config.scheduler_config.async_scheduling
    _check(vllm_config)
    vllm_config.scheduler_config.async_scheduling = is_async


# At import, because the engine and the workers are processes of their own that import this module
# again.
CpuPlatform.check_and_update_config = classmethod(_check_and_keep_async)
torch.cuda.Event = _Done
torch.cuda.current_stream = _Done
torch.cuda.stream = nullcontext

if __name__ == "__main__":
    sys.exit(main())
