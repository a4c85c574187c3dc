"""Our scheduler within vLLM's real engine core: every row of every request, whatever happens to
it."""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from routed_experts.capture.scheduler import (
    distributor,
    output_queue,
    request_rows,
    row_source,
)
from routed_experts.capture.scheduler.scheduler import SchedulerHooks
from routed_experts.capture.scheduler.step import Step
from routed_experts.capture.wire.envelope import ENVELOPE_ID
from routed_experts.capture.wire.transport import StepRows
from tests.contract.engine import (
    PART_BYTES,
    SHARED,
    Client,
    K,
    L,
    Received,
    engine,
    requests_at_random,
    rows_of_prompt,
    sent,
    share_partly,
    tokens,
)
from tests.contract.passes import PassesExecutor, num_changed


def test_an_abort_in_the_prefill(is_async: bool) -> None:
    """What another request finds in the blocks that it left has its rows."""
    client = Client(engine(is_async, chunk=48))
    client.add("gone", tokens(150))
    client.steps(2)
    client.abort("gone")
    client.add("stays", tokens(150))
    client.finish(but="gone")


def test_from_the_second_token_on_rows_come_with_those_of_other_streams(is_async: bool) -> None:
    core = engine(is_async)
    client = Client(core)
    client.add("asks", tokens(20))
    while not client.received["asks"].tokens:
        client.steps(1)
    assert "asks" in core.capture.distributor.requests.streams
    client.finish()


def test_long_prompts_come_in_parts_beside_the_tokens_of_others() -> None:
    """So that no message takes long to carry; each token of the others comes in its own step. What
    came later waits."""
    client = Client(engine(chunk=512))
    client.add("running", tokens(5), max_tokens=30)
    client.steps(4)
    client.add("long", tokens(200))
    client.add("short", tokens(10))
    long, running = client.received["long"], client.received["running"]
    seen: list[int] = []
    while not long.tokens:
        before = len(running.tokens), sum(seen)
        client.step()
        if added := sum(map(len, client.prompts[long.prompt_id].values())) - before[1]:
            assert len(running.tokens) == before[0] + 1
            seen.append(added)
    assert len(seen) == 4
    assert max(seen) * L * K * 2 <= PART_BYTES
    (first,) = [message for message in client.messages if rows_of_prompt("short") in message]
    both = {rows_of_prompt("long"), "long", rows_of_prompt("short"), "short"}
    assert both | {"running"} == set(first)
    client.finish()


@pytest.mark.parametrize("part_rows", [2, 15])
def test_no_prompt_waits_for_ever_behind_others(part_rows: int) -> None:
    """More rows come with each step than a message should have: many more, or a few."""
    core = engine(chunk=512)
    core.capture.output_queue.part_bytes = part_rows * L * K * 2
    client = Client(core)
    client.add("running", tokens(5), max_tokens=200)
    client.add("long", tokens(300))
    client.steps(2)
    for turn in range(60):
        client.add(f"r{turn}", tokens(20, seed=turn), max_tokens=2)
        client.step()
        assert turn < 20 or client.received[f"r{turn - 20}"].tokens
    assert client.received["long"].tokens
    assert len(core.capture.output_queue) < 30
    client.finish()
    assert len(client.stats) < len(client.messages) / 4  # about once a second


def test_each_api_process_gets_what_is_its_own() -> None:
    """And the first of them the numbers of all."""
    core = engine(chunk=512)
    first, *others = clients = [Client(core, index=index) for index in range(3)]
    first.add("running", tokens(5), max_tokens=20)
    for _ in range(4):
        first.step(*others)
    others[0].add("long", tokens(100, seed=1), n=2, max_tokens=30)
    others[1].add("not asked for", tokens(100, seed=2), start=None)
    first.add("long too", tokens(100, seed=3))
    first.run(*others)
    for client in clients:
        client.finish()
    assert [client.stats for client in others] == [[], []]
    assert first.stats[-1].rows_captured >= 5 + 3 * 100


