"""An engine in this process that offloads, in which every computation of a token has a number.

python -m tests.e2e.numbered MODEL

Two computations of one text give the same rows, so that a row of the wrong one is not seen. Here the last ids of two
layers are the number of the computation, and numbers are copied with the KV as it is offloaded and loaded: a row is
right only if the request's forward passes read KV of that number. Other layers are held against the oracle. Prints
what was counted.
"""

import json
import os
import random
import sys
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM reads it

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from routed_experts.capture.engine.v1 import V1Adapter
from tests.e2e.harness import OPTIONS, Oracle, prompt_of
from tests.e2e.offload_on_cpu import CopyingWorker, kv_transfer_config

BLOCK, BLOCKS = 32, 16
FIRST_MOE_LAYER = 1  # of the tiny model
_numbers = count(1)
_number = torch.zeros(BLOCKS, BLOCK, dtype=torch.int64)
_seen: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))


def post_forward(adapter: V1Adapter, scheduler_output: Any) -> None:
    """Numbers a step's computations, and remembers what each request's forward pass read."""
    _post_forward(adapter, scheduler_output)
    if adapter._pending is None:
        return
    step = adapter._pending()
    numbers = np.fromiter(_numbers, dtype=np.int64, count=len(step.slots))
    step.rows[:, 0, -1], step.rows[:, 1, -1] = numbers & 0xFF, numbers >> 8
    _number.reshape(-1)[torch.from_numpy(step.slots)] = torch.from_numpy(numbers)
    adapter._pending = lambda: step
    batch = adapter._runner.input_batch
    for index, request_id in enumerate(batch.req_ids):
        end = int(batch.num_computed_tokens_cpu[index]) + scheduler_output.num_scheduled_tokens[request_id]
        blocks = batch.block_table[0].block_table.np[index, : -(-end // BLOCK)]
        for position, number in enumerate(_number[torch.from_numpy(blocks).long()].reshape(-1)[:end].tolist()):
            _seen[request_id][position].add(number)


_post_forward = V1Adapter.post_forward


def worker() -> CopyingWorker:
    found = get_kv_transfer_group().connector_worker.worker
    assert isinstance(found, CopyingWorker)
    return found


def check(tokens: list[int], rows: np.ndarray, request_id: str, oracle: Oracle) -> int:
    """How many rows are of a computation that the request did not read, or not the oracle's."""
    (seen,) = (seen for known, seen in _seen.items() if known.rpartition("-")[0] == request_id)
    assert len(rows) == len(tokens) - 1
    rows = rows[:, FIRST_MOE_LAYER:].astype(np.int64)
    numbers = rows[:, 0, -1] | rows[:, 1, -1] << 8
    is_own = np.array([number in seen[position] for position, number in enumerate(numbers.tolist())])
    wrong = {at.position for at in oracle.wrong(rows, tokens[:-1]) if at.layer > 1}
    return len(wrong | set(np.flatnonzero(~is_own).tolist()))


def main(model: str) -> dict[str, int]:
    V1Adapter.post_forward = post_forward  # type: ignore[method-assign]
    sizes = {"num_gpu_blocks_override": BLOCKS, "block_size": BLOCK, "max_model_len": 12 * BLOCK}
    sizes |= {"max_num_seqs": 6, "max_num_batched_tokens": 64, "kv_transfer_config": kv_transfer_config(3 << 20)}
    llm = LLM(model, enable_return_routed_experts=True, disable_log_stats=True, **{**OPTIONS, **sizes})
    worker().tensors.append(_number)
    oracle, dice = Oracle(Path(model)), random.Random(0)
    stems = [prompt_of(200, seed) for seed in range(5)]
    counts = {"rows": 0, "wrong": 0}
    for turn in range(6):
        prompts, params = [], []
        for _ in range(8):
            prompts.append({"prompt_token_ids": [*dice.choice(stems)[: dice.randrange(20, 200)], 40 + turn]})
            params.append(SamplingParams(max_tokens=dice.randrange(1, 60), temperature=0, ignore_eos=True))
        for output in llm.generate(prompts, params, use_tqdm=False):
            (choice,) = output.outputs
            tokens = [*output.prompt_token_ids, *choice.token_ids]
            counts["rows"] += len(choice.routed_experts)
            assert choice.routed_experts.dtype == np.uint8, "some rows are not known"
            counts["wrong"] += check(tokens, choice.routed_experts, output.request_id, oracle)
        if turn % 2:
            llm.reset_prefix_cache(reset_connector=turn == 3)
    return counts | {"stored": worker().num_stored, "loaded": worker().num_loaded}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
