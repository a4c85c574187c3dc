"""Conversations with pictures and embeddings, whose token ids do not say which they are."""

import contextlib
import itertools
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from routed_experts.protocol.batch import join_turns, shared_prefix
from routed_experts.protocol.collect import Routing, RoutingError, collect
from tests.protocol.answers import RoutedPrompt, answer, rows_of

SETTINGS = settings(max_examples=80, deadline=None, database=None, derandomize=True)
PICTURE, EMBEDDINGS, TEXT = 15, 0, range(1, 7)
Part = int | tuple[str, int, int]
"""A token of text; or the name of a medium, the id of its placeholders, and how many it has."""

MEDIA = st.tuples(st.sampled_from("ABC"), st.sampled_from([PICTURE, EMBEDDINGS]), st.integers(2, 4))
SMALL_MEDIA = st.tuples(st.sampled_from("ABC"), st.just(PICTURE), st.just(1))


def name_of(part: Part) -> str:
    return "" if isinstance(part, int) else f"{part[0]} of {part[2]}"


def media_of(parts: list[Part]) -> tuple[str, ...]:
    return tuple(name_of(part) for part in parts if not isinstance(part, int))


def ids_of(parts: list[Part]) -> tuple[int, ...]:
    ids_of_parts = ([part] if isinstance(part, int) else [part[1]] * part[2] for part in parts)
    return tuple(itertools.chain.from_iterable(ids_of_parts))


def true_rows(parts: list[Part]) -> np.ndarray:
    """A row depends on all that the model saw up to its token: the content of media, not their
    ids."""
    seen = [
        (name_of(part), at)
        for part in parts
        for at in range(1 if isinstance(part, int) else part[2])
    ]
    content = [str((*what, token)) for what, token in zip(seen, ids_of(parts), strict=True)]
    hashes = itertools.accumulate(
        content, lambda before, token: str(zlib.crc32((before + token).encode()))
    )
    return np.array([zlib.crc32(text.encode()) % 30_000 for text in hashes], np.int16).reshape(
        -1, 1, 1
    )


def answer_to(prompt: list[Part], generated: list[int], start: int = 0, **more: Any) -> Routing:
    rows = true_rows([*prompt, *generated])[start:-1]
    ids = ids_of(prompt)
    return Routing(
        rows,
        start=start,
        prompt_len=len(ids),
        prompt_token_ids=ids,
        token_ids=tuple(generated),
        **more,
    )


@st.composite
def conversation(draw: Any, medium: Any = MEDIA) -> tuple[list[Part], list[int], list[Part]]:
    """The first prompt, what was generated, and the second prompt: most often the history with
    parts exchanged."""
    part = st.sampled_from(TEXT) | medium
    first = draw(st.lists(part, min_size=1, max_size=6))
    generated = draw(st.lists(st.sampled_from(TEXT), min_size=1, max_size=4))
    second: list[Part] = []
    for old in [*first, *generated]:
        change = draw(st.sampled_from(["keep"] * 6 + ["other", "drop", "swap"]))
        if change == "swap" and not isinstance(old, int):
            second.append((draw(st.sampled_from("ABC")), *old[1:]))  # of the same size
        elif change != "drop":
            second.append(draw(part) if change == "other" else old)
    return first, generated, [*second, *draw(st.lists(part, min_size=1, max_size=4))]


def check_turns(before: Routing, prompt: list[Part], said: Any, said_again: Any) -> bool:
    """Whether the turns could be joined; if so, rows are those of the second turn's own history."""
    joinable = []
    with contextlib.suppress(RoutingError):
        joinable.append(shared_prefix(before, ids_of(prompt), media=said))
    for known in (*joinable, before):
        new = answer_to(
            prompt, [3, 4], start=min(known.end, len(ids_of(prompt)) + 1), media=said_again
        )
        try:
            joined_routing = join_turns([known, new])
        except RoutingError:
            continue
        assert np.array_equal(joined_routing.rows, true_rows([*prompt, 3, 4])[:-1])
    for known in joinable:
        assert np.array_equal(known.rows, true_rows(prompt)[: known.end])
    return bool(joinable)


