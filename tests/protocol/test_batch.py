"""Rows verified, joined over turns and padded, against loops over single positions."""

import doctest
import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol import batch, collect, expert_load, ranks
from routed_experts.protocol.batch import (
    align,
    align_generated,
    align_logprobs,
    align_values,
    align_weights,
    generated_mask,
    join_turns,
    scaled,
    shared_prefix,
    spread_layers,
    verify,
)
from routed_experts.protocol.codec import UNKNOWN_WEIGHT
from routed_experts.protocol.collect import Routing, RoutingError
from routed_experts.protocol.ranks import Packed, pack
from tests.protocol.answers import EXPERTS, LAYERS, TOP_K, rows_of, weights_of


def routing_of(p: int, g: int, start: int = 0, seed: int = 1, **more: Any) -> Routing:
    rows = rows_of(p + g - 1, seed)[start:]
    return Routing(rows, start=start, prompt_len=p, **{"weights": weights_of(rows), **more})


@pytest.mark.parametrize("module", [batch, collect, expert_load, ranks])
def test_docstring_examples(module: ModuleType) -> None:
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
    whole = routing_of(5, 4, start=2, weights=np.full((6, LAYERS, TOP_K), 1 / TOP_K, np.float32))
    verify(whole, EXPERTS)
    for wrong in (np.nan, np.inf):
        weights = np.array(whole.weights)
        weights[4, 2, 1] = wrong
        with pytest.raises(RoutingError, match="position 6, layer 2: weights that are not finite"):
            verify(replace(whole, weights=weights), EXPERTS)


def packed_of(routings: list[Routing], length: int | None = None) -> np.ndarray:
    """The log-probabilities of `pack`."""
    packed: Packed = pack(routings, length=length)
    assert packed.logprobs is not None
    return packed.logprobs


