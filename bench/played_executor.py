"""An executor without a model, for vLLM's own server: tokens and rows are there when they are asked
for, after a pause as long as a forward pass. What is measured beside it is the API process, which
waits for nothing else."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from bench.http_server import PLAYED_SLOTS, PLAYED_STEP_MS
from routed_experts.capture.engine.classes import is_capturing
from routed_experts.capture.wire.rows import takes_input
from routed_experts.capture.wire.transport import TOLD_NOTHING, StepRows, Told, attach
from routed_experts.capture.worker.router_input.running import Model, RunningInputs
from routed_experts.protocol.codec import Rows
from routed_experts.protocol.routing_input import ONE_GROUP

_TOKEN = 7


class Player:
    """Plays the steps of a model, which it learns of from the scheduler's outputs alone."""

    def __init__(
        self,
        rows: Rows,
        block_size: int,
        is_captured: bool,
        inputs: RunningInputs | None = None,
    ) -> None:
        """`rows` [n, L, K] are repeated by position, so that the same prompt has the same rows each
        time, where no request gives its own."""
        self._rows, self._block_size, self._is_captured = rows, block_size, is_captured
        self._layer_ids = tuple(range(rows.shape[1]))  # all have experts
        self._inputs = inputs
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def play(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """A token for every request whose prompt is done, and rows of all tokens."""
        starts = self._follow(step)
        scheduled = step.num_scheduled_tokens
        ids = list(scheduled)
        output = ModelRunnerOutput(
            ids,
            {name: index for index, name in enumerate(ids)},
            [
                [_TOKEN] if starts[name] + scheduled[name] >= self._lengths[name] else []
                for name in ids
            ],
        )
        if ids and self._is_captured:
            attach(output, self._rows_of(scheduled, starts))
        return output

    def _follow(self, step: SchedulerOutput) -> dict[str, int]:
        """Learns of requests that begin, go on and end. Returns where each begins in this step."""
        if self._inputs is not None:
            self._inputs.update(step)
        for request_id in step.finished_req_ids:
            self._blocks.pop(request_id, None)
            self._lengths.pop(request_id, None)
        starts = {}
        for new in step.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self._blocks[new.req_id] = list(new.block_ids[0])
            self._lengths[new.req_id] = len(new.prompt_token_ids or ())
        cached = step.scheduled_cached_reqs
        for request_id, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            starts[request_id] = start
            if blocks is not None:
                self._blocks[request_id] += blocks[0]
        return starts

    def _rows_of(self, scheduled: dict[str, int], starts: dict[str, int]) -> StepRows:
        offsets = np.cumsum([0, *scheduled.values()], dtype=np.int64)
        if len(scheduled) == offsets[-1]:  # a token each: numpy is slow for few numbers
            positions = np.array([starts[name] for name in scheduled])
            slots = np.array([self._slot(name, starts[name]) for name in scheduled])
        else:
            positions = np.concatenate(
                [np.arange(count) + starts[name] for name, count in scheduled.items()]
            )
            slots = np.concatenate(
                [self._slots(name, starts[name], count) for name, count in scheduled.items()]
            )
        rows = self._rows[positions % len(self._rows)]
        told = self._put_given(rows, list(scheduled), offsets, starts)
        return StepRows(rows, slots, offsets, told=told, layer_ids=self._layer_ids)

    def _put_given(
        self, rows: Rows, ids: list[str], offsets: NDArray[np.int64], starts: dict[str, int]
    ) -> Told:
        """Puts the rows that requests give into those of a step."""
        if not self._inputs:
            return TOLD_NOTHING
        placed_rows = self._inputs.rows_of_batch(
            ids, offsets, np.array([starts[name] for name in ids])
        )
        for placed in placed_rows:
            rows[placed.first : placed.first + len(placed.rows)] = placed.rows
        return Told(num_rows=sum(len(placed.rows) for placed in placed_rows))

    def _slot(self, request_id: str, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return self._blocks[request_id][block] * self._block_size + offset

    def _slots(self, request_id: str, start: int, count: int) -> NDArray[np.int64]:
        positions = np.arange(start, start + count)
        blocks = np.array(self._blocks[request_id])
        return (
            blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        )


class PlayedExecutor(Executor):
    """For `--distributed-executor-backend`."""

    def _init_executor(self) -> None:
        config = self.model_config.hf_text_config
        self._num_layers, self._top_k = config.num_hidden_layers, config.num_experts_per_tok
        self._num_experts = config.num_experts
        self._block_size = self.cache_config.block_size
        self._step_s = float(os.environ[PLAYED_STEP_MS]) / 1000
        count = self.scheduler_config.max_num_batched_tokens
        scores = np.random.default_rng(0).random(
            (count, self._num_layers, self._num_experts), dtype=np.float32
        )
        rows = np.argpartition(scores, self._top_k, axis=2)[:, :, : self._top_k].astype(np.int16)
        self._takes_input = takes_input(self.vllm_config)
        inputs = None
        if self._takes_input:
            model = Model(self._num_layers, self._top_k, self._num_experts, ONE_GROUP)
            inputs = RunningInputs(model, slice(None))
        is_captured = is_capturing(self.parallel_config.worker_cls)
        self._player = Player(rows, self._block_size, is_captured, inputs)
        self._answers: dict[str, Callable[..., Any]] = {
            "get_kv_cache_spec": self._kv_cache_spec,
            "execute_model": self._play,
            "get_supported_kv_cache_layouts": lambda: ["NHD"],
            "determine_available_memory": lambda: (
                PLAYED_SLOTS // self._block_size * self._spec().page_size_bytes
            ),
            "get_supported_tasks": lambda: ("generate",),
            "compile_or_warm_up_model": lambda: CompilationTimes(0.0, 0.0),
            "routed_experts_info": self._info,
        }

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """What the one worker would say; None where nothing depends on it."""
        answer = self._answers.get(str(method), lambda *_: None)(*args)
        if not non_block:
            return [answer]
        future: Future[Any] = Future()
        future.set_result(answer)
        return [future]

    def check_health(self) -> None:
        """Nothing can fail."""

    def _play(self, step: SchedulerOutput) -> ModelRunnerOutput:
        ends = time.perf_counter() + self._step_s
        output = self._player.play(step)
        if step.kv_connector_metadata is not None:
            output.kv_connector_output = _transferred(step.kv_connector_metadata)
        if step.num_scheduled_tokens:  # others run no model
            time.sleep(max(ends - time.perf_counter(), 0))
        return output

    def _spec(self) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=self._block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
        )

    def _kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        return {"layer": self._spec()}

    def _info(self) -> dict[str, Any]:
        return {
            "num_layers": self._num_layers,
            "top_k": self._top_k,
            "num_experts": self._num_experts,
            "layer_ids": list(range(self._num_layers)),
            "sorted_by_weight": False,
            "weights": False,
            "weights_scale": [1.0] * self._num_layers,
            "weights_on_input": False,
            "runner": "v1",
            "device": "cpu",
            "input": self._takes_input,
            "groups": list(astuple(ONE_GROUP)),
            "kv_slots": PLAYED_SLOTS,
            "device_bytes": 0,
            "pinned_bytes": 0,
        }


def _transferred(metadata: Any) -> KVConnectorOutput:
    """What NIXL's worker says once all KV that a step asks for is there: here at the end of that
    step. The prefill instance need not keep it, as its rows left with the request's end."""
    assert isinstance(metadata, NixlConnectorMetadata)
    return KVConnectorOutput(
        finished_sending=set(metadata.reqs_to_send),
        finished_recving={
            request_id for request_id, load in metadata.reqs_to_recv.items() if load.awaiting_kvs
        },
    )
