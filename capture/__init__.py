"""What runs inside the engine's processes. Only `capture.engine` knows vLLM.

The classes that vLLM is given are named here, so that naming them imports none of its modules.
"""

SCHEDULER = "routed_experts.capture.engine.scheduler.make_scheduler"
WORKERS = {
    "cpu": "routed_experts.capture.engine.worker.CpuCaptureWorker",
    "cuda": "routed_experts.capture.engine.worker.CudaCaptureWorker",
}
