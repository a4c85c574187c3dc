"""Rows on their way through the engine's messages."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.capture.envelope import CAUSES, ENVELOPE_ID, SMALL_ARRAY_BYTES, SingleRows, Unpacker, pack
from routed_experts.capture.message import (
    OptIn,
    PlacedRows,
    prompt_output_id,
    request_of_prompt,
    request_of_rows,
    rows_output_id,
)

L, K = 3, 5  # odd, so that nothing is aligned by chance
LARGE = SMALL_ARRAY_BYTES // (2 * L * K) + 1


@dataclass
class Output:
    routed_experts: Any
    request_id: str = field(default="a")
    kv_transfer_params: Any = None


def message(*counts: int | None) -> tuple[list[Output], list[Any]]:
    """Outputs with so many rows each, None for none at all; and their rows."""
    outputs = []
    for seed, count in enumerate(counts):
        rows = np.random.default_rng(seed).integers(-1, 300, (count or 0, L, K)).astype(np.int16)
        outputs.append(Output(None if count is None else PlacedRows(70_000 * seed, rows)))
    return outputs, [output.routed_experts for output in outputs]


def sent(outputs: list[Output]) -> list[Output]:
    """What the engine sends."""
    packed = pack(outputs)
    return outputs if packed is None else [Output(packed, ENVELOPE_ID), *outputs]


def received(unpacker: Unpacker, outputs: list[Output], message: object, shape: tuple[int, int] = (L, K)) -> list[Any]:
    """The rows of each output but the envelope. They are off the output, where vLLM would collect them too."""
    found: dict[int, PlacedRows] = {}
    assert unpacker.open(outputs, message) == {}
    for output, start, rows in list(unpacker.rows(outputs)):
        assert (rows.dtype, rows.shape[1:]) == (np.int16, shape)
        found[id(output)] = PlacedRows(start, rows)
    assert all(output.routed_experts is None for output in outputs)
    return [found.get(id(output)) for output in outputs]


def check(got: list[PlacedRows | None], expected: list[PlacedRows | None]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.start == b.start
            assert np.array_equal(a.rows, b.rows)


COUNT = st.sampled_from([None, 0, 1, 1, 2, 4, LARGE])


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(st.lists(st.lists(COUNT, max_size=6), min_size=1, max_size=4), st.integers(1, 4))
def test_messages_in_slices(messages: list[list[int | None]], slice_size: int) -> None:
    unpacker = Unpacker()
    for number, counts in enumerate(messages):
        outputs, expected = message(*counts)
        arriving, got = sent(outputs), []
        for first in range(0, len(arriving), slice_size):
            got += received(unpacker, arriving[first : first + slice_size], number)
        check(got, expected)


def test_small_arrays_become_one_and_large_ones_are_not_copied() -> None:
    outputs, (_, large, _, _) = message(1, LARGE, None, 2)
    packed = pack(outputs)
    assert packed is not None
    assert (packed.ndim, packed.dtype) == (1, np.int16)
    assert packed.nbytes < large.rows.nbytes
    assert outputs[1].routed_experts is large.rows
    assert [output.routed_experts is None for output in outputs] == [True, False, True, True]


def test_a_row_that_is_too_large_to_be_packed() -> None:
    outputs = [Output(PlacedRows(7, np.zeros((1, SMALL_ARRAY_BYTES, 1), dtype=np.int16)))]
    ((start, rows),) = received(Unpacker(), sent(outputs), 1, shape=(SMALL_ARRAY_BYTES, 1))
    assert (start, len(rows)) == (7, 1)


def test_single_rows_come_with_others() -> None:
    """In any order of the outputs, and from any places of a step."""
    outputs, expected = message(None, 2, None, LARGE, None)
    step = np.random.default_rng(9).integers(-1, 300, (7, L, K)).astype(np.int16)
    chosen = [outputs[4], outputs[0]]
    packed = pack(outputs, [SingleRows(chosen, [70, 5], step, [6, 2])])
    expected[4], expected[0] = PlacedRows(70, step[6:7]), PlacedRows(5, step[2:3])
    check(received(Unpacker(), [Output(packed, ENVELOPE_ID), *outputs], 1), expected)


def test_what_else_an_envelope_has() -> None:
    outputs: list[Output] = [Output(None, ENVELOPE_ID, {CAUSES: [1]}), Output(None)]
    unpacker = Unpacker()
    assert unpacker.open(outputs, 1) == {CAUSES: [1]}
    assert list(unpacker.rows(outputs)) == []
    assert unpacker.open(outputs, 1) == {}


def test_messages_that_do_not_arrive_whole() -> None:
    unpacker = Unpacker()
    received(unpacker, sent(message(1, 1, 1)[0])[:2], 1)
    check(received(unpacker, sent(message(None, None)[0]), 2), [None, None])  # nothing is left for the next
    assert received(Unpacker(), sent(message(1, LARGE, 2)[0])[1:], 1) == [None] * 3  # without the envelope
    outputs, expected = message(1, LARGE, 2)
    arriving = sent(outputs)
    arriving[2].routed_experts = None
    check(received(Unpacker(), arriving, 1), [expected[0], None, expected[2]])


def test_an_array_at_an_odd_address() -> None:
    """As inside vLLM's message, where nothing is aligned."""
    outputs, expected = message(1, None, 3)
    packed = pack(outputs)
    assert packed is not None
    odd = np.frombuffer(b"x" + packed.tobytes(), dtype=np.int16, offset=1)
    check(received(Unpacker(), [Output(odd, ENVELOPE_ID), *outputs], 1), expected)


@settings(database=None, derandomize=True)
@given(st.integers(0, 1 << 40), st.binary(min_size=16, max_size=16), st.booleans())
def test_opt_in(prompt_start: int, prompt_id: bytes, shared: bool) -> None:
    asked = OptIn(prompt_start, prompt_id, shared=shared)
    assert OptIn.decode(asked.encode()) == asked


def test_no_json_value_is_an_opt_in() -> None:
    """Clients of some endpoints may put any JSON into `extra_args`; JSON has no bytes."""
    for value in (None, 0, 7, True, -1, 1.5, "", "0", "\x00" * 25, [0], {}, {"a": 1}, [0] * 25, b"", b"0"):
        assert OptIn.decode(value) is None


def test_the_output_of_a_prompt_names_the_request() -> None:
    assert request_of_prompt(prompt_output_id("3_cmpl-x-0")) == "3_cmpl-x-0"
    assert request_of_prompt("3_cmpl-x-0") is None
    assert request_of_prompt(rows_output_id("3_cmpl-x-0")) is None
    assert request_of_rows(rows_output_id("3_cmpl-x-0")) == request_of_rows("3_cmpl-x-0") == "3_cmpl-x-0"