def test_a_choice_that_comes_when_another_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may have finished the first before the API process has sent the last. It remembers
    a few prompts."""
    core = engine()
    client = Client(core)
    add, held = core.add_request, []
    monkeypatch.setattr(core, "add_request", lambda *args: held.append(args))
    ids = client.add("g", tokens(100), n=3, max_tokens=1)
    for args in held:
        add(*args)
        client.run()
    monkeypatch.undo()
    monkeypatch.setattr(distributor, "_SENT_PROMPTS", 2)
    for seed in range(3):
        client.add(f"later {seed}", tokens(9, seed), n=2)
    client.finish()
    assert client.times_sent(*ids) == 1
    assert len(core.capture.distributor._sent_prompts) == 2


def test_data_parallel_engines_send_a_prompt_once_each() -> None:
    client = Client(engine(), engine())
    ids = client.add("g", tokens(150), n=6)
    client.finish()
    assert client.times_sent(*ids) == 2


# ---- rows that do not fit a message ----


class Warm(Client):
    """Of an engine that has PROMPT's prefix in its cache, and a request that goes on running."""

    def __init__(self, is_async: bool, **sizes: Any) -> None:
        self.core = engine(is_async, **sizes)
        super().__init__(self.core)
        self._held = patch.object(output_queue, "BACKLOG_SHARE", 1 << 60)
        self.answer("before", PROMPT, max_tokens=1)

    def hold(self, name: str, steps: int, **options: Any) -> list[str]:
        """Adds a request of PROMPT, of whose rows none fits a message before `let_go` is called."""
        self.core.capture.output_queue.part_bytes = 0
        self._held.start()
        ids = self.add(name, PROMPT, **options)
        self.steps(steps)
        return ids

    def let_go(self) -> None:
        self._held.stop()
        self.core.capture.output_queue.part_bytes = PART_BYTES

    def num_tokens(self, *ids: str) -> list[int]:
        return [len(self.received[request_id].tokens) for request_id in ids]


PROMPT = tokens(200)


@pytest.fixture
def warm(is_async: bool) -> Iterator[Warm]:
    client = Warm(is_async, num_blocks=40)
    client.add("running", tokens(5, seed=1), max_tokens=40)
    client.steps(4)
    yield client
    client.let_go()
    client.run()


def test_a_prompt_holds_up_its_own_requests_only(warm: Warm) -> None:
    (before,) = warm.num_tokens("running")
    ids = warm.hold("g", steps=12, n=3, max_tokens=6)
    assert warm.num_tokens("running")[0] >= before + 10
    assert warm.num_tokens(*ids) == [0, 0, 0]
    assert len(warm.core.capture.output_queue) == 1
    warm.let_go()
    warm.finish()
    sent = {rows_of_prompt(request_id) for request_id in ids}
    *parts, last = [message for message in warm.messages if sent & set(message)]
    assert len(parts) == 3
    for part in parts:
        of_prompt, other = part
        assert of_prompt in sent
        assert other == "running"
    assert last[0] in sent
    assert last[-1] == "running"
    assert set(last[1:-1]) == set(ids)


def leave_last(warm: Warm, late: list[str]) -> None:
    """The last request does not leave before its rows: empty steps send them."""
    while warm.core.scheduler.running:
        warm.step()


def pause(warm: Warm, late: list[str]) -> None:
    warm.core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    warm.let_go()
    warm.run()
    assert all(count > 0 for count in warm.num_tokens(*late))
    warm.core.scheduler.set_pause_state(PauseState.UNPAUSED)


def abort(warm: Warm, late: list[str], index: int) -> None:
    warm.abort(late.pop(index))
    warm.step()


def take_blocks(warm: Warm, late: list[str]) -> None:
    """Other requests get the blocks of those that have ended."""
    for index in range(6):
        warm.add(f"other {index}", tokens(180, seed=2 + index))
    warm.steps(18)
    entry, *_ = warm.core.capture.output_queue._entries.values()
    assert all(isinstance(piece, np.ndarray) for piece in entry.rows._pieces)


@pytest.mark.parametrize(
    ("happens", "max_tokens"),
    [
        (leave_last, 1),
        (pause, 4),
        (partial(abort, index=0), 20),
        (partial(abort, index=1), 20),
        (take_blocks, 1),
    ],
)
def test_while_rows_wait(
    warm: Warm, happens: Callable[[Warm, list[str]], None], max_tokens: int
) -> None:
    late = warm.hold("late", steps=6, n=2, max_tokens=max_tokens)
    assert warm.num_tokens(*late) == [0, 0]
    happens(warm, stay := [*late])
    warm.let_go()
    warm.finish(but={*late} - {*stay})
    assert warm.times_sent(*stay) == 1


# ---- ids that clients choose ----


