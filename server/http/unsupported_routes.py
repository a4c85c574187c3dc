"""vLLM's other generating endpoints: most reject routing fields, `/invocations` dispatches to our routes."""

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
    require_key,
    routing_of,
)

CLOSED = ("/v1/responses", "/v1/messages", "/v1/chat/completions/batch")
"""Endpoints that cannot return routing."""

INVOCATIONS = "/invocations"
"""SageMaker's endpoint for all kinds of requests."""


def attach(app: FastAPI) -> None:
    """Replaces the closed endpoints by routes that reject routing, and SageMaker's by one that returns it.

    A plugin's route takes precedence over vLLM's route of the same path.
    """
    for path in CLOSED:
        if (route := _route(app, path)) is not None:
            _add(app, route, route.endpoint, [*route.dependencies, Depends(refuse_routing)])
    if (route := _route(app, INVOCATIONS)) is not None:
        _add(app, route, _dispatching(route.endpoint), [Depends(require_key), *route.dependencies])


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


def _dispatching(vllms: Any) -> Any:
    """SageMaker's endpoint: requests for routing go to the route that fits their body, others to `vllms` endpoint."""
    # Imported here, after vLLM, which resets the log levels that this import changes.
    import model_hosting_container_standards.sagemaker as standards

    @standards.stateful_session_manager()
    @standards.inject_adapter_id(adapter_path="model")  # the adapter comes in a header
    async def routed(raw_request: Request) -> Response:
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
        response: Response = await vllms(raw_request=raw_request)
        return response

    async def invocations(raw_request: Request) -> Response:
        routing = await routing_of(raw_request)
        try:
            response: Response = await (vllms if routing is None else routed)(raw_request=raw_request)
        except Exception:
            await refuse_odd_values(raw_request)
            raise
        return response

    return invocations
