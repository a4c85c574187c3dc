"""Rows on their way through the engine's messages."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from routed_experts.capture.message import (
    ROWS_OUTPUT_ID,
    SMALL_ARRAY_BYTES,
    OptIn,
    PlacedRows,
    Unpacker,
    pack,
    prompt_output_id,
    request_of_prompt,
)

L, K = 3, 5  # odd, so that nothing is aligned by chance


@dataclass
class Output:
    routed_experts: Any
    request_id: str = field(default="a")


def array(num_rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 300, (num_rows, L, K)).astype(np.int16)


LARGE = SMALL_ARRAY_BYTES // (2 * L * K) + 1

Expected = list[PlacedRows | None]


def message(*counts: int | None) -> list[Output]:
    """Outputs with so many rows each; None for none at all."""
    return [
        Output(None if count is None else PlacedRows(70_000 * seed, array(count, seed)))
        for seed, count in enumerate(counts)
    ]


def placed(outputs: list[Output]) -> Expected:
    return [output.routed_experts for output in outputs]


def sent(outputs: list[Output]) -> list[Output]:
    """What the engine sends."""
    packed = pack(outputs)
    return outputs if packed is None else [Output(packed, ROWS_OUTPUT_ID), *outputs]


def unpack(unpacker: Unpacker, outputs: list[Output], message: object) -> list[Output]:
    """Puts the rows back on the outputs that they are of."""
    for output, start, rows in list(unpacker.unpack(outputs, message)):
        output.routed_experts = PlacedRows(start, rows)
    return outputs


def check(outputs: list[Output], expected: Expected) -> None:
    for got, want in zip(placed(outputs), expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert got.start == want.start
            assert got.rows.dtype == np.int16
            assert got.rows.shape == want.rows.shape
            assert np.array_equal(got.rows, want.rows)


COUNTS = [
    pytest.param((), id="nothing"),
    pytest.param((None, None), id="no rows"),
    pytest.param((1,), id="one"),
    pytest.param((1, 1, 1, 1), id="a decoding step"),
    pytest.param((None, 1, None, 2, 0, None), id="some without, one empty"),
    pytest.param((LARGE,), id="only a large one"),
    pytest.param((LARGE, 1, LARGE, 1), id="large ones between"),
    pytest.param((1, LARGE, None, 4), id="a small one first"),
    pytest.param((0, 0), id="empty ones"),
]


@pytest.mark.parametrize("slice_size", [1, 2, 99])
@pytest.mark.parametrize("counts", COUNTS)
def test_what_is_packed_is_unpacked(counts: tuple[int | None, ...], slice_size: int) -> None:
    outputs = message(*counts)
    expected = placed(outputs)
    outputs = sent(outputs)
    unpacker, arrived = Unpacker(), []
    for first in range(0, len(outputs), slice_size):
        arrived += unpack(unpacker, outputs[first : first + slice_size], message=1)
    check(arrived, expected)


def test_small_arrays_become_one_and_large_ones_are_not_copied() -> None:
    outputs = message(1, LARGE, None, 2)
    large = outputs[1].routed_experts.rows
    packed = pack(outputs)
    assert packed is not None
    assert (packed.ndim, packed.dtype) == (1, np.int16)
    assert packed.nbytes < large.nbytes
    assert outputs[1].routed_experts is large
    assert [output.routed_experts is None for output in outputs] == [True, False, True, True]


def test_what_was_unpacked_is_off_the_outputs() -> None:
    """vLLM would collect it beside us."""
    outputs = message(1, LARGE, None, 2)
    arrived = sent(outputs)
    assert [output for output, *_ in Unpacker().unpack(arrived, message=1)] == [outputs[0], outputs[1], outputs[3]]
    assert placed(arrived) == [None] * 4


def test_a_row_that_is_too_large_to_be_packed() -> None:
    outputs = [Output(PlacedRows(7, np.zeros((1, SMALL_ARRAY_BYTES, 1), dtype=np.int16)))]
    ((_, start, rows),) = Unpacker().unpack(sent(outputs), message=1)
    assert (start, len(rows)) == (7, 1)


def test_what_is_left_of_one_message_is_not_taken_for_another() -> None:
    """vLLM stopped in the middle of a message's slices: rows of its requests must not end up at others."""
    first, second = sent(message(1, 1, 1)), message(None, None)
    unpacker = Unpacker()
    unpack(unpacker, first[:2], message=1)
    unpack(unpacker, second, message=2)
    check(second, [None, None])


def test_messages_after_one_another() -> None:
    unpacker = Unpacker()
    for number, counts in enumerate([(1, 1), (None, 1), (2, None, 1), (None,)]):
        outputs = message(*counts)
        expected = placed(outputs)
        check(unpack(unpacker, sent(outputs), message=number), expected)


def test_rows_without_their_header_are_dropped() -> None:
    """Nothing says where they belong."""
    arrived = sent(message(1, LARGE, 2))[1:]
    assert list(Unpacker().unpack(arrived, message=1)) == []
    assert placed(arrived) == [None] * 3


def test_a_large_array_that_is_lost_does_not_take_those_that_were_packed() -> None:
    outputs = message(1, LARGE, 2)
    expected = placed(outputs)
    arrived = sent(outputs)
    arrived[2].routed_experts = None
    check(unpack(Unpacker(), arrived, message=1), [expected[0], None, expected[2]])


def test_an_array_at_an_odd_address() -> None:
    """Inside vLLM's message, where nothing is aligned."""
    outputs = message(1, None, 3)
    expected = placed(outputs)
    packed = pack(outputs)
    assert packed is not None
    odd = np.frombuffer(b"x" + packed.tobytes(), dtype=np.int16, offset=1)
    check(unpack(Unpacker(), [Output(odd, ROWS_OUTPUT_ID), *outputs], message=1), expected)


def test_an_opt_in_is_read_as_it_was_written() -> None:
    asked = OptIn(70_000, bytes(range(16)), shared=True)
    assert OptIn.decode(asked.encode()) == asked


@pytest.mark.parametrize(
    "value", [None, 0, 7, True, -1, 1.5, "", "0", "\x00" * 25, [0], {}, {"a": 1}, [0] * 25, b"", b"0"]
)
def test_nothing_else_is_an_opt_in(value: object) -> None:
    """Clients of some endpoints may put any JSON into `extra_args`; JSON cannot say bytes."""
    assert OptIn.decode(value) is None


def test_the_output_of_a_prompt_says_with_whose_tokens_it_came() -> None:
    assert request_of_prompt(prompt_output_id("3_cmpl-x-0")) == "3_cmpl-x-0"
    assert request_of_prompt("3_cmpl-x-0") is None
