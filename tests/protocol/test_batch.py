"""Rows checked, spliced, joined over turns and padded, against loops over single positions."""

import doctest
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


def test_the_documentation_runs() -> None:
    assert doctest.testmod(module).attempted
    assert not doctest.testmod(module).failed


class TestVerify:
    def test_possible_rows(self) -> None:
        verify(routing_of(5, 4), EXPERTS)
        verify(routing_of(5, 4, start=8), EXPERTS)

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([0, 1, 2, -1], "position 6, layer 2: not known: [0, 1, 2, -1]"),
            ([0, 1, 2, EXPERTS], "position 6, layer 2: out of the range of 60 experts"),
            ([0, 1, 2, -2], "position 6, layer 2: out of the range of 60 experts"),
            ([7, 1, 2, 7], "position 6, layer 2: an expert twice: [7, 1, 2, 7]"),
        ],
    )
    def test_impossible_rows(self, ids: list[int], message: str) -> None:
        routing = routing_of(5, 4, start=2)
        routing.rows[4, 2] = ids
        with pytest.raises(RoutingError) as raised:
            verify(routing, EXPERTS)
        assert message in str(raised.value)


class TestSplice:
    """Tagged legs: the ids say which leg a row came from."""

    PREFILL, DECODE = 1, 2

    def leg(self, tag: int, p: int, g: int, unknown: Any = (), start: int = 0) -> Routing:
        rows = np.full((p + g - 1 - start, LAYERS, TOP_K), tag, dtype=np.int16)
        rows[[at - start for at in unknown]] = -1
        return Routing(rows, start=start, prompt_len=p)

    def tags(self, routing: Routing) -> list[int]:
        return [int(row[0, 0]) for row in routing.rows]

    @pytest.mark.parametrize("unknown", [[], [0], range(4), range(2, 4), [0, 3]])
    def test_the_decode_legs_rows_where_they_are_known(self, unknown: Any) -> None:
        got = splice(self.leg(self.DECODE, 5, 4, unknown), self.leg(self.PREFILL, 5, 1))
        assert self.tags(got) == [self.PREFILL if at in unknown else self.DECODE for at in range(8)]

    def test_a_row_that_is_known_in_part_is_not(self) -> None:
        decode = self.leg(self.DECODE, 5, 4)
        decode.rows[1, 2, 3] = -1
        assert self.tags(splice(decode, self.leg(self.PREFILL, 5, 1)))[:3] == [self.DECODE, self.PREFILL, self.DECODE]
        assert decode.rows[1, 0, 0] == self.DECODE, "the leg itself was changed"

    def test_what_neither_knows(self) -> None:
        got = splice(self.leg(self.DECODE, 5, 4, [0, 1, 2, 3]), self.leg(self.PREFILL, 5, 1, [1]))
        assert self.tags(got) == [1, -1, 1, 1, 2, 2, 2, 2]
        assert got.missing == 1

    def test_generated_rows_are_never_the_prefill_legs(self) -> None:
        """A prefill leg that generated more than one token has rows of other tokens there."""
        got = splice(self.leg(self.DECODE, 5, 4, [5, 6]), self.leg(self.PREFILL, 5, 4))
        assert self.tags(got) == [2, 2, 2, 2, 2, -1, -1, 2]

    @pytest.mark.parametrize(("decode_start", "prefill_start"), [(2, 2), (2, 0), (0, 2), (5, 5)])
    def test_prompt_start(self, decode_start: int, prefill_start: int) -> None:
        unknown = range(decode_start, 4)
        got = splice(
            self.leg(self.DECODE, 5, 4, unknown, decode_start), self.leg(self.PREFILL, 5, 1, (), prefill_start)
        )
        expected = [(1 if at >= prefill_start else -1) if at in unknown else 2 for at in range(decode_start, 8)]
        assert (self.tags(got), got.start) == (expected, decode_start)

    def test_legs_that_do_not_belong_together(self) -> None:
        with pytest.raises(RoutingError, match="legs of 5 and 6 prompt tokens"):
            splice(self.leg(2, 5, 4), self.leg(1, 6, 1))
        with pytest.raises(RoutingError, match="legs of None and None prompt tokens"):
            splice(*(replace(self.leg(tag, 5, 4), prompt_len=None) for tag in (2, 1)))
        a, b = (replace(self.leg(2, 2, 4), prompt_token_ids=ids) for ids in ((1, 2), (1, 3)))
        with pytest.raises(RoutingError, match="different prompts"):
            splice(a, b)
        with pytest.raises(RoutingError, match="rows of shapes"):
            splice(self.leg(2, 5, 4), Routing(rows_of(5, layers=2), prompt_len=5))


