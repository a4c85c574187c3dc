"""Rows from the engine's outputs to streams, through vLLM's own output processor and collectors."""

import gc
import logging
import mmap
import random
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from routed_experts.capture.message import OPT_IN_ARG, ROWS_OUTPUT_ID, OptIn, PlacedRows, pack, prompt_output_id
from routed_experts.capture.stats import STATS_OUTPUT_ID, EngineStats
from routed_experts.server.outputs.arrays import EveryRequest
from routed_experts.server.outputs.row_buffer import RowBuffer, RowBuffers, opt_in
from routed_experts.server.vllm_api import RequestOutput
from tests.server.test_streaming import aligner_of, stream

L, K = 2, 3


def rows_of(first: int, end: int) -> np.ndarray:
    """Rows [n, L, K] that say which position they belong to."""
    return np.repeat(np.arange(first, end, dtype=np.int16), L * K).reshape(-1, L, K)


def positions(arrays: list[np.ndarray]) -> list[int]:
    assert all(rows.shape[1:] == (L, K) for rows in arrays)
    return [int(value) for rows in arrays for value in rows[:, 0, 0]]


def output(request_id: str, tokens: int, first: int | None = None, finish: FinishReason | None = None, rows: int = 0):
    """What the engine sends: `tokens` tokens and, if `first` is given, `rows` rows from there on."""
    sent = None if first is None else PlacedRows(first, rows_of(first, first + (rows or tokens)))
    return EngineCoreOutput(request_id, list(range(tokens)), routed_experts=sent, finish_reason=finish)


