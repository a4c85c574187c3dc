"""Checks what a program's requests say about their experts, before they go to the engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from routed_experts.capture.wire.rows import INPUT_KEY
from routed_experts.protocol.routing_input import (
    INPUT_ARG,
    EncodedInput,
    Groups,
    RoutingInput,
    RoutingInputError,
)
from routed_experts.server.settings import Settings
from routed_experts.server.vllm_api import EngineCoreRequest, VLLMValidationError

_SETTING = f'additional_config={{"{INPUT_KEY}": True}}'


class InputCheck:
    """Of the requests of one engine."""

    def __init__(self, settings: Settings) -> None:
        self._is_on = settings.enable_routed_experts_input
        self._has_default = not settings.input_default.says_nothing
        self._model: dict[str, Any] = {}  # what an input must fit; {} until known
        self._layer_ids: Sequence[int] = ()

    def learn(self, worker: Mapping[str, Any]) -> None:
        """Stores the dimensions that a worker reported."""
        self._model = {name: worker[name] for name in ("num_layers", "top_k", "num_experts")}
        self._model["groups"] = Groups(*worker["groups"])
        self._layer_ids = worker["layer_ids"]

    def check(self, request: EngineCoreRequest) -> None:
        """Raises `VLLMValidationError` for an input that cannot be followed. As long as the model's
        dimensions are not known, the engine's worker alone sees whether it fits them, and ends the
        request with an error."""
        if self._has_default:
            raise VLLMValidationError(
                "routed_experts_default says experts for the requests of a server alone: give them in a program's own "
                "extra_args, with routed_experts.protocol.routing_input.routing_args."
            )
        params = request.sampling_params
        if params is None or INPUT_ARG not in (params.extra_args or {}):
            return
        encoded = EncodedInput.of(params)
        if encoded is None:
            raise VLLMValidationError(
                f"{INPUT_ARG} in extra_args must be what routed_experts.protocol.routing_input.routing_args returned."
            )
        if not self._is_on:
            raise VLLMValidationError(
                f"The engine takes no experts from requests: build it with {_SETTING}."
            )
        try:
            self._check_fits(RoutingInput.decode(encoded), request)
        except RoutingInputError as error:
            problem = error.in_model(self._layer_ids)
            raise VLLMValidationError(f"The routing input of a request: {problem}.") from None
        except ValueError as error:
            raise VLLMValidationError(f"The routing input of a request: {error}.") from None

    def _check_fits(self, routing_input: RoutingInput, request: EngineCoreRequest) -> None:
        """Raises `RoutingInputError` for an input of another model or prompt."""
        if not self._model:
            return
        num_tokens = len(request.prompt_token_ids or ()) or None
        routing_input.check(**self._model, num_prompt_tokens=num_tokens)
