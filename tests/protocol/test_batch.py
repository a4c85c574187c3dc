"""Rows verified, spliced, joined over turns and padded, against loops over single positions."""

import doctest
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol import batch as module
from routed_experts.protocol.batch import align, join_turns, splice, verify
from routed_experts.protocol.collect import Routing, RoutingError
from tests.protocol.answers import EXPERTS, LAYERS, TOP_K, rows_of


def routing_of(p: int, g: int, start: int = 0, seed: int = 1) -> Routing:
    return Routing(rows_of(p + g - 1, seed)[start:], start=start, prompt_len=p)


def test_docstring_examples() -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_verify() -> None:
    verify(routing_of(5, 4), EXPERTS)
    verify(routing_of(5, 4, start=8), EXPERTS)
    for ids, message in (
        ([0, 1, 2, -1], "position 6, layer 2: not known: [0, 1, 2, -1]"),
        ([0, 1, 2, EXPERTS], "position 6, layer 2: out of the range of 60 experts"),
        ([0, 1, 2, -2], "position 6, layer 2: out of the range of 60 experts"),
        ([7, 1, 2, 7], "position 6, layer 2: an expert twice: [7, 1, 2, 7]"),
    ):
        routing = routing_of(5, 4, start=2)
        routing.rows[4, 2] = ids
        with pytest.raises(RoutingError, match=re.escape(message)):
            verify(routing, EXPERTS)


class TestSplice:
    """Rows are filled with 1 in the prefill instance's response and with 2 in the decode instance's."""

    def leg(self, value: int, p: int, g: int, unknown: Any = (), start: int = 0) -> Routing:
        rows = np.full((p + g - 1 - start, LAYERS, TOP_K), value, dtype=np.int16)
        rows[[at - start for at in unknown]] = -1
        return Routing(rows, start=start, prompt_len=p)

    @pytest.mark.parametrize(
        ("decode", "prefill", "expected"),
        [
            # (start, unknown rows) of a decode leg of 5 + 4 tokens; (start, unknown, generated tokens) of a prefill leg
            ((0, []), (0, [], 1), [2, 2, 2, 2, 2, 2, 2, 2]),
            ((0, [0, 3]), (0, [], 1), [1, 2, 2, 1, 2, 2, 2, 2]),
            ((0, [0, 1, 2, 3]), (0, [1], 1), [1, -1, 1, 1, 2, 2, 2, 2]),
            ((0, [5, 6]), (0, [], 4), [2, 2, 2, 2, 2, -1, -1, 2]),  # the prefill leg generated other tokens there
            ((2, [2, 3]), (2, [], 1), [1, 1, 2, 2, 2, 2]),
            ((2, [2, 3]), (0, [], 1), [1, 1, 2, 2, 2, 2]),
            ((0, [0, 1, 2, 3]), (2, [], 1), [-1, -1, 1, 1, 2, 2, 2, 2]),
            ((5, []), (5, [], 1), [2, 2, 2]),
        ],
    )
    def test_prompt_rows_come_from_the_prefill_leg_where_unknown(
        self, decode: Any, prefill: Any, expected: Any
    ) -> None:
        legs = self.leg(2, 5, 4, decode[1], decode[0]), self.leg(1, 5, prefill[2], prefill[1], prefill[0])
        got = splice(*legs)
        assert (got.rows[:, 0, 0].tolist(), got.start) == (expected, decode[0])
        assert got.missing == expected.count(-1)
        assert legs[0].missing == len(decode[1]), "the decode leg was changed"

    def test_a_partly_unknown_row_is_replaced(self) -> None:
        decode = self.leg(2, 5, 4)
        decode.rows[1, 2, 3] = -1
        assert splice(decode, self.leg(1, 5, 1)).rows[:3, 0, 0].tolist() == [2, 1, 2]
        assert decode.rows[1, 0, 0] == 2

    def test_legs_of_different_prompts(self) -> None:
        unknown_len = [replace(self.leg(value, 5, 4), prompt_len=None) for value in (2, 1)]
        different = [replace(self.leg(2, 2, 4), prompt_token_ids=ids) for ids in ((1, 2), (1, 3))]
        for legs, message in (
            ([self.leg(2, 5, 4), self.leg(1, 6, 1)], "legs of 5 and 6 prompt tokens"),
            (unknown_len, "legs of None and None prompt tokens"),
            (different, "different prompts"),
            ([self.leg(2, 5, 4), Routing(rows_of(5, layers=2), prompt_len=5)], "rows of shapes"),
        ):
            with pytest.raises(RoutingError, match=message):
                splice(*legs)


