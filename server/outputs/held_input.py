"""What stands for a request's routing input until the request goes to the engine."""

from copy import copy
from dataclasses import dataclass
from typing import Any

from routed_experts.protocol.routing_input import INPUT_ARG, EncodedInput
from routed_experts.server.vllm_api import EngineCoreRequest


@dataclass(init=False, eq=False)
class HeldInput:
    """In the `SamplingParams` of a request over HTTP, which vLLM encodes at some routes to see
    whether that can be done.

    vLLM sees only `header`. `put_input` moves the arrays into the message to the engine, which
    refuses a header without.
    """

    header: bytes

    def __init__(self, encoded: EncodedInput) -> None:
        self.header = encoded.header
        self._encoded = encoded

    def __repr__(self) -> str:
        return repr(self._encoded)

    def __deepcopy__(self, memo: Any) -> "HeldInput":
        return self

    def take(self) -> EncodedInput:
        """The input, which all choices share."""
        return self._encoded


def put_input(request: EngineCoreRequest) -> None:
    """Puts the routing input of a request into the message to the engine."""
    sampling = request.sampling_params
    if sampling is None or not sampling.extra_args:
        return
    held = sampling.extra_args.get(INPUT_ARG)
    if isinstance(held, HeldInput):
        request.sampling_params = copy(sampling)  # all choices share the object
        request.sampling_params.extra_args = {**sampling.extra_args, INPUT_ARG: held.take()}
