"""Names of vLLM's HTTP server that moved, as the newest version calls them, and substitutes for
missing ones."""

import argparse
from http import HTTPStatus
from importlib import import_module
from typing import Any

import vllm
from fastapi import FastAPI
from fastapi.routing import APIRoute
from vllm.sampling_params import RequestOutputKind


def _first(name: str, *places: str) -> Any:
    """`name` from the first of the modules that has it; one must have it."""
    if (value := _first_or_none(name, *places)) is None:
        raise ImportError(f"vLLM {vllm.__version__} has no {name} in {' or '.join(places)}")
    return value


def _first_or_none(name: str, *places: str) -> Any:
    """The same for a name that older versions do not have. `required.HTTP` says since when it has
    to be there."""
    for place in places:
        try:
            return getattr(import_module(place), name)
        except (ImportError, AttributeError):
            continue
    return None


_ENTRY = "vllm.entrypoints"
_NEW_ENGINE = f"{_ENTRY}.serve.engine.protocol"  # 0.29
_NEW_STARTUP = f"{_ENTRY}.common.startup"  # 0.33
_GENERATE = f"{_ENTRY}.scale_out.token_in_token_out.protocol"

ErrorResponse = _first("ErrorResponse", _NEW_ENGINE, f"{_ENTRY}.openai.engine.protocol")
cli_env_setup = _first("cli_env_setup", _NEW_STARTUP, f"{_ENTRY}.serve.utils.api_utils")
GenerateTokensChoice = _first_or_none("GenerateTokensChoice", _GENERATE) or _first(
    "GenerateResponseChoice", _GENERATE
)
GenerateTokensStreamChoice = _first_or_none("GenerateTokensStreamChoice", _GENERATE) or _first(
    "GenerateResponseStreamChoice", _GENERATE
)
_tokens_response = _first_or_none("GenerateTokensResponse", _GENERATE)  # 0.32
GenerateTokensResponse = _tokens_response or _first("GenerateResponse", _GENERATE)
GenerateTokensStreamResponse = _first_or_none("GenerateTokensStreamResponse", _GENERATE) or _first(
    "GenerateStreamResponse", _GENERATE
)

_keep_alive = _first_or_none("with_sse_keep_alive", f"{_ENTRY}.serve.utils.sse_keep_alive")  # 0.30
_configure_logging = _first_or_none("configure_logging_from_args", "vllm.logger")  # 0.31
_retryable = _first_or_none("RetryableRequestError", "vllm.exceptions")  # 0.32
_generation_error = _first("GenerationError", "vllm.exceptions", f"{_ENTRY}.openai.engine.protocol")
_register_scale_out = _first("register_scale_out_api_routers", f"{_ENTRY}.scale_out.factories")
_attach_plugins = _first_or_none(  # 0.29
    "attach_endpoint_plugins", "vllm.plugins.endpoint_plugins.interface"
)

HAS_SCALE_OUT_FLAG = "enable_scale_out" in _register_scale_out.__code__.co_consts
STREAMS_CHOICES = _tokens_response is not None
"""Whether generate can stream several choices: before, it fails where a choice's first token comes
after another's."""
_REPLACES_ROUTES = (
    _attach_plugins is not None and "openapi_schema" in _attach_plugins.__code__.co_names
)


class _Retryable(_generation_error):  # type: ignore[misc,valid-type]
    """Until 0.32: a failure of a request that clients may repeat."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.status_code = HTTPStatus.SERVICE_UNAVAILABLE


RetryableRequestError: Any = _retryable or _Retryable


with_sse_keep_alive: Any = _keep_alive or (lambda chunks, interval: chunks)
configure_logging_from_args: Any = _configure_logging or (lambda args: None)


def set_output_kind(params: Any, stream: bool) -> None:
    """Until 0.29: generate's responses that are not streamed would come as outputs that repeat all
    earlier tokens."""
    params.output_kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY


def scales_out(args: argparse.Namespace | None) -> bool:
    """Whether vLLM serves its scale-out endpoints; until 0.30 every server does."""
    always = args is not None and not HAS_SCALE_OUT_FLAG
    return always or bool(
        getattr(args, "enable_scale_out", False) or getattr(args, "tokens_only", False)
    )


def replace_routes(app: FastAPI) -> None:
    """Until 0.32: removes routes that a later one of the same path and method replaces; the first
    would win."""
    if _REPLACES_ROUTES:
        return
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    last = {(route.path, method): route for route in routes for method in route.methods}
    app.router.routes[:] = [
        route
        for route in app.routes
        if not isinstance(route, APIRoute)
        or any(last[route.path, method] is route for method in route.methods)
    ]
