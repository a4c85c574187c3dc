"""Rows for a front end that is not ours, as vLLM's in Rust reads them: of every request, on its own
outputs, in the form of vLLM's capture."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from routed_experts.capture.scheduler import row_source, scheduler
from routed_experts.capture.wire.message import Cause
from routed_experts.protocol.codec import UNKNOWN
from tests.contract.engine import (
    BLOCK,
    DECODER_LAYERS,
    NUM_BLOCKS,
    Core,
    K,
    engine,
    sent,
    tokens,
)
from tests.contract.offloading import engine_that_offloads
from tests.contract.served import every_layer_of


@dataclass
class Answer:
    """What came for a request."""

    prompt: list[int]
    start: int  # of the prompt rows
    arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    def take(self, output: EngineCoreOutput) -> None:
        assert self.finish is None, "an output after the last one"
        self.tokens += output.new_token_ids
        self.finish = output.finish_reason
        if output.routed_experts is not None:
            self.arrays.append(output.routed_experts)

    def rows(self) -> np.ndarray[Any, Any]:
        """All arrays in one; vLLM's front end refuses another type or shape among them."""
        assert len({(array.dtype, array.shape[1:]) for array in self.arrays}) == 1
        return np.concatenate(self.arrays)


class FrontEnd:
    """Sends requests without an opt-in, and knows outputs by their request ids only."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.answers: dict[str, Answer] = {}

    def add(
        self,
        name: str,
        prompt: list[int],
        start: int = 0,
        max_tokens: int = 4,
        extra_args: dict[str, Any] | None = None,
    ) -> Answer:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            detokenize=False,
            routed_experts_prompt_start=start,
            extra_args=extra_args,
        )
        request = EngineCoreRequest(
            name, prompt, None, sampling, None, time.time(), None, None, None
        )
        request.external_req_id = name
        self.core.take(sent(request))
        self.answers[name] = Answer(prompt, start)
        return self.answers[name]

    def step(self) -> None:
        self.core.turn()
        for _, message in self.core.messages():
            for output in message.outputs:
                self.answers[output.request_id].take(output)  # there are no others

    def run(self) -> None:
        while self.core.is_busy():
            self.step()

    def check(self) -> None:
        """That all requests ended with their rows, and nothing is left in the engine."""
        for answer in self.answers.values():
            assert answer.finish is FinishReason.LENGTH
            assert answer.rows().dtype == np.uint16
            expected = every_layer_of([*answer.prompt, *answer.tokens[:-1]], answer.start)
            assert np.array_equal(answer.rows(), expected)
        requests = self.core.capture.distributor.requests
        assert not any((requests.running, requests.ended, len(self.core.capture.output_queue)))


def test_every_request_has_its_rows_on_its_own_outputs(is_async: bool) -> None:
    """A prompt in chunks, a prefix hit, a prompt's end only, and requests beside each other."""
    front_end = FrontEnd(engine(is_async, bare_rows=True))
    prompt = tokens(130)
    front_end.add("chunks", prompt, max_tokens=20)
    front_end.add("beside", tokens(9, seed=1), max_tokens=7)
    front_end.run()
    front_end.add("hits", [*prompt, 3], max_tokens=3)
    front_end.add("end only", prompt, start=128)
    front_end.add("generated", prompt, start=130)
    front_end.run()
    front_end.check()
    assert len(front_end.answers["generated"].rows()) == 3


def test_a_request_without_rows_has_an_array_of_none() -> None:
    front_end = FrontEnd(engine(bare_rows=True))
    answer = front_end.add("one token", tokens(5), start=5, max_tokens=1)
    front_end.run()
    front_end.check()
    assert answer.rows().shape == (0, DECODER_LAYERS, K)


@pytest.mark.parametrize(("start", "num_rows"), [(-1, 7), (-(2**63), 7), (2**63 - 1, 2)])
def test_a_prompt_start_outside_the_prompt_stops_no_engine(start: int, num_rows: int) -> None:
    """vLLM's front ends refuse it; the engine does not check it."""
    front_end = FrontEnd(engine(bare_rows=True))
    answer = front_end.add("outside", tokens(5), start=start, max_tokens=3)
    front_end.run()
    assert len(answer.rows()) == num_rows
    assert (answer.rows() >= 0).all()


