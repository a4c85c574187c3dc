"""Which path a request asks for: redirects name no host, and what a proxy may read in another way
is refused."""

import re
from http import HTTPStatus
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.responses import JSONResponse, RedirectResponse
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from routed_experts.server.http.vllm_http import create_error_response

_DOT_SEGMENT = re.compile(r"[/\\]\.\.?([/\\;]|$)")
"""One that is `.` or `..`, with what some servers take for a slash, or for the begin of a segment's
parameters."""
_NO_DOT_SEGMENTS = "The path has segments that are '.' or '..': send it without them."


class DotSegmentsMiddleware:
    """Refuses paths with dot segments.

    A proxy that publishes some paths may normalise what it matches, and pass on what the client
    sent. It takes `/metrics/../v1/models` for `/v1/models`, and vLLM's route of metrics takes all
    that begins with `/metrics`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _DOT_SEGMENT.search(scope["path"]):
            await self._app(scope, receive, send)
            return
        error = create_error_response(_NO_DOT_SEGMENTS, "NotFoundError", HTTPStatus.NOT_FOUND)
        await JSONResponse(error.model_dump(), HTTPStatus.NOT_FOUND)(scope, receive, send)


class SlashRedirects:
    """Redirects requests that no route takes to the path with a slash at its end, or without, if a
    route takes that.

    Starlette's own redirects name the scheme and host that the request has, which are a client's
    word, and not those before a proxy. These are relative, so that they are right whatever path a
    proxy puts the server below.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._not_found = router.default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._not_found
        if scope["type"] == "http":
            path: str = scope["path"]
            changed = path[:-1] if path.endswith("/") else f"{path}/"
            if self._has_route({**scope, "path": changed}):
                query = scope["query_string"].decode("latin-1")
                location = _relative(changed)
                app = RedirectResponse(f"{location}?{query}" if query else location)
        await app(scope, receive, send)

    def _has_route(self, scope: Scope) -> bool:
        if scope["path"] == scope.get("root_path", ""):  # nothing is left of it
            return False
        return any(route.matches(scope)[0] is not Match.NONE for route in self._router.routes)


def _relative(changed: str) -> str:
    """The reference to `changed` from the path with the slash at the end that it lacks, or without
    the one that it has.

    It does not begin with the name: a colon in that would end a scheme.
    """
    name = quote(changed.rstrip("/").rpartition("/")[2], safe="")
    return f"./{name}/" if changed.endswith("/") else f"../{name}"


def settle_paths(app: FastAPI) -> None:
    app.router.redirect_slashes = False
    app.router.default = SlashRedirects(app.router)
    app.add_middleware(DotSegmentsMiddleware)
