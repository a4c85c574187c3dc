"""What vLLM sees of a routing input before it goes to the engine."""

from copy import copy, deepcopy
from typing import Any

import msgspec
import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from routed_experts.protocol.routing_input import INPUT_ARG, EncodedInput, RoutingInput
from routed_experts.server.outputs.held_input import HeldInput, put_input

ENCODED = RoutingInput(rows=np.zeros((1000, 4, 1), np.int16)).encode()


def request_with(extra_args: dict[str, Any] | None) -> EngineCoreRequest:
    params = SamplingParams(extra_args=extra_args)
    return EngineCoreRequest("a", [1], None, params, None, 0.0, None, None, None)


def test_vllm_encodes_and_copies_and_prints_no_array() -> None:
    held = HeldInput(ENCODED)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(held)) == {"header": ENCODED.header}
    for other in (copy(held), deepcopy(held)):
        assert other.take() is ENCODED
    assert repr(held) == repr(ENCODED)


def test_each_choice_of_a_prompt_gets_the_same_arrays() -> None:
    shared = SamplingParams(extra_args={INPUT_ARG: HeldInput(ENCODED), "other": 1})
    requests = [request_with(None) for _ in range(2)]
    for request in requests:
        request.sampling_params = shared
        put_input(request)
        assert request.sampling_params.extra_args == {INPUT_ARG: ENCODED, "other": 1}
        assert EncodedInput.of(request.sampling_params) is ENCODED


def test_the_server_has_a_default_for_requests_that_do_not_say_theirs() -> None:
    other = RoutingInput(rows=np.ones((1, 4, 1), np.int16)).encode()
    theirs: dict[str, tuple[Any, Any]] = {
        "nothing": (None, other),
        "other arguments": ({"other": 1}, other),
        "a client's own value": ({INPUT_ARG: "text"}, other),
        "an input": ({INPUT_ARG: HeldInput(ENCODED)}, ENCODED),
        "that they say nothing": ({INPUT_ARG: HeldInput(None)}, None),
    }
    for extra_args, expected in theirs.values():
        request = request_with(extra_args)
        put_input(request, other)
        assert request.sampling_params is not None
        assert (request.sampling_params.extra_args or {}).get(INPUT_ARG) is expected
        assert EncodedInput.of(request.sampling_params) is expected


def test_other_requests_stay_as_they_are() -> None:
    for extra_args in (None, {"other": 1}, {INPUT_ARG: ENCODED}):
        request = request_with(extra_args)
        params = request.sampling_params
        put_input(request)
        assert request.sampling_params is params