def message(*outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
    """What the engine makes of a step's outputs."""
    packed = pack(outputs)
    header = [] if packed is None else [EngineCoreOutput(ROWS_OUTPUT_ID, [], routed_experts=packed)]
    return [*header, *outputs]


class Frontend:
    """vLLM's output processor with requests of three prompt tokens, and our buffers installed."""

    def __init__(self, stream_interval: int = 1) -> None:
        self.processor = OutputProcessor(None, log_stats=False, stream_interval=stream_interval)
        self.buffers = RowBuffers.install(self.processor)

    def add(
        self, request_id: str, kind: RequestOutputKind = RequestOutputKind.DELTA, n: int = 1
    ) -> RequestOutputCollector:
        params = SamplingParams(n=n, output_kind=kind, detokenize=False)
        queue = RequestOutputCollector(kind, request_id)
        if n == 1:
            self.processor.add_request(self._request(request_id, params, request_id), None, queue=queue)
            return queue
        parent_request = self._request(request_id, params, request_id)
        parent = ParentRequest(parent_request)
        for index in range(n):
            child_id, child_params = parent.get_child_info(index)
            child = self._request(child_id, child_params, request_id)
            self.processor.add_request(child, None, parent_req=parent, request_index=index, queue=queue)
        return queue

    @staticmethod
    def _request(request_id: str, params: SamplingParams, external_id: str) -> EngineCoreRequest:
        request = EngineCoreRequest(request_id, [1, 2, 3], None, params, None, time.time(), None, None, None)
        request.external_req_id = external_id
        return request

    def step(self, *outputs: EngineCoreOutput) -> None:
        self.processor.process_outputs(message(*outputs))


def take(queue: RequestOutputCollector) -> RequestOutput:
    result = queue.get_nowait()
    assert isinstance(result, RequestOutput)
    return result


def buffer_of(result: RequestOutput, choice: int = 0) -> RowBuffer:
    buffer = result.outputs[choice].routed_experts
    assert isinstance(buffer, RowBuffer)
    return buffer


def test_merged_outputs_lose_nothing() -> None:
    """A reader slower than the engine: vLLM merges the outputs, and would keep the last one's rows only."""
    frontend = Frontend()
    queue = frontend.add("a")
    frontend.step(output("a", 1, first=0, rows=3))
    for position in (3, 4):
        frontend.step(output("a", 1, first=position))
    frontend.step(output("a", 1, first=5, finish=FinishReason.STOP))
    merged = take(queue)
    assert queue.get_nowait() is None
    assert len(merged.outputs[0].token_ids) == 4
    assert positions(buffer_of(merged).take(0, 6)) == [0, 1, 2, 3, 4, 5]


def test_an_output_without_rows_does_not_take_the_buffer_away() -> None:
    frontend = Frontend()
    queue = frontend.add("a")
    frontend.step(output("a", 1, first=0, rows=3))
    frontend.step(output("a", 0, finish=FinishReason.ABORT))
    merged = take(queue)
    assert merged.outputs[0].finish_reason == "abort"
    assert positions(buffer_of(merged).take(0, 3)) == [0, 1, 2]


def test_tokens_that_vllm_holds_back_for_the_stream_interval() -> None:
    frontend = Frontend(stream_interval=3)
    queue = frontend.add("a")
    frontend.step(output("a", 1, first=0, rows=3))
    first = take(queue)
    buffer = buffer_of(first)
    assert positions(buffer.take(0, 3)) == [0, 1, 2]
    for position in (3, 4):
        frontend.step(output("a", 1, first=position))
        assert queue.get_nowait() is None
    frontend.step(output("a", 1, first=5))
    held = take(queue)
    assert len(held.outputs[0].token_ids) == 3
    assert buffer_of(held) is buffer
    assert positions(buffer.take(3, 6)) == [3, 4, 5]


@pytest.mark.parametrize("n", [1, 2])
def test_requests_that_are_not_streamed(n: int) -> None:
    frontend = Frontend()
    queue = frontend.add("a", RequestOutputKind.FINAL_ONLY, n)
    names = ["a"] if n == 1 else ["0_a", "1_a"]
    for name in names:
        frontend.step(output(name, 1, first=0, rows=3))
        frontend.step(output(name, 1, first=3, finish=FinishReason.LENGTH))
    choices = take(queue).outputs
    assert len(choices) == n
    for choice in choices:
        assert isinstance(choice.routed_experts, RowBuffer)
        assert positions(choice.routed_experts.take(0, 4)) == [0, 1, 2, 3]


def test_requests_without_the_opt_in_have_no_buffer() -> None:
    frontend = Frontend()
    queue = frontend.add("a")
    frontend.step(output("a", 1))
    assert take(queue).outputs[0].routed_experts is None
    assert len(frontend.buffers) == 0


@pytest.mark.parametrize("how", ["finish", "abort"])
def test_nothing_is_left_behind(how: str) -> None:
    frontend = Frontend()
    queue = frontend.add("a")
    frontend.step(output("a", 1, first=0, rows=3))
    assert len(frontend.buffers) == 1
    buffer = weakref.ref(frontend.processor.request_states["a"].buffer)
    if how == "abort":
        frontend.processor.abort_requests(["a"], internal=True)
    else:
        frontend.step(output("a", 1, first=3, finish=FinishReason.STOP))
    assert len(frontend.buffers) == 0
    take(queue)
    del queue
    gc.collect()
    assert buffer() is None


def test_installing_twice_is_harmless() -> None:
    frontend = Frontend()
    replaced = frontend.processor.process_outputs
    assert RowBuffers.install(frontend.processor) is frontend.buffers
    assert frontend.processor.process_outputs == replaced
    queue = frontend.add("a")
    frontend.step(output("a", 1, first=0, rows=3))
    assert positions(buffer_of(take(queue)).take(0, 9)) == [0, 1, 2]


def test_pushes_and_takes_in_any_order() -> None:
    """Arrays with gaps, overlaps and unknown rows: what came first is kept, at its position, and taken once."""
    for seed in range(300):
        rng, buffer = random.Random(seed), RowBuffer()
        known: dict[int, int] = {}
        end = taken_to = start = rng.choice([0, 3])
        assert buffer.take(start, start + 5) == []
        num_lost = 0
        for step in range(rng.randrange(1, 12)):
            first = start if step == 0 else max(end + rng.choice([0, 0, 0, 0, -2, -1, 1, 3]), start)
            values = [at + 100 * step if rng.random() < 0.9 else -1 for at in range(first, first + rng.randrange(1, 5))]
            rows = np.repeat(np.array(values, dtype=np.int16), L * K).reshape(-1, L, K)
            buffer.push(first, rows)
            num_lost += max(first - end, 0)
            for at, value in enumerate(values, first):
                if at >= end:
                    known[at] = value
            end = max(end, first + len(values))
            assert buffer.num_lost == num_lost
            if rng.random() < 0.5:
                first = taken_to + rng.choice([0, 0, 1])  # what lies before is dropped
                last = rng.choice([first - 1, first, first + 2, 99])
                assert positions(buffer.take(first, last)) == [known.get(at, -1) for at in range(first, min(last, end))]
                taken_to = max(min(last, end), first)
        last = end + rng.choice([0, 2])
        first = min(taken_to, end)
        expected = [known.get(at, -1) for at in range(first, last)]
        if taken_to <= end:
            assert positions(buffer.take(first, last, (L, K))) == expected
            assert buffer.num_lost == num_lost + last - end


@pytest.mark.parametrize("kind", ["once", "lost", "twice"])
def test_messages_that_are_lost_or_arrive_twice(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A lost one leaves a gap at its place, one that arrives twice counts once, at once or after others."""
    logging.getLogger("vllm").addHandler(caplog.handler)
    spans = [(0, 3), (3, 4), (4, 6), (6, 9), (9, 10), (10, 11)]
    for index in range(5 if kind != "once" else 1):
        for later in range(3 if kind == "twice" else 1):
            frontend = Frontend()
            queue = frontend.add("a")
            order = list(range(6))
            if kind == "lost":
                order.remove(index)
            elif kind == "twice":
                order.insert(index + later + 1, index)
            for each in order:
                first, end = spans[each]
                frontend.step(*([output("a", end - first, first=first)] if each else [prompt("a"), first_token("a")]))
            buffer = buffer_of(take(queue))
            gap = range(*spans[index]) if kind == "lost" else range(0)
            assert taken(buffer, 11) == [-1 if at in gap else at for at in range(11)]
            assert buffer.num_lost == len(gap)
            assert kind != "lost" or f"{len(gap)} rows from position {gap.start} on did not arrive" in caplog.text
    logging.getLogger("vllm").removeHandler(caplog.handler)


def test_a_buffer_keeps_no_rows_that_were_taken() -> None:
    buffer = RowBuffer()
    buffer.push(0, rows_of(0, 1000))
    buffer.take(0, 999)
    (kept,) = buffer._arrays
    assert kept.base is None
    assert len(kept) == 1


# ---- a prompt's rows, which come on an output of their own ----


def prompt(request_id: str, start: int = 0) -> EngineCoreOutput:
    """The output with the prompt's rows that goes before the first tokens of `request_id`."""
    return EngineCoreOutput(prompt_output_id(request_id), [], routed_experts=PlacedRows(start, rows_of(start, 3)))


def first_token(request_id: str) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [7], routed_experts=PlacedRows(3, rows_of(3, 3)))


def test_all_choices_get_the_prompts_rows_and_none_a_copy() -> None:
    frontend = Frontend()
    queue = frontend.add("a", n=3)
    frontend.step(prompt("1_a"), first_token("1_a"), first_token("0_a"))
    frontend.step(first_token("2_a"))
    by_index = {choice.index: choice.routed_experts for choice in take(queue).outputs}
    taken = {index: buffer.take(0, 3) for index, buffer in by_index.items()}
    assert {index: positions(rows) for index, rows in taken.items()} == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]}
    assert all(rows[0] is taken[0][0] for rows in taken.values())
    frontend.step(output("0_a", 1, first=3))
    assert positions(by_index[0].take(3, 9)) == [3]


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_an_aborted_choice_does_not_take_the_prompts_rows_with_it(kind: RequestOutputKind) -> None:
    """The engine had sent them with its first token before it heard of the abort."""
    frontend = Frontend()
    queue = frontend.add("a_b", kind, n=2)
    frontend.processor.abort_requests(["0_a_b"], internal=True)
    frontend.step(prompt("0_a_b"), first_token("0_a_b"), first_token("1_a_b"))
    frontend.step(output("1_a_b", 1, first=3, finish=FinishReason.LENGTH))
    (choice,) = [choice for choice in take(queue).outputs if choice.index == 1]
    assert positions(choice.routed_experts.take(0, 9)) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_prompts_rows_that_come_from_several_engines_count_once(kind: RequestOutputKind) -> None:
    frontend = Frontend()
    queue = frontend.add("a", kind, n=3)
    frontend.step(prompt("0_a"), first_token("0_a"))
    frontend.step(output("0_a", 1, first=3, finish=FinishReason.STOP))
    frontend.step(prompt("1_a"), first_token("1_a"))
    frontend.step(output("1_a", 1, first=3))
    frontend.step(prompt("2_a"), first_token("2_a"))
    frontend.step(output("1_a", 0, finish=FinishReason.STOP), output("2_a", 1, first=3, finish=FinishReason.STOP))
    choices = take(queue).outputs
    assert len(choices) == 3
    for choice in choices:
        assert positions(choice.routed_experts.take(0, 9)) == [0, 1, 2, 3]


