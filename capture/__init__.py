"""What runs in the engine's processes: rows from the routers' choices to the engine's outputs.

A folder for each process: `worker` on each GPU, `scheduler` in the engine core, and `wire` for what
passes between processes. `engine` decides at start, and `seams` has what differs between versions
of vLLM. The classes that vLLM is given are named in this file, so that naming them imports none of
its modules.
"""

SCHEDULER = "routed_experts.capture.scheduler.scheduler.make_scheduler"
WORKERS = {
    "cpu": "routed_experts.capture.worker.worker.CpuCaptureWorker",
    "cuda": "routed_experts.capture.worker.worker.CudaCaptureWorker",
}
