"""The endpoint plugin that vLLM loads into its API process."""

import asyncio
import json
import os
import shlex
from argparse import Namespace
from functools import partial
from math import ceil
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import State

from routed_experts.capture.engine.classes import is_capturing
from routed_experts.server import PLUGIN_NAME
from routed_experts.server.http import background
from routed_experts.server.http.answers.serving import (
    RoutedServing,
    RoutedServingChat,
    RoutedServingCompletion,
    RoutedServingTokens,
    rebind_class,
)
from routed_experts.server.http.drain import DrainMiddleware
from routed_experts.server.http.engine import CapturedEngine, ServerState
from routed_experts.server.http.errors import format_framework_errors
from routed_experts.server.http.metrics import show_buffers, show_store
from routed_experts.server.http.process.selftest import probe
from routed_experts.server.http.recording.recording import start_recording
from routed_experts.server.http.requests.defaults import (
    ModelLimits,
    check_defaults_of_model,
    encoded_default,
)
from routed_experts.server.http.requests.request import api_keys
from routed_experts.server.http.requests.routing_input import InputReader
from routed_experts.server.http.routes import unsupported_routes
from routed_experts.server.http.routes.routes import generate_router, router
from routed_experts.server.http.seams import replace_routes, scales_out
from routed_experts.server.outputs.array_store import ArrayStore, store_with
from routed_experts.server.outputs.folders import default_folder
from routed_experts.server.page import PAGE_PATH
from routed_experts.server.page.routes import page_router
from routed_experts.server.settings import Settings, asks_for_every_request
from routed_experts.server.vllm_api import (
    AsyncLLM,
    EngineClient,
    VllmConfig,
    get_logger,
    rank_of_process,
)

logger = get_logger(__name__)

STREAMS_PER_PROCESS = 256
"""With rows beside each token a stream takes 60 to 140 µs of an API process's CPU a token, and a
step of so many streams 20 to 25 ms on an H100 or H200 (docs/run.md)."""
_COUNT_S = 1.0
_SWEEP_S = 15.0
_SWEEP_BUCKET_S = 300.0  # which has whole hours to delete
ADDRESS_FILE_VARIABLE = "ROUTED_EXPERTS_ADDRESS_FILE"

SERVING_CLASSES: dict[str, type[RoutedServing]] = {
    "openai_serving_completion": RoutedServingCompletion,
    "openai_serving_chat": RoutedServingChat,
    "serving_tokens": RoutedServingTokens,
}
"""vLLM's serving objects by their names in the application's state, and what they become."""


class RoutedExpertsPlugin:
    """Puts our routes in the place of vLLM's, and our behaviour on its serving objects."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)
    _app: FastAPI

    def attach_router(self, app: FastAPI) -> None:
        self._app = app
        app.include_router(router)
        args = getattr(app.state, "args", None)
        if scales_out(args):
            app.include_router(generate_router)
        if Settings.of(getattr(args, "additional_config", None), args).routed_experts_page:
            app.include_router(page_router)
        unsupported_routes.attach(app)
        replace_routes(app)
        app.state.routed_experts = ours = ServerState(has_key=bool(api_keys(args or Namespace())))
        app.add_middleware(DrainMiddleware, drain=ours.drain)
        format_framework_errors(app)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Runs before the server listens. Raises if the self-test fails."""
        ours: ServerState = state.routed_experts
        model = state.openai_serving_models.base_model_paths[0].name
        if isinstance(engine_client, AsyncLLM) and is_capturing(
            engine_client.vllm_config.parallel_config.worker_cls
        ):
            ours.captured = await CapturedEngine.start(engine_client, model)
            background.repeat(
                "Counting open buffers", _COUNT_S, partial(show_buffers, ours.captured.buffers)
            )
        for name, cls in SERVING_CLASSES.items():
            if (serving := getattr(state, name, None)) is not None:
                rebind_class(serving, cls, ours)
        # here, as other plugins' routes have been attached
        unsupported_routes.refuse_on_other_routes(self._app)
        if ours.captured is not None:
            await self._test_and_set(ours, ours.captured, args, model)
        if isinstance(engine_client, AsyncLLM):
            ours.drain.guard(engine_client, state)
        background.start("Telling the address", announce(state, args, model))

    async def _test_and_set(
        self, ours: ServerState, captured: CapturedEngine, args: Namespace, model: str
    ) -> None:
        """Tests the server before its settings apply: defaults of requests would change the
        requests of the test."""
        config = captured.engine.vllm_config
        settings = Settings.of(config.additional_config, args)
        limits = ModelLimits(captured.num_experts, config.model_config.max_model_len)
        check_defaults_of_model(settings.routed_experts_default, limits)
        reader = InputReader(captured, ours.store, ours.input_memory)
        input_default = encoded_default(settings.input_default, reader)
        default = default_folder(args.uds or args.port)
        ours.store = store_with(settings, default)
        if ours.store.folder != default:
            ours.store.open()
        await probe(self._app, captured, model)
        ours.settings = settings
        captured.info.defaults = settings.routed_experts_default
        captured.buffers.default_input = input_default
        ours.generate_returns_rows = asks_for_every_request(config)
        ours.input_memory.max_bytes = settings.routed_experts_input_bytes
        seconds = min(
            max(ours.store.lifetime_s / 4, 1), _SWEEP_S if ours.store.folder else _SWEEP_BUCKET_S
        )
        background.repeat("Deleting expired arrays", seconds, partial(sweep, ours.store))
        # before the drain, which is to come first at the end
        if settings.routed_experts_record is not None:
            start_recording(captured, settings.routed_experts_record, settings)