@pytest.mark.parametrize("gone", ["a", "0_a"])
def test_prompts_rows_of_a_request_that_is_gone(gone: str) -> None:
    frontend = Frontend()
    other = frontend.add("b")
    frontend.step(prompt(gone), first_token(gone))
    assert len(frontend.buffers) == 0
    assert other.get_nowait() is None


@pytest.mark.parametrize(("n", "shared"), [(1, False), (2, True)])
def test_the_opt_in_is_added_to_what_a_client_sent(n: int, shared: bool) -> None:
    theirs = {"session": 1}
    params = SamplingParams(n=n, extra_args=theirs)
    opt_in(params, prompt_start=3)
    asked = OptIn.decode(params.extra_args[OPT_IN_ARG])
    assert asked is not None
    assert (asked.prompt_start, asked.shared) == (3, shared)
    assert params.extra_args == {"session": 1, OPT_IN_ARG: asked.encode()}
    assert theirs == {"session": 1}
    again = SamplingParams()
    opt_in(again, prompt_start=3)
    assert OptIn.decode(again.extra_args[OPT_IN_ARG]).prompt_id != asked.prompt_id


@pytest.mark.parametrize("in_slices", [False, True])
def test_the_engines_numbers_are_taken_off(in_slices: bool) -> None:
    frontend = Frontend()
    queues = [frontend.add(name) for name in "ab"]
    seen: list[EngineStats] = []
    frontend.buffers.on_stats = seen.append
    outputs = [output("a", 1, first=0, rows=3), output("b", 1, first=0, rows=3)]
    outputs = message(*outputs)
    stats = EngineStats(1, rows_captured=6, copy_wait_s=0.5, busiest=[2.0], routed=[4.0])
    outputs.insert(0, EngineCoreOutput(STATS_OUTPUT_ID, [], kv_transfer_params=stats.encode()))
    sent = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(sent)
    for part in [arrived.outputs[:3], arrived.outputs[3:]] if in_slices else [arrived.outputs]:
        frontend.processor.process_outputs(part, arrived.timestamp)
    assert seen == [stats]
    for queue in queues:
        assert positions(buffer_of(take(queue)).take(0, 3)) == [0, 1, 2]


