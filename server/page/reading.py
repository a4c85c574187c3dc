"""Reads the files that browsers send to a server, one request after another, in a process of its
own for each: other requests stay quick, and this process keeps nothing."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from http import HTTPStatus
from subprocess import PIPE
from typing import IO

from anyio import (
    CancelScope,
    Lock,
    create_task_group,
    fail_after,
    move_on_after,
    open_process,
    sleep_forever,
)
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from routed_experts.server.page import HEADERS, MAX_BYTES, TOO_LARGE
from routed_experts.server.page.reader_process import MAX_ANSWER_BYTES, REFUSED

MAX_WAITING_BYTES = 4 * MAX_BYTES
"""Of all bodies that come or wait, and of all answers that are sent, when another body comes."""
MOST_BYTES = MAX_WAITING_BYTES + MAX_ANSWER_BYTES
"""The same, when another answer is sent: bodies that wait do not keep one back."""
WAIT_S = 60.0
"""A request waits this long for those before it."""
STALLED_S = 30.0
"""A client that sends no piece of its request, or takes none of its response, for so long loses it,
as its bytes count."""
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
_PIECE_BYTES = 256 << 10


class Reading:
    """What an application reads at this moment."""

    def __init__(self) -> None:
        self.turn = Lock()  # of whose body is read
        self.num_bytes = 0  # of all bodies and answers

    @classmethod
    def of(cls, state: State) -> "Reading":
        if not hasattr(state, "routed_experts_reading"):
            state.routed_experts_reading = cls()
        reading: Reading = state.routed_experts_reading
        return reading

    def reserve(self, more: int, most: int) -> bool:
        """Counts bytes, unless there are then more than `most`."""
        fits = self.num_bytes + more <= most
        self.num_bytes += more if fits else 0
        return fits


class CountedFile:
    """A file in memory, whose bytes count until it is closed. The process that reads gets it as it
    is, and it leaves nothing behind in this one."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._file: IO[bytes] | None = None
        self.num_bytes = 0

    def open(self) -> None:
        """Raises `OSError` if the system has no more descriptors."""
        self._file = os.fdopen(os.memfd_create("routed-experts-saved"), "w+b")

    def write(self, chunk: bytes) -> bool:
        """Writes bytes, unless there are too many of all files."""
        assert self._file is not None
        fits = self._reading.reserve(len(chunk), MAX_WAITING_BYTES)
        if fits:
            self.num_bytes += len(chunk)
            self._file.write(chunk)
        return fits

    def count(self) -> bool:
        """Counts what another process has written, unless there are too many bytes of all files."""
        num_bytes = os.fstat(self.from_start()).st_size
        fits = self._reading.reserve(num_bytes, MOST_BYTES)
        self.num_bytes = num_bytes if fits else 0
        return fits

    def read(self, num_bytes: int = -1) -> bytes:
        assert self._file is not None
        return self._file.read(num_bytes)

    def from_start(self) -> int:
        """The descriptor of the whole file."""
        assert self._file is not None
        self._file.seek(0)
        return self._file.fileno()

    def close(self) -> None:
        self._reading.num_bytes -= self.num_bytes
        self.num_bytes = 0
        if self._file is not None:
            self._file.close()


class FilesResponse(Response):
    """Receives a request with files, waits for its turn, and sends a line for each response in
    them. Nothing is kept of a client that leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        reading = Reading.of(request.app.state)
        with closing(CountedFile(reading)) as body, closing(CountedFile(reading)) as answer:
            try:
                with fail_after(LONGEST_BODY_S):
                    refusal = await _receive_body(request, body)
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
                response = await _response_to(body, answer, reading)
                # A connection whose response is not whole is closed by uvicorn.
                with suppress(TimeoutError, ClientDisconnect), fail_after(LONGEST_BODY_S):
                    await response(scope, _receive_nothing, _in_time(send))
                tasks.cancel_scope.cancel()


async def _receive_body(request: Request, body: CountedFile) -> Response | None:
    """Reads the request to its end, so that the client hears of an error; returns the error."""
    refusal: Response | None = None
    try:
        body.open()
    except OSError:
        refusal = busy_response()
    chunks = request.stream()
    while True:
        with fail_after(STALLED_S):
            chunk = await anext(chunks, None)
        if chunk is None:
            return refusal
        if refusal is not None:
            continue
        if body.num_bytes + len(chunk) > MAX_BYTES:
            refusal = error_response(TOO_LARGE, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        elif not body.write(chunk):
            refusal = busy_response()
        if refusal is not None:
            body.close()


async def _cancel_when_left(receive: Receive, scope: CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _response_to(body: CountedFile, answer: CountedFile, reading: Reading) -> Response:
    """Has a process read a body, in its turn, and write an answer, which is sent after it."""
    with move_on_after(WAIT_S) as waited:
        await reading.turn.acquire()
    if waited.cancelled_caught:
        return busy_response()
    try:
        with fail_after(LONGEST_BODY_S):
            status = await _exit_status(body, answer)
    except NoProcessError as error:
        return error_response(
            NO_PROCESS.format(error), HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"
        )
    except TimeoutError:
        return failed_response()
    finally:
        body.close()
        reading.turn.release()
    if not answer.count():
        return busy_response()
    if status == REFUSED:
        return error_response(answer.read().decode(), HTTPStatus.BAD_REQUEST)
    if status != 0:
        return failed_response()
    headers = {**HEADERS, "Content-Length": str(answer.num_bytes)}
    return StreamingResponse(_pieces(answer), media_type="application/jsonl", headers=headers)


async def _receive_nothing() -> Message:
    """For a response, which must not receive beside `_cancel_when_left`."""
    await sleep_forever()
    raise AssertionError


class NoProcessError(Exception):
    """The system has none left, for example."""


async def _exit_status(body: CountedFile, answer: CountedFile) -> int:
    """Of the process that reads a body, once it has ended. It does not outlive this call, nor this
    process."""
    # A cancellation here would leave a process that has just been started.
    with CancelScope(shield=True):
        try:
            answer.open()
            descriptor = answer.from_start()
            process = await open_process(
                [*COMMAND, str(descriptor)],
                stdin=body.from_start(),
                stdout=PIPE,
                stderr=None,  # the server's
                env=_environment(),
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C is for the server alone
            )
        except OSError as error:
            raise NoProcessError(error.strerror) from error
    try:
        assert process.stdout is not None
        async for _ in process.stdout:  # what a module prints that the environment imports
            pass
        return await process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        with CancelScope(shield=True):
            await process.aclose()


def _environment() -> dict[str, str]:
    """Of the process that reads: it finds modules where this one does, whatever has started it."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        # Each thread of OpenBLAS would take addresses, which have a limit.
        "OPENBLAS_NUM_THREADS": "1",
    }


async def _pieces(answer: CountedFile) -> AsyncIterator[bytes]:
    while piece := answer.read(_PIECE_BYTES):
        yield piece


def _in_time(send: Send) -> Send:
    async def send_in_time(message: Message) -> None:
        with fail_after(STALLED_S):
            await send(message)

    return send_in_time


def busy_response() -> Response:
    response = error_response(BUSY, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError")
    response.headers["Retry-After"] = "60"
    return response


def failed_response() -> Response:
    return error_response(FAILED, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


def too_slow_response() -> Response:
    response = error_response(TOO_SLOW, HTTPStatus.REQUEST_TIMEOUT)
    response.headers["Connection"] = "close"  # whatever still comes of the body
    return response


def error_response(message: str, status: HTTPStatus, kind: str = "BadRequestError") -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)
