"""Routes of the page in the API server. Its files need no API key; the requests that it sends
do."""

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from routed_experts.server.page import HEADERS, PAGE_PATH, page_file

page_router = APIRouter(include_in_schema=False)


@page_router.get("/")
def start() -> Response:
    return RedirectResponse(PAGE_PATH[1:])  # relative: proxies may put the server below a path


@page_router.get(PAGE_PATH)
@page_router.get(PAGE_PATH + "/{name}")
async def page(raw_request: Request, name: str | None = None) -> Response:
    path = PAGE_PATH if name is None else f"{PAGE_PATH}/{name}"
    file = page_file(path, page_config(raw_request))
    if file is None:
        return Response("File not found.", status_code=404)
    content, kind = file
    return Response(content, media_type=kind, headers=HEADERS)


def page_config(raw_request: Request) -> dict[str, str]:
    """Settings that the page needs before its first request."""
    state = raw_request.app.state
    if state.routed_experts.captured is None:
        return {"capture": "off"}
    return {"api-key": "wanted"} if state.routed_experts.has_key else {}
