"""The end of a server: running requests finish before vLLM stops its engine, and new ones get 503.

vLLM's own end waits for requests in the engine, and for those of the only API process. Meanwhile it
answers new requests with `finish_reason: "abort"`. Each of several API processes lets go of the
engine at once, and its running requests are cut off.
"""

import asyncio
import math
import threading
import time
from contextlib import ExitStack
from http import HTTPStatus

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send

from routed_experts.server.http.vllm_http import RetryableRequestError, create_error_response
from routed_experts.server.vllm_api import AsyncLLM, InputStreamError, get_logger

logger = get_logger(__name__)

_RESERVE_S = 5.0
"""Part of `--shutdown-timeout` for ending unfinished requests and stopping the engine."""
_POLL_S = 0.05
_HEALTH = ("/health", "/ping")
_REQUEST_END = "routed_experts.request_end"  # in the scope of a request
STOPPING = "The server is stopping: retry on another instance, or after the restart."


class Drain:
    """Counts running requests, and has the end of the engine wait for them."""

    def __init__(self) -> None:
        self.under_way = 0
        # deadline on the monotonic clock, once new requests are rejected
        self.until: float | None = None

    def guard(self, engine: AsyncLLM, state: State) -> None:
        """Makes `engine.shutdown` wait for requests. Call it in the event loop of the server.

        vLLM calls it in a thread on SIGTERM, and again in the event loop at the end.
        """
        loop = asyncio.get_running_loop()
        thread_of_loop = threading.current_thread()
        shutdown = engine.shutdown

        def end_requests() -> None:
            # vLLM raises the inner error in each of them: 503
            error = InputStreamError(RetryableRequestError(STOPPING))
            loop.call_soon_threadsafe(engine.output_processor.propagate_error, error)

        def shutdown_after_requests(timeout: float | None = None) -> None:
            if threading.current_thread() is not thread_of_loop and hasattr(state, "server"):
                # for clients that do not read the end of their responses
                state.server.config.timeout_graceful_shutdown = _RESERVE_S
                self.until = time.monotonic() + (timeout or 0)
                self._finish(timeout or 0)
                if self.under_way:
                    end_requests()
                    self._wait(time.monotonic() + 1)
                # vLLM does it last, and logs a traceback when its sockets close before
                if engine.output_handler is not None and not loop.is_closed():
                    loop.call_soon_threadsafe(engine.output_handler.cancel)
                timeout = timeout and max(self.until - time.monotonic(), 1)
            shutdown(timeout=timeout)

        engine.shutdown = shutdown_after_requests

    def _finish(self, timeout: float) -> None:
        """Waits for running requests, and leaves some of the time for what comes after."""
        limit = timeout - min(_RESERVE_S, timeout / 5)
        if self.under_way:
            logger.info(
                "Stopping: %d requests have %.0f s to finish; new ones get 503.",
                self.under_way,
                limit,
            )
        self._wait(time.monotonic() + limit)
        if self.under_way:
            logger.warning(
                "Stopping: %d requests did not finish in %.0f s and end with 503; a longer "
                "--shutdown-timeout gives them more.",
                self.under_way,
                limit,
            )

    def _wait(self, deadline: float) -> None:
        while self.under_way and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def refusal(self) -> Response:
        """The response to requests that arrive while the server stops."""
        error = create_error_response(RetryableRequestError(STOPPING))
        seconds = math.ceil((self.until or 0) - time.monotonic())
        headers = {"Retry-After": str(max(seconds, 1)), "Connection": "close"}
        return JSONResponse(error.model_dump(), HTTPStatus.SERVICE_UNAVAILABLE, headers)


class DrainMiddleware:
    """Counts running requests, and rejects new ones while the server stops. Reads such as
    `/metrics` still work."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if self._drain.until is not None and not _only_reads(scope):
            await self._drain.refusal()(scope, receive, send)
            return
        self._drain.under_way += 1
        try:
            with ExitStack() as request_end:
                scope[_REQUEST_END] = request_end
                await self._app(scope, receive, send)
        finally:
            self._drain.under_way -= 1


def request_end_of(raw_request: Request) -> ExitStack:
    """What is called when a request has ended, its response included."""
    stack: ExitStack = raw_request.scope[_REQUEST_END]
    return stack


def _only_reads(scope: Scope) -> bool:
    # below a --root-path or not
    is_health = scope["path"].endswith(_HEALTH)
    return scope.get("method") in ("GET", "HEAD", "OPTIONS") and not is_health
