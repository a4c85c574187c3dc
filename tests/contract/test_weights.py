"""Weights that change, pauses and sleep around `arithmetic`: a row says which weights its token
went through."""

import random
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason

from tests.contract import engine as around
from tests.contract.engine import Client, Core, Rows, requests_at_random, tokens
from tests.contract.passes import PassesExecutor, ReceivedOfPasses


class TrainedReceived(ReceivedOfPasses):
    """A row is of the weights that its token went through."""

    def take(self, output: EngineCoreOutput) -> None:
        """What was kept back until its prompt had been read may come behind an abort; nobody
        listens any more."""
        if self.finish is not FinishReason.ABORT:
            super().take(output)

    def check_prompt(self, prompts: dict[str, Rows]) -> None:
        """Those that were sent with the request, or else the first."""
        rows = prompts.get(self.request_id, next(iter(prompts.values())))
        self.check(rows, self.start or 0, self.prompt_len)


class TrainedExecutor(PassesExecutor):
    """Has weights, each of which chooses other experts, and loses its KV when it sleeps."""

    received = TrainedReceived

    def _init_executor(self) -> None:
        super()._init_executor()
        self.weights = 0

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if method == "sleep":
            self._kv = [None] * len(self._kv)
        return super().collective_rpc(method, *args, **kwargs)

    def passes(self, request_id: str, rows: Rows, start: int) -> np.ndarray:
        """All that go through the same weights are one pass."""
        return np.full(len(rows), self.weights)


class Trained:
    """An engine that has been given a request, and what a trainer does with it."""

    def __init__(self, steps: int = 0, n: int = 1, max_tokens: int = 20, **sizes: Any) -> None:
        self.core: Core = around.engine(executor=TrainedExecutor, **sizes)
        self.client = Client(self.core)
        self.executor: Any = self.core.model_executor
        self.prompt = tokens(150)
        if steps:
            self.ids = self.client.add("running", self.prompt, n=n, max_tokens=max_tokens)
            self.client.steps(steps)

    def weights_of(self, request_id: str) -> list[int]:
        """The weights that an answer's tokens were sampled from, in order and each once."""
        request = self.client.received[request_id]
        ends = range(request.prompt_len, len(request.sequence))
        return list(
            dict.fromkeys(int(self.executor.sampled[request_id][position][-1]) for position in ends)
        )


# ---- one change ----


FINISH_AFTER_PAUSE = {"keep": None, "wait": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def wake_up(trained: Trained, parts: list[Any]) -> None:
    """One part after another: a request that came meanwhile waits for the last."""
    for part in parts:
        assert trained.client.received["during"].tokens == []
        trained.core.wake_up(part)
        trained.client.steps(3)


@pytest.mark.parametrize(
    ("steps", "mode", "clear_cache", "level", "tags"),
    [
        (1, "keep", True, None, []),
        (2, "keep", False, None, []),
        (4, "keep", True, None, []),
        (9, "keep", False, None, []),
        (3, "wait", True, None, []),
        (1, "abort", True, None, []),
        (8, "abort", True, None, []),
        # The executor has lost its KV, and fails if a step goes on reading it.
        (6, "keep", None, 1, [None]),
        (6, "keep", None, 2, [["weights"], ["kv_cache"]]),
        (6, "wait", None, 1, [["kv_cache"], ["weights"]]),
    ],
)
def test_a_change_during_a_pause_or_sleep(
    is_async: bool,
    steps: int,
    mode: Any,
    clear_cache: bool | None,
    level: int | None,
    tags: list[Any],
) -> None:
    """In the prefill and behind it; whoever comes meanwhile is of the new weights alone, and hits
    nothing of before."""
    trained = Trained(steps, is_async=is_async, chunk=48)
    client, core = trained.client, trained.core
    pending = core.pause_scheduler(mode, clear_cache) if level is None else core.sleep(level, mode)
    if mode == "wait":
        client.add("during", trained.prompt, max_tokens=5)
    client.wait(pending)
    running = client.received["running"]
    before = list(running.tokens)
    if mode != "wait":
        client.add("during", trained.prompt, max_tokens=5)
    client.steps(5)
    assert running.tokens == before
    assert running.finish is FINISH_AFTER_PAUSE[mode]
    assert trained.executor.is_sleeping == (level is not None)
    trained.executor.weights += 1
    wake_up(trained, tags)
    assert not trained.executor.is_sleeping
    core.resume_scheduler()
    client.finish(but="running" if mode == "abort" else ())
    assert trained.weights_of("during") == [1]
    if mode != "wait" and clear_cache is not False:  # else it may hit what was computed before
        assert set(trained.executor.sampled["during"][150]) == {1}
    if mode != "abort":
        assert trained.weights_of("running") == [0] * bool(before) + [1] * (mode == "keep")


@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_choices_that_begin_with_other_weights(
    is_async: bool, clear_cache: bool, steps: int
) -> None:
    """More of them than fit a batch: each has the rows of the prompt that it was computed from
    itself."""
    trained = Trained(steps, n=6, max_tokens=3, is_async=is_async, max_num_seqs=2, chunk=96)
    trained.client.pause("keep", clear_cache)
    trained.executor.weights += 1
    trained.core.resume_scheduler()
    trained.client.finish()
    assert trained.weights_of(trained.ids[-1]) == [1]


# ---- everything, and over and over ----


def train(trained: Trained, dice: random.Random, pauses: bool) -> None:
    """What a trainer does between two batches, in one of its orders; with `pauses` never under
    steps."""
    client, core, executor = trained.client, trained.core, trained.executor
    way = dice.randrange(pauses, 5)
    if way == 0:
        executor.weights += 1
    elif way == 1:
        core.reset_prefix_cache(reset_running_requests=True)
        executor.weights += dice.randrange(2)
    elif way == 2:
        client.pause(
            dice.choice(("keep", "keep", "wait", "abort")), clear_cache=dice.random() < 0.5
        )
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


@pytest.mark.parametrize(
    ("seed", "drafts", "stages"), [*((seed, 0, 1) for seed in range(4)), (6, 3, 1), (7, 2, 3)]
)
def test_at_random(is_async: bool, seed: int, drafts: int, stages: int) -> None:
    """Shared prefixes, starts within prompts, `n`, preemptions and aborts besides."""
    dice, pauses = random.Random(seed), seed % 2 == 1
    sizes: dict[str, Any] = {
        "chunk": dice.choice((48, 200)),
        "max_num_seqs": dice.choice((2, 5)),
        "num_blocks": 16,
    }
    trained = Trained(is_async=is_async, **sizes, drafts=drafts, stages=stages)
    client = trained.client

    def disturb() -> None:
        if dice.random() < 0.25:
            train(trained, dice, pauses)

    aborted = requests_at_random(
        client, dice, 80, disturb, ns=(1, 2, 5) if pauses else (), chances=(0.6, 0.1)
    )
    client.run()
    aborted |= {
        name for name, request in client.received.items() if request.finish is FinishReason.ABORT
    }
    client.finish(but=aborted)
    assert len(client.received) > 15
    assert trained.executor.weights > 5
