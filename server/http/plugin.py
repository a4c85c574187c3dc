"""The endpoint plugin that vLLM loads into its API process."""

import asyncio
import json
import os
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import State

from routed_experts.capture.engine.classes import is_capturing
from routed_experts.capture.rows import WEIGHTS_KEY
from routed_experts.capture.seams.http import replace_routes, scales_out
from routed_experts.protocol.codec import CodecError, resolve_dtype
from routed_experts.protocol.models import WEIGHTS, FieldError, check_defaults
from routed_experts.server import LISTENS, MAX_RESPONSE_BYTES, PLUGIN_NAME
from routed_experts.server.http import unsupported_routes
from routed_experts.server.http.drain import Drain, DrainMiddleware
from routed_experts.server.http.engine import CapturedEngine
from routed_experts.server.http.metrics import show_store, watch_buffers
from routed_experts.server.http.recording import start_recording
from routed_experts.server.http.routes import generate_router, router
from routed_experts.server.http.selftest import probe
from routed_experts.server.http.serving import (
    RoutedServing,
    RoutedServingChat,
    RoutedServingCompletion,
    RoutedServingTokens,
    rebind_class,
)
from routed_experts.server.outputs.array_store import ArrayStore, store_with
from routed_experts.server.outputs.arrays import asks_for_every_request
from routed_experts.server.outputs.folders import default_folder, remove_unused
from routed_experts.server.page import PAGE_PATH
from routed_experts.server.page.routes import page_router, wants_key
from routed_experts.server.vllm_api import AsyncLLM, EngineClient, get_logger, rank_of_process

logger = get_logger(__name__)

_SWEEP_S = 15.0
ADDRESS_FILE_VARIABLE = "ROUTED_EXPERTS_ADDRESS_FILE"

