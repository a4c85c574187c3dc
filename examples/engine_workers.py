"""Routing beside calls of a program's own into vLLM's workers, in engines one after the other
without processes.

python examples/engine_workers.py Qwen/Qwen3-30B-A3B
"""

import json
import os
import sys
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

Answer = tuple[list[int], np.ndarray]
"""The tokens of a sequence, and the experts of all but the last."""


class WorkerExtension:
    """What vLLM adds to its workers."""

    model_runner: Any

    def num_weights(self) -> int:
        return sum(parameter.numel() for parameter in self.model_runner.get_model().parameters())


def routers(worker: Any) -> dict[str, torch.Size]:
    """Runs in each worker."""
    weights = worker.model_runner.get_model().named_parameters()
    return {name: weight.shape for name, weight in weights if name.endswith("gate.weight")}


def main(model: str, **options: Any) -> list[Answer]:
    answers: list[Answer] = []
    for prompt in ("Which experts?", "And which in another engine?"):
        extension = f"{os.path.splitext(os.path.basename(__file__))[0]}.WorkerExtension"
        llm = LLM(
            model, enable_return_routed_experts=True, worker_extension_cls=extension, **options
        )
        print("weights:", llm.collective_rpc("num_weights"))
        print("routers:", len(llm.collective_rpc(routers)[0]))
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=12), use_tqdm=False)
        (choice,) = output.outputs
        answers.append(
            ([*(output.prompt_token_ids or ()), *choice.token_ids], choice.routed_experts)
        )
        print(len(answers[-1][0]), "tokens,", answers[-1][1].shape, answers[-1][1].dtype)
        del llm
    return answers


if __name__ == "__main__":
    answers = main(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
