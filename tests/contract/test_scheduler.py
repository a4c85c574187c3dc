"""Our scheduler within vLLM's real engine core: every row of every request, whatever happens to it."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.engine import output_queue
from routed_experts.capture.message import prompt_output_id
from routed_experts.protocol.codec import Rows
from tests.contract.engine import BLOCK, PART_BYTES, Client, Core, K, L, engine, requests_at_random, tokens

# ---- one request a prompt ----


def test_requests_that_share_prefixes(is_async: bool) -> None:
    client = Client(engine(is_async, num_blocks=14))
    base = tokens(100)
    client.add("cold", base)
    client.run()
    client.add("warm", base, start=3)
    client.add("a branch", [*base[:50], 1, 2, 3], start=53, max_tokens=9)
    client.add("not asked for", base[:40], start=None)
    client.finish()
    assert all(len(times) == 1 for times in client.prompts.values())
    assert len(client.prompts) == 2  # the branch asked for no prompt row


def test_few_blocks_make_requests_start_again(is_async: bool) -> None:
    core = engine(is_async, num_blocks=12)
    client = Client(core)
    for index in range(5):
        client.add(str(index), tokens(40, index), max_tokens=30, start=index * 10)
    requests = list(core.scheduler.requests.values())
    client.run()
    assert any(request.num_preemptions for request in requests)
    client.check_finished()


def test_long_prompts_come_in_parts_beside_the_tokens_of_others() -> None:
    """So that no message takes long to carry; each token of the others comes in its own step, and short prompts too."""
    client = Client(engine(chunk=512))
    client.add("running", tokens(5), max_tokens=30)
    client.steps(4)
    client.add("long", tokens(200))
    client.add("short", tokens(10))
    seen: list[int] = []
    while not client.received["long"].tokens:
        before = len(client.received["running"].tokens), len(client.sent_with.get("long", ()))
        client.step()
        added = len(client.sent_with.get("long", ())) - before[1]
        if added:
            assert len(client.received["running"].tokens) == before[0] + 1
            seen.append(added)
    assert len(seen) == 4
    assert max(seen) * L * K * 2 <= PART_BYTES
    (first,) = [message for message in client.messages if prompt_output_id("short") in message]
    assert {prompt_output_id("short"), "short", prompt_output_id("long"), "running"} == set(first)
    client.finish()


def test_a_long_prompt_comes_at_once_where_nobody_else_waits() -> None:
    client = Client(engine(chunk=512))
    client.add("long", tokens(400))
    client.finish()
    long = prompt_output_id("long")
    assert [message for message in client.messages if long in message] == [[long, "long"]]


def test_no_prompt_waits_for_ever_behind_others() -> None:
    """More rows come with each step than a message should have."""
    core = engine(chunk=512)
    core.capture.output_queue.part_bytes = 2 * L * K * 2
    client = Client(core)
    client.add("running", tokens(5), max_tokens=200)
    client.add("long", tokens(300))
    client.steps(2)
    for turn in range(60):
        client.add(f"r{turn}", tokens(20, seed=turn), max_tokens=2)
        client.steps(1)
    assert client.received["long"].tokens
    assert len(core.capture.output_queue) < 12
    client.finish()
    assert len(client.stats) < len(client.messages) / 4  # about once a second


def test_each_api_process_gets_what_is_its_own() -> None:
    core = engine(chunk=512)
    clients = [Client(core, index=index) for index in range(3)]
    clients[0].add("running", tokens(5), max_tokens=20)
    for _ in range(4):
        clients[0].step(*clients[1:])
    clients[1].add("long", tokens(100, seed=1), n=2)
    clients[2].add("not asked for", tokens(100, seed=2), start=None)
    clients[0].add("long too", tokens(100, seed=3))
    clients[0].run(*clients[1:])
    for client in clients:
        client.check_finished()


# ---- n > 1 ----


def test_a_prompt_is_sent_once(is_async: bool) -> None:
    """Also with more choices than fit the batch, and to those who begin when others have ended."""
    client = Client(engine(is_async, max_num_seqs=3))
    for name, length in (("a", 5), ("b", 150), ("c", 150)):
        ids = client.add(name, tokens(length), n=10, start=2, max_tokens=5)
        client.finish()
        assert client.times_sent(*ids) == 1
        assert len({tuple(client.received[request_id].tokens) for request_id in ids}) > 1


def test_a_choice_that_comes_when_another_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may have finished the first before the API process has sent the last."""
    core = engine()
    client = Client(core)
    add, held = core.add_request, []
    monkeypatch.setattr(core, "add_request", lambda *args: held.append(args))
    ids = client.add("g", tokens(100), n=3, max_tokens=1)
    for args in held:
        add(*args)
        client.run()
    client.check_finished()
    assert client.times_sent(*ids) == 1


