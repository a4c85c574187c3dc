"""What runs in the engine's processes: rows from the routers' choices to the engine's outputs.

The modules here know torch and numpy; `engine` alone knows vLLM. The classes that vLLM is given are named in this file,
so that naming them imports none of its modules.
"""

SCHEDULER = "routed_experts.capture.engine.scheduler.make_scheduler"
WORKERS = {
    "cpu": "routed_experts.capture.engine.worker.CpuCaptureWorker",
    "cuda": "routed_experts.capture.engine.worker.CudaCaptureWorker",
}