def test_numbers_that_nobody_wants_are_passed_over() -> None:
    frontend = Frontend()
    queue = frontend.add("a")
    frontend.step(EngineCoreOutput(STATS_OUTPUT_ID, [], kv_transfer_params=EngineStats(0).encode()), output("a", 1))
    assert take(queue).outputs[0].token_ids == [0]
    plain = OutputProcessor(None, log_stats=False)  # one of a process that has not got so far
    plain.process_outputs([EngineCoreOutput(STATS_OUTPUT_ID, [], kv_transfer_params=EngineStats(0).encode())])


@pytest.mark.parametrize("prompt", [5, 5000])
def test_rows_that_nobody_takes_are_few_arrays(prompt: int) -> None:
    buffer = RowBuffer()
    first = rows_of(0, prompt)
    buffer.push(0, first)
    for position in range(prompt, prompt + 10_000):
        buffer.push(position, rows_of(position, position + 1))
    beginning = buffer.take(0, prompt + 7)
    assert positions(beginning) == list(range(prompt + 7))
    assert prompt < 5000 or beginning[0] is first, "the prompt's rows were copied"
    rest = buffer.take(prompt + 7, prompt + 10_000)
    assert positions(rest) == list(range(prompt + 7, prompt + 10_000))
    assert len(rest) < 300