REBOUND_CLASSES: dict[str, type[RoutedServing]] = {
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
        if getattr(args, "routed_experts_page", True):
            app.include_router(page_router)
        unsupported_routes.attach(app)
        replace_routes(app)
        app.state.drain = Drain()
        app.add_middleware(DrainMiddleware, drain=app.state.drain)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Runs before the server listens. Fails if the capture does not bring back what it should."""
        model = state.openai_serving_models.base_model_paths[0].name
        captured: CapturedEngine | None = None
        if isinstance(engine_client, AsyncLLM) and captures(engine_client):
            captured = await CapturedEngine.start(engine_client, model)
            # Kept in the state: asyncio may drop a task that nothing refers to.
            state.buffers_watch = asyncio.create_task(watch_buffers(captured.buffers))
        state.captured_engine = captured
        defaults = defaults_of(args, captured)
        rebind_classes(state, captured, MAX_RESPONSE_BYTES)
        unsupported_routes.refuse_on_other_routes(self._app)  # here, as other plugins' routes have been attached
        if captured is not None:
            await probe(self._app, captured, args, model)  # before server-wide defaults apply
        state.routed_experts_defaults = defaults
        state.array_store = store = store_of(args, captured) if captured is not None else None
        state.vllm_flag_enabled = captured is not None and asks_for_every_request(captured.engine.vllm_config)
        max_bytes = getattr(args, "routed_experts_max_response_bytes", MAX_RESPONSE_BYTES)
        rebind_classes(state, captured, max_bytes, store)
        if store is not None:
            state.store_sweep = asyncio.create_task(sweep_forever(store))
        if captured is not None and getattr(args, "routed_experts_record", None) is not None:
            start_recording(captured, args)  # before the drain, which is to come first at the end
        state.drain.listens = getattr(args, LISTENS, None)
        if isinstance(engine_client, AsyncLLM):
            state.drain.guard(engine_client, state)
        state.announcement = asyncio.create_task(announce(state, args, model))


def rebind_classes(
    state: State, captured: CapturedEngine | None, max_bytes: int, store: ArrayStore | None = None
) -> None:
    """Puts our behavior on vLLM's serving objects; safe to repeat."""
    for name, cls in REBOUND_CLASSES.items():
        if (serving := getattr(state, name, None)) is not None:
            rebind_class(serving, cls, captured, max_bytes, store)


def additional_config(captured: CapturedEngine | None) -> dict[str, Any]:
    given = captured.engine.vllm_config.additional_config if captured is not None else None
    return given if isinstance(given, dict) else {}


def store_of(args: Namespace, captured: CapturedEngine) -> ArrayStore:
    """The store of arrays that responses refer to, as flags of `routed-experts serve` say, or, where vLLM's own command
    serves, the keys of `--additional-config` that programs have. Raises `StoreError`."""
    settings = vars(args) if hasattr(args, "routed_experts_store") else additional_config(captured)
    default = default_folder(str(args.port))
    store = store_with(settings, default, *rank_of_process(captured.engine.vllm_config))
    if store.folder == default:
        remove_unused(default)  # of a process that was killed
    else:
        store.open()
    return store


async def sweep_forever(store: ArrayStore) -> None:
    """Deletes expired arrays while no new ones need their room."""
    while True:
        await asyncio.sleep(min(max(store.lifetime_s / 4, 1), _SWEEP_S))
        show_store(await run_in_threadpool(store.sweep))


def defaults_of(args: Namespace, captured: CapturedEngine | None) -> dict[str, Any]:
    """The server-wide defaults of routing fields; none where nothing is captured.

    They come with `--routed-experts-default`, or, where vLLM's own command serves, as `routed_experts_default` of
    `--additional-config`. A value that no request to this model could have is a `FieldError`.
    """
    if captured is None:
        return {}
    defaults: dict[str, Any] = getattr(args, "routed_experts_default", None) or {}
    if not defaults:
        defaults = check_defaults(additional_config(captured).get("routed_experts_default", {}))
    try:
        resolve_dtype(defaults.get("routed_experts_dtype", "auto"), captured.num_experts)
    except CodecError as error:
        raise FieldError("routed_experts_dtype", f"--routed-experts-default: {error}") from None
    if defaults.get(WEIGHTS) and not captured.info.weights:  # else requests that do not name them would be refused
        raise FieldError(WEIGHTS, f"routed_experts_default: {WEIGHTS} needs {WEIGHTS_KEY} in --additional-config")
    return defaults


def captures(engine: AsyncLLM) -> bool:
    """Whether the engine's workers and scheduler are ours."""
    return is_capturing(engine.vllm_config.parallel_config.worker_cls)


async def announce(state: State, args: Namespace, model: str) -> None:
    """Logs the page's address and a curl command once the server listens."""
    while not getattr(getattr(state, "server", None), "started", False):
        await asyncio.sleep(0.1)
    captured: CapturedEngine | None = state.captured_engine
    base = address(args)
    if not args.uds:
        note_address(base)
    if captured is None:
        logger.info("Serving %s at %s without capturing routed experts.", model, args.uds or base)
        return
    shape = (*captured.shape, captured.num_experts)
    logger.info("Serving %s: %d MoE layers, top %d of %d experts.\n%s", model, *shape, what_to_do(args, base, model))


def note_address(base: str) -> None:
    """Writes the server's address into the file that `ADDRESS_FILE_VARIABLE` names, for a container's health check."""
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


def what_to_do(args: Namespace, base: str, model: str) -> str:
    """What to open and what to paste."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 8, "stream": True, "return_routed_experts": True}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if wants_key(args) else ""
    to = f"--unix-socket {shlex.quote(args.uds)} {base}" if args.uds else base
    curl = f"curl -N {to}/v1/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
    has_page = getattr(args, "routed_experts_page", True) and not args.uds  # which no browser can open
    open_page = f"  open   {base}{PAGE_PATH}\n" if has_page else ""
    return f"{open_page}  paste  {curl}"
