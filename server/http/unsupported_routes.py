"""vLLM's other endpoints that generate: what they do with a request for routing."""

from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from routed_experts.server.http import routes
from routed_experts.server.http.request import (
    RoutedChatRequest,
    RoutedCompletionRequest,
    refuse_odd_values,
    refuse_routing,
    routing_of,
)

CLOSED = ("/v1/responses", "/v1/messages", "/v1/chat/completions/batch")
"""Endpoints whose responses have no place for routing."""

INVOCATIONS = "/invocations"
"""SageMaker's one endpoint for all."""


def attach(app: FastAPI) -> None:
    """Makes the closed endpoints refuse routing, and SageMaker's give what the endpoints behind it give.

    vLLM replaces routes of its own by those that a plugin adds for the same path.
    """
    for path in CLOSED:
        if (route := _route(app, path)) is not None:
            _add(app, route, route.endpoint, [*route.dependencies, Depends(refuse_routing)])
    if (route := _route(app, INVOCATIONS)) is not None:
        _add(app, route, _dispatching(route.endpoint), route.dependencies)


def _route(app: FastAPI, path: str) -> APIRoute | None:
    found = (route for route in app.routes if isinstance(route, APIRoute) and route.path == path)
    return next((route for route in found if "POST" in route.methods), None)


def _add(app: FastAPI, route: APIRoute, endpoint: Any, dependencies: Any) -> None:
    app.router.add_api_route(
        route.path,
        endpoint,
        methods=["POST"],
        dependencies=dependencies,
        response_model=route.response_model,
        responses=route.responses,
        summary=route.summary,
        name=route.name,
    )


def _dispatching(otherwise: Any) -> Any:
    """SageMaker's one endpoint for all: a request for routing goes where its body belongs, others as before."""
    # vLLM has it by now, and puts the log levels back that importing it changes.
    import model_hosting_container_standards.sagemaker as standards

    @standards.stateful_session_manager()
    @standards.inject_adapter_id(adapter_path="model")  # a header of SageMaker's says the adapter, and nothing else
    async def asked(raw_request: Request) -> Response:
        routing, body = await routing_of(raw_request), await raw_request.json()
        try:
            if body.get("messages") is not None:
                chat = RoutedChatRequest.model_validate(body)
                return await routes.create_chat_completion(request=chat, raw_request=raw_request, routing=routing)
            if body.get("prompt") is not None or body.get("prompt_embeds") is not None:
                completion = RoutedCompletionRequest.model_validate(body)
                return await routes.create_completion(request=completion, raw_request=raw_request, routing=routing)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        await refuse_routing(raw_request)
        answer: Response = await otherwise(raw_request=raw_request)
        return answer

    async def invocations(raw_request: Request) -> Response:
        routing = await routing_of(raw_request)
        try:
            answer: Response = await (otherwise if routing is None else asked)(raw_request=raw_request)
        except Exception:
            await refuse_odd_values(raw_request)
            raise
        return answer

    return invocations
