"""Reads the files that browsers send to a server, one request after another, in a process of its
own for each: other requests stay quick, and this process keeps nothing."""

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from subprocess import PIPE

from anyio import (
    CancelScope,
    EndOfStream,
    IncompleteRead,
    Lock,
    create_task_group,
    fail_after,
    move_on_after,
    open_process,
    sleep_forever,
)
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from routed_experts.server.page import HEADERS, MAX_BYTES, TOO_LARGE

MAX_WAITING_BYTES = 4 * MAX_BYTES
"""Of all bodies that come or wait."""
WAIT_S = 60.0
"""A request waits this long for those before it."""
STALLED_S = 30.0
"""A client that sends no piece of its request, or takes none of its response, for so long loses it,
as others wait."""
LONGEST_BODY_S = 600.0
"""In which a body must have come, and an answer must have been taken: a client that sends or takes
a byte now and then would hold its place."""
TOO_SLOW = "The files did not come in time: send them again, or open them with routed-experts view."
BUSY = "The server is reading other files: try again in a minute, or open these with routed-experts view."
FAILED = (
    "The process that reads these files has ended before their end: "
    "open them with routed-experts view."
)
NO_PROCESS = (
    "The server cannot start a process that reads files ({}): open them with routed-experts view."
)
# -P: the folder in which the server was started has no modules of ours.
COMMAND = [sys.executable, "-P", "-m", "routed_experts.server.page.reader_process"]
_HEAD_BYTES = 1 << 16
_PIECE_BYTES = 256 << 10


class Reading:
    """What an application reads at this moment."""

    def __init__(self) -> None:
        self.turn = Lock()  # of whose body is read
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
    """The body of a request, as far as it has come: in a file in memory, which the process that
    reads it gets as it is, and which leaves nothing behind in this one."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._file = os.fdopen(os.memfd_create("routed-experts-saved"), "wb")
        self._num_bytes = 0

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
            if self._num_bytes + len(chunk) > MAX_BYTES:
                refusal = error_response(TOO_LARGE, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            elif not self._reading.reserve(len(chunk)):
                refusal = busy_response()
            else:
                self._num_bytes += len(chunk)
                self._file.write(chunk)
            if refusal is not None:
                self.drop()

    def drop(self) -> None:
        self._reading.reserve(-self._num_bytes)
        self._num_bytes = 0
        self._file.close()

    def from_start(self) -> int:
        """The descriptor of the whole file."""
        self._file.seek(0)
        return self._file.fileno()


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
            async with create_task_group() as tasks:
                tasks.start_soon(_cancel_when_left, receive, tasks.cancel_scope)
                await _answer(body, reading, scope, send)
                tasks.cancel_scope.cancel()


async def _cancel_when_left(receive: Receive, scope: CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _answer(body: Body, reading: Reading, scope: Scope, send: Send) -> None:
    with move_on_after(WAIT_S) as waited:
        await reading.turn.acquire()
    if waited.cancelled_caught:
        await busy_response()(scope, _receive_nothing, send)
        return
    try:
        with fail_after(LONGEST_BODY_S):
            async with reader_of(body) as process:
                response = await _response_of(process)
                await response(scope, _receive_nothing, _in_time(send))
    except NoProcessError as error:
        response = error_response(
            NO_PROCESS.format(error), HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"
        )
        await response(scope, _receive_nothing, send)
    except (TimeoutError, ClientDisconnect):
        return  # uvicorn closes the connection, as the response is not whole
    finally:
        reading.turn.release()


async def _receive_nothing() -> Message:
    """For a response, which must not receive beside `_cancel_when_left`."""
    await sleep_forever()
    raise AssertionError


class NoProcessError(Exception):
    """The system has none left, for example."""


@asynccontextmanager
async def reader_of(body: Body) -> AsyncIterator[Process]:
    """The process that reads a body. It does not outlive the context, nor this process."""
    # A cancellation here would leave a process that has just been started.
    with CancelScope(shield=True):
        try:
            process = await open_process(
                COMMAND,
                stdin=body.from_start(),
                stdout=PIPE,
                stderr=None,  # the server's
                # Each thread of OpenBLAS would take addresses, which have a limit.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the server alone
            )
        except OSError as error:
            raise NoProcessError(error.strerror) from error
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        with CancelScope(shield=True):
            await process.aclose()


async def _response_of(process: Process) -> Response:
    assert process.stdout is not None
    output = BufferedByteReceiveStream(process.stdout)
    try:
        head = json.loads(await output.receive_until(b"\n", _HEAD_BYTES))
    except IncompleteRead:
        return error_response(FAILED, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
    if "error" in head:
        return error_response(head["error"], HTTPStatus.BAD_REQUEST)
    return StreamingResponse(
        _pieces(output, process), media_type="application/jsonl", headers=HEADERS
    )


async def _pieces(output: BufferedByteReceiveStream, process: Process) -> AsyncIterator[bytes]:
    end = b"\n"
    with suppress(EndOfStream):
        while True:
            piece = await output.receive(_PIECE_BYTES)
            yield piece
            end = piece[-1:]
    if await process.wait() != 0:
        line = json.dumps({"error": {"message": FAILED}}).encode()
        yield b"" if end == b"\n" else b"\n"
        yield line + b"\n"


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
