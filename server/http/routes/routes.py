"""The routes: three replace vLLM's routes of the same path, `/v1/routed_experts` is new."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from routed_experts.protocol.input_fields import FieldsOfInput
from routed_experts.protocol.models import ExpertProfile, RoutedExpertsInfo, RoutingOptions
from routed_experts.server.http.answers.response import respond
from routed_experts.server.http.arrays.references import ROWS_PATH
from routed_experts.server.http.arrays.stored_arrays import delete_array, stored_array
from routed_experts.server.http.engine import CapturedEngine, expert_profile
from routed_experts.server.http.requests.request import (
    PackedRoute,
    RoutedChatRequest,
    RoutedCompletionRequest,
    RoutedGenerateRequest,
    generate_routing_of,
    require_key,
    routing_of,
)
from routed_experts.server.http.requests.routing_input import input_of
from routed_experts.server.http.routes import schemas
from routed_experts.server.http.routes.texts import TEXTS_PATH, TokenTexts, texts_of
from routed_experts.server.http.vllm_http import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from routed_experts.server.vllm_api import VLLMNotFoundError

router = APIRouter(route_class=PackedRoute)
"""Routes of every server."""

generate_router = APIRouter(route_class=PackedRoute)
"""Routes of servers with `--enable-scale-out`."""

Routing = Annotated[RoutingOptions | None, Depends(routing_of)]
RoutingInput = Annotated[FieldsOfInput | None, Depends(input_of)]
GenerateRouting = Annotated[RoutingOptions | None, Depends(generate_routing_of)]


@router.post("/v1/completions", dependencies=[Depends(validate_json_request)], **schemas.COMPLETION)
@with_cancellation
@load_aware_call
async def create_completion(
    request: RoutedCompletionRequest,
    raw_request: Request,
    routing_input: RoutingInput,
    routing: Routing,
) -> Response:
    """OpenAI's text completion, optionally with routing."""
    serving = _serving(raw_request, "openai_serving_completion", "Completions API")
    request._routing = routing
    request._input_fields = routing_input
    return await respond(await serving.create_completion(request, raw_request), raw_request)


@router.post("/v1/chat/completions", dependencies=[Depends(validate_json_request)], **schemas.CHAT)
@with_cancellation
@load_aware_call
async def create_chat_completion(
    request: RoutedChatRequest,
    raw_request: Request,
    routing_input: RoutingInput,
    routing: Routing,
) -> Response:
    """OpenAI's chat completion, optionally with routing."""
    serving = _serving(raw_request, "openai_serving_chat", "Chat Completions API")
    request._routing = routing
    request._input_fields = routing_input
    return await respond(await serving.create_chat_completion(request, raw_request), raw_request)


@generate_router.post(
    "/inference/v1/generate",
    dependencies=[Depends(require_key), Depends(validate_json_request)],
    **schemas.GENERATE,
)
@with_cancellation
@load_aware_call
async def generate(
    request: RoutedGenerateRequest,
    raw_request: Request,
    routing_input: RoutingInput,
    routing: GenerateRouting,
) -> Response:
    """vLLM's token-in, token-out completion, optionally with routing. Needs `--enable-scale-out`.
    Routing fields stand at the top level of the request."""
    serving = _serving(raw_request, "serving_tokens", "generate tokens API")
    request._routing = routing
    request._input_fields = routing_input
    return await respond(await serving.serve_tokens(request, raw_request), raw_request)


@router.get("/v1/routed_experts", **schemas.INFO)
async def routed_experts(raw_request: Request) -> RoutedExpertsInfo:
    """Dimensions of the arrays for the served model: layers, experts per token, number of
    experts."""
    return _captured(raw_request).info


@router.get("/v1/routed_experts/profile", **schemas.PROFILE)
async def routed_experts_profile(raw_request: Request) -> ExpertProfile:
    """How often each expert was chosen by all tokens of all requests since the server started. The
    difference of two responses is what happened between them."""
    return await expert_profile(_captured(raw_request))


@router.post(TEXTS_PATH, dependencies=[Depends(validate_json_request)], **schemas.TEXTS)
async def token_texts(raw_request: Request) -> TokenTexts:
    """The texts of up to 16,384 tokens, `{"token_ids": [39, 72]}`, each as it stands within a text,
    for whoever shows rows beside tokens."""
    return await texts_of(await raw_request.body(), _captured(raw_request).engine)


# Their parameters are texts, and not in the signatures: FastAPI would say that it answers 422.
@router.get(ROWS_PATH + "/{id}", response_class=Response, **schemas.ROWS)
@router.head(ROWS_PATH + "/{id}", include_in_schema=False)
async def stored_rows(raw_request: Request) -> Response:
    """An array that a response refers to, or with `?layers=12:24&tokens=0:8192` a part of it. Both
    count from 0 in this array."""
    store = raw_request.app.state.routed_experts.store
    key = raw_request.path_params["id"]
    part = raw_request.query_params
    return await stored_array(raw_request, store, key, part.get("layers"), part.get("tokens"))


@router.delete(ROWS_PATH + "/{id}", status_code=204, **schemas.DELETION)
async def delete_rows(raw_request: Request) -> Response:
    """Deletes an array that a response refers to, before it expires."""
    store = raw_request.app.state.routed_experts.store
    key = raw_request.path_params["id"]
    return await delete_array(raw_request, store, key)


def _captured(raw_request: Request) -> CapturedEngine:
    captured: CapturedEngine | None = raw_request.app.state.routed_experts.captured
    if captured is None:
        raise VLLMNotFoundError("This server does not capture routed experts.")
    return captured


def _serving(raw_request: Request, name: str, api: str) -> Any:
    serving = getattr(raw_request.app.state, name, None)
    if serving is None:
        raise NotImplementedError(f"The model does not support {api}")
    return serving
