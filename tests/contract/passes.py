"""An executor around `engine` whose router chooses otherwise each time: a row says in which forward
pass its token was computed."""

from collections import defaultdict
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from tests.contract.engine import (
    BLOCK,
    NUM_BLOCKS,
    ArithmeticExecutor,
    Client,
    Received,
    Rows,
    Sequence,
    Tokens,
)
from tests.rows import check_rows

NUM_TOLD_APART = 200
"""So many passes are."""


def of_pass(rows: Rows, passes: np.ndarray) -> Rows:
    """`rows` ([n, L, K]) as the router chooses them in each of `passes` ([n])."""
    return rows + (passes % NUM_TOLD_APART * 64).astype(np.int16)[:, None, None]


class ReceivedOfPasses(Received):
    """The rows of a prompt are those of the KV that its first token was sampled from, and each
    other one is that of the KV that the next token was."""

    def check(self, rows: Rows, first: int, end: int) -> None:
        __tracebackhide__ = True
        passes = passes_of(self.executor, self.request_id, end)[first:]
        check_rows(rows, of_pass(self.sequence.rows(first, end), passes), first)


class PassesExecutor(ArithmeticExecutor):
    """Chooses other experts in each forward pass, and remembers what each token was sampled from."""

    received: type[Received] = ReceivedOfPasses

    def _init_executor(self) -> None:
        super()._init_executor()
        self.num_passes = 0
        # By request and position of a token, the passes that the KV before it is of; as of the last
        # time, since what was in flight at a reset is sampled again.
        self.sampled: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        self._made = np.zeros(NUM_BLOCKS * BLOCK, dtype=np.int64)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self.num_passes += 1
        return super().execute_model(scheduler_output, non_block)

    def passes(self, request_id: str, rows: Rows, start: int) -> np.ndarray:
        """As in which passes ([n]) the tokens of these rows are computed, the first at `start`."""
        return np.full(len(rows), self.num_passes)

    def compute(
        self, request_id: str, sequence: Sequence, tokens: Tokens, start: int, end: int
    ) -> Rows:
        rows = super().compute(request_id, sequence, tokens, start, end)
        passes = self.passes(request_id, rows, start)
        self._made[sequence.slots(start, end)] = passes
        return of_pass(rows, passes)

    def _verify(self, sequence: Tokens, end: int, request_id: str) -> list[int]:
        own = self._sequences[request_id]
        first = len(own.tokens)
        sampled = super()._verify(sequence, end, request_id)
        for position in range(first, first + len(sampled)):
            self.sampled[request_id][position] = self._made[own.slots(0, position)]
        return sampled


def passes_of(executor: Any, request_id: str, end: int) -> np.ndarray:
    """The passes that a request's rows up to position `end` are of: [end]."""
    sampled = executor.sampled[request_id]
    prompt_len = min(sampled)
    generated = [sampled[position + 1][position] for position in range(prompt_len, end)]
    return np.array([*sampled[prompt_len][:end], *generated], dtype=np.int64)


def num_changed(client: Client, request_id: str) -> int:
    """Of how many tokens that a request was sent rows of, its KV changed its experts later."""
    request = client.received[request_id]
    sampled = client.engines[0].model_executor.sampled[request_id]
    changed: set[int] = set()
    for end in range(request.prompt_len, len(request.sequence)):
        last = sampled[len(request.sequence) - 1][:end]
        changed |= set(np.flatnonzero(last != sampled[end]).tolist())
    return len(changed)
