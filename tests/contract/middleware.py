"""Middleware as operators name it with `--middleware`."""

import json
from collections.abc import Awaitable, Callable

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

Next = Callable[[Request], Awaitable[Response]]


class Passes(BaseHTTPMiddleware):
    """Changes nothing, as one that measures or logs; it reads the body."""

    async def dispatch(self, request: Request, call_next: Next) -> Response:
        await request.body()
        return await call_next(request)


async def holds_back(request: Request, call_next: Next) -> Response:
    """Sends nothing before it has the whole response."""
    response = await call_next(request)
    parts = [part async for part in response.body_iterator]  # type: ignore[attr-defined]
    return Response(b"".join(parts), response.status_code, dict(response.headers))


async def refuses(request: Request, call_next: Next) -> Response:
    """Knows who may come in, and needs more than the server's key."""
    return JSONResponse({"error": "nobody's"}, status_code=403)


async def needs_a_header(request: Request, call_next: Next) -> Response:
    """Fails where a client does not say whose it is."""
    request.state.tenant = request.headers["x-tenant"]
    return await call_next(request)


async def refuses_answers(request: Request, call_next: Next) -> Response:
    """Decides when the answer is there."""
    await call_next(request)
    return JSONResponse({"error": "not this answer"}, status_code=429)


async def keeps_rows(request: Request, call_next: Next) -> Response:
    """Lets only those fields out that it knows."""
    response = await call_next(request)
    body = b"".join([part async for part in response.body_iterator])  # type: ignore[attr-defined]
    if response.headers.get("content-type") != "application/json":
        return Response(body, response.status_code, dict(response.headers))
    answer = json.loads(body)
    for choice in answer.get("choices", ()):
        choice.pop("routed_experts", None)
    return JSONResponse(answer, response.status_code)


class Breaks:
    """Fails where a response begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def fails(message: object) -> None:
            raise RuntimeError("the database of this middleware is gone")

        await self._app(scope, receive, fails)