def test_a_row_that_is_not_known_is_sent_as_missing() -> None:
    at, frontend = 4, Frontend()
    queue = frontend.add("a")

    def results() -> Iterator[RequestOutput]:
        for position in range(2, 7):
            sent = output("a", 1, first=max(position, 3))
            if position == 2:
                sent = first_token("a")
                frontend.step(prompt("a"))
            elif position == at:
                sent.routed_experts.rows[0, 1, 2] = -1
            sent.finish_reason = FinishReason.LENGTH if position == 6 else None
            frontend.step(sent)
            yield take(queue)

    chunks = stream(aligner_of(), results())
    arrays = [chunk["choices"][0]["routed_experts"] for chunk in chunks[1:]]
    assert [array["missing"] for array in arrays] == [int(position == at) for position in range(3, 7)]


def test_few_rows_that_wait_keep_no_message_of_the_engine() -> None:
    """A reader that stops would keep the rows of all that ran beside it."""
    buffer, messages = RowBuffer(), [np.zeros((256, 48, 8), dtype=np.int16) for _ in range(5)]
    for position, message in enumerate(messages):
        buffer.push(position, message[7:8])
    kept = buffer.take(0, 5)
    assert [rows.base is None for rows in kept] == [True] * 5
    large = np.zeros((256, 48, 8), dtype=np.int16)
    buffer.push(5, large[:100])
    buffer.push(105, large[:1])
    assert buffer.take(5, 105)[0].base is large, "the rows of a prompt were copied"


