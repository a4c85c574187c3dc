"""The endpoint plugin that vLLM loads into its API process."""

import asyncio
from argparse import Namespace

from fastapi import FastAPI
from starlette.datastructures import State

from routed_experts.capture import WORKERS
from routed_experts.server import PLUGIN_NAME
from routed_experts.server.captured_engine import CapturedEngine
from routed_experts.server.probe import probe
from routed_experts.server.routes import router
from routed_experts.server.vllm_api import AsyncLLM, EngineClient, get_logger
from routed_experts.server.vllm_serving import RoutedServingChat, RoutedServingCompletion, adopt

logger = get_logger(__name__)


class RoutedExpertsPlugin:
    """Puts our routes in the place of vLLM's, and our behaviour on its serving objects."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Runs before the port answers.

        Raises:
            ProbeError: the capture does not bring back what it should.
        """
        model = state.openai_serving_models.base_model_paths[0].name
        state.captured_engine = None
        if isinstance(engine_client, AsyncLLM) and captures(engine_client):
            state.captured_engine = await CapturedEngine.start(engine_client, model)
            await probe(state.captured_engine)
        adopt(state.openai_serving_completion, RoutedServingCompletion, state.captured_engine)
        adopt(state.openai_serving_chat, RoutedServingChat, state.captured_engine)
        state.announcement = asyncio.create_task(announce(state, args, model))  # kept: a task alone may be dropped


def captures(engine: AsyncLLM) -> bool:
    """Whether the engine's workers and scheduler are ours."""
    return engine.vllm_config.parallel_config.worker_cls in WORKERS.values()


async def announce(state: State, args: Namespace, model: str) -> None:
    """Logs where the server answers and a line to paste, once it does."""
    while not getattr(getattr(state, "server", None), "started", False):
        await asyncio.sleep(0.1)
    scheme = "https" if args.ssl_certfile else "http"
    base = f"{scheme}://{args.host or 'localhost'}:{args.port}"
    captured: CapturedEngine | None = state.captured_engine
    if captured is None:
        logger.info("Serving %s at %s without capturing routed experts.", model, base)
        return
    logger.info(
        "Serving %s at %s: %d MoE layers, top %d of %d experts. Try:\n\n"
        '  curl -N %s/v1/completions -H \'Content-Type: application/json\' -d \'{"model": "%s", "prompt": '
        '"Hello", "max_tokens": 8, "stream": true, "return_routed_experts": true}\'\n',
        model,
        base,
        captured.num_layers,
        captured.top_k,
        captured.num_experts,
        base,
        model,
    )
