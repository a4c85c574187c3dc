"""Weights that change, pauses and sleep around `arithmetic`: a row says which weights its token went through."""

import gc
import random
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason

from routed_experts.capture.engine import scheduler
from tests.contract.engine import (
    BLOCK,
    NUM_BLOCKS,
    ArithmeticExecutor,
    Client,
    Core,
    Received,
    Rows,
    Sequence,
    Tokens,
    engine,
    requests_at_random,
    tokens,
)


class TrainedExecutor(ArithmeticExecutor):
    """Has weights, which a row tells, loses its KV when it sleeps, and remembers what each token was sampled from.

    Attributes:
        weights: a number.
        sampled: by request and position of a token, the weights that the tokens before it went through, all of them or
            the last ones; as of the last time, since what was in flight at a reset is sampled again.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self.weights = 0
        self.sampled: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        self._made = np.zeros(NUM_BLOCKS * BLOCK, dtype=np.int64)

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if method == "sleep":
            self._kv = [None] * len(self._kv)
        return super().collective_rpc(method, *args, **kwargs)

    def compute(self, request_id: str, sequence: Sequence, tokens: Tokens, start: int, end: int) -> Rows:
        rows = super().compute(request_id, sequence, tokens, start, end)
        self._made[sequence.slots(start, end)] = self.weights
        return told(rows, np.full(end - start, self.weights))

    def _verify(self, sequence: Tokens, end: int, request_id: str) -> list[int]:
        own = self._sequences[request_id]
        first = len(own.tokens)
        sampled = super()._verify(sequence, end, request_id)
        self.sampled[request_id][first] = self._made[own.slots(0, first)]
        for position in range(first + 1, first + len(sampled)):
            self.sampled[request_id][position] = np.array([self.weights])
        return sampled


def told(rows: Rows, weights: np.ndarray) -> Rows:
    """`rows` ([n, L, K]) as each of `weights` ([n]) has them."""
    return rows + (weights % 200 * 64).astype(np.int16)[:, None, None]


@dataclass
class TrainedReceived(Received):
    """A prompt's rows are of the weights that the first token was sampled from, and all others of those that the next
    token was."""

    request_id: str = ""
    sampled: dict[int, np.ndarray] = field(default_factory=dict)
    sent_with: dict[str, Rows] = field(default_factory=dict)

    def take(self, output: EngineCoreOutput, prompts: list[Rows]) -> None:
        """What was kept back until its prompt had been read may come behind an abort; nobody listens any more."""
        if self.finish is not FinishReason.ABORT:
            super().take(output, prompts)

    def check_prompt(self, prompts: list[Rows]) -> None:
        """Those that were sent with the request, or else the first."""
        self.check(self.sent_with.get(self.request_id, prompts[0]), self.start or 0, self.prompt_len)

    def check(self, rows: Rows, first: int, end: int) -> None:
        if end <= self.prompt_len:
            weights = self.sampled[self.prompt_len][first:end]
        else:
            weights = np.array([self.sampled[position + 1][-1] for position in range(first, end)])
        assert np.array_equal(rows, told(self.sequence.rows(first, end), weights))


class TrainedClient(Client):
    def expect(self, request_id: str, *about: Any) -> Received:
        executor: Any = self.engines[0].model_executor
        sampled = executor.sampled[request_id]
        return TrainedReceived(*about, request_id=request_id, sampled=sampled, sent_with=self.sent_with)

    def wait(self, done: Any) -> None:
        """Lets the engine go on until it has done what it was asked for."""
        while isinstance(done, Future) and not done.done():
            self.step()
        if isinstance(done, Future):
            done.result()
        self.step()


def trained(**sizes: Any) -> tuple[TrainedClient, Core, TrainedExecutor]:
    core = engine(executor=TrainedExecutor, **sizes)
    executor = core.model_executor
    assert isinstance(executor, TrainedExecutor)
    return TrainedClient(core), core, executor


def weights_of(client: Client, request_id: str) -> list[int]:
    """The weights that an answer's tokens were sampled from, in order and each once."""
    request = client.received[request_id]
    assert isinstance(request, TrainedReceived)
    ends = range(request.prompt_len, len(request.sequence))
    return list(dict.fromkeys(int(request.sampled[position][-1]) for position in ends))


