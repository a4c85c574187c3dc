"""Rows from the engine's outputs to streams, through vLLM's own output processor and collectors."""

import gc
import logging
import random
import time
import weakref
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from routed_experts.capture.wire.envelope import ENVELOPE_ID, Notes, pack
from routed_experts.capture.wire.message import (
    OPT_IN_ARG,
    PROMPT_ROWS,
    OptIn,
    PlacedRows,
    RowsOutput,
)
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.server.outputs.processor import RowBuffers, opt_in
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import RequestOutput
from tests.server.known import K, L, buffer_of, push_from_message, rows_of

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
STOP, ABORT = FinishReason.STOP, FinishReason.ABORT


def positions(arrays: list[np.ndarray]) -> list[int]:
    assert all(rows.shape[1:] == (L, K) for rows in arrays)
    return [int(value) for rows in arrays for value in rows[:, 0, 0]]


def output(
    request_id: str,
    tokens: int,
    first: int | None = None,
    finish: FinishReason | None = None,
    rows: int = 0,
) -> EngineCoreOutput:
    """What the engine sends: `tokens` tokens and, if `first` is given, `rows` rows from there
    on."""
    sent = None if first is None else PlacedRows(first, rows_of(first, first + (rows or tokens)))
    return EngineCoreOutput(
        request_id, list(range(tokens)), routed_experts=sent, finish_reason=finish
    )


def prompt(request_id: str, first: int = 0, end: int = 3, value: int = 0) -> EngineCoreOutput:
    """The output with rows of the prompt that goes before the first tokens of `request_id`."""
    brings = RowsOutput(
        PROMPT_ROWS, prompt_id_of(request_id.removeprefix("0_").removeprefix("1_")), request_id
    )
    return rows_output(brings, first, rows_of(first + value, end + value))


def rows_output(brings: RowsOutput, first: int, rows: Any) -> EngineCoreOutput:
    return EngineCoreOutput(
        brings.output_id, [], stop_reason=brings.kind, routed_experts=PlacedRows(first, rows)
    )


def prompt_id_of(name: str) -> bytes:
    """Of the request `name`, whose choices are called `0_name` and so on."""
    return name.encode().ljust(16)


def first_token(request_id: str) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [7], routed_experts=PlacedRows(3, rows_of(3, 3)))