class TestTurns:
    """A conversation of 30 tokens in three turns."""

    ROWS = rows_of(29)

    def turn(self, p: int, g: int, start: int, **changed: int) -> Routing:
        tokens = [changed.get(f"at{at}", at) for at in range(30)]
        ids = {"prompt_token_ids": tuple(tokens[:p]), "token_ids": tuple(tokens[p : p + g])}
        rows = self.ROWS[start : p + g - 1]
        return Routing(rows, start=start, prompt_len=p, weights=weights_of(rows), **ids)

    @pytest.mark.parametrize("starts", [(0, 7, 17), (0, 0, 0), (2, 5, 16)])
    def test_join(self, starts: tuple[int, int, int]) -> None:
        """Rows of the earlier turn are kept."""
        turns = [
            self.turn(p, g, s) for (p, g), s in zip([(5, 3), (12, 6), (22, 8)], starts, strict=True)
        ]
        joined_routing = join_turns(
            [replace(turn, rows=turn.rows + 100 * number) for number, turn in enumerate(turns)]
        )
        number = np.repeat([0, 1, 2], [7, 10, 12])[:, None, None]
        assert np.array_equal(joined_routing.rows, (self.ROWS + 100 * number)[starts[0] :])
        assert np.array_equal(joined_routing.weights, weights_of(self.ROWS[starts[0] :]))
        assert (joined_routing.start, joined_routing.end, joined_routing.prompt_len) == (
            starts[0],
            29,
            22,
        )
        assert join_turns(turns[:1]) is turns[0]
        assert np.array_equal(join_turns([turns[0], self.turn(7, 1, 7)]).rows, turns[0].rows)

    @pytest.mark.parametrize(("padding", "first"), [("right", 0), ("left", 4), (25, 3)])
    @pytest.mark.parametrize("num_tokens", [30, 27, 24])
    def test_a_batch_of_joined_turns(self, padding: Any, first: int, num_tokens: int) -> None:
        """A single turn is beside them. Nothing but what was generated is marked."""
        single = self.turn_with_logprobs(22, 8, 0)
        if padding == "left":
            first = 34 - num_tokens
        options: Any = {"padding": padding, "num_tokens": [num_tokens] * 2}
        mask = align_generated([self.three_turns(), single], 34, **options)
        logprobs = align_logprobs([self.three_turns(), single], 34, **options)
        generated_of = ([*range(5, 8), *range(12, 18), *range(22, 30)], [*range(22, 30)])
        for row, generated in enumerate(generated_of):
            expected = {first + at: -float(at) for at in generated if at < num_tokens}
            assert np.flatnonzero(mask[row]).tolist() == [*expected]
            assert logprobs[row].tolist() == [expected.get(column, 0) for column in range(34)]
        assert (mask.dtype, logprobs.dtype) == (np.bool_, np.float64)

    def turn_with_logprobs(self, p: int, g: int, start: int) -> Routing:
        """Each token's log-probability is its position, negated."""
        return replace(self.turn(p, g, start), logprobs=-np.arange(p, p + g, dtype=float))

    def three_turns(self) -> Routing:
        """Joined; 5 to 7, 12 to 17 and 22 to 29 were generated."""
        sizes = ((5, 3, 0), (12, 6, 7), (22, 8, 17))
        return join_turns([self.turn_with_logprobs(*size) for size in sizes])

    def test_joined_turns_that_are_packed(self) -> None:
        """The first sequence is cut within its last turn, and each has padding behind it."""
        sequences = [self.three_turns(), self.turn_with_logprobs(5, 3, 0)]
        packed = pack(sequences, multiple=8, length=48, num_tokens=[25, 8])
        assert packed.generated is not None
        assert packed.logprobs is not None
        expected = {at: -float(at) for at in (*range(5, 8), *range(12, 18), *range(22, 25))}
        expected |= {32 + at: -float(at) for at in range(5, 8)}
        assert np.flatnonzero(packed.generated).tolist() == [*expected]
        assert packed.logprobs.tolist() == [expected.get(token, 0) for token in range(48)]

    def test_log_probabilities_that_one_turn_lacks(self) -> None:
        """They are NaN, so that a loss over what was generated cannot leave them out."""
        first = self.turn(5, 3, 0)
        joined_routing = join_turns([first, self.turn_with_logprobs(12, 6, 7)])
        (aligned_logprobs,) = align_logprobs([joined_routing], 20, pad=7)
        packed_logprobs = pack([joined_routing], length=20).logprobs
        assert packed_logprobs is not None
        for logprobs, filler in ((aligned_logprobs, 7), (packed_logprobs, 0)):
            assert np.isnan(logprobs[5:8]).all()
            assert logprobs[12:18].tolist() == [-float(at) for at in range(12, 18)]
            assert (logprobs[[*range(5), *range(8, 12), 18, 19]] == filler).all()
        with pytest.raises(RoutingError, match="has no log-probabilities: set logprobs"):
            align_logprobs([joined_routing, first], 20)
        with pytest.raises(RoutingError, match="some responses have log-probabilities, others"):
            pack([joined_routing, first])

    def test_log_probabilities_of_the_prompt(self) -> None:
        """Which `echo` has; the first token has none."""
        echoed = replace(
            self.turn(5, 3, 0), logprobs=np.array([np.nan, -1, -2, -3, -4, -5, -6, -7])
        )
        expected = [0, -1, -2, -3, -4, -5, -6, -7, 0]
        assert align_logprobs([echoed], 9)[0].tolist() == expected
        assert packed_of([echoed], length=9).tolist() == expected

    def test_a_response_without_ids_of_its_prompt(self) -> None:
        """As a program may make one: the mask that it has is of the generated tokens."""
        routing = replace(self.turn(5, 3, 0), prompt_token_ids=())
        packed = pack([routing, routing], length=16)
        assert packed.generated is not None
        assert packed.generated.tolist() == align_generated([routing] * 2, 8).flatten().tolist()
        assert np.flatnonzero(packed.generated).tolist() == [5, 6, 7, 13, 14, 15]

    def test_a_batch_without_token_ids(self) -> None:
        """What was generated is not known then: a prompt's length is the last turn's alone."""
        known = self.turn_with_logprobs(5, 3, 0)
        routings = [known, replace(known, token_ids=None)]
        packed = pack(routings)
        assert packed.generated is None
        assert packed.logprobs is None
        for of_batch in (align_generated, align_logprobs):
            with pytest.raises(RoutingError, match="no token ids: set return_token_ids"):
                of_batch(routings, 8)
        without_logprobs = pack([self.turn(5, 3, 0)])
        assert without_logprobs.generated is not None
        assert without_logprobs.logprobs is None

    def test_token_ids_of_another_number_than_rows(self) -> None:
        cut = replace(self.turn_with_logprobs(5, 3, 0), rows=self.ROWS[:5], weights=None)
        message = r"sequence 0 of 6 tokens \(1 generated\) has 8 values"
        with pytest.raises(RoutingError, match=message):
            align_generated([cut], 8)
        with pytest.raises(RoutingError, match=message):
            pack([cut])
        many = replace(self.turn(5, 3, 0), logprobs=np.zeros(9))
        with pytest.raises(RoutingError, match="of 8 tokens has 9 log-probabilities"):
            align_logprobs([many], 8)

    def test_log_probabilities_of_a_history_that_was_rewritten(self) -> None:
        """What the prompt replaced was not generated: the last token of a turn, or all after a
        position."""
        first = replace(self.turn(5, 3, 0), logprobs=np.array([-5.0, -6.0, -7.0]))
        second = replace(self.turn(12, 6, 7, at7=99), logprobs=np.full(6, -1.0))
        joined_routing = join_turns([first, second])
        assert np.flatnonzero(generated_mask(joined_routing)).tolist() == [5, 6, *range(12, 18)]
        prefix = shared_prefix(first, range(12), end=6)
        joined_routing = join_turns([prefix, self.turn(12, 6, 6)])
        assert np.flatnonzero(generated_mask(joined_routing)).tolist() == [5, *range(12, 18)]
        assert joined_routing.logprobs[5] == -5
        assert np.isnan(joined_routing.logprobs[6:]).all()

    def test_rows_that_hold_for_another_prompt(self) -> None:
        """Which continues the history, is a part of it, or has another token somewhere."""
        before = self.turn(12, 6, 2)
        for prompt, end in (
            (range(22), 17),
            (range(18), 17),
            (range(9), 9),
            ([*range(17), 99, 18], 17),
            ([*range(13), 99, *range(14, 22)], 13),
            ([0, 1, 99], 2),
        ):
            shared = shared_prefix(before, [*prompt])
            assert (shared.start, shared.end) == (2, end)
            assert np.array_equal(shared.rows, self.ROWS[2:end])
            assert np.array_equal(shared.weights, weights_of(self.ROWS[2:end]))
        with pytest.raises(
            RoutingError, match="differs at position 1, but rows before 2 were left out"
        ):
            shared_prefix(before, [0, 99])
        with pytest.raises(RoutingError, match="set return_token_ids"):
            shared_prefix(replace(before, token_ids=None), [0])

    def test_turns_that_do_not_continue(self) -> None:
        first, second = self.turn(5, 3, 0), self.turn(12, 6, 7, at6=99)
        for turns, message in (
            ([first, self.turn(12, 6, 8)], "a gap: rows up to 7, and a turn that begins at 8"),
            ([self.turn(12, 6, 0), first], "ends at 7, after rows up to 17"),
            ([first, second], "differs from what came before it at position 6"),
            (
                [first, replace(self.turn(12, 6, 7), weights=None)],
                "some turns have weights, others have none",
            ),
        ):
            with pytest.raises(RoutingError, match=message):
                join_turns(turns)
        # The last token of a turn has no row, and a template may replace it.
        assert join_turns([first, self.turn(12, 6, 7, at7=99)]).end == 17


