"""vLLM's other routes: all reject routing fields but `/invocations`, which dispatches to our
routes."""

import json
from collections.abc import Collection, Iterator
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from routed_experts.protocol.models import INPUT_FIELDS, OPT_IN, PREFIXES, PROMPT_START
from routed_experts.server.http.requests.request import (
    ENDPOINTS,
    RoutedChatRequest,
    RoutedCompletionRequest,
    misplaced_fields,
    require_key,
    routing_of,
)
from routed_experts.server.http.requests.routing_input import input_of
from routed_experts.server.http.routes import routes
from routed_experts.server.http.vllm_http import CompletionRequest
from routed_experts.server.vllm_api import VLLMValidationError

INVOCATIONS = "/invocations"
"""SageMaker's endpoint for all kinds of requests."""

_OURS = __name__.partition(".")[0]
_WITH_BODY = ("POST", "PUT", "PATCH")
_LONGEST_NAME = 64
_BEGINNINGS = tuple(prefix.encode() for prefix in PREFIXES)


def attach(app: FastAPI) -> None:
    """Replaces SageMaker's endpoint by one that returns routing: a plugin's route wins over vLLM's
    of the same path."""
    routes = (
        route for route in app.routes if isinstance(route, APIRoute) and route.path == INVOCATIONS
    )
    if (route := next((route for route in routes if "POST" in route.methods), None)) is not None:
        app.router.add_api_route(
            INVOCATIONS,
            _dispatching(route.endpoint),
            methods=["POST"],
            dependencies=[Depends(require_key), *route.dependencies],
            response_model=route.response_model,
            responses=route.responses,
            summary=route.summary,
            name=route.name,
        )


def refuse_on_other_routes(app: FastAPI) -> None:
    """Has every route of `app` that is not ours reject routing fields. Called when all routes are
    there."""
    # Where vLLM renders a prompt, it puts this field of its own into the request for our endpoint.
    vllms_own = {PROMPT_START} & CompletionRequest.model_fields.keys()
    for route in app.routes:
        if isinstance(route, Route) and not is_ours(route):
            allowed = vllms_own if route.path.endswith("/render") else ()
            route.app = _refusing(route.app, allowed)


def is_ours(route: Route) -> bool:
    return (
        str(getattr(getattr(route, "endpoint", None), "__module__", "")).partition(".")[0] == _OURS
    )


def _refusing(app: ASGIApp, allowed: Collection[str]) -> ASGIApp:
    """`app`, which rejects JSON bodies with routing fields but those `allowed`."""

    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY or not _is_json(scope):
            await app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body", False):
            messages.append(await receive())
        for name in _routing_fields(b"".join(message.get("body", b"") for message in messages)):
            if name not in allowed:
                raise _refusal(name)
        unread = iter(messages)

        async def receive_again() -> Message:
            return next(unread, None) or await receive()

        await app(scope, receive_again, send)

    return refusing


def _is_json(scope: Scope) -> bool:
    """Whether a body says that it is JSON, or nothing."""
    return "json" in Headers(scope=scope).get("content-type", "json").lower()


def _routing_fields(content: bytes) -> Iterator[str]:
    """Names of the routing fields in a JSON body, which is parsed only if it may have some."""
    if not any(beginning in content for beginning in _BEGINNINGS):
        return
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):  # which vLLM reports
        return
    if isinstance(body, dict):
        yield from (name for name in body if name.startswith(PREFIXES))
        yield from (name for _, name in misplaced_fields(body))


def _refusal(name: str) -> VLLMValidationError:
    name = name[:_LONGEST_NAME].encode("utf-8", "replace").decode()  # without lone surrogates
    message = f"{name}: this endpoint does not return routed experts: use {ENDPOINTS}"
    if name in INPUT_FIELDS:
        message = f"{name}: this endpoint takes no routing: use {ENDPOINTS}"
    return VLLMValidationError(message, parameter=name)


def _dispatching(vllms: Any) -> Any:
    """SageMaker's endpoint: requests for routing go to the route that fits their body, others to
    `vllms` endpoint."""
    # Imported here, after vLLM, which resets the log levels that this import changes.
    import model_hosting_container_standards.sagemaker as standards

    @standards.stateful_session_manager()
    @standards.inject_adapter_id(adapter_path="model")  # the adapter comes in a header
    async def routed(raw_request: Request) -> Response:
        routing_input = await input_of(raw_request)
        routing = await routing_of(raw_request)
        body = await raw_request.json()
        try:
            if body.get("messages") is not None:
                chat = RoutedChatRequest.model_validate(body)
                return await routes.create_chat_completion(
                    request=chat,
                    raw_request=raw_request,
                    routing_input=routing_input,
                    routing=routing,
                )
            if body.get("prompt") is not None or body.get("prompt_embeds") is not None:
                completion = RoutedCompletionRequest.model_validate(body)
                return await routes.create_completion(
                    request=completion,
                    raw_request=raw_request,
                    routing_input=routing_input,
                    routing=routing,
                )
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        if routing_input is not None and not routing_input.says_nothing:
            name = routing_input.first_field
            raise VLLMValidationError(f"{name} is for {ENDPOINTS}", parameter=name)
        if routing is not None and not routing.by_default:
            raise VLLMValidationError(
                f"This request does not return routed experts: use {ENDPOINTS}", parameter=OPT_IN
            )
        response: Response = await vllms(raw_request=raw_request)
        return response

    async def invocations(raw_request: Request) -> Response:
        routing_input = await input_of(raw_request)
        routing = await routing_of(raw_request)
        is_vllms = routing is None and routing_input is None
        response: Response = await (vllms if is_vllms else routed)(raw_request=raw_request)
        return response

    return invocations
