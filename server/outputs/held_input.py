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
    refuses a header without. None: the request says that it says nothing, whatever the server's
    default is.
    """

    header: bytes

    def __init__(self, encoded: EncodedInput | None) -> None:
        self.header = b"" if encoded is None else encoded.header
        self._encoded = encoded

    def __repr__(self) -> str:
        return repr(self._encoded)

    def __deepcopy__(self, memo: Any) -> "HeldInput":
        return self

    def take(self) -> EncodedInput | None:
        """The input, which all choices share."""
        return self._encoded


def put_input(request: EngineCoreRequest, default: EncodedInput | None = None) -> None:
    """Puts the routing input of a request, or the server's default, into the message to the engine.

    Here, because the requests of every route come here.
    """
    sampling = request.sampling_params
    if sampling is None:
        return
    extra_args = dict(sampling.extra_args or {})
    held = extra_args.get(INPUT_ARG)
    is_of_program = isinstance(held, EncodedInput)  # which shares the engine with a server
    if isinstance(held, HeldInput):
        said = held.take()
    elif default is None or is_of_program:
        return
    else:
        said = default
    extra_args.pop(INPUT_ARG, None)
    if said is not None:
        extra_args[INPUT_ARG] = said
    request.sampling_params = copy(sampling)  # all choices share the object
    request.sampling_params.extra_args = extra_args
