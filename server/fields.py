"""What a request says of routing: read from its body, checked, and told to the engine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request
from pydantic import PrivateAttr

from routed_experts.protocol.models import (
    HISTOGRAM,
    OPT_IN,
    PROMPT_START,
    FieldError,
    RoutingFields,
    RoutingOptions,
    parse_options,
)
from routed_experts.server.row_feeds import opt_in
from routed_experts.server.vllm_api import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    SamplingParams,
    VLLMValidationError,
)

ENDPOINTS = "/v1/completions, /v1/chat/completions or /inference/v1/generate"


class RoutedRequest(RoutingFields):
    """What all request models add to vLLM's."""

    _routing: RoutingOptions | None = PrivateAttr(default=None)

    @property
    def routing(self) -> RoutingOptions | None:
        """The checked routing fields; None if the request does not ask for routing."""
        return self._routing

    @routing.setter
    def routing(self, options: RoutingOptions | None) -> None:
        self._routing = options

    def opt_in(self, params: SamplingParams) -> SamplingParams:
        """`params`, telling the engine to send this request's rows if it asks for them."""
        if self.routing is not None:
            opt_in(params, self.routing.prompt_start)
        # vLLM's own field of that name is not used; it has its own check of it, which comes after a stream began.
        params.routed_experts_prompt_start = 0
        return params


class RoutedCompletionRequest(RoutedRequest, CompletionRequest):
    """A completion request that may ask for routing."""

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        return self.opt_in(super().to_sampling_params(*args, **kwargs))


class RoutedChatRequest(RoutedRequest, ChatCompletionRequest):
    """A chat completion request that may ask for routing."""

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        return self.opt_in(super().to_sampling_params(*args, **kwargs))


class RoutedGenerateRequest(RoutedRequest, GenerateRequest):
    """A request with token ids that may ask for routing."""


async def routing_of(raw_request: Request) -> RoutingOptions | None:
    """The request's routing options, checked before vLLM's model of the body is.

    Raises:
        VLLMValidationError: with `parameter` set to the field's name.
    """
    body = await _body(raw_request)
    return None if body is None else _parse(body, raw_request)


async def generate_routing_of(raw_request: Request) -> RoutingOptions | None:
    """As `routing_of`, for vLLM's token-in, token-out endpoint, whose own way of asking is understood too.

    Raises:
        VLLMValidationError: with `parameter` set to the field's name.
    """
    body = await _body(raw_request)
    options = None if body is None else _parse(body, raw_request, _vllms_default(raw_request))
    if body is None or options is None:
        return None
    params = body.get("sampling_params")
    start = params.get(PROMPT_START) if isinstance(params, dict) else None
    if start:  # 0 is what clients send that send every field
        if type(start) is not int:  # vLLM would make an integer of some, where nobody here sees it
            raise VLLMValidationError(f"{PROMPT_START} must be an integer", parameter=PROMPT_START)
        if options.prompt_start_param in body and options.prompt_start != start:
            raise VLLMValidationError(
                f"{options.prompt_start_param} and sampling_params.{PROMPT_START} differ",
                parameter=options.prompt_start_param,
            )
        if start < 0:
            raise VLLMValidationError(f"{PROMPT_START} must not be negative", parameter=PROMPT_START)
        options = replace(options, prompt_start=start)
    return options.with_vllms_forms()


async def refuse_routing(raw_request: Request) -> None:
    """For endpoints that cannot return routing: a request that asks for it must not lose it without a word.

    Raises:
        VLLMValidationError: the request asks for routing.
    """
    body = await _body(raw_request) or {}
    for name in (OPT_IN, HISTOGRAM):
        if body.get(name) not in (None, False):
            raise VLLMValidationError(f"This endpoint does not return routed experts: use {ENDPOINTS}.", parameter=name)


def _vllms_default(raw_request: Request) -> dict[str, Any]:
    """Where vLLM's own flag was given to its own command, each request of that endpoint asks."""
    return {OPT_IN: True} if getattr(raw_request.app.state, "asks_in_vllms_way", False) else {}


def _parse(
    body: Mapping[str, Any], raw_request: Request, defaults: Mapping[str, Any] | None = None
) -> RoutingOptions | None:
    defaults = {**(defaults or {}), **(getattr(raw_request.app.state, "routed_experts_defaults", None) or {})}
    try:
        return parse_options(body, defaults)
    except FieldError as error:
        raise VLLMValidationError(str(error), parameter=error.param) from None


async def _body(raw_request: Request) -> dict[str, Any] | None:
    """The JSON object of a request; None for others, which vLLM answers."""
    try:
        body = await raw_request.json()
    except ValueError:
        return None
    return body if isinstance(body, dict) else None
