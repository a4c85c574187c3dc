"""Errors of the web framework in the form that vLLM's have."""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from routed_experts.server.http.vllm_http import create_error_response


def format_framework_errors(app: FastAPI) -> None:
    """Bodies that are no text, wrong methods, and paths without a route.

    vLLM formats errors of FastAPI's class, of which these are a base. Can go when it formats both.
    """
    app.exception_handler(HTTPException)(_formatted)


async def _formatted(_: Request, error: HTTPException) -> JSONResponse:
    status = HTTPStatus(error.status_code)
    content = create_error_response(str(error.detail), status.phrase, status).model_dump()
    return JSONResponse(content, status, error.headers)
