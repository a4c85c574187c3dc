"""Rows on their way from answers to a training batch: checked, joined, padded. Imports numpy only."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from routed_experts.protocol.codec import UNKNOWN
from routed_experts.protocol.collect import Routing, RoutingError


def verify(routing: Routing, num_experts: int) -> None:
    """Checks that a router over `num_experts` experts can have chosen `routing`, and that all of it is known.

    >>> verify(Routing(np.array([[[0, 2], [2, 2]]], np.int16), start=7), num_experts=4)
    Traceback (most recent call last):
    ...
    routed_experts.protocol.collect.RoutingError: position 7, layer 1: an expert twice: [2, 2]

    Raises:
        RoutingError: an id is -1, out of range, or twice in a layer of a row; names the first.
    """
    ids = routing.rows
    _reject(routing, ids == UNKNOWN, "not known")
    _reject(routing, (ids < 0) | (ids >= num_experts), f"out of the range of {num_experts} experts")
    ordered = np.sort(ids, axis=2)
    _reject(routing, ordered[:, :, 1:] == ordered[:, :, :-1], "an expert twice")


def _reject(routing: Routing, wrong: NDArray[np.bool_], why: str) -> None:
    if wrong.any():
        row, layer, _ = np.argwhere(wrong)[0]
        ids = routing.rows[row, layer].tolist()
        raise RoutingError(f"position {routing.start + row}, layer {layer}: {why}: {ids}")


def splice(decode: Routing, prefill: Routing) -> Routing:
    """The decode leg's answer of prefill/decode disaggregation, with the prompt rows that only the prefill leg knows.

    A row belongs to the KV entry of its token. The decode leg computes the last prompt token again and may have had a
    prefix of its own, so its row is taken wherever it is known; the others are of KV that came from the prefill leg.
    Rows that neither knows stay -1.

    >>> def leg(*ids):
    ...     return Routing(np.array(ids, np.int16).reshape(-1, 1, 1), prompt_len=3)
    >>> splice(decode=leg(9, -1, 7, 8), prefill=leg(1, 2, 3)).rows.ravel().tolist()
    [9, 2, 7, 8]

    Raises:
        RoutingError: the legs are of different prompts or models, or where the prompt ends is not known.
    """
    if decode.prompt_len is None or decode.prompt_len != prefill.prompt_len:
        raise RoutingError(f"legs of {decode.prompt_len} and {prefill.prompt_len} prompt tokens")
    if decode.prompt_token_ids and prefill.prompt_token_ids and decode.prompt_token_ids != prefill.prompt_token_ids:
        raise RoutingError("the legs have different prompts")
    _same_shape(decode, prefill)
    rows = decode.rows.copy()
    first, end = max(decode.start, prefill.start), min(decode.prompt_len, decode.end, prefill.end)
    if first < end:
        ours, theirs = rows[first - decode.start : end - decode.start], prefill.rows[first - prefill.start :]
        unknown = np.flatnonzero((ours == UNKNOWN).any(axis=(1, 2)))
        ours[unknown] = theirs[unknown]
    return replace(decode, rows=rows)


def join_turns(turns: Sequence[Routing]) -> Routing:
    """The rows of a whole conversation, from turns that each left out (prompt start) what was there already.

    Where a turn brings rows again, the earlier ones are kept: the tokens of that turn were generated with them.

    >>> first = Routing(np.array([1, 2, 3], np.int16).reshape(-1, 1, 1), start=0, prompt_len=2)
    >>> second = Routing(np.array([4, 5, 6], np.int16).reshape(-1, 1, 1), start=3, prompt_len=5)
    >>> join_turns([first, second]).rows.ravel().tolist()
    [1, 2, 3, 4, 5, 6]

    Raises:
        RoutingError: rows between two turns are missing; a turn's prompt is not what came before it (a chat template
            that drops or rewrites tokens), as far as the responses have token ids.
    """
    joined = turns[0]
    for turn in turns[1:]:
        if turn.start > joined.end:
            raise RoutingError(f"a gap: rows up to {joined.end}, and a turn that begins at {turn.start}")
        if turn.end < joined.end:
            raise RoutingError(f"a turn that ends at {turn.end}, after rows up to {joined.end}")
        _same_shape(joined, turn)
        _same_tokens(joined, turn)
        rows = np.concatenate([joined.rows, turn.rows[joined.end - turn.start :]])
        joined = replace(turn, rows=rows, start=joined.start)
    return joined


def _same_tokens(before: Routing, turn: Routing) -> None:
    if before.prompt_token_ids is None or before.token_ids is None or turn.prompt_token_ids is None:
        return
    # Of the last token of the turn before there is no row, so it does not matter.
    theirs, ours = (*before.prompt_token_ids, *before.token_ids)[: before.end], turn.prompt_token_ids
    if ours[: len(theirs)] != theirs:
        same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), len(ours))
        raise RoutingError(f"the turn's prompt differs from what came before it at position {same}")


def _same_shape(a: Routing, b: Routing) -> None:
    if len(a.rows) and len(b.rows) and a.rows.shape[1:] != b.rows.shape[1:]:
        raise RoutingError(f"rows of shapes {a.rows.shape[1:]} and {b.rows.shape[1:]}")


def spread_layers(
    rows: NDArray[np.integer[Any]], layer_ids: Sequence[int], num_hidden_layers: int, *, fill: int = 0
) -> NDArray[np.integer[Any]]:
    """`rows` [..., L, K] as [..., num_hidden_layers, K]: each layer at its decoder layer, `fill` in dense layers.

    The server does this, with 0, for `routed_experts_layers: "all"`, as vLLM's own capture does. Most trainers index
    rows by decoder layer. In a row with unknown ids (-1) the dense layers are -1 too.

    >>> rows = np.array([[[3, 1], [0, 2]], [[-1, -1], [-1, -1]]])
    >>> spread_layers(rows, layer_ids=[1, 2], num_hidden_layers=3).tolist()
    [[[0, 0], [3, 1], [0, 2]], [[-1, -1], [-1, -1], [-1, -1]]]

    Args:
        layer_ids: decoder layer of each of the L layers, from `GET /v1/routed_experts`.

    Raises:
        ValueError: `rows` do not have one layer for each of `layer_ids`.
    """
    if len(layer_ids) != rows.shape[-2]:
        raise ValueError(f"rows of {rows.shape[-2]} layers, but {len(layer_ids)} layer ids")
    spread = np.full((*rows.shape[:-2], num_hidden_layers, rows.shape[-1]), fill, dtype=rows.dtype)
    if rows.min(initial=0) == UNKNOWN:
        spread[(rows == UNKNOWN).any(axis=(-2, -1))] = UNKNOWN
    spread[..., layer_ids, :] = rows
    return spread


def align(
    routings: Sequence[Routing],
    length: int,
    *,
    last: Literal["repeat"] | int,
    padding: Literal["left", "right"] | int = "right",
    num_tokens: Sequence[int] | None = None,
    pad: ArrayLike = UNKNOWN,
    dtype: DTypeLike = np.int16,
) -> NDArray[np.integer[Any]]:
    """The rows [B, length, L, K] of a padded batch of whole sequences: row p of a response stands where token p stands.

    >>> routing = Routing(np.array([[[3, 1]], [[0, 2]]], np.int16))  # of three tokens
    >>> align([routing], length=5, padding="left", last=-1)[0, :, 0].tolist()
    [[-1, -1], [-1, -1], [3, 1], [0, 2], [-1, -1]]
    >>> align([routing], length=5, last="repeat", pad=[0, 1])[0, :, 0].tolist()
    [[3, 1], [0, 2], [0, 2], [0, 1], [0, 1]]

    Args:
        length: columns of the batch.
        last: what stands for the row of the last token, which never went through the model: the row before it
            (`repeat`), or an id in all of its places.
        padding: the side that is padded; or the column in which generated tokens begin, with prompts padded on the
            left of it and answers on the right.
        num_tokens: of each sequence, where it was cut; otherwise all of P + G.
        pad: an id, or ids [K] or [L, K], for padding.

    Raises:
        RoutingError: a sequence does not fit, lacks rows before its last token, or does not fit `dtype`.
    """
    if not routings:
        raise RoutingError("no answers")
    batch = np.empty((len(routings), length, *routings[0].rows.shape[1:]), dtype=np.int16)
    batch[...] = pad
    for place, routing in enumerate(routings):
        _same_shape(routings[0], routing)
        count = routing.end + 1 if num_tokens is None else num_tokens[place]
        first = _first_column(routing, count, length, padding)
        if first < 0 or first + count > length:
            raise RoutingError(f"sequence {place} of {count} tokens does not fit {length} columns with {padding=}")
        batch[place, first : first + count] = _rows_of_all(routing, count, last)
    limits = np.iinfo(np.dtype(dtype))
    if batch.min(initial=0) < limits.min or batch.max(initial=0) > limits.max:
        raise RoutingError(f"{np.dtype(dtype)} cannot hold all of {batch.min()} to {batch.max()}")
    return batch.astype(dtype, copy=False)


def _first_column(routing: Routing, count: int, length: int, padding: Literal["left", "right"] | int) -> int:
    if padding == "left":
        return length - count
    if padding == "right":
        return 0
    if routing.prompt_len is None:
        raise RoutingError("where the prompt ends is not known: ask with return_token_ids, or for the split layout")
    return padding - routing.prompt_len


def _rows_of_all(routing: Routing, count: int, last: Literal["repeat"] | int) -> NDArray[np.int16]:
    """Rows [count, L, K] of the first `count` tokens."""
    if routing.start:
        raise RoutingError(f"rows before {routing.start} were left out: join the turns first")
    if count <= routing.end:
        return routing.rows[:count]
    if count > routing.end + 1:
        raise RoutingError(f"rows up to {routing.end} for {count} tokens")
    if last != "repeat":
        return np.concatenate([routing.rows, np.full((1, *routing.rows.shape[1:]), last, dtype=np.int16)])
    if not len(routing.rows):
        raise RoutingError("there is no row to repeat")
    return np.concatenate([routing.rows, routing.rows[-1:]])
