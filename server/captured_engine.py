"""The engine of a server that captures, and what its rows mean."""

from dataclasses import dataclass
from typing import Any

from routed_experts.protocol.models import CaptureInfo, RoutedExpertsInfo
from routed_experts.server.row_feeds import RowFeeds
from routed_experts.server.vllm_api import VLLM_VERSION, AsyncLLM

_BYTES_PER_ID = 2


@dataclass(frozen=True)
class CapturedEngine:
    """A server without capture has none."""

    engine: AsyncLLM
    feeds: RowFeeds
    model: str
    num_layers: int
    top_k: int
    num_experts: int

    @classmethod
    async def start(cls, engine: AsyncLLM, model: str) -> "CapturedEngine":
        """Starts to take rows off the engine's outputs, and asks its workers what they mean."""
        worker = await _ask_worker(engine)
        feeds = RowFeeds.install(engine.output_processor)
        return cls(engine, feeds, model, worker["num_layers"], worker["top_k"], worker["num_experts"])

    @property
    def shape(self) -> tuple[int, int]:
        """(L, K)"""
        return self.num_layers, self.top_k

    async def info(self) -> RoutedExpertsInfo:
        """The answer of `GET /v1/routed_experts`, with the counts of this moment."""
        worker = await _ask_worker(self.engine)
        slots = worker["kv_slots"]
        return RoutedExpertsInfo(
            model=self.model,
            num_layers=self.num_layers,
            top_k=self.top_k,
            num_experts=self.num_experts,
            layer_ids=worker["layer_ids"],
            vllm_version=VLLM_VERSION,
            capture=CaptureInfo(
                runner=worker["runner"],
                device=worker["device"],
                kv_slots=slots,
                host_cache_bytes=slots * self.num_layers * self.top_k * _BYTES_PER_ID,
                device_bytes=worker["device_bytes"],
                pinned_bytes=worker["pinned_bytes"],
                tracked_requests=worker["tracked_requests"],
                open_feeds=len(self.feeds),
            ),
        )


async def _ask_worker(engine: AsyncLLM) -> dict[str, Any]:
    answers = await engine.collective_rpc("routed_experts_info")
    worker: dict[str, Any] = answers[0]
    return worker