def test_requests_that_are_preempted(is_async: bool) -> None:
    front_end = FrontEnd(engine(is_async, num_blocks=12, bare_rows=True))
    for number in range(4):
        front_end.add(f"request {number}", tokens(2 * BLOCK, seed=number), max_tokens=5 * BLOCK)
    num_preempted = 0
    while front_end.core.is_busy():
        front_end.step()
        running = front_end.core.scheduler.requests.values()
        num_preempted += sum(request.num_preemptions for request in running)
    front_end.check()
    assert num_preempted


def test_drafts_that_are_rejected(is_async: bool) -> None:
    """Then rows come with their tokens."""
    front_end = FrontEnd(engine(is_async, drafts=2, bare_rows=True))
    for number in range(3):
        front_end.add(f"request {number}", tokens(40, seed=number), max_tokens=30)
    front_end.run()
    front_end.check()
    assert front_end.core.model_executor.rejected > 0


def test_a_request_that_is_aborted_leaves_nothing_for_another_of_its_id() -> None:
    core = engine(bare_rows=True)
    front_end = FrontEnd(core)
    front_end.add("again", tokens(20), max_tokens=30)
    for _ in range(5):
        front_end.step()
    core.abort_requests(["again"])
    front_end.answers["again"] = Answer([], 0)  # a front end takes no more of it
    front_end.run()
    front_end.add("again", tokens(20, seed=1), max_tokens=5)
    front_end.run()
    front_end.check()


@pytest.mark.parametrize(
    "name", ["routed_experts_deactivate", "return_routed_experts", "routed_experts_" + "x" * 500]
)
def test_fields_of_our_server_are_refused(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients can put them into extra arguments, from which nobody would take them."""
    front_end = FrontEnd(engine(bare_rows=True))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.ERROR, scheduler.logger.name):
        asks = front_end.add("asks", tokens(20), extra_args={"others": 1, name: [1]})
    front_end.run()
    assert (asks.finish, asks.tokens) == (FinishReason.ERROR, [])
    assert (
        f"Request 'asks' has the field {name[:64]!r}, which vLLM's front end in Rust does not serve: it ends with an "
        "error. `routed-experts serve` does, without VLLM_USE_RUST_FRONTEND."
    ) in caplog.text
    del front_end.answers["asks"]
    front_end.add("others", tokens(20), extra_args={"others": 1})
    front_end.run()
    front_end.check()


def test_an_unknown_row_makes_an_array_of_another_type() -> None:
    """vLLM's has no -1. A front end that has got others before ends the request with an error."""
    core = engine(bare_rows=True)
    front_end = FrontEnd(core)
    front_end.add("first", tokens(3 * BLOCK), max_tokens=1)
    front_end.run()
    core.capture.cache.forget(np.arange(NUM_BLOCKS * BLOCK))
    answer = front_end.add("hits", tokens(3 * BLOCK), max_tokens=1)
    front_end.run()
    assert answer.rows().dtype == np.int16
    assert (answer.rows() == UNKNOWN).any()


def test_the_log_tells_of_unknown_rows_and_no_cause_is_kept(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a KV connector, other front ends are told why rows are unknown."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    core = engine_that_offloads(bare_rows=True)
    front_end = FrontEnd(core)
    front_end.add("first", tokens(3 * BLOCK), max_tokens=1)
    front_end.run()
    core.capture.cache.forget(np.arange(NUM_BLOCKS * BLOCK), Cause.KV_TRANSFER)
    answer = front_end.add("hits", tokens(3 * BLOCK), max_tokens=1)
    with caplog.at_level(logging.ERROR, row_source.logger.name):
        front_end.run()
    assert (answer.rows() == UNKNOWN).any()
    assert "Request 'hits': some of its rows are not known" in caplog.text
    assert not core.capture.distributor.source.pop_unknown()
