"""KV that is lost and computed again, by a router that chooses otherwise each time: with the experts
that its tokens had.

The executor is that of `passes`: a row says in which forward pass its token was computed, or as
which it was told to be.
"""

import random
import time
from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from routed_experts.capture.wire.step_tag import tag_of
from routed_experts.capture.wire.transport import Told, detach
from tests.contract import engine as around
from tests.contract.engine import BLOCK, Client, Rows, tokens
from tests.contract.passes import NUM_TOLD_APART, PassesExecutor, num_changed, of_pass


class ToldExecutor(PassesExecutor):
    """Chooses other experts in each forward pass, but for tokens that are told theirs."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.num_told = 0  # in this pass
        self.told: dict[str, list[tuple[int, int]]] = defaultdict(list)  # by request, positions
        self._tag: Any = None

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self.num_told = 0
        self._tag = tag_of(scheduler_output)
        return super().execute_model(scheduler_output, non_block)

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = super()._run(step)
        rows = detach(output)
        if rows is not None:
            rows.told = Told(self.num_told)
        return output

    def passes(self, request_id: str, rows: Rows, start: int) -> np.ndarray:
        passes = super().passes(request_id, rows, start) % NUM_TOLD_APART
        given = self._tag.recomputed.get(request_id)
        if given is not None:
            first = max(start, given.start)
            until = min(start + len(rows), given.start + len(given.rows))
            part = slice(first - start, until - start)
            told = given.rows[first - given.start : until - given.start]
            known = (told >= 0).all(axis=(1, 2))
            passes[part][known] = (told - rows[part])[known, 0, 0] // 64
            # Of another token, they are not of any pass.
            assert np.array_equal(told[known], of_pass(rows[part], passes[part])[known])
            self.num_told += len(told)
            self.told[request_id].append((first, until))
        return passes


def counting(replays: bool = True, hits: bool = False, **sizes: Any) -> Client:
    """`hits`: whether a request that is preempted hits its own KV, as far as it is there."""
    core = around.engine(executor=ToldExecutor, replays=replays, **sizes)
    core.scheduler.kv_cache_manager.enable_caching = hits
    return Client(core)


def num_told(client: Client) -> int:
    told = client.engines[0].model_executor.told
    return sum(end - first for spans in told.values() for first, end in spans)


def run_short_of_blocks(client: Client, at_end: bool = False) -> None:
    """Three requests of which one, at times two, are preempted."""
    for index in range(3):
        client.add(
            f"r{index}", tokens(50 + index, seed=index), max_tokens=60, at_end=at_end and index != 1
        )
    client.finish()


@pytest.mark.parametrize("at_end", [False, True], ids=["with tokens", "at the end"])
@pytest.mark.parametrize("chunk", [16, 48, 200])
def test_tokens_that_are_computed_again_have_the_experts_that_were_sent(
    is_async: bool, chunk: int, at_end: bool
) -> None:
    client = counting(is_async=is_async, chunk=chunk, num_blocks=12)
    run_short_of_blocks(client, at_end)
    assert [num_changed(client, name) for name in client.received] == [0, 0, 0]
    assert num_told(client) > 50
    assert client.stats[-1].rows_recomputed == num_told(client)
    assert client.stats[-1].rows_rerouted == 0


def test_without_the_flag_the_router_chooses_again(is_async: bool) -> None:
    client = counting(is_async=is_async, num_blocks=12, replays=False)
    run_short_of_blocks(client)
    changed = sum(num_changed(client, name) for name in client.received)
    assert changed > 50
    assert num_told(client) == 0
    assert client.stats[-1].rows_rerouted >= changed


def test_rows_that_are_not_known_are_the_routers_choice() -> None:
    """Of the second block, as if its KV had come without rows."""
    client = counting(is_async=False, chunk=16)
    client.add("r", tokens(50), max_tokens=20)
    client.steps(10)
    core = client.engines[0]
    blocks = core.model_executor._sequences["r"].blocks
    core.capture.cache.forget(np.arange(BLOCK) + BLOCK * blocks[1])
    preempt(client, "r")
    client.finish()
    assert num_changed(client, "r") == BLOCK
    assert client.stats[-1].rows_rerouted == BLOCK


def test_after_a_reset_of_the_prefix_cache_the_router_chooses() -> None:
    """As weights may have changed: others may hit what is computed then."""
    client = counting(is_async=False)
    client.add("r", tokens(50), max_tokens=20)
    client.steps(10)
    client.engines[0].reset_prefix_cache(reset_running_requests=True)
    client.finish()
    assert num_changed(client, "r") >= 50
    assert num_told(client) == 0
    assert client.stats[-1].rows_rerouted == num_changed(client, "r")


def preempt(client: Client, request_id: str) -> None:
    """As if no block were left for its next step."""
    scheduler = client.engines[0].scheduler
    request = scheduler.requests[request_id]
    if request.status == RequestStatus.RUNNING:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())  # clock: of its metrics
        # It may be resumed by the next step.
        scheduler.prev_step_scheduled_req_ids.discard(request_id)


def generating(num_tokens: int, **options: Any) -> Client:
    """A request that has as many tokens, its prompt of 50 among them."""
    client = counting(chunk=16, **options)
    client.add("r", tokens(50), max_tokens=24)
    while len(client.received["r"].sequence) < num_tokens:
        client.step()
    return client


AROUND_A_STEPS_END = range(4 * 16 - 1, 4 * 16 + 2)
"""Numbers of tokens. Of some, four steps compute all that have rows, and not the last token."""


@pytest.mark.parametrize("stages", [1, 3])
def test_a_preemption_while_an_earlier_one_is_made_good(is_async: bool, stages: int) -> None:
    """After each number of steps."""
    for num_tokens, num_steps in product(AROUND_A_STEPS_END, range(7)):
        client = generating(num_tokens, is_async=is_async, stages=stages)
        preempt(client, "r")
        client.steps(num_steps)
        preempt(client, "r")
        client.finish()
        at = f"{num_tokens} tokens, {num_steps} steps"
        assert num_changed(client, "r") == 0, at
        assert client.stats[-1].rows_rerouted == 0, at


@pytest.mark.parametrize(
    ("seed", "drafts", "stages", "weights"),
    [(0, 0, 1, True), (1, 0, 1, False), (4, 0, 3, True), (5, 3, 1, True), (12, 3, 1, False)],
)
def test_at_random(is_async: bool, seed: int, drafts: int, stages: int, weights: bool) -> None:
    """Requests that come and go, of which some lose KV twice before all of it is computed again, or
    are sent rows after they have lost it."""
    dice = random.Random(seed)
    client = counting(
        is_async=is_async,
        chunk=dice.choice((16, 48)),
        max_num_seqs=5,
        num_blocks=14,
        hits=seed % 2 == 1,
        drafts=drafts,
        stages=stages,
        weights=weights,
    )
    gone = set()
    for turn in range(40):
        if dice.random() < 0.6:
            prompt = tokens(dice.randrange(1, 100), seed=1000 * seed + turn)
            forms = {"at_end": turn % 3 == 0, "weights": weights and turn % 2 == 0}
            client.add(f"r{turn}", prompt, max_tokens=dice.randrange(1, 50), **forms)
        if client.received and dice.random() < 0.1:
            gone.add(one := dice.choice(list(client.received)))
            client.abort(one)
        client.steps(dice.randrange(8))
    client.finish(but=gone)
    assert num_told(client) > (0 if seed % 2 == 1 else 100)
    assert client.stats[-1].rows_rerouted == 0
    assert sum(num_changed(client, name) for name in client.received) == 0