SIZES, LENGTH = ((5, 4), (9, 2), (3, 1)), 14


def aligned(routings: list[Routing], name: str, left: list[int], fill: float) -> np.ndarray:
    """Rows, or their weights, position by position."""
    out = np.full((3, LENGTH, LAYERS, TOP_K), fill)
    for number, (p, g) in enumerate(SIZES):
        rows = getattr(routings[number], name)
        for column in range(LENGTH):
            at = column - left[number]
            if 0 <= at < p + g - 1:
                out[number, column] = rows[at]
    return out


@pytest.mark.parametrize(
    ("padding", "left"), [("right", [0, 0, 0]), ("left", [5, 3, 10]), (9, [4, 0, 6])]
)
def test_every_row_is_in_its_tokens_column(padding: Any, left: list[int]) -> None:
    routings = [routing_of(p, g, seed=number) for number, (p, g) in enumerate(SIZES)]
    got = align(routings, LENGTH, padding=padding)
    assert got.dtype == np.int16
    assert np.array_equal(got, aligned(routings, "rows", left, -1))
    weights = align_weights(routings, LENGTH, padding=padding)
    assert weights.dtype == np.float32
    assert np.array_equal(weights, aligned(routings, "weights", left, np.nan), equal_nan=True)
    with pytest.raises(RoutingError, match="has no weights"):
        align_weights([replace(routings[0], weights=None)], LENGTH)


def padded(values: list[Any], first: int, fill: Any) -> list[Any]:
    """A line of `LENGTH` columns with the values from column `first` on."""
    return [*[fill] * first, *values, *[fill] * (LENGTH - first - len(values))]


@pytest.mark.parametrize("cut", [0, 1, 4])
@pytest.mark.parametrize(
    ("padding", "left"), [("right", [0, 0, 0]), ("left", [5, 3, 10]), (9, [4, 0, 6])]
)
def test_every_value_is_in_its_tokens_column(padding: Any, left: list[int], cut: int) -> None:
    """Token ids of whole sequences, and log-probabilities and a mask of generated tokens; also of
    sequences that were cut."""
    routings = [routing_of(p, g, seed=number) for number, (p, g) in enumerate(SIZES)]
    ids_of = [list(range(100, 100 + p + g)) for p, g in SIZES]
    logprobs_of = [[None, *(-0.5 * at for at in range(1, g))] for _, g in SIZES]
    options: Any = {"padding": padding, "num_tokens": [p + g - cut for p, g in SIZES]}
    ids = align_values(routings, ids_of, LENGTH, pad=-7, **options)
    logprobs = align_values(routings, logprobs_of, LENGTH, **options)
    mask = align_values(routings, [np.ones(g, bool) for _, g in SIZES], LENGTH, **options)
    for row, (p, g) in enumerate(SIZES):
        first = left[row] + (cut if padding == "left" else 0)
        end = first + p + g - cut
        begin = min(first + p, end)  # of the generated tokens
        assert ids[row].tolist() == padded(ids_of[row][: end - first], first, fill=-7)
        assert mask[row].tolist() == padded([True] * (end - begin), begin, fill=False)
        values = [np.nan, *logprobs_of[row][1:]][: end - begin]
        assert np.array_equal(logprobs[row], padded(values, begin, fill=0), equal_nan=True)
    assert (ids.dtype.kind, logprobs.dtype, mask.dtype) == ("i", np.float64, np.bool_)


