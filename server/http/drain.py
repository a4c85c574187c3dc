"""The end of a server: running requests finish before vLLM stops its engine, and end with 503 if
the engine dies.

A server is in one phase. `Drain._move` is the only way from one to another, and these are all the
moves; another one is not made:

    from               to           when
    -----------------  -----------  ---------------------------------------------------------------
    SERVING            STOPPING     vLLM stops the server; running requests finish, new ones get 503
    SERVING, STOPPING  ENGINE_TOLD  the engine is told to stop, as no request is running any more,
                                    or none could be waited for
    SERVING, STOPPING  ENGINE_DIED  the engine has ended by itself; all requests get 503

So the engine either dies or is told to stop, whichever comes first.
"""

import asyncio
import concurrent.futures
import math
import os
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Awaitable, Coroutine
from enum import Enum, auto
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


class Phase(Enum):
    SERVING = auto()
    """New requests are let in."""
    STOPPING = auto()
    """Running requests have until a deadline to finish. The engine does not know yet."""
    ENGINE_TOLD = auto()
    """To stop, so that its end is no death."""
    ENGINE_DIED = auto()
    """Before anybody told it to stop."""


TRANSITIONS: dict[Phase, tuple[Phase, ...]] = {
    Phase.SERVING: (Phase.STOPPING, Phase.ENGINE_TOLD, Phase.ENGINE_DIED),
    Phase.STOPPING: (Phase.ENGINE_TOLD, Phase.ENGINE_DIED),
    Phase.ENGINE_TOLD: (),
    Phase.ENGINE_DIED: (),
}
"""Where a server may go from each phase: the table above."""


class Drain:
    """Finishes running requests before vLLM stops its engine, or ends them if it dies, and rejects
    new ones meanwhile.

    vLLM stops the engine first: later requests end with `finish_reason: "abort"`, and unfinished
    ones with 500 and tracebacks in the log. If the engine dies, requests of the only API process
    end so too, and those of several wait until vLLM kills their process. Can go when vLLM's API
    process waits for its requests, and ends them with 503.
    """

    def __init__(self) -> None:
        self.phase = Phase.SERVING  # set by `_move` only
        # vLLM tells the engine in a thread; that it has died is seen in the event loop
        self._moving = threading.Lock()
        self.under_way = 0  # running requests
        # deadline on the monotonic clock, once new requests are rejected
        self.until: float | None = None
        self._port: _Port | None = None  # once it closes before the server shuts down
        self._end: asyncio.Task[None] | None = None  # of the server whose engine has died
        # what `guard` was given
        self._engine: AsyncLLM | None = None
        self._state = State()
        self._args = Namespace()
        self._shared: Shared | None = None  # among several API processes

    def _move(self, to: Phase) -> bool:
        """Moves the server into another phase if `TRANSITIONS` has the move. Returns whether it
        has."""
        with self._moving:
            if to not in TRANSITIONS[self.phase]:
                return False
            self.phase = to
            return True

    @property
    def has_engine_died(self) -> bool:
        return self.phase is Phase.ENGINE_DIED

    def guard(self, engine: AsyncLLM, state: State, args: Namespace) -> None:
        """Makes `engine.shutdown` wait for requests, and watches the engine. Call it in the event
        loop of the server."""
        loop = asyncio.get_running_loop()
        self._engine = engine
        self._state = state
        self._args = args
        self._shared = getattr(args, SHARED, None)
        self._finish_before_shutdown(engine, loop)
        self._answer_when_dead(engine)
        for end in _ends_to_watch(self._shared):
            loop.add_reader(end, self._see_end, loop, end)

    def _server(self) -> Any:
        """uvicorn's server; None before it listens."""
        return getattr(self._state, "server", None)

    def _finish_before_shutdown(self, engine: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        """Replaces `engine.shutdown` by one that waits for running requests.

        vLLM's signal handlers call `shutdown` in a thread. Other callers have no requests to wait
        for.
        """
        shutdown = engine.shutdown

        def shutdown_after_requests(timeout: float | None = None) -> None:
            server = self._server()
            if server is not None and loop.is_running() and not _in_event_loop():
                _wait_for(self._run(server, timeout or 0), loop)
                if timeout and self.until is not None:
                    timeout = max(self.until - time.monotonic(), 1.0)
            self._move(Phase.ENGINE_TOLD)
            shutdown(timeout=timeout)

        engine.shutdown = shutdown_after_requests

    def _answer_when_dead(self, engine: AsyncLLM) -> None:
        """Replaces what tells requests that the engine is dead. vLLM has them answer 500, and log a
        traceback each."""
        add_request = engine.add_request
        propagate_error = engine.output_processor.propagate_error

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
        if not self._move(Phase.ENGINE_DIED):
            return
        self.until = time.monotonic() + _RESTART_S
        setattr(self._args, ENGINE_DIED, True)
        logger.error("The engine has died: %d running requests end with 503.", self.under_way)
        server = self._server()
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
        self._move(Phase.STOPPING)
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
        if self._port is None:
            self._port = _Port(server, self._shared)
            self._port.close_before_shutdown()

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


class _Port:
    """The port on which a server listens, alone or with other API processes."""

    def __init__(self, server: Any, shared: Shared | None) -> None:
        self._server = server
        self._shared = shared
        self._closing: asyncio.Task[None] | None = None

    def close_before_shutdown(self) -> None:
        """Replaces uvicorn's `shutdown`, which vLLM calls in several ways: if the engine is dead,
        whenever it looks.

        uvicorn closes connections whose client has not sent its request yet, and waits for others.
        Meanwhile, vLLM keeps the port of several API processes open, though nobody accepts a
        connection.
        """
        shutdown = self._server.shutdown

        async def close_and_shut_down(sockets: Any = None) -> None:
            if self._closing is None:
                self._closing = background.start("Closing the port", self.close())
            await asyncio.shield(self._closing)  # vLLM may cancel this, and call it again
            await shutdown(sockets)

        self._server.shutdown = close_and_shut_down

    async def close(self) -> None:
        """Closes the port, and answers those who have just connected."""
        server = self._server
        for connection in self._stop_listening():
            background.start("Answering a client", serve_connection(server, connection))
        deadline = time.monotonic() + _NEW_S
        await asyncio.sleep(_POLL_S)  # for those that were accepted just now
        while time.monotonic() < deadline and any(map(_is_new, server.server_state.connections)):
            await asyncio.sleep(_POLL_S)
        # A client that does not read the end of a response would hold the server for ever.
        server.config.timeout_graceful_shutdown = _LINGER_S

    def _stop_listening(self) -> list[socket.socket]:
        """Returns the connections that nobody has accepted."""
        if self._shared is not None:
            stop_accepting(self._server)
            return self._shared.stop_listening()
        listening = listening_sockets(self._server)  # before the server closes its own
        stop_accepting(self._server)
        return list(chain.from_iterable(map(close_for_all, listening)))


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


def _ends_to_watch(shared: Shared | None) -> list[int]:
    """File descriptors that are readable once an engine has ended."""
    if shared is None:
        return ends_of_engines()
    return [os.dup(shared.engines_live.fileno())]


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