def test_rows_that_nobody_takes_are_in_memory_of_their_own() -> None:
    """Joined a mebibyte at a time, which the system gets back one by one when an answer has ended."""
    buffer = RowBuffer()
    rows = np.arange(7 * 48 * 8, dtype=np.int16).reshape(7, 48, 8)
    for index in range(1000):
        buffer.push(7 * index, rows)
    first, *others = buffer.take(0, 7000)
    assert np.array_equal(first, np.tile(rows, (len(first) // 7, 1, 1)))
    assert 960_000 < first.nbytes <= 1 << 20
    assert sum(map(len, [first, *others])) == 7000
    assert all(isinstance(memory_of(rows), mmap.mmap) for rows in [first, *others] if len(rows) > 64)


def memory_of(rows: np.ndarray) -> object:
    base: object = rows
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base


# ---- rows say where they belong ----


def taken(buffer: RowBuffer, end: int) -> list[int]:
    return positions(buffer.take(0, end, (L, K)))


def test_rows_of_one_output_that_are_lost_leave_a_gap_there_alone() -> None:
    frontend = Frontend()
    queues = [frontend.add(request_id) for request_id in "ab"]
    frontend.step(*(output(request_id, 1, first=0, rows=3) for request_id in "ab"))
    large = rows_of(3, 1403)
    sent = message(
        EngineCoreOutput("a", [1], routed_experts=PlacedRows(3, rows_of(3, 4))),
        EngineCoreOutput("b", [1], routed_experts=PlacedRows(3, large)),
    )
    assert sent[2].routed_experts is large
    sent[2].routed_experts = None
    frontend.processor.process_outputs(sent)
    frontend.step(*(output(request_id, 1, first=4 if request_id == "a" else 1403) for request_id in "ab"))
    one, other = (buffer_of(take(queue)) for queue in queues)
    assert taken(one, 5) == [0, 1, 2, 3, 4]
    assert taken(other, 1404) == [0, 1, 2, *[-1] * 1400, 1403]


def test_rows_without_the_output_that_places_them_are_dropped() -> None:
    frontend = Frontend()
    queue = frontend.add("a")
    frontend.step(prompt("a"), first_token("a"))
    frontend.processor.process_outputs(message(output("a", 1, first=3))[1:])
    lone = output("a", 1)
    lone.routed_experts = rows_of(4, 5)
    frontend.processor.process_outputs([lone])
    frontend.step(output("a", 1, first=5))
    assert taken(buffer_of(take(queue)), 6) == [0, 1, 2, -1, -1, 5]


def prompt_part(sender: str, first: int, end: int, value: int = 0) -> EngineCoreOutput:
    rows = rows_of(first + value, end + value)
    return EngineCoreOutput(prompt_output_id(sender), [], routed_experts=PlacedRows(first, rows))


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
def test_a_prompt_that_comes_in_parts(lost: int | None) -> None:
    frontend = Frontend()
    queue = frontend.add("a", n=2)
    for first in range(3):
        if first != lost:
            frontend.step(prompt_part("0_a", first, first + 1))
    frontend.step(first_token("0_a"), first_token("1_a"))
    frontend.step(output("1_a", 1, first=3))
    buffers = {choice.index: choice.routed_experts for choice in take(queue).outputs}
    expected = [-1 if at == lost else at for at in range(3)]
    assert {index: taken(buffer, 3 + index) for index, buffer in buffers.items()} == {0: expected, 1: [*expected, 3]}


def test_a_choice_has_the_prompt_that_is_whole() -> None:
    """Two engines have some of the choices each; one has sent a part of the prompt, and the other all of it."""
    frontend = Frontend()
    queue = frontend.add("a", n=3)
    frontend.step(prompt_part("1_a", 0, 1, 100))
    frontend.step(prompt_part("0_a", 0, 3, 0), first_token("0_a"), first_token("2_a"))
    frontend.step(prompt_part("1_a", 1, 3, 100), first_token("1_a"))
    buffers = {choice.index: choice.routed_experts for choice in take(queue).outputs}
    assert [taken(buffers[index], 3) for index in range(3)] == [[0, 1, 2], [100, 101, 102], [0, 1, 2]]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (2, 0, 3, 1)])
def test_parts_of_two_engines_are_not_mixed(order: tuple[int, ...]) -> None:
    """Each choice has its own prompt's where it brought them, and those of one other where it did not."""
    frontend = Frontend()
    queue = frontend.add("a", n=3)
    parts = [("0_a", 0, 2, 0), ("0_a", 2, 3, 0), ("1_a", 0, 1, 100), ("1_a", 1, 3, 100)]
    for index in order:
        frontend.step(prompt_part(*parts[index]))
    frontend.step(*(first_token(f"{index}_a") for index in range(3)))
    buffers = {choice.index: choice.routed_experts for choice in take(queue).outputs}
    own, other = [0, 1, 2], [100, 101, 102]
    got = [taken(buffers[index], 3) for index in range(3)]
    assert got[:2] == [own, other]
    assert got[2] == (other if order[0] == 2 else own)


def test_an_array_is_there_for_a_reader_slower_than_the_engine() -> None:
    """vLLM gives it what waits at once."""
    processor = OutputProcessor(None, log_stats=False, stream_interval=1)
    model = SimpleNamespace(get_num_experts=lambda: 8, get_total_num_hidden_layers=lambda: L)
    worker = {"num_layers": L, "top_k": K, "layer_ids": list(range(L))}
    engine: Any = SimpleNamespace(output_processor=processor, model_config=model, collective_rpc=lambda _: [worker])
    EveryRequest.install(engine)
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "a")
    processor.add_request(Frontend._request("a", params, "a"), None, queue=queue)
    processor.process_outputs(message(output("a", 1, first=0, rows=3)))
    assert positions([take(queue).outputs[0].routed_experts]) == [0, 1, 2]
