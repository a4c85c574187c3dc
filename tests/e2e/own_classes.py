"""A program whose worker, worker extension and scheduler are its own, with the capture mixed in; see `examples`."""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class OwnWorker(Worker):
    """Counts its steps."""

    steps = 0

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().execute_model(*args, **kwargs)


class Extension:
    """Says how many."""

    steps: int

    def how_many(self) -> int:
        return self.steps


class OwnScheduler(Scheduler):
    """Counts them too."""

    steps = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        OwnScheduler.steps += 1
        return super().schedule(*args, **kwargs)


if __name__ == "__main__":
    import own_classes  # what the engine imports: not this module, which has another name

    llm = LLM(
        sys.argv[1],
        enable_return_routed_experts=True,
        worker_cls="own_classes.OwnWorker",
        worker_extension_cls="own_classes.Extension",
        scheduler_cls="own_classes.OwnScheduler",
        async_scheduling=False,
        **json.loads(sys.argv[2]),
    )
    (output,) = llm.generate("Whose classes?", SamplingParams(max_tokens=12), use_tqdm=False)
    (choice,) = output.outputs
    assert llm.collective_rpc("how_many")[0] >= 12
    assert own_classes.OwnScheduler.steps >= 12
    answers = [([*(output.prompt_token_ids or ()), *choice.token_ids], choice.routed_experts)]
