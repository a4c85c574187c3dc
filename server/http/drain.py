"""The end of a server: running requests finish before vLLM stops its engine, and end with 503 if
the engine dies."""

import asyncio
import concurrent.futures
import math
import os
import time
from argparse import Namespace
from collections.abc import Awaitable, Coroutine
from http import HTTPStatus
from itertools import chain
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.datastructures import MutableHeaders, State
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routed_experts.server.http import background
from routed_experts.server.http.connection import when_left
from routed_experts.server.http.seams import listening_sockets, serve_connection, stop_accepting
from routed_experts.server.http.vllm_http import RetryableRequestError, create_error_response
from routed_experts.server.shared import ENGINE_DIED, SHARED, Shared, close_for_all, ends_of_engines
from routed_experts.server.vllm_api import (
    AsyncLLM,
    EngineDeadError,
    InputStreamError,
    envs,
    get_logger,
)

logger = get_logger(__name__)

_RESERVE_S = 5.0
"""Part of `--shutdown-timeout` that is reserved for ending unfinished requests and stopping the
engine."""
_ERROR_S = 2.0
"""Time for sending errors. After it, connections of clients that do not read are aborted."""
_NEW_S = 1.0
"""Once the port is closed, time for the request of a client that has just connected."""
_LINGER_S = 2.0
"""After that, time for clients to read the end of their responses."""
_RESTART_S = 5.0
"""`Retry-After` of a server whose engine has died. It restarts later, but others may be there."""
_POLL_S = 0.05
_HEALTH = ("/health", "/ping")
STOPPING = "The server is stopping: retry on another instance, or after the restart."
DIED = "The engine has died: retry on another instance, or after the restart."


