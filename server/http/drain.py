"""Stopping: finishes running requests before vLLM stops its engine."""

import asyncio
import math
import time
from http import HTTPStatus
from multiprocessing.connection import Connection
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.datastructures import State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routed_experts.server.http.vllm_http import RetryableRequestError, create_error_response
from routed_experts.server.vllm_api import AsyncLLM, InputStreamError, get_logger

logger = get_logger(__name__)

_RESERVE_S = 5.0
"""Part of `--shutdown-timeout` that is reserved for ending unfinished requests and stopping the engine."""
_ERROR_S = 2.0
"""Time for sending errors. After it, connections of clients that do not read are aborted."""
_POLL_S = 0.05
_HEALTH = ("/health", "/ping")
STOPPING = "The server is stopping: retry on another instance, or after the restart."


class Drain:
    """Finishes running requests before vLLM stops its engine, and rejects new ones meanwhile.

    vLLM stops the engine first: later requests end with `finish_reason: "abort"`, and unfinished ones with 500 and
    tracebacks in the log. Can go when vLLM's API process waits for its requests.
    """

    def __init__(self) -> None:
        self.under_way = 0  # running requests
        self.until: float | None = None  # deadline on the monotonic clock, while the server is stopping
        # What to close when this process no longer listens: the port of several stays open until all have.
        self.listens: Connection | None = None

    def guard(self, engine: AsyncLLM, state: State) -> None:
        """Makes `engine.shutdown` wait for requests. Call it in the event loop of the server.

        vLLM's signal handlers call `shutdown` in a thread. Other callers have no requests to wait for.
        """
        loop, shutdown = asyncio.get_running_loop(), engine.shutdown

        def shutdown_after_requests(timeout: float | None = None) -> None:
            server = getattr(state, "server", None)
            if self.until is None and server is not None and loop.is_running() and not _in_event_loop():
                try:
                    asyncio.run_coroutine_threadsafe(self._run(engine, server, timeout or 0), loop).result()
                except Exception:
                    logger.exception("Stopping: waiting for running requests failed.")
                if self.until is not None:
                    timeout = timeout and max(self.until - time.monotonic(), 1.0)
            shutdown(timeout=timeout)

        engine.shutdown = shutdown_after_requests

    async def _run(self, engine: AsyncLLM, server: Any, timeout: float) -> None:
        """Returns when no request is running, at the latest after about `timeout` seconds."""
        begun, limit = time.monotonic(), timeout - min(_RESERVE_S, timeout / 5)
        self.until = begun + timeout
        if self.under_way:
            logger.info("Stopping: %d requests have %.0f s to finish; new ones get 503.", self.under_way, limit)
        if not await self._finished(begun + limit):
            logger.warning("Stopping: %d requests did not finish in %.0f s and end with 503.", self.under_way, limit)
            await self._end_requests(engine, server)
        # A client that does not read the end of a response would hold the server for ever.
        server.config.timeout_graceful_shutdown = max(begun + limit - time.monotonic(), 1.0)
        if (handler := engine.output_handler) is not None:
            handler.cancel()  # vLLM cancels it last, and it logs a traceback when its sockets close before

    async def _end_requests(self, engine: AsyncLLM, server: Any) -> None:
        ended = InputStreamError(RetryableRequestError(STOPPING))  # vLLM raises the inner error
        deadline = time.monotonic() + _ERROR_S
        while time.monotonic() < deadline:  # repeated, because a request may be on its way to the engine
            engine.output_processor.propagate_error(ended)
            if await self._finished(time.monotonic() + _POLL_S):
                return
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await self._finished(time.monotonic() + 1)

    async def _finished(self, deadline: float) -> bool:
        while self.under_way:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def until_shutdown(self, receive: Receive) -> Receive:
        """`receive` of the server's lifespan, whose shutdown comes when the server has closed its sockets."""

        async def receive_and_tell() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self.listens is not None:
                self.listens.close()
            return message

        return receive_and_tell

    def refusal(self) -> Response:
        """The response to requests that arrive while the server stops."""
        assert self.until is not None
        error = create_error_response(RetryableRequestError(STOPPING))
        seconds = max(math.ceil(self.until - time.monotonic()), 1)
        headers = {"Retry-After": str(seconds), "Connection": "close"}
        return JSONResponse(error.model_dump(), HTTPStatus.SERVICE_UNAVAILABLE, headers)


class DrainMiddleware:
    """Counts running requests, and rejects new ones while the server stops. Reads such as `/metrics` still work."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        drain = self._drain
        if scope["type"] == "lifespan":
            await self._app(scope, drain.until_shutdown(receive), send)
            return
        if drain.until is not None and not _only_reads(scope):
            await drain.refusal()(scope, receive, send)
            return
        drain.under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            drain.under_way -= 1


def _only_reads(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))  # a proxy may or may not strip --root-path
    return scope.get("method") in ("GET", "HEAD", "OPTIONS") and path not in _HEALTH


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
