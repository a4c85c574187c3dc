"""Rows on their way through the engine's messages."""

from dataclasses import dataclass

import numpy as np
import pytest

from routed_experts.capture.message import (
    SMALL_ARRAY_BYTES,
    OptIn,
    Unpacker,
    pack,
    prompt_output_id,
    request_of_prompt,
)

L, K = 3, 5  # odd, so that nothing is aligned by chance


@dataclass
class Output:
    routed_experts: np.ndarray | None


def array(num_rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 300, (num_rows, L, K)).astype(np.int16)


LARGE = SMALL_ARRAY_BYTES // (2 * L * K) + 1


def message(*counts: int | None) -> list[Output]:
    """Outputs with so many rows each; None for none at all."""
    return [Output(None if count is None else array(count, seed)) for seed, count in enumerate(counts)]


def arrays(outputs: list[Output]) -> list[np.ndarray | None]:
    return [output.routed_experts for output in outputs]


def unpack(unpacker: Unpacker, outputs: list[Output], message: object) -> None:
    """Puts the rows back on the outputs that they are of."""
    for output, rows in list(unpacker.unpack(outputs, message)):
        output.routed_experts = rows


def check(outputs: list[Output], expected: list[np.ndarray | None]) -> None:
    for got, want in zip(arrays(outputs), expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert got.dtype == np.int16
            assert got.shape == want.shape
            assert np.array_equal(got, want)


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
    expected = arrays(outputs)
    pack(outputs)
    unpacker = Unpacker()
    for first in range(0, len(outputs), slice_size):
        unpack(unpacker, outputs[first : first + slice_size], message=1)
    check(outputs, expected)


def test_small_arrays_become_one_and_large_ones_are_not_copied() -> None:
    outputs = message(1, LARGE, None, 2)
    large = outputs[1].routed_experts
    pack(outputs)
    packed = outputs[0].routed_experts
    assert packed is not None
    assert (packed.ndim, packed.dtype) == (1, np.int16)
    assert outputs[1].routed_experts is large
    assert outputs[3].routed_experts is None


def test_what_was_unpacked_is_off_the_outputs() -> None:
    """vLLM would collect it beside us."""
    outputs = message(1, LARGE, None, 2)
    pack(outputs)
    assert [output for output, _ in Unpacker().unpack(outputs, message=1)] == [outputs[0], outputs[1], outputs[3]]
    assert arrays(outputs) == [None] * 4


@pytest.mark.parametrize("unknown", [None, 0, 2])
@pytest.mark.parametrize("slice_size", [1, 99])
def test_whether_all_rows_of_a_message_are_known(unknown: int | None, slice_size: int) -> None:
    outputs = [Output(np.zeros((count, L, K), dtype=np.int16)) for count in (1, LARGE, 2)]
    if unknown is not None:
        outputs[unknown].routed_experts[-1, -1, -1] = -1
    pack(outputs)
    unpacker = Unpacker()
    for first in range(0, len(outputs), slice_size):
        unpack(unpacker, outputs[first : first + slice_size], message=1)
        assert unpacker.is_known == (unknown is None)
    unpack(unpacker, [Output(None)], message=2)
    assert unpacker.is_known


@pytest.mark.parametrize("expert", [-1, 0])
def test_whether_a_row_is_known_that_is_too_large_to_be_packed(expert: int) -> None:
    outputs = [Output(np.full((1, SMALL_ARRAY_BYTES, 1), expert, dtype=np.int16))]
    pack(outputs)
    unpacker = Unpacker()
    unpack(unpacker, outputs, message=1)
    assert unpacker.is_known == (expert == 0)


def test_what_is_left_of_one_message_is_not_taken_for_another() -> None:
    """vLLM stopped in the middle of a message's slices: rows of its requests must not end up at others."""
    first, second = message(1, 1, 1), message(None, None)
    pack(first)
    unpacker = Unpacker()
    unpack(unpacker, first[:1], message=1)
    unpack(unpacker, second, message=2)
    check(second, [None, None])


def test_messages_after_one_another() -> None:
    unpacker = Unpacker()
    for number, counts in enumerate([(1, 1), (None, 1), (2, None, 1), (None,)]):
        outputs = message(*counts)
        expected = arrays(outputs)
        pack(outputs)
        unpack(unpacker, outputs, message=number)
        check(outputs, expected)


def test_an_array_at_an_odd_address() -> None:
    """Inside vLLM's message, where nothing is aligned."""
    outputs = message(1, None, 3)
    expected = arrays(outputs)
    pack(outputs)
    packed = outputs[0].routed_experts
    assert packed is not None
    outputs[0].routed_experts = np.frombuffer(b"x" + packed.tobytes(), dtype=np.int16, offset=1)
    unpack(Unpacker(), outputs, message=1)
    check(outputs, expected)


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
