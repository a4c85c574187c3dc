"""Rows on their way through the engine's messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.capture.wire.envelope import (
    ENVELOPE_ID,
    SMALL_ARRAY_BYTES,
    Notes,
    SingleRows,
    Unpacker,
    pack,
)
from routed_experts.capture.wire.message import (
    GENERATED_ROWS,
    PROMPT_ROWS,
    Cause,
    OptIn,
    PlacedRows,
    RowsOutput,
    UnknownRows,
)
from routed_experts.capture.wire.rows import combined, ids_of, with_steps
from routed_experts.capture.wire.stats import EngineStats
from routed_experts.protocol.codec import Rows

L, K = 3, 5  # odd, so that nothing is aligned by chance
LARGE = SMALL_ARRAY_BYTES // (2 * L * K) + 1


@dataclass
class Output:
    routed_experts: Any
    request_id: str = field(default="a")
    kv_transfer_params: Any = None
    stop_reason: str | None = None


def envelope(packed: Any, notes: Any = None) -> Output:
    return Output(packed, ENVELOPE_ID, notes, stop_reason=ENVELOPE_ID)


def rows_of(count: int, seed: int, has_weights: bool = False) -> Rows:
    ids = np.random.default_rng(seed).integers(-1, 300, (count, L, K)).astype(np.int16)
    return combined(ids, ids.astype(np.float32) * 1.1) if has_weights else ids


def message(
    *specs: int | None, weights: Sequence[bool] = (), steps: Sequence[bool] = ()
) -> tuple[list[Output], list[Any]]:
    """Outputs with so many rows each, None for none at all, some with weights, some with steps; and
    their rows."""
    outputs = []
    has = zip_longest(specs, weights, steps, fillvalue=False)
    for seed, (count, has_weights, has_steps) in enumerate(has):
        rows = None
        if count is not None:
            rows = PlacedRows(70_000 * seed, rows_of(count, seed, has_weights))
        if rows is not None and has_steps:
            of_rows = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
            rows = rows._replace(steps=of_rows)
        outputs.append(Output(rows))
    return outputs, [output.routed_experts for output in outputs]


def sent(outputs: list[Output], singles: Sequence[SingleRows] = ()) -> list[Output]:
    """What the engine sends."""
    packed = pack(outputs, singles)
    return outputs if packed is None else [envelope(packed), *outputs]


def received(unpacker: Unpacker, outputs: list[Output], message: object) -> list[Any]:
    """The rows of each output but the envelope. They are off the output, where vLLM would collect
    them too."""
    assert unpacker.open(outputs, message) is None
    rows = {
        id(output): PlacedRows(start, run.of(place))
        for output, start, run, place in unpacker.rows(outputs)
    }
    assert all(output.routed_experts is None for output in outputs)
    return [rows.get(id(output)) for output in outputs]


def check(got: list[PlacedRows | None], expected: list[PlacedRows | None]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.start, a.rows.dtype, a.rows.flags.c_contiguous) == (b.start, np.int16, True)
            rows = b.rows if b.steps is None else with_steps(b.rows, b.steps)
            assert np.array_equal(a.rows, rows)


COUNT = st.sampled_from([None, 0, 1, 1, 2, 4, LARGE])


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(st.data(), st.integers(1, 4))
def test_messages_in_slices(data: st.DataObject, slice_size: int) -> None:
    """Rows of any number, with and without weights and steps; single ones from any place of a step,
    in any order of outputs."""
    unpacker = Unpacker()
    for number in range(data.draw(st.integers(1, 4))):
        counts = data.draw(st.lists(COUNT, max_size=6))
        flags = st.lists(st.booleans(), max_size=len(counts))
        outputs, expected = message(*counts, weights=data.draw(flags), steps=data.draw(flags))
        chosen = data.draw(
            st.permutations([at for at, count in enumerate(counts) if count is None])
        )
        step, singles = rows_of(7, 9, data.draw(st.booleans())), []
        step_number = data.draw(st.none() | st.integers(0, (1 << 32) - 1))
        if chosen:
            places = data.draw(
                st.lists(st.integers(0, 6), min_size=len(chosen), max_size=len(chosen))
            )
            singles = [
                SingleRows(
                    [outputs[at] for at in chosen],
                    [7 * at for at in chosen],
                    step,
                    np.array(places),
                    step_number,
                )
            ]
            steps = None if step_number is None else np.array([step_number], np.uint32)
            for at, start in zip(chosen, places, strict=True):
                expected[at] = PlacedRows(7 * at, step[start : start + 1], steps)
        arriving, got = sent(outputs, singles), []
        for first in range(0, len(arriving), slice_size):
            got += received(unpacker, arriving[first : first + slice_size], number)
        check(got, expected)


def test_rows_of_one_shape_are_read_as_one_run() -> None:
    """As with drafts, which bring several rows for each output: a run takes time to read."""
    outputs, expected = message(2, 1, None, 2, 3, 1, LARGE, 2)
    unpacker = Unpacker()
    arriving = sent(outputs)
    unpacker.open(arriving, 1)
    found = list(unpacker.rows(arriving))
    check(
        [PlacedRows(start, run.of(place)) for _, start, run, place in found],
        [placed for placed in expected if placed is not None],
    )
    runs = [id(run) for _, _, run, _ in found]
    assert len({runs[0], runs[2], runs[6]}) == len({runs[1], runs[4]}) == 1
    assert len(set(runs)) == 4


def test_small_arrays_become_one_and_large_ones_are_not_copied() -> None:
    outputs, (_, large, _, _) = message(1, LARGE, None, 2)
    packed = pack(outputs)
    assert packed is not None
    assert (packed.ndim, packed.dtype) == (1, np.int16)
    assert packed.nbytes < large.rows.nbytes
    assert outputs[1].routed_experts is large.rows
    assert [output.routed_experts is None for output in outputs] == [True, False, True, True]


def test_ids_are_sent_as_if_no_weights_were_captured() -> None:
    cut, alone = (
        sent([Output(PlacedRows(0, ids_of(rows) if has_weights else rows)) for rows in all_rows])
        for has_weights in (True, False)
        for all_rows in [[rows_of(count, count, has_weights) for count in (1, 2, LARGE)]]
    )
    for ours, theirs in zip(cut, alone, strict=True):
        assert ours.routed_experts is theirs.routed_experts is None or np.array_equal(
            ours.routed_experts, theirs.routed_experts
        )


def test_what_else_an_envelope_has() -> None:
    unknown = UnknownRows(b"\xff" * 16, "asks", is_prompt=True, cause=Cause.KV_TRANSFER, num_rows=3)
    notes = Notes([unknown], EngineStats(7, copy_wait_s=0.5, busiest=[2.0]))
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(notes.encode()))
    outputs: list[Output] = [envelope(None, arrived), Output(None)]
    unpacker = Unpacker()
    assert Notes.decode(unpacker.open(outputs, 1)) == notes
    assert list(unpacker.rows(outputs)) == []
    assert Notes.decode(unpacker.open(outputs, 1)) == Notes()
    assert Notes().encode() == {}


def test_messages_that_do_not_arrive_whole() -> None:
    unpacker = Unpacker()
    received(unpacker, sent(message(1, 1, 1)[0])[:2], 1)
    # nothing is left for the next
    check(received(unpacker, sent(message(None, None)[0]), 2), [None, None])
    # without the envelope
    assert received(Unpacker(), sent(message(1, LARGE, 2)[0])[1:], 1) == [None] * 3
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
    check(received(Unpacker(), [envelope(odd), *outputs], 1), expected)


def test_no_json_value_is_an_opt_in() -> None:
    """Clients of some endpoints may put any JSON into `extra_args`; JSON has no bytes."""
    for value in (
        None,
        0,
        7,
        True,
        -1,
        1.5,
        "",
        "0",
        "\x00" * 25,
        [0],
        {},
        {"a": 1},
        [0] * 25,
        b"",
        b"0",
    ):
        assert OptIn.decode(value) is None


@pytest.mark.parametrize("kind", [PROMPT_ROWS, GENERATED_ROWS])
@pytest.mark.parametrize("request_id", ["", "cmpl-1-0", "0_cmpl-1", ":/ \x00é"])
def test_an_output_of_rows_says_whose(kind: str, request_id: str) -> None:
    brings = RowsOutput(kind, bytes(range(240, 256)), request_id)
    assert RowsOutput.of(Output(None, brings.output_id, stop_reason=kind)) == brings
    # of a client that has chosen this id
    assert RowsOutput.of(Output(None, brings.output_id)) is None
