"""Middleware as operators name it with `--middleware`."""

from collections.abc import Awaitable, Callable

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

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
