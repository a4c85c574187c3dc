"""The engine of a server that captures, the dimensions of its rows, and the state of the server
around it."""

from asyncio import gather
from base64 import b64encode
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np

from routed_experts.capture.wire.rows import row_shape
from routed_experts.protocol.batch import has_dense_layers
from routed_experts.protocol.models import (
    CaptureInfo,
    ExpertProfile,
    ProfileArray,
    RoutedExpertsInfo,
)
from routed_experts.protocol.version import VERSION
from routed_experts.server.http.drain import Drain
from routed_experts.server.http.input_memory import InputMemory
from routed_experts.server.http.metrics import EngineMetrics, label_with
from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.outputs.processor import RowBuffers
from routed_experts.server.settings import INPUT_BYTES, Settings
from routed_experts.server.vllm_api import VLLM_VERSION, AsyncLLM

_BYTES_PER_WORD = 2


@dataclass(frozen=True)
class CapturedEngine:
    """The engine, its row buffers and the dimensions of its rows. A server without capture has
    none."""

    engine: AsyncLLM
    buffers: RowBuffers
    info: RoutedExpertsInfo  # the response of `GET /v1/routed_experts`

    @classmethod
    async def start(cls, engine: AsyncLLM, model: str) -> "CapturedEngine":
        """Asks the workers for the dimensions of rows, and installs the row buffers."""
        info = await _info(engine, model)
        buffers = RowBuffers.install(engine.output_processor)
        if buffers.every_request is not None:
            buffers.every_request.is_on = False  # over HTTP, each request opts in
        label_with(model)
        buffers.on_stats = EngineMetrics(model, info.layer_ids, info.num_experts).update
        return cls(engine, buffers, info)

    @property
    def num_experts(self) -> int:
        return self.info.num_experts

    @property
    def shape(self) -> tuple[int, int]:
        """(L, K)"""
        return self.info.num_layers, self.info.top_k

    def row_shape(self, with_weights: bool, with_steps: bool) -> tuple[int, int]:
        """Shape of the rows of a request: (L, K), higher if it asks for weights or steps."""
        return row_shape(*self.shape, with_weights, with_steps)

    @property
    def decoder_layers(self) -> tuple[list[int], int] | None:
        """The decoder layer of each of the L layers, and the number of decoder layers; None if the
        L layers are all decoder layers."""
        layer_ids = self.info.layer_ids
        num_layers = self.info.num_hidden_layers
        return (layer_ids, num_layers) if has_dense_layers(layer_ids, num_layers) else None


async def expert_profile(captured: CapturedEngine) -> ExpertProfile:
    """The sum over the workers of all engines. Of tensor-parallel ranks and pipeline stages, those
    that do not give the model's output have counted nothing."""
    workers = await _ask_workers(captured.engine, "routed_experts_profile")
    shape = [captured.info.num_layers, captured.info.num_experts]

    def total(name: str, dtype: Literal["int64", "float64"]) -> ProfileArray:
        summed = np.sum([np.frombuffer(worker[name], dtype) for worker in workers], axis=0)
        return ProfileArray(data=b64encode(summed).decode(), shape=shape, dtype=dtype)

    return ExpertProfile(
        counts=total("counts", "int64"),
        weights=total("weights", "float64") if captured.info.weights else None,
        tokens=sum(worker["tokens"] for worker in workers),
        since=min(worker["since"] for worker in workers),
    )


async def _ask_workers(engine: AsyncLLM, method: str) -> list[Any]:
    """The answers of all workers of all data-parallel ranks; `AsyncLLM` itself returns those of the
    first rank."""
    core = engine.engine_core
    ranks = getattr(core, "core_engines", [])
    if len(ranks) < 2:
        answers: list[Any] = await engine.collective_rpc(method)
        return answers
    call = ("collective_rpc", method, None, (), None)
    of_ranks = await gather(*[core._call_utility_async(*call, engine=rank) for rank in ranks])
    return [answer for of_rank in of_ranks for answer in of_rank]


async def _info(engine: AsyncLLM, model: str) -> RoutedExpertsInfo:
    # has the fields of both models by their names
    worker, *_ = await engine.collective_rpc("routed_experts_info")
    row_bytes = (
        prod(row_shape(worker["num_layers"], worker["top_k"], worker["weights"])) * _BYTES_PER_WORD
    )
    capture = CaptureInfo(**worker, host_cache_bytes=worker["kv_slots"] * row_bytes)
    of_model = {
        "model": model,
        "num_hidden_layers": engine.model_config.get_total_num_hidden_layers(),
        "model_dtype": str(engine.model_config.dtype).removeprefix("torch."),
    }
    return RoutedExpertsInfo(
        **worker, **of_model, version=VERSION, vllm_version=VLLM_VERSION, capture=capture
    )


@dataclass
class ServerState:
    """What this server has in the state of the application, as `routed_experts`."""

    # the defaults until the self-test has passed
    settings: Settings = field(default_factory=Settings)
    captured: CapturedEngine | None = None
    store: ArrayStore | None = None
    input_memory: InputMemory = field(default_factory=lambda: InputMemory(INPUT_BYTES))
    has_key: bool = False  # whether clients have to send a key
    generate_returns_rows: bool = False  # to all requests, as vLLM's own flag has it
    drain: Drain = field(default_factory=Drain)
