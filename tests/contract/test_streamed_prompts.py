"""Prompts that programs stream in. vLLM keeps each as one request, which waits for its next chunk;
a chunk is a request with its id that is `resumable`, and the end of all is one that is not.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason

from routed_experts.capture.wire.message import OPT_IN_ARG, OptIn
from routed_experts.protocol.routing_input import routing_args
from routed_experts.server.outputs.processor import refuse_if_streamed_in
from tests.contract.engine import Core, check_nothing_is_left, engine, sent, tokens

LENGTH, ERROR = FinishReason.LENGTH, FinishReason.ERROR
OPTED_IN = {OPT_IN_ARG: OptIn(0, bytes(16), shared=False).encode()}
GIVEN = routing_args(rows=[[[1, 2]]])


class Ended(NamedTuple):
    """What an engine said at the end of a chunk or request."""

    process: int  # the API process that it was said to
    reason: FinishReason


def chunk_of(
    length: int, process: int = 0, args: dict[str, Any] | None = None
) -> EngineCoreRequest:
    """A chunk of a prompt, as vLLM's `AsyncLLM` makes it of a `StreamingInput`."""
    params = SamplingParams(max_tokens=1, detokenize=False, extra_args=args)
    prompt = tokens(length, seed=length)
    request = EngineCoreRequest("same", prompt, None, params, None, time.time(), None, None, None)
    request.client_index = process
    request.resumable = True
    return request


def end_of(process: int = 0, args: dict[str, Any] | None = None) -> EngineCoreRequest:
    """What `AsyncLLM` sends behind the last chunk. Its token is no part of the prompt."""
    request = chunk_of(1, process, args)
    request.resumable = False
    return request


@pytest.fixture
def core(is_async: bool) -> Core:
    return engine(is_async)


def ends(core: Core, *requests: EngineCoreRequest) -> list[Ended]:
    """What the engine says of these requests, which come at once."""
    return [ended for ended, _ in ends_and_forgotten(core, *requests)]


def ends_and_forgotten(
    core: Core, *requests: EngineCoreRequest
) -> list[tuple[Ended, set[str] | None]]:
    """The same, each with the ids of which its message says that they run in the engine no more."""
    for request in requests:
        core.take(sent(request))
    said = []
    while core.is_busy():
        core.turn()
        for process, message in core.messages():
            for output in message.outputs:
                if output.finish_reason is not None:
                    ended = Ended(process, output.finish_reason)
                    said.append((ended, message.finished_requests))
    return said


def check_no_request_is_left(core: Core) -> None:
    scheduler = core.scheduler
    assert not scheduler.requests
    assert scheduler.num_waiting_for_streaming_input == 0
    assert scheduler.get_kv_cache_usage() == 0
    check_nothing_is_left(core.capture)


@pytest.mark.parametrize("other", [chunk_of, lambda length, process: end_of(process)])
def test_a_prompt_goes_on_beside_the_same_id_of_another_process(
    core: Core, other: Callable[[int, int], EngineCoreRequest]
) -> None:
    """vLLM alone would take the other's chunk into this prompt, or end it."""
    assert ends(core, chunk_of(40)) == [Ended(0, LENGTH)]
    assert ends(core, other(30, 1)) == [Ended(1, ERROR)]
    (prompt,) = core.scheduler.requests.values()
    assert prompt.num_prompt_tokens == 40
    assert ends(core, chunk_of(50)) == [Ended(0, LENGTH)]
    assert prompt.num_prompt_tokens == 90
    assert ends(core, end_of()) == []
    check_no_request_is_left(core)


@pytest.mark.parametrize("args", [OPTED_IN, GIVEN], ids=["rows out", "rows in"])
def test_the_end_of_a_prompt_is_not_refused(core: Core, args: dict[str, Any]) -> None:
    """It has the parameters of the program's call, and nothing is computed with them."""
    assert ends(core, chunk_of(40)) == [Ended(0, LENGTH)]
    assert ends(core, end_of(args=args)) == []
    check_no_request_is_left(core)


def test_an_api_process_is_told_that_what_was_refused_does_not_run(core: Core) -> None:
    """With data parallelism it counts what runs in each engine until it is told that. But where it
    has another request of this id, it has to know that one's engine."""
    core.scheduler.finished_req_ids_dict = defaultdict(set)
    whole = end_of(process=1)
    assert ends_and_forgotten(core, chunk_of(40)) == [(Ended(0, LENGTH), None)]
    assert ends_and_forgotten(core, whole) == [(Ended(1, ERROR), {"same"})]
    given = chunk_of(50, args=GIVEN)
    assert ends_and_forgotten(core, given) == [(Ended(0, ERROR), None)]
    assert ends_and_forgotten(core, chunk_of(60)) == [(Ended(0, LENGTH), None)]
    assert ends(core, end_of()) == []
    check_no_request_is_left(core)


@pytest.mark.parametrize("args", [OPTED_IN, GIVEN], ids=["rows out", "rows in"])
def test_a_process_refuses_a_chunk_with_rows_before_an_engine_has_it(args: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="prompt that is streamed in"):
        refuse_if_streamed_in(chunk_of(40, args=args))
    for fits in (chunk_of(40), end_of(args=args)):
        refuse_if_streamed_in(fits)
