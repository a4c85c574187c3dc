"""The step of each row, against the steps that the workers count themselves."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.kv.loads import KVLoad
from routed_experts.capture.scheduler.scheduler import step_number
from routed_experts.capture.wire.message import Cause
from routed_experts.capture.wire.prefill_rows import PrefillRows
from routed_experts.protocol.codec import UNKNOWN_STEP
from routed_experts.protocol.saved import ModelInfo, read
from routed_experts.server.tools.saved import opened
from tests.contract.engine import (
    BLOCK,
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
from tests.contract.offloading import engine_that_offloads, num_loaded
from tests.contract.passes import PassesExecutor, passes_of
from tests.contract.served import SIZES, ServedExecutor, served
from tests.e2e.harness import prompt_of


class CountingExecutor(PassesExecutor):
    """Its forward passes are the steps. Its rows say nothing of them."""

    counts_steps = True
    received = Received

    def compute(
        self, request_id: str, sequence: Sequence, tokens: Tokens, start: int, end: int
    ) -> Rows:
        super().compute(request_id, sequence, tokens, start, end)
        return tokens.rows(start, end)


class ServedCountingExecutor(CountingExecutor, ServedExecutor):
    """The same behind an API process."""

    last: "ServedCountingExecutor"

    def _init_executor(self) -> None:
        super()._init_executor()
        type(self).last = self


def check_steps(client: Client, ranks: int = 1) -> int:
    """That each row came with its step; gives how many did."""
    checked = 0
    for request_id, came in client.steps_of_rows.items():
        if not came:  # it did not ask for rows, or was aborted before it had some
            continue
        executors = [core.model_executor for core in client.engines]
        (rank,) = (i for i, one in enumerate(executors) if request_id in one.sampled)
        expected = passes_of(executors[rank], request_id, max(came) + 1).tolist()
        assert came == {at: step_number(expected[at], rank, ranks) for at in came}
        checked += len(came)
    return checked


def all_came(client: Client, request_id: str) -> bool:
    request = client.received[request_id]
    assert request.start is not None
    return sorted(client.steps_of_rows[request_id]) == [
        *range(request.start, len(request.sequence) - 1)
    ]


@pytest.mark.parametrize("at_end", [False, True])
def test_chunks_and_a_prefix_hit(at_end: bool) -> None:
    client = Client(engine(executor=CountingExecutor, chunk=64))
    prompt = tokens(150)
    client.answer("first", prompt, steps=True, at_end=at_end)
    client.answer("again", [*prompt[:96], 7, 8], steps=True, at_end=at_end)
    first, again = client.steps_of_rows["first"], client.steps_of_rows["again"]
    assert len({first[position] for position in range(150)}) == 3  # chunks
    assert [again[position] for position in range(96)] == [first[at] for at in range(96)]
    assert again[96] == again[97] > first[149]
    assert [step - first[149] for step in map(first.__getitem__, range(150, 153))] == [1, 2, 3]
    assert all(all_came(client, request_id) for request_id in client.steps_of_rows)
    assert check_steps(client) == 153 + 101
    client.finish()


@pytest.mark.parametrize(
    ("is_async", "drafts", "weights", "stages"),
    [(True, 0, False, 1), (False, 0, True, 1), (False, 3, False, 1), (True, 0, True, 2)],
)
def test_at_random(is_async: bool, drafts: int, weights: bool, stages: int) -> None:
    """Preemptions, chunks, prefix hits, aborts, choices and drafts."""
    core = engine(
        is_async,
        chunk=48,
        num_blocks=24,
        drafts=drafts,
        weights=weights,
        stages=stages,
        executor=CountingExecutor,
    )
    preempted = preemptions(core)
    client = Client(core)
    gone = requests_at_random(client, random.Random(3), 80, lambda: None, ns=(1, 1, 3))
    client.finish(but=gone, missing=None)
    assert check_steps(client) > 1000
    assert len(preempted) > 2
    assert drafts == 0 or min(core.model_executor.accepted, core.model_executor.rejected) > 20


def preemptions(core: Core) -> list[str]:
    """The requests that are preempted, as they are."""
    preempted: list[str] = []
    preempt = core.scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    core.scheduler._preempt_request = noted
    return preempted


def test_two_engines_give_no_number_twice() -> None:
    cores = [engine(executor=CountingExecutor) for _ in range(2)]
    for rank, core in enumerate(cores):
        core.vllm_config.parallel_config.data_parallel_index = rank
        core.vllm_config.parallel_config.data_parallel_size = 2
    client = Client(*cores)
    client.add("both", tokens(100), n=2, own_prompt=True, max_tokens=20, steps=True)
    client.finish()
    assert check_steps(client, ranks=2) == 2 * 119
    numbers = [set(steps.values()) for steps in client.steps_of_rows.values()]
    assert not numbers[0] & numbers[1]


def test_numbers_begin_anew_before_the_unknown_one() -> None:
    for ranks in (1, 3, 64):
        last = UNKNOWN_STEP // ranks
        for rank in (0, ranks - 1):
            assert step_number(last - 1, rank, ranks) < UNKNOWN_STEP
            assert step_number(last, rank, ranks) == rank


def test_steps_take_less_than_two_bytes_a_row() -> None:
    sizes = []
    for steps in (False, True):
        client = Client(engine(executor=CountingExecutor, chunk=512))
        sizes.append(bytes_of_messages(client))
        for index in range(16):
            client.add(f"r{index}", tokens(150, index), max_tokens=40, steps=steps)
        client.finish()
    rows = 16 * 189
    (without,), (with_steps,) = sizes
    assert 0 < with_steps - without < 2 * rows


def bytes_of_messages(client: Client) -> list[int]:
    """The bytes of arrays in all messages so far: of one number, which grows."""
    total = [0]
    receive = client.receive

    def counted(message: Any, index: int = 0) -> None:
        arrays = [output.routed_experts for output in message.outputs]
        total[0] += sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        receive(message, index)

    client.receive = counted
    return total


def test_recordings_of_a_load_with_preemptions(tiny_model: Path, tmp_path: Path) -> None:
    """Requests that do not ask for steps are recorded with them, as the server's default says."""
    flags = ("--max-num-batched-tokens", "48", "--num-gpu-blocks-override", "24")
    flags += ("--max-model-len", "368", "--routed-experts-record", str(tmp_path))
    flags += ("--routed-experts-default", json.dumps({"routed_experts_steps": True}))
    with served(tiny_model, ServedCountingExecutor, *SIZES, *flags) as server:

        def ask(index: int) -> None:
            prompt = [*prompt_of(100, index % 4), index]  # four prefixes
            server.complete(prompt=prompt, max_tokens=20 + index, ignore_eos=True)

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(ask, range(24)))
        preempted = server.metric("vllm:num_preemptions_total")
    executor = ServedCountingExecutor.last
    checked = 0
    for answer in read(opened(sorted(map(str, tmp_path.glob("*.jsonl")))), ModelInfo()):
        (routing,) = answer.routings()
        name = answer.parts[0]["id"]
        (request_id,) = (request for request in executor.sampled if request.startswith(name))
        assert routing.steps is not None
        assert np.array_equal(routing.steps, passes_of(executor, request_id, routing.end))
        checked += len(routing.steps)
    assert checked == sum(100 + 20 + index for index in range(24))
    assert preempted > 5


