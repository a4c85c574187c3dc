"""The connection of a request, as seen outside of all middleware.

What the routes send says nothing of what the client got: a middleware may hold a response back, and
then a route is done long before the first byte leaves.
"""

import asyncio
import inspect
import select
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# the first, on Linux, comes with the client's end
_HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)
_KEY = "routed_experts.connection"  # in the scope of a request
_LONGEST_EXPECTED = 64


class Connection:
    """What the server knows of the client of one request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        # messages with a part of the body that were sent to a client that was there, once somebody
        # asked for their number
        self.num_sent = 0
        self.reached_route = False  # whether a route of ours has asked for this
        self._receive = receive
        self._send = send
        self._is_disconnected = False  # as `receive` said
        self._cycle = _uvicorns(receive)
        self._at_end: set[Callable[[], None]] = set()
        self._counts_sent = False
        self._expected: set[bytes] = set()  # texts that were not sent yet
        self._end_of_sent = b""  # in which such a text may begin
        self._expects_end = False  # of the body
        self._has_sent_end = False
        # of the response, by its headers
        self._is_compressed = False
        self._has_length = False
        self._has_ended = False

    @property
    def transport(self) -> asyncio.Transport | None:
        """None for a client without a socket, as the self-test."""
        return getattr(self._cycle, "transport", None)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._is_disconnected = True
        return message

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._is_compressed = b"content-encoding" in names
            self._has_length = b"content-length" in names
        elif self._counts_sent and message["type"] == "http.response.body":
            return self._send_and_count(message)
        return self._send(message)  # no coroutine of ours, as there is one for each chunk

    async def _send_and_count(self, message: Message) -> None:
        """Sends a part of the body."""
        was_there = not self._has_left() and not self._is_closing()
        await self._send(message)
        body = message.get("body", b"")
        # The client may have left while `send` waited for it to read. The transport says nothing
        # here: uvicorn closes it behind the last message.
        if was_there and not (body and self._has_left()):
            self._count(body, is_end=not message.get("more_body", False))

    def _count(self, body: bytes, *, is_end: bool) -> None:
        """Counts a part of the body that was sent to a client that was there."""
        if body:
            self.num_sent += 1
            self._look_for_expected(body)
        if is_end:
            self._has_sent_end = True

    def expect(self, text: str) -> None:
        """Looks for a text in what is sent from now on. It has 64 bytes at most."""
        self._expected.add(text.encode())

    def expect_end(self) -> None:
        """Nobody reads what is sent of the body without its end."""
        self._expects_end = True

    def may_have_sent(self, text: str) -> bool:
        """False if a text was expected and not sent, or the body's end was. What is compressed says
        nothing of a text. The end of a body whose length is known need not be sent: a client that
        has all of it leaves."""
        if self._expects_end and not self._has_sent_end and not self._has_length:
            return False
        return self._is_compressed or text.encode() not in self._expected

    def _look_for_expected(self, body: bytes) -> None:
        if self._expected:
            sent = self._end_of_sent + body
            self._expected = {text for text in self._expected if text not in sent}
            self._end_of_sent = sent[-_LONGEST_EXPECTED:]

    def _has_left(self) -> bool:
        return self._is_disconnected or getattr(self._cycle, "disconnected", False)

    def _is_closing(self) -> bool:
        """Whether the connection ends, also where the event loop has not read the client's end of
        it yet."""
        transport = self.transport
        if transport is None:
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


def _uvicorns(receive: Receive) -> object | None:
    """uvicorn's object for a request, which knows at once that the client has left. `receive` says
    so only to a task that waits for it, and in a later turn of the event loop.

    At its log level trace, uvicorn puts a function of its own around `receive`.
    """
    inner: object = receive
    while inspect.isfunction(inner):
        inner = inspect.getclosurevars(inner).nonlocals.get("receive")
    return getattr(inner, "__self__", None)


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
    connection.reached_route = True
    return connection


def when_left(scope: Scope, function: Callable[[], None]) -> bool:
    """Calls `function` when a request has left all middleware. False where nothing stands around
    it."""
    connection: Connection | None = scope.get(_KEY)
    if connection is None:
        return False
    connection.at_end(function, counts_sent=False)
    return True


def reached_route(scope: Scope) -> bool:
    """Whether a route of ours asked for the connection of a request that has ended."""
    connection: Connection | None = scope.get(_KEY)
    return connection is not None and connection.reached_route
