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
        unpacker.unpack(outputs[first : first + slice_size], message=1)
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


def test_unpacked_arrays_share_no_memory() -> None:
    """A request that runs long would keep the rows of all that ran beside it."""
    outputs = message(1, 2)
    pack(outputs)
    Unpacker().unpack(outputs, message=1)
    assert all(output.routed_experts is not None and output.routed_experts.base is None for output in outputs)


def test_what_is_left_of_one_message_is_not_taken_for_another() -> None:
    """vLLM stopped in the middle of a message's slices: rows of its requests must not end up at others."""
    first, second = message(1, 1, 1), message(None, None)
    pack(first)
    unpacker = Unpacker()
    unpacker.unpack(first[:1], message=1)
    unpacker.unpack(second, message=2)
    check(second, [None, None])


def test_messages_after_one_another() -> None:
    unpacker = Unpacker()
    for number, counts in enumerate([(1, 1), (None, 1), (2, None, 1), (None,)]):
        outputs = message(*counts)
        expected = arrays(outputs)
        pack(outputs)
        unpacker.unpack(outputs, message=number)
        check(outputs, expected)


def test_an_array_at_an_odd_address() -> None:
    """Inside vLLM's message, where nothing is aligned."""
    outputs = message(1, None, 3)
    expected = arrays(outputs)
    pack(outputs)
    packed = outputs[0].routed_experts
    assert packed is not None
    outputs[0].routed_experts = np.frombuffer(b"x" + packed.tobytes(), dtype=np.int16, offset=1)
    Unpacker().unpack(outputs, message=1)
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
