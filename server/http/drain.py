"""What the API process does between the signal to stop and the end of vLLM's engine."""

import asyncio
import math
import time
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send

from routed_experts.server.http.vllm_http import RetryableRequestError, create_error_response
from routed_experts.server.vllm_api import AsyncLLM, InputStreamError, get_logger

logger = get_logger(__name__)

_RESERVE_S = 5.0
"""Of the time that `--shutdown-timeout` gives, what is kept for ending what did not finish and for the engine's end."""
_ERROR_S = 2.0
"""For sending errors. Connections of clients that do not read are cut after it."""
_POLL_S = 0.05
_HEALTH = ("/health", "/ping")
STOPPING = "The server is stopping: send the request again, to another instance or once it has started again."


class Drain:
    """Lets requests under way finish before vLLM stops its engine, and refuses new ones meanwhile.

    vLLM stops the engine first. Requests that come later end with `finish_reason: "abort"`, and those that have not
    finished after `--shutdown-timeout` with 500 and tracebacks in the log. Until vLLM's API process waits for its
    requests.

    Attributes:
        under_way: requests that are being answered.
        until: when the server is to have stopped, on the monotonic clock; None until it is told to.
    """

    def __init__(self) -> None:
        self.under_way = 0
        self.until: float | None = None

    def guard(self, engine: AsyncLLM, state: State) -> None:
        """Puts the wait for requests before `engine.shutdown`. Call it in the event loop that answers them.

        vLLM's signal handlers call `shutdown` in a thread; elsewhere it is called when there is nothing to wait for.
        """
        loop, shutdown = asyncio.get_running_loop(), engine.shutdown

        def shutdown_after_requests(timeout: float | None = None) -> None:
            server = getattr(state, "server", None)
            if self.until is None and server is not None and loop.is_running() and not _in_event_loop():
                try:
                    asyncio.run_coroutine_threadsafe(self._run(engine, server, timeout or 0), loop).result()
                except Exception:
                    logger.exception("Stopping: requests under way could not be waited for.")
                if self.until is not None:
                    timeout = timeout and max(self.until - time.monotonic(), 1.0)
            shutdown(timeout=timeout)

        engine.shutdown = shutdown_after_requests

    async def _run(self, engine: AsyncLLM, server: Any, timeout: float) -> None:
        """Returns when no request is under way, at the latest about when `timeout`, in seconds, is over."""
        begun, limit = time.monotonic(), timeout - min(_RESERVE_S, timeout / 5)
        self.until = begun + timeout
        if self.under_way:
            logger.info("Stopping: %d requests have %.0f s to finish; new ones get 503.", self.under_way, limit)
        if not await self._finished(begun + limit):
            logger.warning("Stopping: %d requests did not finish in %.0f s and end with 503.", self.under_way, limit)
            await self._end_requests(engine, server)
        if (handler := engine.output_handler) is not None:
            handler.cancel()  # or it logs a traceback if vLLM, which cancels it last, has closed its sockets

    async def _end_requests(self, engine: AsyncLLM, server: Any) -> None:
        ended = InputStreamError(RetryableRequestError(STOPPING))  # which vLLM raises as the error in it
        deadline = time.monotonic() + _ERROR_S
        while time.monotonic() < deadline:  # again, as a request may be on its way to the engine
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

    def refusal(self) -> Response:
        """What a request gets that comes while the server stops."""
        assert self.until is not None
        error = create_error_response(RetryableRequestError(STOPPING))
        seconds = max(math.ceil(self.until - time.monotonic()), 1)
        headers = {"Retry-After": str(seconds), "Connection": "close"}
        return JSONResponse(error.model_dump(), HTTPStatus.SERVICE_UNAVAILABLE, headers)


class DrainMiddleware:
    """Counts requests, and refuses new ones once the server stops. What only reads, such as `/metrics`, is answered."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        drain = self._drain
        if drain.until is not None and not _only_reads(scope):
            await drain.refusal()(scope, receive, send)
            return
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        drain.under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            drain.under_way -= 1


def _only_reads(scope: Scope) -> bool:
    if scope["type"] == "lifespan":
        return True
    path = scope["path"].removeprefix(scope.get("root_path", ""))  # a proxy may or may not strip --root-path
    return scope.get("method") in ("GET", "HEAD", "OPTIONS") and path not in _HEALTH


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
