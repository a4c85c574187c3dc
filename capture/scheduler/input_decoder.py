"""Joins what a request says of its experts with its arrays, which travel beside the message."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreRequest, core
from vllm.v1.serial_utils import MsgpackDecoder

from routed_experts.capture.scheduler.router_inputs import NamedInput, name_of_kv
from routed_experts.protocol.routing_input import INPUT_ARG


class InputDecoder(MsgpackDecoder):
    """Reads requests in an engine's process.

    vLLM's encoder puts a numpy array of 256 bytes or more into a frame of its own, wherever it is
    in a request, and its number into the message. Its decoder makes an array of it again only where
    a field's type says so, and `SamplingParams.extra_args` may be anything.
    """

    def decode(self, bufs: Any) -> Any:
        message = super().decode(bufs)
        if isinstance(message, EngineCoreRequest) and message.sampling_params is not None:
            _join(message, message.sampling_params.extra_args or {}, bufs)
        return message


def read_inputs() -> None:
    """Has this process's engine decode requests with `InputDecoder`.

    vLLM's thread for messages makes its decoder after the scheduler. Needed until vLLM decodes
    arrays in `extra_args`.
    """
    core.MsgpackDecoder = InputDecoder


def _join(request: EngineCoreRequest, args: dict[str, Any], frames: Sequence[Any]) -> None:
    """Puts the input, with its arrays, in the place of what the message has of it."""
    value = args.get(INPUT_ARG)
    if not isinstance(value, Mapping) or not isinstance(value.get("header"), bytes):
        return  # of a client, in JSON: it says nothing
    data = _data_of(value.get("arrays"), frames)
    if data is None:
        return  # the scheduler refuses it
    encoded = NamedInput(value["header"], np.frombuffer(data, np.uint8))
    args[INPUT_ARG] = encoded
    # Now, as vLLM hashes the prompt next, in this thread; in the scheduler's, steps would wait.
    request.cache_salt = name_of_kv(request.cache_salt, encoded)


def _data_of(array: object, frames: Sequence[Any]) -> Any:
    """The bytes of an array as vLLM's messages have it: its dtype, its shape, and its bytes or the
    number of their frame. None if it is none."""
    match array:
        case [_, _, int(number)] if 0 < number < len(frames):
            return frames[number]
        case [_, _, bytes() | memoryview() as data]:
            return data
    return None
