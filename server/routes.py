"""The three routes: the two extended ones take the place of vLLM's, the third is new."""

from collections.abc import AsyncGenerator
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse

from routed_experts.protocol import codec
from routed_experts.protocol.models import RoutedExpertsInfo, RoutingOptions
from routed_experts.server.captured_engine import CapturedEngine
from routed_experts.server.encoding import LARGE_BYTES
from routed_experts.server.fields import OPT_IN, RoutedChatRequest, RoutedCompletionRequest, check_routing_fields
from routed_experts.server.openapi import examples, schemas
from routed_experts.server.vllm_api import (
    ChatCompletionResponse,
    CompletionResponse,
    ErrorResponse,
    VLLMValidationError,
    load_aware_call,
    metrics_header,
    validate_json_request,
    with_cancellation,
    with_sse_keep_alive,
)
from routed_experts.server.vllm_serving import RoutedServing
from routed_experts.server.whole import WholeAnswer

router = APIRouter()

_METRICS_HEADER = "endpoint-load-metrics-format"
Options = Annotated[RoutingOptions | None, Depends(check_routing_fields)]


@router.post(
    "/v1/completions",
    dependencies=[Depends(validate_json_request)],
    responses=schemas.generate_responses(
        schemas.RoutedCompletionResponse, examples.COMPLETION_ANSWER, examples.COMPLETION_STREAM
    ),
    openapi_extra=schemas.request_example(examples.COMPLETION_REQUEST),
)
@with_cancellation
@load_aware_call
async def create_completion(request: RoutedCompletionRequest, raw_request: Request, options: Options) -> Response:
    """Text completion, as OpenAI's, with the routing of every token if asked for."""
    serving = raw_request.app.state.openai_serving_completion
    if serving is None:
        raise NotImplementedError("The model does not support Completions API")
    request.routing = options
    answer = await serving.create_completion(request, raw_request)
    is_list = isinstance(request.prompt, list) and not all(isinstance(item, int) for item in request.prompt)
    return await _respond(answer, serving, request, raw_request, is_list)


@router.post(
    "/v1/chat/completions",
    dependencies=[Depends(validate_json_request)],
    responses=schemas.generate_responses(schemas.RoutedChatResponse, examples.CHAT_ANSWER, examples.CHAT_STREAM),
    openapi_extra=schemas.request_example(examples.CHAT_REQUEST),
)
@with_cancellation
@load_aware_call
async def create_chat_completion(request: RoutedChatRequest, raw_request: Request, options: Options) -> Response:
    """Chat completion, as OpenAI's, with the routing of every token if asked for."""
    serving = raw_request.app.state.openai_serving_chat
    if serving is None:
        raise NotImplementedError("The model does not support Chat Completions API")
    request.routing = options
    answer = await serving.create_chat_completion(request, raw_request)
    return await _respond(answer, serving, request, raw_request, is_list=False)


@router.get("/v1/routed_experts", responses=schemas.info_responses())
async def routed_experts(raw_request: Request) -> RoutedExpertsInfo:
    """What the arrays of routed experts mean for the served model."""
    captured: CapturedEngine | None = raw_request.app.state.captured_engine
    if captured is None:
        raise VLLMValidationError("This server does not capture routed experts.", parameter=OPT_IN)
    return await captured.info()


async def _respond(
    answer: ErrorResponse | CompletionResponse | ChatCompletionResponse | WholeAnswer | AsyncGenerator[str, None],
    serving: RoutedServing,
    request: RoutedCompletionRequest | RoutedChatRequest,
    raw_request: Request,
    is_list: bool,
) -> Response:
    """The HTTP response that vLLM's route would send for `answer`, with the routing that was collected for it."""
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if not isinstance(answer, CompletionResponse | ChatCompletionResponse | WholeAnswer):
        interval = float(getattr(raw_request.app.state.args, "sse_keep_alive_interval", 0))
        return StreamingResponse(with_sse_keep_alive(answer, interval), media_type="text/event-stream")
    body = (answer.response if isinstance(answer, WholeAnswer) else answer).model_dump()
    for choice in body["choices"]:
        choice.pop("routed_experts", None)  # vLLM's own field, null where it is not used
    headers = metrics_header(raw_request.headers.get(_METRICS_HEADER, ""))
    if not isinstance(answer, WholeAnswer):
        return JSONResponse(body, headers=headers)
    assert request.routing is not None
    encoder, rows = serving.encoder(request.routing), answer.rows

    def encode() -> bytes:
        rows.add_to(body, encoder, is_list)
        return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)

    try:
        content = await run_in_threadpool(encode) if rows.nbytes > LARGE_BYTES else encode()
    except codec.CodecError as error:
        raise VLLMValidationError(str(error), parameter="routed_experts_dtype") from None
    return Response(content, media_type="application/json", headers=headers)
