"""KV that is lost and computed again, in vLLM's own engine core with the tiny model: under the
experts that its tokens had."""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.outputs import ModelRunnerOutput

from routed_experts.capture.seams.engine import HAS_SINK
from routed_experts.capture.wire.message import OPT_IN_ARG, OptIn
from routed_experts.capture.wire.rows import INPUT_KEY, RECOMPUTE_KEY
from routed_experts.capture.wire.step_tag import tag_of
from routed_experts.capture.wire.transport import detach
from routed_experts.protocol.routing_input import routing_args
from tests.contract.test_moe_layers import Engine, stepped
from tests.contract.test_router_input import rows_for
from tests.e2e.harness import prompt_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(torch.cuda.is_available(), reason="written for the worker of the CPU build"),
    pytest.mark.skipif(not HAS_SINK, reason="routing as an input needs vLLM 0.32"),
]

BANNED = 3
L, E = 5, 16  # of the tiny model


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    """Whose KV cache has room for two requests of four."""
    with stepped(
        tiny_model,
        additional_config={INPUT_KEY: True, RECOMPUTE_KEY: True},
        block_size=64,
        num_gpu_blocks_override=10,
    ) as running:
        yield running


class Run(NamedTuple):
    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]
    # by request, those of each position from its first token on: one for each time it was computed
    rows: dict[str, dict[int, list[np.ndarray]]]
    num_told: int  # tokens that were told what they had
    num_preempted: int

    def num_changed(self) -> int:
        """How many positions had other experts when they were computed again."""
        return sum(
            any(not np.array_equal(of_position[0], again) for again in of_position)
            for rows in self.rows.values()
            for of_position in rows.values()
        )

    def num_computed_again(self) -> int:
        return sum(
            len(of_position) > 1 for rows in self.rows.values() for of_position in rows.values()
        )


class Runner:
    """Four requests: one is natural, one gives its experts, one has a bias, and one is natural and
    sent its rows at the end."""

    def __init__(self, engine: Engine) -> None:
        self.core = engine.core
        self.scheduler: Any = engine.core.scheduler
        self.run = Run({}, {}, defaultdict(lambda: defaultdict(list)), 0, 0)
        self._update = self.scheduler.update_from_output

    def finish(self) -> Run:
        bias = np.zeros((L, E), np.float32)
        bias[:, BANNED] = -np.inf
        self._add("natural", 110)
        self._add("forced", 104, **routing_args(rows=rows_for(104)))
        self._add("steered", 100, **routing_args(bias=bias))
        self._add("at end", 96, at_end=True)
        with patch.object(self.scheduler, "update_from_output", self._record):
            while self.scheduler.has_requests():
                for message in self.core.step()[0].values():
                    self._take(message.outputs)
        return self.run

    def _add(self, name: str, length: int, at_end: bool = False, **args: Any) -> None:
        opt_in = OptIn(0, os.urandom(16), shared=False, final_only=at_end)
        sampling = SamplingParams(
            max_tokens=100,
            temperature=0,
            ignore_eos=True,
            logprobs=0,
            extra_args={OPT_IN_ARG: opt_in.encode(), **args},
        )
        prompt = prompt_of(length, seed=length)
        request = EngineCoreRequest(name, prompt, None, sampling, None, 0.0, None, None, None)
        self.core.add_request(*self.core.preprocess_add_request(request))
        self.run.tokens[name] = []
        self.run.logprobs[name] = []

    def _record(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        tag = tag_of(scheduled)
        captured = detach(output)
        if tag is not None and captured is not None:
            step = self.scheduler.aux_output_connector._steps[tag.number]
            num_told = sum(len(placed.rows) for placed in tag.recomputed.values())
            num_preempted = len(scheduled.preempted_req_ids or ())
            self.run = self.run._replace(
                num_told=self.run.num_told + num_told,
                num_preempted=self.run.num_preempted + num_preempted,
            )
            for name, index in output.req_id_to_index.items():
                start = step.starts[name]
                rows = captured.rows[captured.offsets[index] : captured.offsets[index + 1]]
                if start == 0 and not self.run.tokens[name]:
                    self.run.rows[name].clear()  # it was preempted before its first token
                for position, row in enumerate(rows, start):
                    self.run.rows[name][position].append(row)
        return self._update(scheduled, output)

    def _take(self, outputs: Any) -> None:
        for output in outputs:
            if output.request_id in self.run.tokens and output.new_token_ids:
                self.run.tokens[output.request_id] += output.new_token_ids
                logprobs = output.new_logprobs.logprobs[:, 0].tolist()
                self.run.logprobs[output.request_id] += logprobs


@pytest.fixture
def chooses_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers whose logits are a little different in each forward pass, as in 16 bits, but more."""
    noise = torch.Generator().manual_seed(0)
    for runner in engine.runners:
        route = runner.router._compute_routing

        def compute_routing(
            hidden: Any, logits: torch.Tensor, *args: Any, route: Any = route, **options: Any
        ) -> Any:
            off = 0.3 * torch.randn(logits.shape, generator=noise)
            return route(hidden, logits + off, *args, **options)

        monkeypatch.setattr(runner.router, "_compute_routing", compute_routing)


def turn_off(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    distributor = engine.core.scheduler.aux_output_connector.distributor
    monkeypatch.setattr(distributor.recomputed, "is_on", False)


@pytest.mark.usefixtures("chooses_again")
def test_experts_stay_as_they_were_sent_whatever_the_router_chooses_later(engine: Engine) -> None:
    run = Runner(engine).finish()
    assert run.num_preempted > 1
    assert run.num_computed_again() > 200
    assert run.num_told == sum(
        len(of_position) - 1 for rows in run.rows.values() for of_position in rows.values()
    )
    assert run.num_changed() == 0
    given = rows_for(104)
    for position in range(104):
        for row in run.rows["forced"][position]:
            assert np.array_equal(row, given[position])
    for of_position in run.rows["steered"].values():
        assert not (np.array(of_position) == BANNED).any()


@pytest.mark.usefixtures("chooses_again")
def test_without_the_flag_the_router_chooses_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn_off(engine, monkeypatch)
    run = Runner(engine).finish()
    assert run.num_preempted > 1
    assert run.num_changed() > 100
    assert run.num_told == 0


def test_in_float32_nothing_changes_bit_for_bit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_flag = Runner(engine).finish()
    turn_off(engine, monkeypatch)
    without = Runner(engine).finish()
    assert with_flag.num_preempted == without.num_preempted > 1
    assert with_flag.num_told > 200
    assert with_flag.num_changed() == without.num_changed() == 0
    assert with_flag.tokens == without.tokens
    assert with_flag.logprobs == without.logprobs
