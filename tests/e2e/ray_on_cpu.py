"""`routed-experts` with Ray as executor on a CPU.

    python -m tests.e2e.ray_on_cpu serve ... -tp 2 --distributed-executor-backend ray

vLLM's platform for CPUs does not say what Ray calls its devices, and that is all that it lacks. Here it says GPUs, of
which Ray is told that there are two. Not part of the server.
"""

import sys
from typing import Any

import ray
from vllm.platforms.cpu import CpuPlatform

from routed_experts.server.cli.main import main

_init = ray.init


def see_gpus() -> None:
    """Called in each of Ray's processes."""
    CpuPlatform.ray_device_key = "GPU"


def _init_with_gpus(**kwargs: Any) -> Any:
    runtime_env = {"worker_process_setup_hook": "tests.e2e.ray_on_cpu.see_gpus"}
    return _init(**{**kwargs, "num_cpus": 1, "num_gpus": 2, "runtime_env": runtime_env})


# At import, because the engine is a process of its own that imports this module again.
see_gpus()
ray.init = _init_with_gpus

if __name__ == "__main__":
    sys.exit(main())
