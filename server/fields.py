"""What a request says of routing: read from its body, checked, and told to the engine."""

from typing import Any

from fastapi import Request
from pydantic import PrivateAttr

from routed_experts.capture.message import PROMPT_START_ARG
from routed_experts.protocol.models import FieldError, RoutingFields, RoutingOptions, parse_options
from routed_experts.server.vllm_api import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingParams,
    VLLMValidationError,
)

OPT_IN = "return_routed_experts"


class RoutedRequest(RoutingFields):
    """What both request models add to vLLM's."""

    _routing: RoutingOptions | None = PrivateAttr(default=None)

    @property
    def routing(self) -> RoutingOptions | None:
        """The checked routing fields; None if the request does not ask for routing."""
        return self._routing

    @routing.setter
    def routing(self, options: RoutingOptions | None) -> None:
        self._routing = options

    def opt_in(self, params: SamplingParams) -> SamplingParams:
        """`params`, telling the engine whether to send this request's rows."""
        args = dict(params.extra_args or {})
        args.pop(PROMPT_START_ARG, None)  # not a client's to set
        if self.routing is not None:
            args[PROMPT_START_ARG] = self.routing.prompt_start
        params.extra_args = args or None
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


async def check_routing_fields(raw_request: Request) -> RoutingOptions | None:
    """The request's routing options, checked before vLLM's model of the body is.

    Raises:
        VLLMValidationError: with `parameter` set to the field's name.
    """
    try:
        body = await raw_request.json()
    except ValueError:
        return None  # vLLM answers bodies that are not JSON
    if not isinstance(body, dict):
        return None
    try:
        return parse_options(body)
    except FieldError as error:
        raise VLLMValidationError(str(error), parameter=error.param) from None