@pytest.mark.parametrize("max_tokens", [1, 20], ids=["ended", "running"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_id_that_comes_again_right_after_an_abort(warm: Warm, max_tokens: int, n: int) -> None:
    """Without vLLM's random end of ids: the rows of the first request's prompt wait, and its steps
    are under way."""
    ids = warm.hold("again", steps=6, n=n, max_tokens=max_tokens)
    warm.abort(*ids)
    warm.add("again", tokens(190, seed=9), n=n, max_tokens=9)
    warm.let_go()
    warm.finish()
    assert warm.times_sent(*ids) == 1


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("at_end", [False, True], ids=["with tokens", "at the end"])
def test_an_id_that_comes_again_while_steps_are_under_way(
    is_async: bool, steps: int, at_end: bool
) -> None:
    """vLLM alone would give the first request's tokens to the second, or fail."""
    client = Client(engine(is_async, chunk=48, stages=2))
    client.add("again", tokens(60), max_tokens=20)
    client.steps(steps)
    client.abort("again")
    client.add("again", tokens(70, seed=1), max_tokens=9, at_end=at_end)
    client.finish()


@pytest.mark.parametrize("start", [0, None], ids=["rows", "no rows"])
def test_an_id_that_runs_for_another_api_process(is_async: bool, start: int | None) -> None:
    """Each process knows its own requests only. vLLM alone would end the engine."""
    core = engine(is_async)
    first, second = Client(core, index=0), Client(core, index=1)
    first.add("same", tokens(30), max_tokens=20, start=start)
    first.step(second)
    second.add("same", tokens(40, seed=1), max_tokens=3, start=start)
    first.run(second)
    assert second.received.pop("same").finish is FinishReason.ERROR
    second.finish()
    first.finish()
    assert len(first.received["same"].tokens) == 20


def test_choices_of_a_prompt_whose_other_choices_have_left(warm: Warm) -> None:
    """Those that had a token waited for its rows, and are aborted: the others bring the rows
    again."""
    add, late = warm.core.add_request, []
    with patch.object(
        warm.core,
        "add_request",
        lambda *args: late.append(args) if late_comes(args) else add(*args),
    ):
        first, second = warm.hold("g", steps=6, n=2, max_tokens=20)
    warm.abort(first)
    for args in late:
        add(*args)
    warm.let_go()
    warm.finish(but=first)
    assert warm.received[second].tokens


def late_comes(args: tuple[Any, ...]) -> bool:
    return str(args[0].request_id).startswith("1_")


@pytest.mark.parametrize("at_end", [False, True], ids=["with tokens", "at the end"])
def test_a_request_with_the_id_of_the_outputs_that_carry_rows(warm: Warm, at_end: bool) -> None:
    warm.add(ENVELOPE_ID, PROMPT, max_tokens=9, at_end=at_end)
    warm.finish()


@pytest.mark.parametrize("at_end", [False, True], ids=["with tokens", "at the end"])
@pytest.mark.parametrize(("waits_for", "clear_cache"), [("all", True), ("a part", False)])
def test_a_pause_that_aborts_loses_no_token(
    warm: Warm, waits_for: str, clear_cache: bool, at_end: bool
) -> None:
    """vLLM tells clients of the abort at once: of those whose outputs are kept back, it has to come
    after these."""
    late = warm.hold("late", steps=6, n=2, max_tokens=30, at_end=at_end)
    ids, core = ["running", *late], warm.core
    warm.let_go()
    if waits_for == "a part":
        warm.step()
    assert len(core.capture.output_queue) == 1
    assert warm.num_tokens(ids[1]) == [0]
    sampled = {
        request_id: list(core.scheduler.requests[request_id].output_token_ids) for request_id in ids
    }
    warm.pause("abort", clear_cache)
    for request_id in ids:
        request = warm.received.pop(request_id)
        assert len(request.tokens) >= 3
        assert (request.tokens, request.finish) == (sampled[request_id], FinishReason.ABORT)
        assert request.num_rows == len(request.tokens) - 1
    assert len(core.capture.output_queue) == 0
    core.resume_scheduler()
    warm.add("after", PROMPT)
    warm.finish()


def test_rows_that_are_needed_at_the_end_come_with_it(is_async: bool) -> None:
    """Whole if they fit a message, else in parts before the last output."""
    client = Client(engine(is_async))
    ids = [
        client.add(f"whole-{index}", tokens(20), max_tokens=40 + index, at_end=True)[0]
        for index in range(6)
    ]
    (long,) = client.add("in parts", tokens(20), max_tokens=150, at_end=True)
    client.steps(30)
    assert {client.received[request_id].num_rows for request_id in [*ids, long]} == {0}
    client.finish()
    assert [client.received[request_id].num_rows for request_id in ids] == [
        39 + index for index in range(6)
    ]
    assert client.received[long].num_arrays < 6


@pytest.mark.parametrize("steps", [0, 1, 3, 70])
def test_rows_of_aborted_requests_that_need_them_at_the_end(is_async: bool, steps: int) -> None:
    """The engine answers an abort with the rows of all tokens that were sent, whatever had been
    computed by then; a pause too."""
    client = Client(engine(is_async))
    for name, end in (
        ("asked", client.abort),
        ("paused", lambda *_: client.pause("abort", clear_cache=True)),
    ):
        ids = client.add(name, tokens(100), n=2, max_tokens=150, at_end=True)
        client.steps(steps)
        end(*ids)
        client.run()
        # which checked that all rows came
        requests = [client.received[request_id] for request_id in ids]
        assert all(
            request.finish is FinishReason.ABORT or (name, steps) == ("paused", 0)
            for request in requests
        )
        assert all(request.num_rows == max(len(request.tokens) - 1, 0) for request in requests)
        client.engines[0].resume_scheduler()
        client.finish(but=ids)
    assert steps < 70 or min(request.num_rows for request in requests) > 60


@pytest.mark.parametrize("num_tokens", [0, 8], ids=["of a prompt", "at the end"])
def test_rows_that_are_gone_are_an_error_in_the_log(
    warm: Warm, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing loads KV here, so that all rows of a prefix and of a running answer should be
    known."""
    errors: list[Any] = []
    monkeypatch.setattr(row_source.logger, "error", lambda *args: errors.append(args[1:]))
    monkeypatch.setattr(Received, "check", lambda *_: None)
    warm.core.capture.output_queue.part_bytes = 1 << 30
    warm.add("asks", PROMPT, max_tokens=20, at_end=True)
    while warm.num_tokens("asks") < [num_tokens]:
        warm.step()
    warm.core.capture.cache._written[:] = False
    warm.run()
    assert errors == [("asks",)]


# ---- a known token that is computed again ----


@pytest.mark.parametrize("at_end", [False, True], ids=["with tokens", "at the end"])
def test_a_known_token_that_is_computed_again(at_end: bool) -> None:
    """With drafts a step may begin at a token whose row is known, as if one more draft had been
    rejected. The next token was not sampled with the row of that time, which stands in the host
    cache since."""
    core = engine(is_async=False, drafts=3, executor=PassesExecutor)
    schedule = core.scheduler.schedule

    def one_back(*args: Any, **kwargs: Any) -> SchedulerOutput:
        for request in core.scheduler.running:
            if request.num_output_tokens > 1:
                request.num_computed_tokens -= 1
        return schedule(*args, **kwargs)

    core.scheduler.schedule = one_back
    client = Client(core)
    client.add("asks", tokens(20), max_tokens=150, at_end=at_end)
    client.finish()
    assert core.model_executor.rejected > 10
    assert num_changed(client, "asks") > 30


# ---- steps that do not fit ----


def test_an_output_of_a_step_that_is_not_in_flight_is_named() -> None:
    core = engine(is_async=False)
    core.take(sent(request_of("asks")))
    scheduled = core.scheduler.schedule()
    output = core.model_executor.execute_model(scheduled) or core.model_executor.sample_tokens(None)
    core.capture.receive(scheduled, output)
    with pytest.raises(AssertionError, match=r"step 1 arrives, of requests \['asks'\]: expected"):
        core.capture.receive(scheduled, output)


def test_a_step_without_rows_names_its_requests() -> None:
    core = engine(is_async=False)
    core.take(sent(request_of("asks")))
    scheduled = core.scheduler.schedule()
    with pytest.raises(RuntimeError, match=r"\['asks'\]: expected rows"):
        core.capture.receive(scheduled, ModelRunnerOutput(["asks"], {"asks": 0}, [[1]]))


def test_a_request_that_is_not_in_its_step_is_named() -> None:
    """Another's rows would be wrong ids."""
    core = engine(is_async=False)
    core.take(sent(request_of("asks")))
    step = Step(1, core.scheduler.schedule(), {})
    rows = StepRows(np.zeros((1, L, K), np.int16), np.zeros(1, np.int64), np.array([0, 1]))
    step.arrive(rows, {"asks": 0})
    expected = r"request 'other': expected in the step, which actually has \['asks'\]"
    for look_up in (step.rows_of, step.starts.__getitem__, lambda name: step.starts_of([name])):
        with pytest.raises(AssertionError, match=expected):
            look_up("other")
    with pytest.raises(AssertionError, match=expected):
        step.extents_of(["asks", "other"])


def request_of(name: str) -> EngineCoreRequest:
    """As an API process sends it."""
    sampling = SamplingParams(max_tokens=4)
    return EngineCoreRequest(name, tokens(5), None, sampling, None, time.time(), None, None, None)


# ---- what vLLM does with them ----


class NewerScheduler:
    """The hooks as a newer vLLM calls them: with more arguments, and for outputs that are not
    ours."""

    def __init__(self, hooks: SchedulerHooks) -> None:
        self._hooks: Any = hooks

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._hooks, name)
        if name not in CALLED_BY_VLLM:
            return method
        return lambda *args: method(*args, "more", since="0.34")

    def take_output(self, request: Request, output: Any) -> Any:
        hooks = self._hooks
        assert not hooks.replays_prompt_logprobs(request)
        assert hooks.take_logprobs(request, output) is None
        assert hooks.take_prompt_logprobs(request, output, keys=("logprobs",)) is None
        assert hooks.release_request(request) is None
        return hooks.take_output(request, output, {"keys": True})


CALLED_BY_VLLM = {
    "build_connector_meta",
    "request_finished",
    "reset",
    "max_cache_hit",
    "request_loading",
}


def test_a_newer_vllm_gives_more_arguments_and_asks_for_more(is_async: bool) -> None:
    core = engine(is_async, num_blocks=12, chunk=48)
    core.scheduler.aux_output_connector = NewerScheduler(core.scheduler.aux_output_connector)
    client = Client(core)
    client.add("runs", tokens(60), max_tokens=30)
    client.steps(5)
    client.add("needs more than is free", tokens(140, seed=1), n=2)
    client.finish()
    with pytest.raises(AttributeError):
        _ = core.scheduler.aux_output_connector._typing_error


def test_a_block_that_is_copied_brings_its_rows(is_async: bool) -> None:
    client = Client(engine(is_async))
    prompt = tokens(SHARED + 4)
    client.add("source", prompt, max_tokens=30)
    client.steps(4)
    copies = share_partly(client.engines[0], client, prompt)
    client.finish()
    assert len(copies) == 1


# ---- what it counts, and what it costs ----


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


def test_whoever_reads_the_messages_of_a_step_gets_all_of_it() -> None:
    """`InprocClient` takes `get(0)`, the engine's process `items()`, and a program's own scheduler
    may copy them."""
    core = engine()
    client = Client(core)
    client.answer("before", tokens(200), max_tokens=1)
    client.add("running", tokens(5, seed=1), max_tokens=20)
    for name in ("long", "too"):
        client.add(name, tokens(200), n=2)
    core.capture.output_queue.part_bytes = 8 * L * K * 2
    while core.is_busy():
        messages, _ = core.step_fn()
        if messages and (message := {**messages}.get(0)):
            client.receive(message)
    client.finish()
    assert [len(times) for times in client.prompts.values()] == [1, 1, 1, 1]


class Unwalked(request_rows.Index):
    """Refuses to be walked through, but for requests that end, which are few."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a step walks through all requests")

    items = __iter__  # type: ignore[assignment]

    def values(self) -> Any:
        assert len(self) <= 2
        return super().values()


def test_a_step_costs_what_it_schedules_and_not_what_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_rows, "Index", Unwalked)
    core = engine(max_num_seqs=2)
    client = Client(core)
    for index in range(20):
        client.add(str(index), tokens(3, index))
    client.finish()


@pytest.mark.parametrize(
    ("seed", "drafts", "stages", "weights"),
    [(0, 0, 1, True), (1, 0, 1, False), (4, 3, 1, False), (5, 2, 3, True)],
)
def test_at_random(is_async: bool, seed: int, drafts: int, stages: int, weights: bool) -> None:
    """Shared prefixes, `n`, starts within prompts, preemptions, aborts and resets; single choices
    may be aborted."""
    dice = random.Random(seed)
    sizes: dict[str, Any] = {
        "chunk": dice.choice((16, 48, 200)),
        "max_num_seqs": dice.choice((2, 5)),
        "num_blocks": 11,
    }
    core = engine(is_async, **sizes, drafts=drafts, stages=stages, weights=weights)
    client = Client(core)
    preempted: set[str] = set()

    def reset() -> None:
        preempted.update(
            name for name, request in core.scheduler.requests.items() if request.num_preemptions
        )
        if seed % 2 == 0 and dice.random() < 0.1:
            core.scheduler.reset_prefix_cache(reset_running_requests=True)

    aborted = requests_at_random(client, dice, 60, reset, ns=(1, 1, 2, 7))
    client.finish(but=aborted)
    assert (client.num_weights > 100) == weights
    assert preempted
    assert seed % 2 == 0 or all(len(times) == 1 for times in client.prompts.values())
    # which are scheduled as if those in flight were right, and filled up with some that nobody made
    if drafts:
        assert min(core.model_executor.accepted, core.model_executor.rejected) > 100
