"""Routes of the page in the API server. Its files need no API key; the requests that it sends do."""

import os
from argparse import Namespace

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from routed_experts.server.page import HEADERS, MAX_BYTES, PAGE_PATH, READ_PATH, TOO_LARGE, page_file, read_saved

page_router = APIRouter(include_in_schema=False)


@page_router.get("/")
def start() -> Response:
    return RedirectResponse(PAGE_PATH[1:])  # relative: proxies may put the server below a path


@page_router.get(PAGE_PATH)
@page_router.get(PAGE_PATH + "/{name}")
async def page(raw_request: Request, name: str | None = None) -> Response:
    found = page_file(PAGE_PATH if name is None else f"{PAGE_PATH}/{name}", page_config(raw_request))
    if found is None:
        return Response("File not found.", status_code=404)
    content, kind = found
    return Response(content, media_type=kind, headers=HEADERS)


@page_router.post(READ_PATH)
async def read(raw_request: Request) -> Response:
    """The responses in files that are opened in the page. They are read in a thread."""
    body = bytearray()
    async for chunk in raw_request.stream():  # to its end, so that the client hears of the error
        if len(body) <= MAX_BYTES:
            body += chunk
    if len(body) > MAX_BYTES:
        return _error(TOO_LARGE, 413)
    try:
        lines = await run_in_threadpool(read_saved, bytes(body))
    except ValueError as error:
        return _error(str(error), 400)
    return StreamingResponse(lines, media_type="application/jsonl", headers=HEADERS)


def _error(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)


def page_config(raw_request: Request) -> dict[str, str]:
    """Settings that the page needs before its first request."""
    state = raw_request.app.state
    if state.routed_experts.captured is None:
        return {"capture": "off"}
    return {"api-key": "wanted"} if api_keys(getattr(state, "args", Namespace())) else {}


def api_keys(args: Namespace) -> list[str]:
    """The API keys that vLLM's routes accept; empty if they need none."""
    return [key for key in (getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]) if key]