def test_choices_of_preempted_prompts(is_async: bool) -> None:
    client = Client(engine(is_async, num_blocks=14, max_num_seqs=4))
    one, other = (client.add(name, tokens(60, seed), n=6, max_tokens=30) for seed, name in enumerate("ab"))
    client.finish()
    assert client.times_sent(*one) == client.times_sent(*other) == 1


def test_a_reset_of_the_prefix_cache_under_running_choices(is_async: bool) -> None:
    core = engine(is_async)
    client = Client(core)
    ids = client.add("g", tokens(150), n=4, max_tokens=12)
    for turn in range(200):
        if turn % 3 == 2:
            core.scheduler.reset_prefix_cache(reset_running_requests=True)
        client.steps(1 + turn % 2 * 4)
    client.finish()
    assert client.times_sent(*ids) < 4  # again for those that had no token yet, and once for all of them


def test_a_reset_whenever_it_happens(is_async: bool) -> None:
    """Outputs in flight are dropped then, that of the first token among them: the prompt is read where it is next."""
    core = engine(is_async)
    client = Client(core)
    for steps in range(1, 9):
        ids = client.add(f"g{steps}", tokens(150, seed=steps), n=2, max_tokens=6)
        client.steps(steps)
        core.scheduler.reset_prefix_cache(reset_running_requests=True)
        client.finish()
        assert client.times_sent(*ids) in (1, 2)


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_choice_that_is_aborted(is_async: bool, aborted: int) -> None:
    """Whenever it happens, and whether or not it was the one that brought the prompt's rows."""
    client = Client(engine(is_async))
    for steps in range(7):
        ids = client.add(f"g{steps}", tokens(150, seed=steps), n=3, max_tokens=5)
        client.steps(steps)
        gone = ids.pop(aborted)
        client.abort(gone)
        client.finish(but=gone)
        assert client.times_sent(*ids) == 1


def test_data_parallel_engines_send_a_prompt_once_each() -> None:
    client = Client(engine(), engine())
    ids = client.add("g", tokens(150), n=6)
    client.finish()
    assert client.times_sent(*ids) == 2


# ---- drafts, and stages of a pipeline ----


def test_drafts_that_are_rejected_leave_no_row(is_async: bool) -> None:
    """A step is scheduled as if those in flight were right; and batches are filled up with drafts that nobody made."""
    core = engine(is_async, num_blocks=14, drafts=3)
    client = Client(core)
    base = tokens(60)
    client.add("one token", tokens(1, 1), max_tokens=20)
    client.add("before", base, max_tokens=40)
    client.run()
    for seed in range(4):
        client.add(f"warm {seed}", [*base, *client.received["before"].tokens[: 20 + seed]], start=7, max_tokens=30)
    client.add("g", tokens(33, 2), n=3, max_tokens=25)
    client.add("not asked for", tokens(40, 3), start=None, max_tokens=30)
    requests = list(core.scheduler.requests.values())
    client.finish()
    assert core.model_executor.accepted > 100
    assert core.model_executor.rejected > 100
    assert any(request.num_preemptions for request in requests)


def test_more_steps_in_flight(is_async: bool) -> None:
    """As with pipeline parallelism."""
    client = Client(engine(is_async, num_blocks=14, max_num_seqs=6, stages=3, drafts=2))
    client.add("before", tokens(60), max_tokens=5)
    client.run()
    for seed in range(6):
        client.add(str(seed), [*tokens(60)[: 10 * seed], *tokens(9, seed)], max_tokens=30)
    client.add("g", tokens(60), n=4, max_tokens=20)
    client.finish()


# ---- rows that a thread reads while steps go on ----


class Busy:
    """Keeps the thread that reads prompts' rows busy, so that what comes next has to wait."""

    def __init__(self, core: Core) -> None:
        self._go = threading.Event()
        core.capture._prompt_reader._thread.submit(self._go.wait)

    def end(self) -> None:
        self._go.set()


Warm = tuple[Client, Core, list[int]]