def test_the_documented_request(
    tiny_model: Path, documented: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tiny_model, ServedCountingExecutor, *SIZES) as server:
        (text,) = documented
        text = text.replace("http://localhost:8000", server.url).replace("tiny-moe", "tiny")
        names: dict[str, Any] = {}
        exec(text, names)
    executor, name = ServedCountingExecutor.last, names["response"].id
    (request_id,) = (request for request in executor.sampled if request.startswith(name))
    steps = names["routing"].steps.tolist()
    assert steps == passes_of(executor, request_id, 5).tolist()
    assert [step - steps[0] for step in steps] == [0, 0, 1, 2, 3]
    assert str(names["routing"].steps) in capsys.readouterr().out


def test_rows_that_were_offloaded_and_rows_of_another_engine() -> None:
    core = engine_that_offloads(is_async=True)
    client = Client(core)
    prompt = tokens(5 * BLOCK + 3)
    client.answer("first", prompt, steps=True)
    core.empty_prefix_cache()
    client.answer("again", prompt, steps=True)
    assert num_loaded(core) == 5
    first, again = client.steps_of_rows["first"], client.steps_of_rows["again"]
    loaded = range(5 * BLOCK)
    assert [again[position] for position in loaded] == [first[position] for position in loaded]
    assert again[5 * BLOCK] > max(first.values())

    table = np.arange(1)
    slots = np.arange(BLOCK)
    cache = HostCache(num_blocks=1, block_size=BLOCK)
    rows = np.zeros((BLOCK, 2, 3), np.int16)
    cache.write(slots, rows, step=7)
    assert set(cache.steps(table, 0, BLOCK).tolist()) == {7}
    came = PrefillRows(rows, until=0.0)
    KVLoad(slots, came, Cause.KV_TRANSFER).apply(cache)
    assert set(cache.steps(table, 0, BLOCK).tolist()) == {UNKNOWN_STEP}