class Drain:
    """Finishes running requests before vLLM stops its engine, or ends them if it dies, and rejects
    new ones meanwhile.

    vLLM stops the engine first: later requests end with `finish_reason: "abort"`, and unfinished
    ones with 500 and tracebacks in the log. If the engine dies, requests of the only API process
    end so too, and those of several wait until vLLM kills their process. Can go when vLLM's API
    process waits for its requests, and ends them with 503.
    """

    def __init__(self) -> None:
        self.under_way = 0  # running requests
        # deadline on the monotonic clock, once new requests are rejected
        self.until: float | None = None
        self.has_engine_died = False
        self._has_told_engine = False  # to stop, so that its end is no death
        self._replaces_shutdown = False
        self._closing: asyncio.Task[None] | None = None  # of the port, for this process
        self._shared: Shared | None = None  # among several API processes
        self._args = Namespace()
        self._engine: AsyncLLM | None = None
        self._state = State()
        self._end: asyncio.Task[None] | None = None  # of the server whose engine has died

    def guard(self, engine: AsyncLLM, state: State, args: Namespace) -> None:
        """Makes `engine.shutdown` wait for requests, and watches the engine. Call it in the event
        loop of the server.

        vLLM's signal handlers call `shutdown` in a thread. Other callers have no requests to wait
        for.
        """
        loop = asyncio.get_running_loop()
        self._engine, self._state, self._args = engine, state, args
        self._shared = getattr(args, SHARED, None)
        shutdown = engine.shutdown

        def shutdown_after_requests(timeout: float | None = None) -> None:
            server = getattr(state, "server", None)
            waits = server is not None and loop.is_running() and not _in_event_loop()
            if waits:
                _wait_for(self._run(server, timeout or 0), loop)
                if self.until is not None:
                    timeout = timeout and max(self.until - time.monotonic(), 1.0)
            self._has_told_engine = True
            shutdown(timeout=timeout)

        engine.shutdown = shutdown_after_requests
        self._answer_when_dead(engine)
        ends = (
            ends_of_engines()
            if self._shared is None
            else [os.dup(self._shared.engines_live.fileno())]
        )
        for end in ends:
            loop.add_reader(end, self._see_end, loop, end)

    def _answer_when_dead(self, engine: AsyncLLM) -> None:
        """Replaces what tells requests that the engine is dead. vLLM has them answer 500, and log a
        traceback each."""
        add_request, propagate_error = engine.add_request, engine.output_processor.propagate_error

        async def add_request_or_refuse(*args: Any, **kwargs: Any) -> Any:
            try:
                return await add_request(*args, **kwargs)
            except EngineDeadError:
                self.engine_died()
                raise self._error() from None

        def propagate(error: Exception) -> None:
            # it is not ours: no output of the engine arrives any more
            if not isinstance(error, InputStreamError):
                self.engine_died()
                error = self._error()
            propagate_error(error)

        engine.add_request = add_request_or_refuse
        engine.output_processor.propagate_error = propagate

    def _see_end(self, loop: asyncio.AbstractEventLoop, end: int) -> None:
        loop.remove_reader(end)
        os.close(end)
        self.engine_died()

    def engine_died(self) -> None:
        """Ends running requests and the server. Runs in the event loop; only the first call
        counts."""
        if self.has_engine_died or self._has_told_engine:
            return
        self.has_engine_died = True
        self.until = time.monotonic() + _RESTART_S
        setattr(self._args, ENGINE_DIED, True)
        logger.error("The engine has died: %d running requests end with 503.", self.under_way)
        server = getattr(self._state, "server", None)
        if server is not None:  # else it does not listen yet
            self._stop_reading_outputs()
            self._end = background.start(
                "Ending a server whose engine has died", self._end_server(server)
            )

    async def _end_server(self, server: Any) -> None:
        self._close_port_first(server)
        await self._end_requests(server)
        if not envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
            server.should_exit = True

    async def _run(self, server: Any, timeout: float) -> None:
        """Returns when no request is running, at the latest after about `timeout` seconds."""
        self._close_port_first(server)
        if self._end is not None:
            await asyncio.wait([self._end])
            return
        begun = time.monotonic()
        limit = timeout - min(_RESERVE_S, timeout / 5)
        self.until = begun + timeout
        if self.under_way:
            logger.info(
                "Stopping: %d requests have %.0f s to finish; new ones get 503.",
                self.under_way,
                limit,
            )
        if not await self._finished(begun + limit):
            logger.warning(
                "Stopping: %d requests did not finish in %.0f s and end with 503.",
                self.under_way,
                limit,
            )
            await self._end_requests(server)
        self._stop_reading_outputs()

    def _stop_reading_outputs(self) -> None:
        """vLLM does it last, and logs a traceback when its sockets close before."""
        assert self._engine is not None
        if (handler := self._engine.output_handler) is not None:
            handler.cancel()

    async def _end_requests(self, server: Any) -> None:
        assert self._engine is not None
        ended = self._error()
        deadline = time.monotonic() + _ERROR_S
        # repeated, because a request may be on its way to the engine
        while time.monotonic() < deadline:
            self._engine.output_processor.propagate_error(ended)
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

    def _close_port_first(self, server: Any) -> None:
        """Replaces uvicorn's `shutdown`, which vLLM calls in several ways: if the engine is dead,
        whenever it looks.

        uvicorn closes connections whose client has not sent its request yet, and waits for others.
        Meanwhile, vLLM keeps the port of several API processes open, though nobody accepts a
        connection.
        """
        if self._replaces_shutdown:
            return
        self._replaces_shutdown = True
        shutdown = server.shutdown

        async def close_and_shut_down(sockets: Any = None) -> None:
            if self._closing is None:
                self._closing = background.start("Closing the port", self._close(server))
            await asyncio.shield(self._closing)  # vLLM may cancel this, and call it again
            await shutdown(sockets)

        server.shutdown = close_and_shut_down

    async def _close(self, server: Any) -> None:
        """Closes the port, and answers those who have just connected."""
        if self._shared is None:
            listening = listening_sockets(server)  # before the server closes its own
            stop_accepting(server)
            unaccepted = list(chain.from_iterable(map(close_for_all, listening)))
        else:
            stop_accepting(server)
            unaccepted = self._shared.stop_listening()
        for connection in unaccepted:
            background.start("Answering a client", serve_connection(server, connection))
        deadline = time.monotonic() + _NEW_S
        await asyncio.sleep(_POLL_S)  # for those that were accepted just now
        while time.monotonic() < deadline and any(map(_is_new, server.server_state.connections)):
            await asyncio.sleep(_POLL_S)
        # A client that does not read the end of a response would hold the server for ever.
        server.config.timeout_graceful_shutdown = _LINGER_S

    @property
    def _why(self) -> str:
        return DIED if self.has_engine_died else STOPPING

    def _error(self) -> InputStreamError:
        """What ends a request with 503: vLLM raises the inner error."""
        return InputStreamError(RetryableRequestError(self._why))

    def request_ended(self) -> None:
        self.under_way -= 1

    def retry_after(self) -> str:
        """Seconds, as a header has them."""
        return str(max(math.ceil((self.until or 0) - time.monotonic()), 1))

    def refusal(self) -> Response:
        """The response to requests that arrive while the server stops, or after its engine has
        died."""
        error = create_error_response(RetryableRequestError(self._why))
        headers = {"Retry-After": self.retry_after(), "Connection": "close"}
        return JSONResponse(error.model_dump(), HTTPStatus.SERVICE_UNAVAILABLE, headers)

    async def refuse_without_engine(self, request: Request, error: Exception) -> Response:
        """The handler of `EngineDeadError`, for requests that find out before anybody tells
        them."""
        self.engine_died()
        return self.refusal()


class DrainMiddleware:
    """Counts running requests, and rejects new ones while the server stops. Reads such as
    `/metrics` still work."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        drain = self._drain
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if drain.until is not None and not _only_reads(scope):
            await drain.refusal()(scope, receive, send)
            return

        def send_and_say_when(message: Message) -> Awaitable[None]:
            if (
                drain.until is not None
                and message["type"] == "http.response.start"
                and message["status"] == 503
            ):
                MutableHeaders(scope=message).setdefault("Retry-After", drain.retry_after())
            return send(message)

        drain.under_way += 1
        # Other middleware may hold the response back after this one has returned.
        ends_later = when_left(scope, drain.request_ended)
        try:
            await self._app(scope, receive, send_and_say_when)
        finally:
            if not ends_later:
                drain.request_ended()


def _only_reads(scope: Scope) -> bool:
    # a proxy may or may not strip --root-path
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return scope.get("method") in ("GET", "HEAD", "OPTIONS") and path not in _HEALTH


def _is_new(connection: Any) -> bool:
    """Whether no request has come on one of uvicorn's connections."""
    return getattr(connection, "cycle", connection) is None


def _wait_for(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Waits in a thread for what the event loop does."""
    try:
        asyncio.run_coroutine_threadsafe(work, loop).result()
    except concurrent.futures.CancelledError:  # the loop ends
        pass
    except Exception:
        logger.exception("Stopping: waiting for running requests failed.")


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
