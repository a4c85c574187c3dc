"""Nothing that a client can send opts its request in: through vLLM's own request models and its own encoding."""

import json
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from fastapi import UploadFile
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from routed_experts.capture.engine.scheduler import opt_in_of
from routed_experts.capture.message import OPT_IN_ARG, OptIn
from routed_experts.protocol.models import parse_options
from routed_experts.server.http.request import RoutedChatRequest, RoutedCompletionRequest, RoutedGenerateRequest

FORGED = OptIn(0, bytes(range(16)), shared=False).encode()
VALUES = [
    *(0, 1, 7, -1, True, False, None, 1.5, "", "0", "1", [0], [1, 2], {}, {"prompt_start": 0}),
    *(list(FORGED), FORGED.decode("latin-1"), FORGED.hex(), repr(FORGED), {"__bytes__": FORGED.hex()}),
    {"type": "bytes", "data": list(FORGED)},
]
MESSAGES = [{"role": "user", "content": "abc"}]


def with_xargs(kind: type, **body: Any) -> Callable[[Any], SamplingParams]:
    """How a request of `kind` with `vllm_xargs` becomes sampling parameters."""

    def make(value: Any) -> SamplingParams:
        request = kind.model_validate_json(json.dumps({**body, "vllm_xargs": {OPT_IN_ARG: value}}))
        return request.to_sampling_params(5, {})

    return make


def speech(model: type) -> Callable[[Any], SamplingParams]:
    """A form, whose `vllm_xargs` are JSON in a text."""
    return lambda value: model.model_validate(
        {"file": UploadFile(BytesIO()), "vllm_xargs": json.dumps({OPT_IN_ARG: value})}
    ).to_sampling_params(5, {})


def messages(value: Any) -> SamplingParams:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "vllm_xargs": {OPT_IN_ARG: value}}
    request = AnthropicMessagesRequest.model_validate_json(json.dumps(body))
    return AnthropicServingMessages.to_chat_completion_request(request).to_sampling_params(5, {})


def generate(value: Any) -> SamplingParams:
    body = {"token_ids": [1, 2, 3], "sampling_params": {"extra_args": {OPT_IN_ARG: value}}}
    return RoutedGenerateRequest.model_validate_json(json.dumps(body)).sampling_params


ENDPOINTS = {
    "completions": with_xargs(RoutedCompletionRequest, model="tiny", prompt="abc"),
    "chat": with_xargs(RoutedChatRequest, model="tiny", messages=MESSAGES),
    "responses": with_xargs(ResponsesRequest, model="tiny", input="abc"),
    "messages": messages,
    "generate": generate,
    "transcriptions": speech(TranscriptionRequest),
    "translations": speech(TranslationRequest),
}


def opt_in_in_the_engine(params: SamplingParams) -> OptIn | None:
    """What the scheduler makes of a request, on the far side of vLLM's encoding."""
    request = EngineCoreRequest("r", [1, 2, 3], None, params, None, 0.0, None, None, None)
    received = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    return opt_in_of(Request.from_engine_core_request(received, None))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_json_is_an_opt_in(endpoint: str) -> None:
    for value in VALUES:
        try:
            params = ENDPOINTS[endpoint](value)
        except ValueError:
            continue  # the endpoint does not take such a value
        assert params.extra_args is not None
        assert OPT_IN_ARG in params.extra_args
        assert opt_in_in_the_engine(params) is None, value
    assert ENDPOINTS[endpoint](7).extra_args[OPT_IN_ARG] == 7  # so that there is a way to the engine


@pytest.mark.parametrize(("n", "value"), [(1, 0), (3, "x")])
def test_ours_is_one_whatever_the_client_sends_beside_it(value: Any, n: int) -> None:
    body = {"model": "tiny", "prompt": "abc", "n": n, "temperature": 1.0, "return_routed_experts": True}
    body |= {"routed_experts_prompt_start": 2, "vllm_xargs": {OPT_IN_ARG: value, "theirs": 1}}
    request = RoutedCompletionRequest.model_validate_json(json.dumps(body))
    request.routing = parse_options(body)
    params = request.to_sampling_params(5, {})
    asked = opt_in_in_the_engine(params)
    assert asked is not None
    assert (asked.prompt_start, asked.shared) == (2, n > 1)
    assert params.extra_args["theirs"] == 1