class TestTurns:
    """A conversation of 30 tokens in three turns."""

    ROWS = rows_of(29)

    def turn(self, p: int, g: int, start: int, **changed: int) -> Routing:
        tokens = [changed.get(f"at{at}", at) for at in range(30)]
        ids = {"prompt_token_ids": tuple(tokens[:p]), "token_ids": tuple(tokens[p : p + g])}
        return Routing(self.ROWS[start : p + g - 1], start=start, prompt_len=p, **ids)

    @pytest.mark.parametrize("starts", [(0, 7, 17), (0, 0, 0), (0, 5, 16), (2, 7, 17)])
    def test_join(self, starts: tuple[int, int, int]) -> None:
        turns = [self.turn(p, g, s) for (p, g), s in zip([(5, 3), (12, 6), (22, 8)], starts, strict=True)]
        joined = join_turns(turns)
        assert np.array_equal(joined.rows, self.ROWS[starts[0] :])
        assert (joined.start, joined.end, joined.prompt_len) == (starts[0], 29, 22)
        assert join_turns(turns[:1]) is turns[0]

    def test_rows_of_the_earlier_turn_are_kept(self) -> None:
        first, second = self.turn(5, 3, 0), self.turn(12, 6, 0)
        joined = join_turns([first, replace(second, rows=second.rows + 100)])
        assert np.array_equal(joined.rows[:7], self.ROWS[:7])
        assert np.array_equal(joined.rows[7:], self.ROWS[7:17] + 100)
        assert np.array_equal(join_turns([first, self.turn(7, 1, 7)]).rows, first.rows)

    def test_turns_that_do_not_continue(self) -> None:
        first, second = self.turn(5, 3, 0), self.turn(12, 6, 7, at6=99)
        for turns, message in (
            ([first, self.turn(12, 6, 8)], "a gap: rows up to 7, and a turn that begins at 8"),
            ([self.turn(12, 6, 0), first], "ends at 7, after rows up to 17"),
            ([first, second], "differs from what came before it at position 6"),
        ):
            with pytest.raises(RoutingError, match=message):
                join_turns(turns)
        # The last token of a turn has no row, and a template may replace it.
        assert join_turns([first, self.turn(12, 6, 7, at7=99)]).end == 17


class TestAlign:
    SIZES = ((5, 4), (9, 2), (3, 1))
    LENGTH = 14

    def expected(self, left: list[int], last: Any, pad: Any) -> np.ndarray:
        """Position by position."""
        out = np.empty((3, self.LENGTH, LAYERS, TOP_K), dtype=np.int64)
        for place, (p, g) in enumerate(self.SIZES):
            rows = rows_of(p + g - 1, seed=place)
            for column in range(self.LENGTH):
                at = column - left[place]
                if 0 <= at < p + g - 1:
                    out[place, column] = rows[at]
                elif at == p + g - 1:
                    out[place, column] = rows[-1] if last == "repeat" else last
                else:
                    out[place, column] = pad
        return out

    @pytest.mark.parametrize(("padding", "left"), [("right", [0, 0, 0]), ("left", [5, 3, 10]), (9, [4, 0, 6])])
    def test_every_row_is_in_its_tokens_column(self, padding: Any, left: list[int]) -> None:
        routings = [routing_of(p, g, seed=place) for place, (p, g) in enumerate(self.SIZES)]
        for last in ("repeat", -1, 7):
            for pad in (-1, 0, [0, 1, 2, 3]):
                got = align(routings, self.LENGTH, last=last, padding=padding, pad=pad)
                assert got.dtype == np.int16
                assert np.array_equal(got, self.expected(left, last, np.asarray(pad)))
        for dtype in ("uint8", "int32", "int64"):
            got = align(routings, self.LENGTH, last="repeat", padding=padding, pad=0, dtype=dtype)
            assert got.dtype == np.dtype(dtype)
            assert np.array_equal(got, self.expected(left, "repeat", 0))

    def test_truncated_sequences(self) -> None:
        rows = routing_of(5, 4).rows
        got = align([routing_of(5, 4)] * 3, 9, last=-1, num_tokens=[9, 8, 3])
        for place, known in enumerate((8, 8, 3)):
            assert np.array_equal(got[place, :known], rows[:known])
            assert (got[place, known:] == -1).all()

    def test_sequences_that_cannot_be_aligned(self) -> None:
        routing, wide = routing_of(5, 4), routing_of(5, 4)
        wide.rows[3, 0, 0] = 256
        for routings, length, options, message in (
            *(
                ([routing], 8, {"padding": p}, "sequence 0 of 9 tokens does not fit 8 col")
                for p in ("left", "right", 4)
            ),
            ([routing], 9, {"dtype": "uint8"}, "uint8 cannot hold all of -1 to"),
            ([wide], 9, {"last": "repeat", "dtype": "uint8"}, "uint8 cannot hold all of 0 to 256"),
            ([routing], 12, {"num_tokens": [10]}, "rows up to 8 for 10 tokens"),
            ([routing_of(5, 4, start=2)], 12, {}, "rows before 2 were left out: join the turns first"),
            ([Routing(rows_of(0))], 12, {"last": "repeat"}, "no row to repeat"),
            ([replace(routing, prompt_len=None)], 12, {"padding": 6}, "where the prompt ends is not known"),
            ([], 12, {}, "no answers"),
        ):
            with pytest.raises(RoutingError, match=message):
                align(routings, length, **{"last": -1, **options})  # type: ignore[arg-type]
