"""Reads the files that browsers send to a server: one request after another, so that other requests
stay quick."""

import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from anyio import (
    CancelScope,
    CapacityLimiter,
    Event,
    Lock,
    create_task_group,
    fail_after,
    move_on_after,
)
from anyio.to_thread import run_sync
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from routed_experts.server.page import HEADERS, MAX_BYTES, TOO_LARGE, read_saved

MAX_WAITING_BYTES = 4 * MAX_BYTES
"""Of all bodies that come or wait."""
WAIT_S = 60.0
"""A request waits this long for those before it."""
STALLED_S = 30.0
"""A client that sends no piece of its request, or takes none of its response, for so long loses it,
as others wait."""
LONGEST_BODY_S = 600.0
"""In which a body must have come: a client that sends a byte now and then would hold its place."""
TOO_SLOW = "The files did not come in time: send them again, or open them with routed-experts view."
BUSY = "The server is reading other files: try again in a minute, or open these with routed-experts view."
_NEVER = 1 << 30
_PIECE_BYTES = 256 << 10
_PAUSE_S = 0.0005
"""After a line, for other threads: each else waits for the interpreter's lock as long as Python
lets one hold it."""


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Python's collector of cycles visits all objects whenever their number has grown by a quarter,
    and no other thread runs meanwhile: a second each time, with a million objects of a JSON text.
    They have no cycles, so that it would free nothing. Young objects are visited as before."""
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Reading:
    """What an application reads at this moment."""

    def __init__(self) -> None:
        self.turn = Lock()
        self.thread = CapacityLimiter(1)  # apart from the threads that other routes share
        self.num_bytes = 0  # of all bodies

    @classmethod
    def of(cls, state: State) -> "Reading":
        if not hasattr(state, "routed_experts_reading"):
            state.routed_experts_reading = cls()
        reading: Reading = state.routed_experts_reading
        return reading

    @contextmanager
    def body(self) -> Iterator["Body"]:
        """A body, whose bytes count until it ends."""
        body = Body(self)
        try:
            yield body
        finally:
            body.drop()

    def reserve(self, more: int) -> bool:
        """Counts bytes (or fewer, if negative), unless there are too many."""
        fits = self.num_bytes + more <= MAX_WAITING_BYTES
        self.num_bytes += more if fits else 0
        return fits


class Body:
    """The body of a request, as far as it is kept."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._bytes = bytearray()

    async def receive(self, request: Request) -> Response | None:
        """Reads the request to its end, so that the client hears of an error; returns the error."""
        refusal: Response | None = None
        chunks = request.stream()
        while True:
            with fail_after(STALLED_S):
                chunk = await anext(chunks, None)
            if chunk is None:
                return refusal
            if refusal is not None:
                continue
            if len(self._bytes) + len(chunk) > MAX_BYTES:
                refusal = error_response(TOO_LARGE, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            elif not self._reading.reserve(len(chunk)):
                refusal = busy_response()
            else:
                self._bytes += chunk
            if refusal is not None:
                self.drop()

    def drop(self) -> None:
        self._reading.reserve(-len(self._bytes))
        self._bytes = bytearray()

    def lines(self) -> Iterator[bytes]:
        with without_full_collections():
            return map(str.encode, read_saved(self._bytes))


class Client:
    """Whether the client of a request whose body has come is still there."""

    def __init__(self, receive: Receive) -> None:
        self.has_left = False
        self._receive = receive
        self._left = Event()

    async def cancel_when_left(self, scope: CancelScope) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_left = True  # for the thread, which nothing else stops
        self._left.set()
        scope.cancel()

    async def receive(self) -> Message:
        """For a response, which must not receive beside this object."""
        await self._left.wait()
        return {"type": "http.disconnect"}


class FilesResponse(Response):
    """Receives a request with files, waits for its turn, and sends a line for each response in
    them. Nothing is kept of a client that leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        reading = Reading.of(request.app.state)
        with reading.body() as body:
            try:
                with fail_after(LONGEST_BODY_S):
                    refusal = await body.receive(request)
            except ClientDisconnect:
                return
            except TimeoutError:
                await too_slow_response()(scope, receive, send)
                return
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            client = Client(receive)
            async with create_task_group() as tasks:
                tasks.start_soon(client.cancel_when_left, tasks.cancel_scope)
                await _answer(body, reading, client, scope, send)
                tasks.cancel_scope.cancel()


async def _answer(body: Body, reading: Reading, client: Client, scope: Scope, send: Send) -> None:
    with move_on_after(WAIT_S) as waited:
        await reading.turn.acquire()
    if waited.cancelled_caught:
        await busy_response()(scope, client.receive, send)
        return
    try:
        response = await _response_to(body, reading.thread, client)
        await response(scope, client.receive, _in_time(send))
    except (TimeoutError, ClientDisconnect):
        return  # uvicorn closes the connection, as the response is not whole
    finally:
        reading.turn.release()


async def _response_to(body: Body, thread: CapacityLimiter, client: Client) -> Response:
    try:
        lines = await run_sync(body.lines, limiter=thread)
    except ValueError as error:
        return error_response(str(error), HTTPStatus.BAD_REQUEST)
    return StreamingResponse(
        _pieces(lines, thread, client), media_type="application/jsonl", headers=HEADERS
    )


async def _pieces(
    lines: Iterator[bytes], thread: CapacityLimiter, client: Client
) -> AsyncIterator[bytes]:
    while text := await run_sync(some_of, lines, client, limiter=thread):
        for first in range(0, len(text), _PIECE_BYTES):
            yield text[first : first + _PIECE_BYTES]


def some_of(lines: Iterator[bytes], client: Client) -> bytes:
    """The next lines, as many as make a piece: to go to the thread for each line takes longer than
    a line. None after the client has left."""
    text = bytearray()
    with without_full_collections():
        for line in lines:
            text += line
            time.sleep(_PAUSE_S)
            if len(text) >= _PIECE_BYTES or client.has_left:
                break
    return bytes(text)


def _in_time(send: Send) -> Send:
    async def send_in_time(message: Message) -> None:
        with fail_after(STALLED_S):
            await send(message)

    return send_in_time


def busy_response() -> Response:
    response = error_response(BUSY, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError")
    response.headers["Retry-After"] = "60"
    return response


def too_slow_response() -> Response:
    response = error_response(TOO_SLOW, HTTPStatus.REQUEST_TIMEOUT)
    response.headers["Connection"] = "close"  # whatever still comes of the body
    return response


def error_response(message: str, status: HTTPStatus, kind: str = "BadRequestError") -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)
