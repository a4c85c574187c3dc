"""What a serving class answered, as an HTTP response."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from routed_experts.server.encoding import LostRowsError
from routed_experts.server.metrics import count_answer
from routed_experts.server.vllm_api import ErrorResponse, create_error_response, metrics_header, with_sse_keep_alive
from routed_experts.server.whole import WholeAnswer, body_of, encoded

MSGPACK = "application/msgpack"
_JSON = "application/json"
_METRICS_HEADER = "endpoint-load-metrics-format"
_AT_ONCE_BYTES, _AT_ONCE_LIST_BYTES = 512 << 10, 192 << 10
"""Answers with more bytes of rows are sent in parts, between which others get a turn. So many take about 2 ms; parts,
and a thread to prepare them in, would take twice that."""


async def respond(answer: Any, raw_request: Request) -> Response:
    """The HTTP response that vLLM's route would send for `answer`, with the routing that belongs to it."""
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if not isinstance(answer, BaseModel | WholeAnswer):
        interval = float(getattr(raw_request.app.state.args, "sse_keep_alive_interval", 0))
        return StreamingResponse(with_sse_keep_alive(answer, interval), media_type="text/event-stream")
    packed = wants_msgpack(raw_request.headers.get("accept", ""))
    headers = metrics_header(raw_request.headers.get(_METRICS_HEADER, ""))
    if not isinstance(answer, WholeAnswer):
        body = body_of(answer)
        if packed:
            return Response(encoded(body, packed), media_type=MSGPACK, headers=headers)
        return JSONResponse(body, headers=headers)
    try:
        return await _with_rows(answer, packed, headers)
    except LostRowsError as error:
        failure = create_error_response(str(error), "InternalServerError", HTTPStatus.INTERNAL_SERVER_ERROR)
        return JSONResponse(failure.model_dump(), status_code=failure.error.code)


async def _with_rows(answer: WholeAnswer, packed: bool, headers: Any) -> Response:
    media_type = MSGPACK if packed else _JSON
    if answer.nbytes <= (_AT_ONCE_LIST_BYTES if answer.encoder.fmt == "list" else _AT_ONCE_BYTES):
        body = b"".join(answer.prepare(packed))
        count_answer(answer.encoder.sent, answer.rows.num_lost)
        return Response(body, media_type=media_type, headers=headers)
    parts = await run_in_threadpool(answer.prepare, packed)
    return StreamingResponse(_in_turns(answer, parts), media_type=media_type, headers=headers)


async def _in_turns(answer: WholeAnswer, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    try:
        for part in parts:
            yield part
            await asyncio.sleep(0)
    finally:
        count_answer(answer.encoder.sent, answer.rows.num_lost)


def wants_msgpack(accept: str) -> bool:
    """Whether the header `Accept` names MessagePack, and JSON not rather."""
    weights = {_JSON: 0.0, MSGPACK: 0.0}
    for item in accept.lower().split(","):
        name, *params = (part.strip() for part in item.split(";"))
        if name in weights:
            weights[name] = _weight(params)
    return weights[MSGPACK] > 0 and weights[MSGPACK] >= weights[_JSON]


def _weight(params: list[str]) -> float:
    for param in params:
        if param.startswith("q="):
            try:
                return float(param[2:])
            except ValueError:
                return 0.0
    return 1.0