def test_values_of_another_number_of_tokens() -> None:
    routing = routing_of(5, 4)
    for values, of_tokens, message in (
        ([1] * 8, routing, r"sequence 0 of 9 tokens \(4 generated\) has 8 values"),
        ([1] * 4, replace(routing, prompt_len=None), r"\(unknown generated\) has 4 values"),
        ([[1] * 9], routing, r"values of sequence 0 must be numbers of shape \[n\], not \[1, 9\]"),
    ):
        with pytest.raises(ValueError, match=message):
            align_values([of_tokens], [values], 9)
    with pytest.raises(ValueError, match="pad must be from 0 to 255, as the values are uint8"):
        align_values([routing], [np.ones(9, np.uint8)], 12, pad=-1)


@pytest.mark.parametrize("padding", ["left", 9])
def test_batches_are_spread_over_decoder_layers(padding: Any) -> None:
    """As their responses one by one: a dense layer of padding, of the last token and of unknown
    rows is -1 too."""
    routings = [routing_of(p, g, seed=number) for number, (p, g) in enumerate(SIZES)]
    routings[1].rows[2, 1] = -1
    spread = spread_layers(align(routings, LENGTH, padding=padding), [1, 2, 4], 5)
    every = [
        replace(routing, rows=spread_layers(routing.rows, [1, 2, 4], 5), weights=None)
        for routing in routings
    ]
    assert np.array_equal(spread, align(every, LENGTH, padding=padding))
    assert sorted(np.unique(spread[:, :, [0, 3]])) == [-1, 0]


def test_weights_of_decoder_layers_and_of_the_models_paper() -> None:
    """A layer without experts has 0, in a row with unknown weights NaN; -1 is a weight like
    others."""
    weights = np.full((3, 2, TOP_K), -1.0, np.float32)
    weights[1] = UNKNOWN_WEIGHT
    spread = spread_layers(weights, [1, 2], 4)
    assert not spread[[0, 2]][:, [0, 3]].any()
    assert np.isnan(spread[1]).all()
    assert np.array_equal(spread[[0, 2]][:, [1, 2]], weights[[0, 2]])
    scaled_weights = scaled(np.ones((3, 2, TOP_K), np.float32), {"weights_scale": [2.5, 1.0]})
    assert scaled_weights.dtype == np.float32
    assert scaled_weights.tolist() == [[[2.5] * TOP_K, [1.0] * TOP_K]] * 3
    for wrong, message in (
        (lambda: scaled(weights, {"weights_scale": [1.0]}), "2 layers"),
        (
            lambda: spread_layers(weights, [1, 4], 4),
            "decoder layer 4 of layer_ids is missing in num_hidden_layers=4",
        ),
        (lambda: spread_layers(weights, [1, 2, 3], 6), "rows of 2 layers, but 3 layer_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_truncated_sequences() -> None:
    rows = routing_of(5, 4).rows
    got = align([routing_of(5, 4)] * 3, 9, num_tokens=[9, 8, 3])
    for number, known in enumerate((8, 8, 3)):
        assert np.array_equal(got[number, :known], rows[:known])
        assert (got[number, known:] == -1).all()


def test_sequences_that_cannot_be_aligned() -> None:
    routing = routing_of(5, 4)
    too_long = "sequence 0 of 9 tokens does not fit 8 col"
    for routings, length, options, message in (
        *(([routing], 8, {"padding": padding}, too_long) for padding in ("left", "right", 4)),
        ([routing], 12, {"num_tokens": [10]}, "rows up to 8 for 10 tokens"),
        ([routing_of(5, 4, start=2)], 12, {}, "rows before 2 were left out: join the turns first"),
        (
            [replace(routing, prompt_len=None)],
            12,
            {"padding": 6},
            "where the prompt ends is not known",
        ),
        ([], 12, {}, "no answers"),
    ):
        with pytest.raises(RoutingError, match=message):
            align(routings, length, **options)  # type: ignore[arg-type]