# ---- one change ----


@pytest.mark.parametrize(("steps", "clear_cache"), [(1, True), (2, False), (4, True), (9, False)])
def test_a_pause_that_keeps_requests(is_async: bool, clear_cache: bool, steps: int) -> None:
    """In the prefill and behind it; whoever comes during the pause is of the new weights alone."""
    client, core, executor = trained(is_async=is_async, chunk=48)
    client.add("running", tokens(150), max_tokens=20)
    client.steps(steps)
    client.pause("keep", clear_cache)
    before = client.received["running"].tokens
    client.add("during", tokens(60, seed=1), max_tokens=5)
    client.steps(5)
    assert client.received["running"].tokens == before
    executor.weights += 1
    core.resume_scheduler()
    client.finish()
    assert weights_of(client, "running") == ([0, 1] if before else [1])
    assert weights_of(client, "during") == [1]


def test_a_pause_that_waits(is_async: bool) -> None:
    client, core, executor = trained(is_async=is_async)
    client.add("running", tokens(150), max_tokens=20)
    client.steps(3)
    pause = core.pause_scheduler("wait")
    client.add("during", tokens(60, seed=1))
    client.wait(pause)
    assert client.received["running"].finish is FinishReason.LENGTH
    assert client.received["during"].tokens == []
    executor.weights += 1
    core.resume_scheduler()
    client.finish()
    assert (weights_of(client, "running"), weights_of(client, "during")) == ([0], [1])


@pytest.mark.parametrize("steps", [1, 8])
def test_a_pause_that_aborts(is_async: bool, steps: int) -> None:
    """Nothing of those that were aborted is left behind, and what they had computed is not found again."""
    client, core, executor = trained(is_async=is_async, chunk=48)
    client.add("gone", tokens(150), max_tokens=20)
    client.steps(steps)
    client.pause("abort", clear_cache=True)
    assert client.received.pop("gone").finish is FinishReason.ABORT
    executor.weights += 1
    core.resume_scheduler()
    client.add("after", tokens(150), max_tokens=5)
    client.finish()
    assert weights_of(client, "after") == [1]


@pytest.mark.parametrize(
    ("level", "mode", "tags"),
    [(1, "keep", [None]), (2, "keep", [["weights"], ["kv_cache"]]), (1, "wait", [["kv_cache"], ["weights"]])],
)
def test_requests_while_the_engine_sleeps(is_async: bool, level: int, mode: Any, tags: list[Any]) -> None:
    """The executor has lost its KV, and fails if a step goes on reading it."""
    client, core, executor = trained(is_async=is_async, chunk=48)
    prompt = tokens(150)
    client.add("running", prompt, max_tokens=20)
    client.steps(6)
    client.wait(core.sleep(level, mode))
    assert core.model_executor.is_sleeping
    client.add("during", prompt, max_tokens=5)
    client.steps(3)
    executor.weights += 1
    for woken in tags:
        assert client.received["during"].tokens == []
        core.wake_up(woken)
        client.steps(3)
    assert not core.model_executor.is_sleeping
    client.finish()
    assert weights_of(client, "running") == ([0, 1] if mode == "keep" else [0])
    assert weights_of(client, "during") == [1]


def test_weights_that_change_without_a_pause(is_async: bool) -> None:
    """A prefix hit then finds the old weights' KV, and their rows with it, until the prefix cache is reset."""
    client, core, executor = trained(is_async=is_async)
    prompt = tokens(150)
    client.add("running", prompt, max_tokens=20)
    client.steps(6)
    executor.weights += 1
    client.add("hit", prompt, max_tokens=5)
    client.run()
    assert weights_of(client, "running") == [0, 1]
    assert set(executor.sampled["hit"][150].tolist()) == {0, 1}
    core.reset_prefix_cache()
    client.add("after", prompt, max_tokens=5)
    client.finish()
    assert set(executor.sampled["after"][150].tolist()) == {1}