def message(*outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
    """What the engine makes of a step's outputs."""
    packed = pack(outputs)
    header = [] if packed is None else [envelope(routed_experts=packed)]
    return [*header, *outputs]


def envelope(**fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(ENVELOPE_ID, [], stop_reason=ENVELOPE_ID, **fields)


class Frontend:
    """vLLM's output processor with our buffers installed, and the request "a" of three prompt
    tokens."""

    def __init__(
        self,
        n: int = 1,
        kind: RequestOutputKind = DELTA,
        interval: int = 1,
        asks: bool = True,
    ) -> None:
        self.processor = OutputProcessor(None, log_stats=False, stream_interval=interval)
        self.buffers = RowBuffers.install(self.processor)
        params = None if asks else SamplingParams(n=n, output_kind=kind, detokenize=False)
        self.queue = self.add("a", n, kind, params)

    def add(
        self,
        request_id: str,
        n: int = 1,
        kind: RequestOutputKind = DELTA,
        params: SamplingParams | None = None,
    ) -> RequestOutputCollector:
        if params is None:
            params = SamplingParams(n=n, output_kind=kind, detokenize=False)
            opt_in(params, prompt_start=0, prompt_id=prompt_id_of(request_id))
        queue = RequestOutputCollector(kind, request_id)
        if n == 1:
            self.processor.add_request(request_of(request_id, params), None, queue=queue)
            return queue
        parent = ParentRequest(request_of(request_id, params))
        for index in range(n):
            child_id, child_params = parent.get_child_info(index)
            child = request_of(child_id, child_params, request_id)
            self.processor.add_request(
                child, None, parent_req=parent, request_index=index, queue=queue
            )
        return queue

    def step(self, *outputs: EngineCoreOutput) -> None:
        self.processor.process_outputs(message(*outputs))

    def taken(self, end: int, queue: RequestOutputCollector | None = None) -> list[list[int]]:
        """The rows of each choice that a reader takes, up to position `end`; unknown ones if they
        did not arrive."""
        return [
            positions(buffer.take(0, end, (L, K)))
            for buffer in buffers_of(take(queue or self.queue))
        ]


def request_of(
    request_id: str, params: SamplingParams, external_id: str | None = None
) -> EngineCoreRequest:
    request = EngineCoreRequest(
        request_id, [1, 2, 3], None, params, None, time.time(), None, None, None
    )
    request.external_req_id = external_id or request_id
    return request


def take(queue: RequestOutputCollector) -> RequestOutput:
    result = queue.get_nowait()
    assert isinstance(result, RequestOutput)
    return result


def buffers_of(result: RequestOutput) -> list[RowBuffer]:
    """By the index of the choice."""
    choices = sorted(result.outputs, key=lambda choice: choice.index)
    assert [choice.index for choice in choices] == [*range(len(choices))]
    buffers: list[Any] = [choice.routed_experts for choice in choices]
    assert all(isinstance(buffer, RowBuffer) for buffer in buffers)
    return buffers


def what_has_come(queue: RequestOutputCollector) -> list[RequestOutput]:
    """The result that a reader finds now, if there is one."""
    result = queue.get_nowait()
    if result is None:
        return []
    assert isinstance(result, RequestOutput)
    return [result]


def num_tokens_of(results: list[RequestOutput]) -> list[list[int]]:
    return [[len(choice.token_ids) for choice in result.outputs] for result in results]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("kind", "interval", "is_slow", "tokens_of_results"),
    [(DELTA, 1, True, [4]), (DELTA, 3, False, [1, 3, 0]), (FINAL_ONLY, 1, False, [4])],
)
def test_no_reader_loses_rows(
    kind: RequestOutputKind, interval: int, is_slow: bool, tokens_of_results: list[int], n: int
) -> None:
    """vLLM merges outputs for one slower than the engine, holds tokens back for the stream interval
    or to the end, and would give the last output's rows only."""
    frontend = Frontend(n, kind, interval)
    names = ["a"] if n == 1 else ["0_a", "1_a"]
    results: list[RequestOutput] = []
    for first, num_rows in ((0, 3), (3, 1), (4, 1), (5, 1)):
        frontend.step(*(output(name, 1, first, None, num_rows) for name in names))
        results += [] if is_slow else what_has_come(frontend.queue)
    frontend.step(*(output(name, tokens=0, finish=ABORT) for name in names))
    results += what_has_come(frontend.queue)
    assert num_tokens_of(results) == [[tokens] * n for tokens in tokens_of_results]
    assert {choice.finish_reason for choice in results[-1].outputs} == {"abort"}
    assert frontend.queue.get_nowait() is None
    check_buffers_are_the_same(results)
    for buffer in buffers_of(results[0]):
        assert positions(buffer.take(0, 6)) == [0, 1, 2, 3, 4, 5]


def check_buffers_are_the_same(results: list[RequestOutput]) -> None:
    """Each choice has one, whatever vLLM merges."""
    first = buffers_of(results[0])
    for result in results:
        for buffer, expected in zip(buffers_of(result), first, strict=True):
            assert buffer is expected


def test_nothing_is_left_behind() -> None:
    finished, aborted = Frontend(), Frontend()
    buffers = []
    for frontend in (finished, aborted):
        frontend.step(output("a", 1, first=0, rows=3))
        assert len(frontend.buffers) == 1
        buffers.append(weakref.ref(frontend.processor.request_states["a"].buffer))
    finished.step(output("a", 1, first=3, finish=STOP))
    aborted.processor.abort_requests(["a"], internal=True)
    for frontend in (finished, aborted):
        assert len(frontend.buffers) == 0
        take(frontend.queue)
        del frontend.queue
    gc.collect()
    assert [buffer() for buffer in buffers] == [None, None]


class RandomRows:
    """Pushes arrays with gaps, overlaps and unknown rows, and knows what a buffer has then."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.buffer = RowBuffer()
        self.start = self.rng.choice([0, 3])
        self.end = self.start  # behind the last row that was pushed
        self.num_lost = 0  # in gaps
        self._values: dict[int, int] = {}  # by position: what came first stays
        self._num_pushed = 0

    def expected(self, first: int, end: int) -> list[int]:
        return [self._values.get(position, -1) for position in range(first, end)]

    def push(self) -> None:
        first = self.start
        if self._num_pushed:
            first = max(self.end + self.rng.choice([0, 0, 0, 0, -2, -1, 1, 3]), self.start)
        values = [self._value(first + index) for index in range(self.rng.randrange(1, 5))]
        rows = np.repeat(np.array(values, dtype=np.int16), L * K).reshape(-1, L, K)
        self.buffer.push(first, rows)
        self._num_pushed += 1
        self.num_lost += max(first - self.end, 0)
        for position, value in enumerate(values, first):
            if position >= self.end:
                self._values[position] = value
        self.end = max(self.end, first + len(values))

    def _value(self, position: int) -> int:
        """Another one in each array."""
        return position + 100 * self._num_pushed if self.rng.random() < 0.9 else -1


def test_pushes_and_takes_in_any_order() -> None:
    """What came first is kept, at its position, and taken once."""
    for seed in range(200):
        push_and_take(seed)


def push_and_take(seed: int) -> None:
    rows = RandomRows(seed)
    taken_to = rows.start
    assert rows.buffer.take(taken_to, taken_to + 5) == []
    for _ in range(rows.rng.randrange(1, 12)):
        rows.push()
        assert rows.buffer.num_lost == rows.num_lost
        if rows.rng.random() < 0.5:
            first = taken_to + rows.rng.choice([0, 0, 1])  # what lies before is dropped
            last = rows.rng.choice([first - 1, first, first + 2, 99])
            taken_to = max(min(last, rows.end), first)
            taken = rows.buffer.take(first, last)
            assert positions(taken) == rows.expected(first, min(last, rows.end))
    if taken_to <= rows.end:
        last = rows.end + rows.rng.choice([0, 2])
        taken = rows.buffer.take(taken_to, last, (L, K))
        assert positions(taken) == rows.expected(taken_to, last)
        assert rows.buffer.num_lost == rows.num_lost + last - rows.end


# ---- a prompt's rows, which come on outputs of their own ----


@pytest.mark.parametrize(
    ("first", "end", "is_taken"),
    [(3, 4, True), (3, 5, False), (2, 4, False), (4, 5, False), (3, 3, False)],
)
def test_the_only_row_that_waits(first: int, end: int, is_taken: bool) -> None:
    buffer = buffer_of((2, rows_of(2, 3)))
    buffer.take(2, 3)
    push_from_message(buffer, 3, rows_of(3, 4))
    row = buffer.take_only_row(first, end)
    assert (row is not None) == is_taken
    if row is None:
        assert positions(buffer.take(3, 4)) == [3]
    else:
        run, place = row
        assert positions([run.of(place)]) == [3]
        assert buffer.take(4, 4) == []
        push_from_message(buffer, 4, rows_of(4, 5))
        assert buffer.take_only_row(4, 5) is not None


@pytest.mark.parametrize("cut", [4, 5])
def test_one_of_two_rows_that_wait_is_not_the_only_one(cut: int) -> None:
    """Whether they came in one message or in two."""
    buffer = buffer_of((2, rows_of(2, 3)))
    buffer.take(2, 3)
    push_from_message(buffer, 3, rows_of(3, cut))
    push_from_message(buffer, cut, rows_of(cut, 6))
    assert buffer.take_only_row(3, 4) is None
    assert buffer.take_only_row(3, 6) is None
    assert positions(buffer.take(3, 6)) == [3, 4, 5]


def test_a_row_that_comes_twice_is_not_taken_twice() -> None:
    buffer = buffer_of((2, rows_of(2, 3)))
    buffer.take(2, 3)
    for _ in range(2):
        push_from_message(buffer, 3, rows_of(3, 4))
    assert positions(buffer.take(3, 4)) == [3]
    assert buffer.end == 4


def test_all_choices_get_the_prompts_rows_and_none_a_copy() -> None:
    frontend = Frontend(n=3)
    frontend.step(prompt("1_a"), first_token("1_a"), first_token("0_a"))
    frontend.step(first_token("2_a"))
    buffers = buffers_of(take(frontend.queue))
    shared = [buffer.take(0, 3) for buffer in buffers]
    assert [positions(rows) for rows in shared] == [[0, 1, 2]] * 3
    assert all(rows[0] is shared[0][0] for rows in shared)
    frontend.step(output("0_a", 1, first=3))
    assert positions(buffers[0].take(3, 9)) == [3]


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_an_aborted_choice_does_not_take_the_prompts_rows_with_it(kind: RequestOutputKind) -> None:
    """The engine had sent them with its first token before it heard of the abort."""
    frontend = Frontend()
    queue = frontend.add("a_b", 2, kind)
    frontend.processor.abort_requests(["0_a_b"], internal=True)
    frontend.step(prompt("0_a_b"), first_token("0_a_b"), first_token("1_a_b"))
    frontend.step(output("1_a_b", 1, first=3, finish=FinishReason.LENGTH))
    (choice,) = [choice for choice in take(queue).outputs if choice.index == 1]
    assert positions(choice.routed_experts.take(0, 9)) == [0, 1, 2, 3]


@pytest.mark.parametrize("gone", ["b", "0_b"])
def test_prompts_rows_of_a_request_that_is_gone(gone: str) -> None:
    frontend = Frontend(asks=False)
    frontend.step(prompt(gone), first_token(gone))
    assert len(frontend.buffers) == 0
    assert frontend.queue.get_nowait() is None
    frontend.step(output("a", 1))  # of a request that did not opt in
    assert take(frontend.queue).outputs[0].routed_experts is None
    assert len(frontend.buffers) == 0


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
def test_a_prompt_that_comes_in_parts(lost: int | None) -> None:
    frontend = Frontend(n=2)
    for first in range(3):
        if first != lost:
            frontend.step(prompt("0_a", first, first + 1))
    frontend.step(first_token("0_a"), first_token("1_a"))
    frontend.step(output("1_a", 1, first=3))
    expected = [-1 if at == lost else at for at in range(3)]
    assert frontend.taken(4) == [[*expected, -1], [*expected, 3]]


OWN, OTHER = [0, 1, 2], [100, 101, 102]
PARTS = [("0_a", 0, 2), ("0_a", 2, 3), ("1_a", 0, 1, 100), ("1_a", 1, 3, 100)]
ALL_TOKENS = ["0_a", "1_a", "2_a"]


@pytest.mark.parametrize(
    ("steps", "of_choice_2"),
    [
        ([[0], [1], [2], [3], ALL_TOKENS], OWN),
        ([[0], [2], [1], [3], ALL_TOKENS], OWN),
        ([[2], [0], [1], [3], ALL_TOKENS], OTHER),
        ([[2], [0], [3], [1], ALL_TOKENS], OTHER),
        ([[2], [0, 1, "0_a", "2_a"], [3, "1_a"]], OWN),
    ],
)
def test_parts_of_two_engines_are_not_mixed(steps: list[list[Any]], of_choice_2: list[int]) -> None:
    """Each choice has its own prompt's where it brought them; where it did not, those of one other,
    which are whole."""
    frontend = Frontend(n=3)
    for step in steps:
        frontend.step(
            *(prompt(*PARTS[item]) if isinstance(item, int) else first_token(item) for item in step)
        )
    assert frontend.taken(3) == [OWN, OTHER, of_choice_2]


# ---- ids that clients choose ----

OF_A = RowsOutput(PROMPT_ROWS, prompt_id_of("a"), "a").output_id


@pytest.mark.parametrize("name", [ENVELOPE_ID, PROMPT_ROWS, OF_A, "routed-experts-rows-of-a"])
def test_no_id_of_a_request_is_taken_for_an_output_of_the_captures(name: str) -> None:
    frontend = Frontend()
    queue, plain = (
        frontend.add(name),
        frontend.add(f"{name} ", params=SamplingParams(output_kind=DELTA)),
    )
    frontend.processor.process_outputs([output(f"{name} ", 1)])  # alone, without an envelope
    assert len(take(plain).outputs[0].token_ids) == 1
    frontend.step(output(name, 1, first=0, rows=3))
    assert frontend.taken(3, queue) == [[0, 1, 2]]


def test_an_id_that_comes_again() -> None:
    """What the engine had sent for the request that was aborted does not reach the one with its
    id."""
    frontend = Frontend()
    frontend.processor.abort_requests(["a"], internal=True)
    asks = SamplingParams(output_kind=DELTA, detokenize=False)
    opt_in(asks, prompt_start=0)
    queue = frontend.add("a", params=asks)
    own = RowsOutput(PROMPT_ROWS, OptIn.of(asks).prompt_id, "a")
    frontend.step(prompt("a", value=100))
    frontend.step(rows_output(own, 0, rows_of(0, 3)), first_token("a"))
    assert frontend.taken(3, queue) == [[0, 1, 2]]


# ---- what goes with them ----


@pytest.mark.parametrize(("n", "shared"), [(1, False), (2, True)])
def test_the_opt_in_is_added_to_what_a_client_sent(n: int, shared: bool) -> None:
    theirs = {"session": 1}
    params = SamplingParams(n=n, extra_args=theirs)
    opt_in(params, prompt_start=3)
    decoded = OptIn.decode(params.extra_args[OPT_IN_ARG])
    assert decoded is not None
    assert (decoded.prompt_start, decoded.shared) == (3, shared)
    assert params.extra_args == {"session": 1, OPT_IN_ARG: decoded.encode()}
    assert theirs == {"session": 1}
    again = SamplingParams()
    opt_in(again, prompt_start=3)
    assert OptIn.decode(again.extra_args[OPT_IN_ARG]).prompt_id != decoded.prompt_id


@pytest.mark.parametrize("stop", [None, ["x"]])
def test_rows_come_at_the_end_where_the_engine_knows_it(stop: list[str] | None) -> None:
    """A stop string ends a request in the API process."""
    params = SamplingParams(stop=stop, detokenize=True)
    opt_in(params, prompt_start=0, at_end=True)
    decoded = OptIn.decode(params.extra_args[OPT_IN_ARG])
    assert decoded is not None
    assert decoded.final_only == (stop is None)


@pytest.mark.parametrize("in_slices", [False, True])
def test_the_engines_numbers_are_taken_off(in_slices: bool) -> None:
    frontend, seen = Frontend(), []
    other = frontend.add("b")
    stats = EngineStats(1, rows_captured=6, copy_wait_s=0.5, busiest=[2.0], routed=[4.0])
    sent = envelope(kv_transfer_params=Notes(stats=stats).encode())
    frontend.step(sent)  # passed over where nobody wants them
    # of a process that has not got so far
    OutputProcessor(None, log_stats=False).process_outputs([sent])
    frontend.buffers.on_stats = seen.append
    outputs = message(output("a", 1, first=0, rows=3), output("b", 1, first=0, rows=3))
    outputs[0].kv_transfer_params = sent.kv_transfer_params
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(
        MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    )
    for part in [arrived.outputs[:3], arrived.outputs[3:]] if in_slices else [arrived.outputs]:
        frontend.processor.process_outputs(part, arrived.timestamp)
    assert seen == [stats]
    assert frontend.taken(3) == frontend.taken(3, other) == [[0, 1, 2]]


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_an_abort_of_a_choice_whose_rows_come_at_its_end_waits_for_them(
    n: int, internal: bool
) -> None:
    """The engine's answer brings them. Others end at once, and those whose rows come with a
    stop string."""
    frontend = Frontend()
    asks = SamplingParams(n=n, output_kind=DELTA, detokenize=False)
    opt_in(asks, prompt_start=0, at_end=True, prompt_id=prompt_id_of("b"))
    queue = frontend.add("b", n, params=asks)
    ids = ["b"] if n == 1 else ["0_b", "1_b"]
    frontend.step(prompt(ids[0]), *(output(choice_id, 3) for choice_id in ids))
    assert sorted(frontend.processor.abort_requests(["b", "a", "unknown"], internal)) == sorted(
        ["a", *ids]
    )
    assert set(frontend.processor.request_states) == set(ids)
    frontend.step(*(output(choice_id, 0, first=3, rows=2, finish=ABORT) for choice_id in ids))
    result = take(queue)
    assert {choice.finish_reason for choice in result.outputs} == {"abort"}
    assert [positions(buffer.take(0, 5)) for buffer in buffers_of(result)] == [[0, 1, 2, 3, 4]] * n
    assert not frontend.processor.request_states
    assert not frontend.processor.parent_requests
    assert not frontend.processor.external_req_ids


def test_outputs_have_their_buffer_before_any_row() -> None:
    """Up to 0.30 vLLM keeps the first of several outputs that it merges for a slow reader, with
    what is on it."""
    asks = SamplingParams(output_kind=DELTA, detokenize=False)
    opt_in(asks, prompt_start=3, at_end=True)
    frontend = Frontend()
    queue = frontend.add("b", params=asks)
    frontend.step(output("b", 1))
    (buffer,) = buffers_of(take(queue))
    frontend.step(output("b", 1, first=3, finish=STOP))
    assert buffers_of(take(queue)) == [buffer]
    assert positions(buffer.take(3, 4, (L, K))) == [3]


# ---- the memory of rows that wait ----


def test_few_rows_that_wait_keep_no_message_of_the_engine() -> None:
    """A reader that stops would keep the rows of all that ran beside it."""
    buffer, messages = RowBuffer(), [np.zeros((256, 48, 8), dtype=np.int16) for _ in range(5)]
    for position, sent in enumerate(messages):
        buffer.push(position, sent[7:8])
    assert [rows.base is None for rows in buffer.take(0, 5)] == [True] * 5
    large = np.zeros((256, 48, 8), dtype=np.int16)
    buffer.push(5, large[:100])
    buffer.push(105, large[:1])
    assert buffer.take(5, 105)[0].base is large, "the rows of a prompt were copied"
    # of a model with few layers: packed too
    groups = [np.zeros((256, 4, 8), dtype=np.int16) for _ in range(3)]
    for position, sent in enumerate(groups):
        buffer.push(106 + 64 * position, sent[:64])
    assert all(rows.base is None for rows in buffer.take(106, 106 + 3 * 64))
    buffer = RowBuffer()
    buffer.push(0, rows_of(0, 1000))
    buffer.take(0, 999)
    (remaining,) = buffer._arrays
    assert (remaining.base, len(remaining)) == (None, 1), "rows that were taken are kept"


# ---- rows say where they belong ----


def test_rows_of_one_output_that_are_lost_leave_a_gap_there_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    frontend = Frontend()
    queue = frontend.add("b")
    frontend.step(*(output(request_id, 1, first=0, rows=3) for request_id in "ab"))
    sent = message(output("a", 1, first=3), output("b", 1, first=3, rows=1400))
    assert len(sent[2].routed_experts) == 1400
    sent[2].routed_experts = None
    frontend.processor.process_outputs(sent)
    logging.getLogger("vllm").addHandler(caplog.handler)
    frontend.step(output("a", 1, first=4), output("b", 1, first=1403))
    logging.getLogger("vllm").removeHandler(caplog.handler)
    lost = "Request 'b': 1400 rows from position 3 on did not arrive and are sent as -1."
    assert {record.getMessage() for record in caplog.records} == {lost}
    assert frontend.taken(5) == [[0, 1, 2, 3, 4]]
    assert frontend.taken(1404, queue) == [[0, 1, 2, *[-1] * 1400, 1403]]


def test_rows_without_the_output_that_places_them_are_dropped() -> None:
    frontend = Frontend()
    frontend.step(prompt("a"), first_token("a"))
    frontend.processor.process_outputs(message(output("a", 1, first=3))[1:])
    lone = output("a", 1)
    lone.routed_experts = rows_of(4, 5)
    frontend.processor.process_outputs([lone])
    frontend.step(output("a", 1, first=5))
    assert frontend.taken(6) == [[0, 1, 2, -1, -1, 5]]
