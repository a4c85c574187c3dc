"""Outputs that are materialised later, and how much of a prompt comes with others."""

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.output_queue import OutputQueue
from routed_experts.capture.scheduler.pending_rows import PendingRows
from routed_experts.capture.scheduler.request_rows import RequestRows
from routed_experts.capture.wire.message import PROMPT_ROWS, OptIn
from routed_experts.capture.wire.transport import detach
from routed_experts.capture.worker.device_cache import DeviceCache
from routed_experts.capture.worker.pipeline import Pipeline
from routed_experts.capture.worker.v1 import OutputWithRows

KV = KVConnectorOutput(finished_sending={"r"})


class Later(AsyncModelRunnerOutput):
    """Stands for the V1 runner's own, which needs CUDA."""

    def get_output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(req_ids=["r"], req_id_to_index={"r": 0})

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        return KV


def test_an_output_brings_its_rows_when_it_is_materialised() -> None:
    cache = DeviceCache(num_layers=2, max_tokens=4, top_k=2, device=torch.device("cpu"))
    cache.ids.fill_(3)
    output = OutputWithRows(Later(), Pipeline(cache, 1).submit(torch.arange(4), np.array([0, 2])))
    cache.ids.fill_(7)  # by the next step
    assert detach(output.get_output()).rows.tolist() == [[[3, 3], [3, 3]]] * 2
    assert output.get_kv_connector_output() is KV


def test_tokens_of_others_come_with_8_mib_of_a_prompt_at_most() -> None:
    queue, message = OutputQueue(), EngineCoreOutputs(outputs=[EngineCoreOutput("other", [1])])
    rows = np.zeros((20 << 10, 8, 64), dtype=np.int16)  # 20 MiB
    cache = HostCache(num_blocks=1, block_size=1)
    cache.write(np.zeros(1, dtype=np.int64), rows[:1])
    pending = PendingRows(cache, 0, [rows], np.empty(0, dtype=np.int64), lambda *_: None)
    opt_in = OptIn(0, bytes(16), shared=False)
    long = RequestRows(
        "long", 0, opt_in, len(rows), weights_epoch=0, rows_at_end=False, next_row=len(rows) - 1
    )
    queue.send_prompt(long, opt_in.prompt_id, pending)
    queue.fill({0: message})
    (part,) = (output for output in message.outputs if output.stop_reason == PROMPT_ROWS)
    assert part.routed_experts.rows.nbytes == 8 << 20
