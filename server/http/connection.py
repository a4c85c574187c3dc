"""The connection of a request, as seen outside of all middleware.

What the routes send says nothing of what the client got: a middleware may hold a response back, and
then a route is done long before the first byte leaves.
"""

import select
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# the first, on Linux, comes with the client's end
_HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)
_KEY = "routed_experts.connection"  # in the scope of a request


class Connection:
    """What the server knows of the client of one request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        # messages with a part of the body that were sent to a client that was there, once somebody
        # asked for their number
        self.num_sent = 0
        self._receive = receive
        self._send = send
        self._is_disconnected = False  # as `receive` said
        # uvicorn's object for a request, which knows at once that the client has left. `receive`
        # says so only to a task that waits for it, and in a later turn of the event loop.
        self._cycle: object | None = getattr(receive, "__self__", None)
        self._at_end: set[Callable[[], None]] = set()
        self._counts_sent = False
        self._has_ended = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._is_disconnected = True
        return message

    def send(self, message: Message) -> Awaitable[None]:
        if self._counts_sent and message["type"] == "http.response.body" and message.get("body"):
            return self._send_and_count(message)
        return self._send(message)  # no coroutine of ours, as there is one for each chunk

    async def _send_and_count(self, message: Message) -> None:
        was_there = not self._has_left() and not self._is_closing()
        await self._send(message)
        # The client may have left while `send` waited for it to read. The transport says nothing
        # here: uvicorn closes it behind the last message.
        if was_there and not self._has_left():
            self.num_sent += 1

    def _has_left(self) -> bool:
        return self._is_disconnected or getattr(self._cycle, "disconnected", False)

    def _is_closing(self) -> bool:
        """Whether the connection ends, also where the event loop has not read the client's end of
        it yet."""
        transport = getattr(self._cycle, "transport", None)
        if transport is None:  # a client without a socket, as the self-test
            return False
        sock = transport.get_extra_info("socket")
        return transport.is_closing() or (sock is not None and _was_closed_by_peer(sock.fileno()))

    def at_end(self, function: Callable[[], None], *, counts_sent: bool = True) -> None:
        """Calls `function` once when the request has ended; at once if it has. From now on,
        `num_sent` counts if `counts_sent`, which takes a look at the connection for each message.
        """
        self._counts_sent = self._counts_sent or counts_sent
        if self._has_ended:
            function()
        else:
            self._at_end.add(function)

    def end(self) -> None:
        self._has_ended = True
        for function in self._at_end:
            function()


def _was_closed_by_peer(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, _HANGUP)
    return bool(poll.poll(0))


class ConnectionMiddleware:
    """Puts its `Connection` into the scope of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_KEY] = connection = Connection(receive, send)
        try:
            await self._app(scope, connection.receive, connection.send)
        finally:
            connection.end()


def watch_connections(app: FastAPI) -> None:
    """Puts `ConnectionMiddleware` around `app` with all its middleware.

    `add_middleware` cannot do that: vLLM adds the operator's middleware after ours, and has built
    the stack by then.
    """
    app.middleware_stack = ConnectionMiddleware(
        app.middleware_stack or app.build_middleware_stack()
    )


def connection_of(request: Request) -> Connection:
    """The connection, for a route of ours that serves `request`."""
    connection: Connection = request.scope[_KEY]
    return connection