@SETTINGS
@given(conversation(), st.booleans(), st.booleans())
def test_no_wrong_row_comes_out_if_media_are_not_said(
    turns: Any, says_first: bool, says_second: bool
) -> None:
    """Pictures of the same size look the same; also if the media of one prompt only are
    said."""
    first, generated, second = turns
    assume(not (says_first and says_second))
    before = answer_to(first, generated, media=media_of(first) if says_first else None)
    said = media_of(second) if says_second else None
    check_turns(before, second, said, said)


@SETTINGS
@given(conversation(MEDIA | SMALL_MEDIA))
def test_said_media_are_compared(turns: Any) -> None:
    """None is too small, and turns whose media continue are joined, as far as their tokens are
    the same."""
    first, generated, second = turns
    before, said = answer_to(first, generated, media=media_of(first)), media_of(second)
    shorter = min(len(said), len(media_of(first)))
    assert check_turns(before, second, said, said) == (media_of(first)[:shorter] == said[:shorter])
    continued = [*first, *generated, ("D", PICTURE, 2)]
    shared = shared_prefix(before, ids_of(continued), media=media_of(continued))
    assert shared.end == before.end
    turn = answer_to(continued, [1, 2], start=shared.end, media=media_of(continued))
    assert np.array_equal(join_turns([shared, turn]).rows, true_rows([*continued, 1, 2])[:-1])


def test_a_loop_that_was_generated_is_text() -> None:
    before = answer_to([1, 2], [5] * 20)
    shared = shared_prefix(before, [1, 2, *[5] * 20, 6])
    assert shared.end == 21
    assert join_turns([shared, answer_to([1, 2, *[5] * 20, 6], [1], start=21)]).end == 23


def test_a_prompt_of_embeddings() -> None:
    """Its ids are zeros."""
    before = Routing(rows_of(13), prompt_len=10, prompt_token_ids=(0,) * 10, token_ids=(7, 8, 9, 9))
    message = r"repeats token 0 at position 1, .*: give the `media` of each prompt, `\(\)` for text, or `end`"
    with pytest.raises(RoutingError, match=message):
        shared_prefix(before, [0] * 10 + [5])
    with pytest.raises(RoutingError, match=message):
        join_turns(
            [before, Routing(rows_of(1), start=13, prompt_token_ids=(*[0] * 10, 7, 8, 9, 9))]
        )
    said = replace(before, media=("one",))
    assert shared_prefix(said, [0] * 10 + [5], media=["one"]).end == 10
    with pytest.raises(RoutingError, match="medium 0 of the prompt is another: give `end`"):
        shared_prefix(said, [0] * 10 + [5], media=["other"])


def test_the_end_by_hand() -> None:
    """Of rows that hold by the caller's word."""
    first: list[Part] = [1, ("A", PICTURE, 4), 2, ("B", PICTURE, 4)]
    second: list[Part] = [*first[:3], ("C", PICTURE, 4), 3]
    before = answer_to(first, [4, 5], media=media_of(first))
    for said, its in ((media_of(second), before), (None, replace(before, media=None))):
        shared = shared_prefix(its, ids_of(second), media=said, end=6)
        turn = answer_to(second, [4, 5], start=shared.end, media=said)
        assert (shared.end, shared.media) == (6, said)
        assert np.array_equal(join_turns([shared, turn]).rows, true_rows([*second, 4, 5])[:-1])
    assert shared_prefix(before, [1, 9], end=6).end == 1, "tokens are compared too"


def test_media_of_a_response() -> None:
    (routing,) = collect(answer(RoutedPrompt(rows_of(5), [rows_of(2)])), media=["A"])
    assert routing.media == ("A",)