class TestTurns:
    """A conversation of 30 tokens in three turns."""

    ROWS = rows_of(29)
    TOKENS = tuple(range(30))

    def turn(self, p: int, g: int, start: int, tokens: tuple[int, ...] | None = None) -> Routing:
        tokens = self.TOKENS if tokens is None else tokens
        return Routing(
            self.ROWS[start : p + g - 1],
            start=start,
            prompt_len=p,
            prompt_token_ids=tokens[:p],
            token_ids=tokens[p : p + g],
        )

    @pytest.mark.parametrize("starts", [(0, 7, 17), (0, 0, 0), (0, 5, 16), (2, 7, 17)])
    def test_joined(self, starts: tuple[int, int, int]) -> None:
        turns = [self.turn(p, g, s) for (p, g), s in zip([(5, 3), (12, 6), (22, 8)], starts, strict=True)]
        joined = join_turns(turns)
        assert np.array_equal(joined.rows, self.ROWS[starts[0] :])
        assert (joined.start, joined.end, joined.prompt_len) == (starts[0], 29, 22)

    def test_the_earlier_turns_rows_are_kept(self) -> None:
        second = self.turn(12, 6, 0)
        second = replace(second, rows=second.rows + 100)
        joined = join_turns([self.turn(5, 3, 0), second])
        assert np.array_equal(joined.rows[:7], self.ROWS[:7])
        assert np.array_equal(joined.rows[7:], self.ROWS[7:17] + 100)

    def test_a_turn_that_brings_nothing_new(self) -> None:
        turn = self.turn(5, 3, 0)
        assert np.array_equal(join_turns([turn, self.turn(7, 1, 7)]).rows, turn.rows)

    def test_a_gap(self) -> None:
        with pytest.raises(RoutingError, match="a gap: rows up to 7, and a turn that begins at 8"):
            join_turns([self.turn(5, 3, 0), self.turn(12, 6, 8)])

    def test_turns_in_the_wrong_order(self) -> None:
        with pytest.raises(RoutingError, match="ends at 7, after rows up to 17"):
            join_turns([self.turn(12, 6, 0), self.turn(5, 3, 0)])

    def test_a_template_that_changed_what_was_said(self) -> None:
        tokens = (*range(6), 99, *range(7, 30))
        with pytest.raises(RoutingError, match="differs from what came before it at position 6"):
            join_turns([self.turn(5, 3, 0), self.turn(12, 6, 7, tokens)])

    def test_the_last_token_of_a_turn_has_no_row_and_may_be_replaced(self) -> None:
        tokens = (*range(7), 99, *range(8, 30))
        assert join_turns([self.turn(5, 3, 0), self.turn(12, 6, 7, tokens)]).end == 17

    def test_one_turn(self) -> None:
        turn = self.turn(5, 3, 0)
        assert join_turns([turn]) is turn


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

    @pytest.mark.parametrize("last", ["repeat", -1, 7])
    @pytest.mark.parametrize("pad", [-1, 0, [0, 1, 2, 3]])
    @pytest.mark.parametrize(
        ("padding", "left"), [("right", [0, 0, 0]), ("left", [5, 3, 10]), (9, [4, 0, 6])], ids=["right", "left", "both"]
    )
    def test_row_p_stands_where_token_p_stands(self, padding: Any, left: list[int], pad: Any, last: Any) -> None:
        routings = [routing_of(p, g, seed=place) for place, (p, g) in enumerate(self.SIZES)]
        got = align(routings, self.LENGTH, last=last, padding=padding, pad=pad)
        assert got.dtype == np.int16
        assert np.array_equal(got, self.expected(left, last, np.asarray(pad)))

    def test_sequences_that_were_cut_have_all_their_rows(self) -> None:
        routing = routing_of(5, 4)
        got = align([routing] * 3, 9, last=-1, num_tokens=[9, 8, 3])
        assert np.array_equal(got[0, :8], routing.rows)
        assert (got[0, 8] == -1).all()
        assert np.array_equal(got[1, :8], routing.rows)
        assert np.array_equal(got[2, :3], routing.rows[:3])
        assert (got[2, 3:] == -1).all()

    @pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
    def test_types(self, dtype: str) -> None:
        got = align([routing_of(5, 4)], 9, last="repeat", pad=0, dtype=dtype)
        assert got.dtype == np.dtype(dtype)
        assert np.array_equal(got[0, :8], routing_of(5, 4).rows)

    def test_what_does_not_fit(self) -> None:
        routing = routing_of(5, 4)
        for padding in ("left", "right", 4):
            with pytest.raises(RoutingError, match="sequence 0 of 9 tokens does not fit 8 columns"):
                align([routing], 8, last=-1, padding=padding)
        with pytest.raises(RoutingError, match="uint8 cannot hold all of -1 to"):
            align([routing], 9, last=-1, dtype="uint8")
        routing.rows[3, 0, 0] = 256
        with pytest.raises(RoutingError, match="uint8 cannot hold all of 0 to 256"):
            align([routing], 9, last="repeat", dtype="uint8")
        with pytest.raises(RoutingError, match="rows up to 8 for 10 tokens"):
            align([routing], 12, last=-1, num_tokens=[10])
        with pytest.raises(RoutingError, match="rows before 2 were left out: join the turns first"):
            align([routing_of(5, 4, start=2)], 12, last=-1)
        with pytest.raises(RoutingError, match="no row to repeat"):
            align([Routing(rows_of(0))], 12, last="repeat")
        with pytest.raises(RoutingError, match="where the prompt ends is not known"):
            align([replace(routing, prompt_len=None)], 12, last=-1, padding=6)
        with pytest.raises(RoutingError, match="no answers"):
            align([], 12, last=-1)