@pytest.fixture
def warm(is_async: bool) -> Iterator[Warm]:
    """An engine that has the prompt's prefix in its cache, and a request that goes on running."""
    core = engine(is_async)
    client = Client(core)
    prompt = tokens(200)
    client.add("before", prompt, max_tokens=1)
    client.run()
    client.add("running", tokens(5, seed=1), max_tokens=40)
    client.steps(4)
    yield client, core, prompt
    client.run()


def test_a_read_holds_up_its_own_prompt_only(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    client, core, prompt = warm
    patience: list[float | None] = []

    def wait(reads: list[Future[Rows]], seconds: float | None) -> Any:
        patience.append(seconds)
        return futures.wait(reads, seconds)

    monkeypatch.setattr(output_queue, "wait", wait)
    busy = Busy(core)
    ids = client.add("g", prompt, n=3, max_tokens=6)
    before = len(client.received["running"].tokens)
    client.steps(12)
    assert len(patience) >= 10
    assert all(seconds is not None and seconds <= 5e-3 for seconds in patience)  # none of them waited for the thread
    assert len(client.received["running"].tokens) >= before + 10
    assert client.received[ids[0]].tokens == []
    assert len(core.capture.output_queue) == 1
    busy.end()
    client.finish()
    sent = {prompt_output_id(request_id) for request_id in ids}
    *parts, last = [message for message in client.messages if sent & set(message)]
    assert len(parts) == 3
    assert all(len(part) == 2 and part[0] in sent and part[1] == "running" for part in parts)
    assert last[0] in sent
    assert last[-1] == "running"
    assert set(last[1:-1]) == set(ids)


def test_choices_whose_prompt_was_sent_are_not_kept_back_for_another(warm: Warm) -> None:
    client, core, prompt = warm
    busy = Busy(core)
    ids = client.add("g", prompt, n=3, max_tokens=60)
    client.steps(4)
    busy.end()
    while not client.received[ids[0]].tokens:
        client.step()
    before = [len(client.received[request_id].tokens) for request_id in ids]
    busy = Busy(core)
    client.add("other", prompt, max_tokens=3)
    client.steps(10)
    assert all(len(client.received[name].tokens) >= count + 8 for name, count in zip(ids, before, strict=True))
    assert client.received["other"].tokens == []
    busy.end()
    client.finish()


def test_the_last_request_does_not_leave_before_its_rows(is_async: bool) -> None:
    """No later step would send them."""
    core = engine(is_async)
    client = Client(core)
    client.add("before", tokens(200), max_tokens=1)
    client.run()
    busy = Busy(core)
    threading.Timer(0.3, busy.end).start()
    client.add("after", tokens(200), max_tokens=1)
    client.finish()


def test_a_pause_does_not_keep_rows_back(warm: Warm) -> None:
    client, core, prompt = warm
    busy = Busy(core)
    client.add("late", prompt)
    client.steps(6)
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert client.received["late"].tokens == []
    threading.Timer(0.3, busy.end).start()
    client.run()
    assert client.received["late"].tokens
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    client.finish()


@pytest.mark.parametrize(("waits_for", "clear_cache"), [("the thread", True), ("a part", False)])
def test_a_pause_that_aborts_loses_no_token(warm: Warm, waits_for: str, clear_cache: bool) -> None:
    """vLLM tells clients of the abort at once: of those whose outputs are kept back, it has to come after these."""
    client, core, prompt = warm
    busy = Busy(core)
    ids = ["running", *client.add("late", prompt, n=2, max_tokens=30)]
    client.steps(6)
    if waits_for == "a part":
        busy.end()
        client.steps(1)
    else:
        threading.Timer(0.3, busy.end).start()
    assert len(core.capture.output_queue) == 1
    assert client.received[ids[1]].tokens == []
    sampled = {request_id: list(core.scheduler.requests[request_id].output_token_ids) for request_id in ids}
    assert all(len(sampled[request_id]) >= 3 for request_id in ids)
    client.pause("abort", clear_cache)
    for request_id in ids:
        request = client.received[request_id]
        assert request.tokens == sampled[request_id]
        assert request.finish is FinishReason.ABORT
        assert request.num_rows == len(request.tokens) - 1
    assert len(core.capture.output_queue) == 0
    core.resume_scheduler()
    client.add("after", prompt)
    client.run()
    assert client.received["after"].finish is FinishReason.LENGTH


@pytest.mark.parametrize("aborted", [0, 1])
def test_an_abort_while_the_rows_are_read(warm: Warm, aborted: int) -> None:
    client, core, prompt = warm
    busy = Busy(core)
    ids = client.add("g", prompt, n=2, max_tokens=20)
    client.steps(6)
    gone = ids.pop(aborted)
    client.abort(gone)
    client.step()
    busy.end()
    client.finish(but=gone)
    assert client.times_sent(*ids) == 1


def test_blocks_that_are_taken_by_others_while_they_are_read(is_async: bool) -> None:
    core = engine(is_async, num_blocks=20)
    client = Client(core)
    prompt = tokens(160)
    client.add("before", prompt, max_tokens=1)
    client.run()
    busy = Busy(core)
    client.add("gone", prompt, max_tokens=1)
    client.add("running", tokens(5, seed=1), max_tokens=40)
    client.steps(6)
    threading.Timer(0.3, busy.end).start()
    for index in range(2):
        client.add(f"other {index}", tokens(140, seed=2 + index))
    client.finish()


# ---- blocks that vLLM copies ----


def share_partly(core: Core, request_id: str, source: str, num_tokens: int) -> list[tuple[int, int]]:
    """Has a request hit the first `num_tokens` of another that is running, the last of them in a part of a block.

    vLLM finds such hits in hybrid models only. What follows is its own: it copies the block for the request, which
    goes on writing into the copy. Gives the copies, as they are scheduled.
    """
    copies: list[tuple[int, int]] = []
    manager, schedule = core.scheduler.kv_cache_manager, core.scheduler.schedule
    look_up = manager.get_computed_blocks

    def hit(request: Request, *limit: Any) -> Any:
        found = look_up(request, *limit)
        if request.request_id != request_id:
            return found
        (tables,) = manager.coordinator.single_type_managers
        blocks = list(tables.req_to_blocks[source][: -(-num_tokens // BLOCK)])
        return type(found[0])((blocks,)), num_tokens, *found[2:]

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        copies.extend(step.kv_cache_block_copies or ())
        return step

    manager.get_computed_blocks, core.scheduler.schedule = hit, scheduled
    return copies


def test_a_block_that_is_copied_brings_its_rows(is_async: bool) -> None:
    core = engine(is_async)
    client = Client(core)
    prompt = tokens(2 * BLOCK + 9)
    client.add("source", prompt, max_tokens=30)
    client.steps(4)
    copies = share_partly(core, "shares", "source", 2 * BLOCK + 5)
    client.add("shares", [*prompt[: 2 * BLOCK + 5], 1, 2, 3])
    client.run()
    assert len(copies) == 1
    client.check_finished()


def test_a_block_that_is_copied_to_is_not_being_read(is_async: bool) -> None:
    """The rows of a request that has ended are still to be read when its block gets a copy of another's."""
    core = engine(is_async, num_blocks=32)
    client = Client(core)
    prompt, shared = tokens(10 * BLOCK), tokens(2 * BLOCK + 9, seed=1)
    client.add("before", prompt, max_tokens=1)
    client.run()
    client.add("source", shared, max_tokens=60)
    client.steps(8)  # into its fourth block, so that it soon needs no other
    busy = Busy(core)
    client.add("ended", prompt, max_tokens=1)
    client.steps(4)
    reader = core.capture._prompt_reader
    (read,) = reader._reads
    pool = core.scheduler.kv_cache_manager.block_pool
    others = pool.get_new_blocks(pool.get_num_free_blocks() - int(read.blocks.sum()))  # theirs are the next
    copies = share_partly(core, "shares", "source", 2 * BLOCK + 5)
    client.add("shares", [*shared[: 2 * BLOCK + 5], 1, 2, 3])
    receive, wait_for_reads = core.capture.receive, reader.wait_for_reads

    def received(step: SchedulerOutput, *args: Any) -> None:
        if step.kv_cache_block_copies:
            assert not read.rows.done()
            reader.wait_for_reads = waits
        receive(step, *args)

    def waits(slots: Any) -> None:
        busy.end()
        wait_for_reads(slots)

    core.capture.receive = received
    client.run()
    pool.free_blocks(others)
    ((_, destination),) = copies
    assert read.blocks[destination]
    client.check_finished()


def test_a_read_that_fails_ends_the_engine(warm: Warm) -> None:
    client, core, prompt = warm
    cache = core.capture._cache
    read = cache.read
    cache.read = lambda *args: read(args[0][:1], *args[1:])
    client.add("broken", prompt)
    with pytest.raises(ValueError, match="block table"):
        client.run()
    core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    core.capture.output_queue._prompts.clear()


# ---- what it counts ----


def test_rows_are_counted_once_and_nothing_stays_tracked(is_async: bool) -> None:
    client = Client(engine(is_async, chunk=16))
    for index in range(3):
        client.add(str(index), tokens(40, seed=index), max_tokens=9)
    client.add("not asked for", tokens(30, seed=3), start=None, max_tokens=2)
    client.steps(2)
    assert client.stats[0].requests_tracked == 3
    client.finish()
    last = client.stats[-1]
    rows = 3 * (40 + 8) + 30 + 1
    # A step may have begun when the one before it turned out to be a request's last.
    assert rows <= last.rows_captured <= rows + (4 if is_async else 0)
    assert rows * L * K * 2 <= last.host_cache_bytes <= last.rows_captured * L * K * 2
    assert last.requests_tracked == 0
    assert len(last.busiest) == L


def test_one_api_process_gets_the_numbers_of_all() -> None:
    core = engine()
    first, other = Client(core, index=0), Client(core, index=1)
    other.add("a", tokens(20))
    other.run(first)
    other.check_finished()
    assert other.stats == []
    assert first.stats[-1].rows_captured >= 20 + 3


# ---- an engine without a process of its own ----


READERS: tuple[Callable[[dict[int, EngineCoreOutputs]], EngineCoreOutputs | None], ...] = (
    lambda messages: messages.get(0),
    lambda messages: {**messages}.get(0),
    lambda messages: (messages | {}).get(0),
    lambda messages: {client: messages[client] for client in messages}.get(0),
)


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_the_messages_of_a_step_gets_all_of_it(reader: Any) -> None:
    """`InprocClient` takes `get(0)`, the engine's process `items()`, and a program's own scheduler may copy them."""
    core = engine()
    client = Client(core)
    client.add("before", tokens(200), max_tokens=1)
    client.run()
    client.add("running", tokens(5, seed=1), max_tokens=20)
    for name in ("long", "too"):
        client.add(name, tokens(200), n=2)
    threading.Timer(0.3, Busy(core).end).start()
    while core.scheduler.has_requests() or core.batch_queue:
        messages, _ = core.step_fn()
        if messages and (message := reader(messages)):
            client.receive(message)
    client.check_finished()
    assert sorted(len(times) for times in client.prompts.values()) == [1, 1, 1, 1]


# ---- what a step costs ----


class CountedId(str):
    """A request id that counts how often one of them is looked at: looking it up takes its hash."""

    looks = 0

    def __hash__(self) -> int:
        CountedId.looks += 1
        return super().__hash__()


def test_a_step_costs_what_it_schedules_and_not_what_is_queued() -> None:
    core = engine(max_num_seqs=2)
    client = Client(core)

    def looks() -> int:
        """At requests, when a step of two has been scheduled."""
        core.capture._tracked = {CountedId(name): state for name, state in core.capture._tracked.items()}
        CountedId.looks = 0
        core.capture.build_connector_meta(step, core.scheduler.requests)
        return CountedId.looks

    for index in range(5):
        client.add(str(index), tokens(3, index))
    step = core.scheduler.schedule()
    step.num_scheduled_tokens = {CountedId(name): count for name, count in step.num_scheduled_tokens.items()}
    assert len(step.num_scheduled_tokens) == 2
    few = looks()
    for index in range(5, 500):
        client.add(str(index), tokens(3, index))
    assert core.capture.num_tracked == 500
    assert looks() == few > 0


# ---- everything at once ----


@pytest.mark.parametrize(("seed", "drafts", "stages"), [*((seed, 0, 1) for seed in range(4)), (4, 3, 1), (5, 2, 3)])
def test_at_random(is_async: bool, seed: int, drafts: int, stages: int) -> None:
    """Shared prefixes, `n`, starts within prompts, preemptions, aborts and resets; single choices may be aborted."""
    dice = random.Random(seed)
    sizes: dict[str, Any] = {"chunk": dice.choice((16, 48, 200)), "max_num_seqs": dice.choice((2, 5)), "num_blocks": 16}
    core = engine(is_async, **sizes, drafts=drafts, stages=stages)
    client = Client(core)
    resets = []

    def reset() -> None:
        if dice.random() < 0.1:
            resets.append(core.scheduler.reset_prefix_cache(reset_running_requests=True))

    aborted = requests_at_random(client, dice, 60, reset, ns=(1, 1, 2, 7))
    client.finish(but=aborted)
    assert resets or all(len(times) == 1 for times in client.prompts.values())