@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_choices_that_begin_with_other_weights(is_async: bool, clear_cache: bool, steps: int) -> None:
    """More of them than fit a batch: each has the rows of the prompt that it was computed from itself."""
    client, core, executor = trained(is_async=is_async, max_num_seqs=2, chunk=96)
    ids = client.add("g", tokens(150), n=6, max_tokens=3)
    client.steps(steps)
    client.pause("keep", clear_cache)
    executor.weights += 1
    core.resume_scheduler()
    client.finish()
    assert weights_of(client, ids[-1]) == [1]


# ---- everything, and over and over ----


def train(client: TrainedClient, core: Core, executor: TrainedExecutor, dice: random.Random, pauses: bool) -> None:
    """What a trainer does between two batches, in one of its orders; with `pauses` never under steps."""
    way = dice.randrange(pauses, 5)
    if way == 0:
        executor.weights += 1
    elif way == 1:
        core.reset_prefix_cache(reset_running_requests=True)
        executor.weights += dice.randrange(2)
    elif way == 2:
        client.pause(dice.choice(("keep", "keep", "wait", "abort")), clear_cache=dice.random() < 0.5)
        executor.weights += dice.randrange(2)
        if dice.random() < 0.3:
            core.reset_prefix_cache(reset_running_requests=True)
        core.resume_scheduler()
    else:
        client.wait(core.sleep(dice.choice((1, 2)), dice.choice(("keep", "wait", "abort"))))
        tags = dice.choice(([None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]))
        for woken in tags:
            executor.weights += dice.randrange(2)
            core.wake_up(woken)
            client.steps(dice.randrange(3))


@pytest.mark.parametrize(("seed", "drafts", "stages"), [*((seed, 0, 1) for seed in range(4)), (6, 3, 1), (7, 2, 3)])
def test_at_random(is_async: bool, seed: int, drafts: int, stages: int) -> None:
    """Shared prefixes, starts within prompts, `n`, preemptions and aborts besides."""
    dice, pauses = random.Random(seed), seed % 2 == 1
    chunk = dice.choice((48, 200))
    client, core, executor = trained(
        is_async=is_async, chunk=chunk, max_num_seqs=dice.choice((2, 5)), num_blocks=16, drafts=drafts, stages=stages
    )

    def disturb() -> None:
        if dice.random() < 0.25:
            train(client, core, executor, dice, pauses)

    aborted = requests_at_random(client, dice, 80, disturb, ns=(1, 2, 5) if pauses else (), chances=(0.6, 0.1))
    client.run()
    aborted |= {name for name, request in client.received.items() if request.finish is FinishReason.ABORT}
    for request_id in aborted:
        client.received.pop(request_id)
    assert len(client.received) > 15
    client.check_finished()
    assert executor.weights > 5


def test_hundreds_of_cycles_leave_nothing_behind() -> None:
    client, core, executor = trained(num_blocks=16, chunk=48)
    dice = random.Random(1)

    def cycles(count: int) -> tuple[dict[str, int], int]:
        """How much is left afterwards in what the scheduler's side of the capture keeps, and memory of the process."""
        for _ in range(count):
            client.add("one", tokens(dice.randrange(1, 60)), max_tokens=4)
            client.add("several", tokens(dice.randrange(1, 60)), n=2, max_tokens=4)
            client.steps(dice.randrange(8))
            train(client, core, executor, dice, pauses=True)
            client.run()
            for kept in (client.received, client.prompts, client.sent_with, client.messages, client.stats):
                kept.clear()
            executor.sampled.clear()
        kept_by_us = vars(core.capture) | {"outbox waits": core.capture.output_queue._waiting}
        sizes = {name: len(value) for name, value in kept_by_us.items() if hasattr(value, "__len__")}
        assert sizes.pop("_sent_prompts") <= scheduler._SENT_PROMPTS
        gc.collect()
        return sizes, psutil.Process().memory_info().rss

    sizes, memory = cycles(50)
    sizes_later, memory_later = cycles(250)
    assert sizes_later == sizes
    assert max(sizes.values()) == 0
    assert memory_later - memory < 8 << 20