async def sweep(store: ArrayStore) -> None:
    """Deletes expired arrays even if no new ones need the space."""
    show_store(await store.reader.run(store.sweep))


async def announce(state: State, args: Namespace, model: str) -> None:
    """Logs the page's address and a curl command once the server listens."""
    while not getattr(getattr(state, "server", None), "started", False):
        await asyncio.sleep(0.1)
    captured = state.routed_experts.captured
    base = address(args)
    if not args.uds:
        note_address(base)
    if captured is None:
        logger.info("Serving %s at %s without capturing routed experts.", model, args.uds or base)
        return
    shape = (*captured.shape, captured.num_experts)
    has_page = state.routed_experts.settings.routed_experts_page
    what = what_to_do(args, base, model, has_page) + processes_to_add(captured.engine.vllm_config)
    logger.info("Serving %s: %d MoE layers, top %d of %d experts.\n%s", model, *shape, what)


def note_address(base: str) -> None:
    """Writes the server's address into the file that `ADDRESS_FILE_VARIABLE` names, for a
    container's health check."""
    if not (file := os.environ.get(ADDRESS_FILE_VARIABLE)):
        return
    try:
        Path(file).write_text(base)
    except OSError as error:
        logger.warning("The server's address cannot be written for health checks: %s", error)


def address(args: Namespace) -> str:
    """Where a browser on this machine finds the server; with `--uds`, a client of that socket."""
    scheme = "https" if args.ssl_certfile else "http"
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else "localhost"
    listens = "localhost" if args.uds else f"{f'[{host}]' if ':' in host else host}:{args.port}"
    return f"{scheme}://{listens}{(args.root_path or '').rstrip('/')}"


def processes_to_add(config: VllmConfig) -> str:
    """A line if the requests that may run at once are more than the API processes stream without
    being the limit."""
    parallel = config.parallel_config
    # Behind a load balancer of its own, a server has the engines of this host only.
    engines = (
        parallel.data_parallel_size_local
        if parallel.local_engines_only
        else parallel.data_parallel_size
    )
    at_once = config.scheduler_config.max_num_seqs * engines
    _, processes = rank_of_process(config)
    needed = ceil(at_once / STREAMS_PER_PROCESS)
    if needed <= processes:
        return ""
    return (
        f"\n  note   {at_once} requests may run at once; streams with routed experts need an API process for every "
        f"{STREAMS_PER_PROCESS}: --api-server-count {needed}"
    )


def what_to_do(args: Namespace, base: str, model: str, has_page: bool) -> str:
    """The page's address, and a curl command."""
    body = {
        "model": model,
        "prompt": "Hello",
        "max_tokens": 8,
        "stream": True,
        "return_routed_experts": True,
    }
    if args.skip_tokenizer_init:  # the server takes no text, and returns none
        body |= {"prompt": [1, 2, 3], "return_token_ids": True}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if api_keys(args) else ""
    to = f"--unix-socket {shlex.quote(args.uds)} {base}" if args.uds else base
    curl = f"curl -N {to}/v1/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
    # no browser opens a socket
    open_page = f"  open   {base}{PAGE_PATH}\n" if has_page and not args.uds else ""
    return f"{open_page}  paste  {curl}"
