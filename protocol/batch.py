"""Checks, joins and pads rows of responses for a training batch. Imports numpy and msgspec."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routed_experts.protocol import arguments
from routed_experts.protocol.codec import UNKNOWN, UNKNOWN_WEIGHT
from routed_experts.protocol.fetch import Span, read_reference
from routed_experts.protocol.routing import PROMPT_END_UNKNOWN, Routing, RoutingError, num_same

Number = TypeVar("Number", bound=np.generic)
Padding = Literal["left", "right"] | int
"""The side to pad, or the column of the first generated token."""
_TokenIds = NDArray[np.int64]


def verify(routing: Routing, num_experts: int) -> None:
    """Checks that all ids of `routing` are known, in range, and distinct within each layer of a
    row.

    Weights, where `routing` has them, must be finite.

    >>> verify(Routing(np.array([[[0, 2], [2, 2]]], np.int16), start=7), num_experts=4)
    Traceback (most recent call last):
    ...
    routed_experts.protocol.routing.RoutingError: position 7, layer 1: an expert twice: [2, 2]

    Raises:
        RoutingError: an id is -1, out of range, or twice in a layer of a row, or weights are not as
            they must be; names the first.
    """
    ids = routing.rows
    num_experts = arguments.integer("num_experts", num_experts, least=1)
    _reject(routing, ids == UNKNOWN, "not known")
    _reject(routing, (ids < 0) | (ids >= num_experts), f"out of the range of {num_experts} experts")
    ordered = np.sort(ids, axis=2)
    _reject(routing, ordered[:, :, 1:] == ordered[:, :, :-1], "an expert twice")
    if routing.weights is not None:
        _reject(
            routing, ~np.isfinite(routing.weights), "weights that are not finite", routing.weights
        )


def scaled(weights: NDArray[np.float32], info: Mapping[str, Any]) -> NDArray[np.float32]:
    """`weights` [..., L, K] times what vLLM multiplies the output of each layer by: the factors of
    the model's paper.

    >>> scaled(np.array([[[0.5, 0.25]]], np.float32), {"weights_scale": [2.5]}).tolist()
    [[[1.25, 0.625]]]

    Args:
        info: the response of `GET /v1/routed_experts`.

    Raises:
        ValueError: `weights` do not have the layers of `info`.
    """
    weights = arguments.array("weights", weights, "f", "...LK")
    scale = arguments.array("weights_scale of info", info.get("weights_scale", ()), "iuf", "L")
    if len(scale) != weights.shape[-2]:
        raise ValueError(
            f"weights of {weights.shape[-2]} layers, but the scale of {len(scale)} in info"
        )
    product: NDArray[np.float32] = weights * scale.astype(np.float32)[:, None]
    return product


def _reject(
    routing: Routing, wrong: NDArray[np.bool_], why: str, values: NDArray[Any] | None = None
) -> None:
    """Raises `RoutingError` with the first of `values` [n, L, K], the ids if there are none, that
    is wrong."""
    if not wrong.any():
        return
    row, layer, _ = np.argwhere(wrong)[0]
    wrong_values = (routing.rows if values is None else values)[row, layer].tolist()
    raise RoutingError(f"position {routing.start + row}, layer {layer}: {why}: {wrong_values}")


def shared_prefix(
    before: Routing,
    prompt: Sequence[int],
    *,
    media: Sequence[str] | None = None,
    end: int | None = None,
) -> Routing:
    """The rows of `before` that hold for a prompt of the tokens `prompt`: those of the tokens that
    both begin with.

    The `end` of the result is the next turn's `routed_experts_prompt_start`, and `join_turns` joins
    the two. It is the position of the last token of `before` if the prompt continues it, and less
    if a chat template or a tool rewrote the history.

    >>> rows = np.array([1, 2, 3], np.int16).reshape(-1, 1, 1)
    >>> before = Routing(rows, prompt_len=2, prompt_token_ids=(5, 6), token_ids=(7, 8))
    >>> shared_prefix(before, [5, 6, 7, 8, 9]).end, shared_prefix(before, [5, 6, 9]).end
    (3, 2)

    Args:
        media: those of `prompt`, as in `Routing.media`. Token ids do not tell one picture from
            another of its size.
        end: the result ends there at the latest; rows before it hold for `prompt` by the caller's
            word, whichever media it has. Without `media` the result then has no token ids, so that
            `join_turns` joins it by positions alone.

    Raises:
        RoutingError: the tokens of `before` are unknown, or differ before its first row; or,
            without `end`, the media differ, or are not given although a prompt repeats a token, as
            placeholders of media do.
    """
    tokens_before = before.all_token_ids
    tokens = _token_ids("prompt", prompt)
    new_media = None if media is None else tuple(media)
    shared_end = num_same(tokens_before[: before.end], tokens)
    if end is None:
        _check_same_media(before, tokens, new_media, shared_end)
    else:
        shared_end = min(shared_end, arguments.integer("end", end))
    if shared_end < before.start:
        raise RoutingError(
            f"the prompt differs at position {shared_end}, but rows before {before.start} were left out"
        )
    num_rows = shared_end - before.start
    prefix = replace(
        before,
        rows=before.rows[:num_rows],
        weights=None if before.weights is None else before.weights[:num_rows],
        steps=None,
    )
    if new_media is not None:
        return replace(prefix, media=new_media)
    if end is not None:  # by the caller's word: the next turn is joined by positions alone
        mask = generated_mask(before)
        logprobs = _logprobs_of_all(before, len(mask))
        return replace(
            prefix,
            prompt_token_ids=None,
            token_ids=None,
            media=None,
            generated=mask,
            logprobs=logprobs,
        )
    return prefix


@overload
def join_turns(turns: Sequence[Routing]) -> Routing: ...


@overload
def join_turns(turns: Sequence[Mapping[str, Any]]) -> list[Span]: ...


def join_turns(
    turns: Sequence[Routing] | Sequence[Mapping[str, Any]],
) -> Routing | list[Span]:
    """Joins the rows of a conversation's turns, each requested with a prompt start.

    Where turns overlap, the earlier rows are kept: the earlier tokens were generated with them.
    Log-probabilities are then of all P + G tokens: each turn's own of what it generated, NaN where
    none is known; without token ids, those of the last turn. `generated_mask` tells which tokens
    the turns generated.

    References, of each turn its prompt's and its choice's, are joined without reading an array:
    `fetch.fetch_spans` reads the spans that come back. Whether the turns' tokens continue each
    other is for the caller to know then: references have none.

    >>> first = Routing(np.array([1, 2, 3], np.int16).reshape(-1, 1, 1), start=0, prompt_len=2)
    >>> second = Routing(np.array([4, 5, 6], np.int16).reshape(-1, 1, 1), start=3, prompt_len=5)
    >>> join_turns([first, second]).rows.ravel().tolist()
    [1, 2, 3, 4, 5, 6]
    >>> references = [
    ...     {"start": start, "shape": [num_rows, 1, 1], "dtype": "int16"}
    ...     for start, num_rows in [(0, 3), (2, 4)]
    ... ]
    >>> [(span.first, span.end) for span in join_turns(references)]
    [(0, 3), (1, 4)]

    Raises:
        RoutingError: rows between two turns are missing; only some turns have weights; or the
            responses have token ids, and a turn's prompt does not begin with the tokens before it
            (some chat templates drop or rewrite tokens); or media differ or are not given, as for
            `shared_prefix`.
    """
    if not turns:
        raise RoutingError("no turns")
    if isinstance(turns[0], Mapping):
        return _join_references(cast("Sequence[Mapping[str, Any]]", turns))
    conversation, *later = cast("Sequence[Routing]", turns)
    for turn in later:
        conversation = _continued(conversation, turn)
    return conversation


def _continued(before: Routing, turn: Routing) -> Routing:
    """`turn` with the rows before it."""
    if turn.start > before.end:
        raise RoutingError(
            f"a gap: rows up to {before.end}, and a turn that begins at {turn.start}"
        )
    if turn.end < before.end:
        raise RoutingError(f"a turn that ends at {turn.end}, after rows up to {before.end}")
    _check_same_shape(before, turn)
    _check_same_tokens(before, turn)
    overlap = before.end - turn.start
    rows = np.concatenate([before.rows, turn.rows[overlap:]])
    weights = None
    if before.weights is not None and turn.weights is not None:
        weights = np.concatenate([before.weights, turn.weights[overlap:]])
    elif before.weights is not turn.weights:
        raise RoutingError("some turns have weights, others have none")
    return replace(
        turn,
        rows=rows,
        weights=weights,
        steps=None,
        start=before.start,
        **_values_of_both(before, turn),
    )


def _values_of_both(before: Routing, turn: Routing) -> dict[str, Any]:
    """Which tokens were generated, and log-probabilities [P + G], of a turn and what came before.
    None without token ids."""
    if turn.prompt_token_ids is None or turn.token_ids is None:
        return {}
    generated = generated_mask(turn).copy()
    logprobs = _logprobs_of_all(turn, len(generated))
    logprobs_before = None
    if before.generated is not None or None not in (before.prompt_token_ids, before.token_ids):
        mask_before = generated_mask(before)
        stayed_end = _num_tokens_that_stay(before, turn.prompt_token_ids)
        stayed = np.flatnonzero(mask_before[:stayed_end])
        generated[stayed] = True
        logprobs_before = _logprobs_of_all(before, len(mask_before))
    if logprobs_before is not None:
        if logprobs is None:
            logprobs = np.full(len(generated), np.nan)
        logprobs[stayed] = logprobs_before[stayed]
    return {"generated": generated, "logprobs": logprobs}


def _num_tokens_that_stay(before: Routing, prompt: Sequence[int]) -> int:
    """How many of the tokens of `before` the prompt begins with. The last one of a turn has no row,
    so that it may be another in the next prompt."""
    if before.prompt_token_ids is None or before.token_ids is None:
        return before.end
    return num_same(before.all_token_ids[: before.end + 1], prompt)


def _logprobs_of_all(routing: Routing, num_tokens: int) -> NDArray[np.float64] | None:
    """[P + G], NaN for a prompt without them."""
    if routing.logprobs is None:
        return None
    logprobs = np.full(num_tokens, np.nan)
    logprobs[num_tokens - len(routing.logprobs) :] = routing.logprobs
    return logprobs


def generated_mask(routing: Routing) -> NDArray[np.bool_]:
    """[P + G], whether each token was generated, in any of the turns that were joined.

    `align_generated` pads it to a batch.

    >>> rows = np.zeros((3, 1, 1), np.int16)
    >>> generated_mask(Routing(rows, prompt_token_ids=(5, 6), token_ids=(7, 8))).tolist()
    [False, False, True, True]

    Raises:
        RoutingError: the response has no token ids.
    """
    if routing.generated is not None:
        return routing.generated
    mask = np.ones(len(routing.all_token_ids), bool)
    mask[: len(routing.prompt_token_ids or ())] = False
    return mask


def _join_references(references: Sequence[Mapping[str, Any]]) -> list[Span]:
    spans: list[Span] = []
    first = read_reference(references[0])
    end = first.start
    _, *shape = first.shape
    for reference in references:
        described = read_reference(reference)
        start = described.start
        num_rows, *of_row = described.shape
        if start > end:
            raise RoutingError(f"a gap: rows up to {end}, and a reference that begins at {start}")
        if of_row != shape:
            raise RoutingError(f"rows of shapes {shape} and {of_row}")
        if start + num_rows < end:
            raise RoutingError(
                f"a reference that ends at {start + num_rows}, after rows up to {end}: give "
                "a conversation's references in order, of one choice each turn"
            )
        if described.part == "generated" and start != end:
            raise RoutingError(
                f"generated rows that begin at {start}, after rows up to {end}: give "
                "a conversation's references in order, of one choice each turn"
            )
        if start + num_rows > end:
            spans.append(Span(reference, end - start, num_rows))
            end = start + num_rows
    return spans


def _check_same_tokens(before: Routing, turn: Routing) -> None:
    """Raises `RoutingError` if the prompt of `turn` does not begin with the tokens of `before`."""
    if None in (before.prompt_token_ids, before.token_ids, turn.prompt_token_ids):
        _check_same_media(before, _token_ids("prompt_token_ids", ()), turn.media, 0)
        return
    # The last token of the previous turn has no row, so it may differ.
    tokens_before = before.all_token_ids[: before.end]
    prompt = _token_ids("prompt_token_ids", turn.prompt_token_ids or ())
    shared_end = num_same(tokens_before, prompt)
    if shared_end < len(tokens_before):
        raise RoutingError(
            f"the turn's prompt differs from what came before it at position {shared_end}"
        )
    _check_same_media(before, prompt, turn.media, shared_end)


def _check_same_media(
    before: Routing, prompt: _TokenIds, media: tuple[str, ...] | None, shared_end: int
) -> None:
    """Raises `RoutingError` if the tokens before `shared_end`, which are the same, may stand for other
    media in `prompt`.

    Equal media have equally many placeholders. So if one list begins with the other, each
    placeholder that is the same stands for the same medium. And if a prompt has no media, what it
    shares with another has none.
    """
    if before.media is not None and media is not None:
        for index, (medium_before, medium) in enumerate(zip(before.media, media, strict=False)):
            if medium_before != medium:
                raise RoutingError(
                    f"medium {index} of the prompt is another: give `end`, the position where it begins"
                )
        return
    has_no_media = () in (before.media, media)
    if has_no_media:
        return
    sent = _token_ids("prompt_token_ids", before.prompt_token_ids or ())
    # What was generated has no media, so only the prompt that was sent is looked at.
    for ids in (sent, prompt[: len(sent)]):
        repeated = np.flatnonzero(ids[:-1][:shared_end] == ids[1:][:shared_end])
        if len(repeated):
            raise RoutingError(
                f"the prompt repeats token {ids[repeated[0]]} at position {repeated[0] + 1}, as placeholders of "
                "pictures, sounds and embeddings do: give the `media` of each prompt, `()` for text, or `end`"
            )


def _token_ids(name: str, ids: Sequence[int]) -> _TokenIds:
    return arguments.array(name, ids, "iu", "n").astype(np.int64)


def _check_same_shape(a: Routing, b: Routing) -> None:
    if len(a.rows) and len(b.rows) and a.rows.shape[1:] != b.rows.shape[1:]:
        raise RoutingError(f"rows of shapes {a.rows.shape[1:]} and {b.rows.shape[1:]}")


def spread_layers(
    rows: NDArray[Number], layer_ids: Sequence[int], num_hidden_layers: int
) -> NDArray[Number]:
    """`rows` [..., L, K] as [..., num_hidden_layers, K]: each layer at its decoder layer, 0 in dense
    layers.

    With `routed_experts_layers: "all"` the server does this itself, as vLLM's own capture does.
    Most trainers index rows by decoder layer. Takes rows of a response, and batches of `align` and
    `align_weights`. In a row with unknown ids (-1) or weights (NaN), dense layers are -1 (NaN) too.

    >>> rows = np.array([[[3, 1], [0, 2]], [[-1, -1], [-1, -1]]])
    >>> spread_layers(rows, layer_ids=[1, 2], num_hidden_layers=3).tolist()
    [[[0, 0], [3, 1], [0, 2]], [[-1, -1], [-1, -1], [-1, -1]]]

    Args:
        layer_ids: decoder layer of each of the L layers, from `GET /v1/routed_experts`.

    Raises:
        ValueError: `rows` do not have one layer for each of `layer_ids`, or a decoder layer is
            named twice or does not exist.
    """
    rows = arguments.array("rows", rows, "iuf", "...LK")
    num_hidden_layers = arguments.integer("num_hidden_layers", num_hidden_layers)
    layers = arguments.integers("layer_ids", layer_ids)
    if len(layers) != rows.shape[-2]:
        raise ValueError(f"rows of {rows.shape[-2]} layers, but {len(layers)} layer_ids")
    if max(layers, default=0) >= num_hidden_layers:
        raise ValueError(
            f"decoder layer {max(layers)} of layer_ids is missing in num_hidden_layers={num_hidden_layers}"
        )
    if len(set(layers)) < len(layers):
        raise ValueError(f"layer_ids must differ, not {layers}")
    return spread_unchecked(rows, layers, num_hidden_layers)


def has_dense_layers(layer_ids: Sequence[int], num_hidden_layers: int) -> bool:
    """Whether the model has decoder layers other than `layer_ids`, so that `spread_layers` changes
    rows.

    >>> has_dense_layers([1, 2], num_hidden_layers=3), has_dense_layers([0, 1], num_hidden_layers=2)
    (True, False)
    """
    return list(layer_ids) != list(range(num_hidden_layers))


def spread_unchecked(
    rows: NDArray[Number],
    layer_ids: Sequence[int] | NDArray[np.intp],
    num_hidden_layers: int,
) -> NDArray[Number]:
    """`spread_layers` of arguments that are known to be right. The checks take ten times as long as
    the work, if `rows` are a single row."""
    shape = (*rows.shape[:-2], num_hidden_layers, rows.shape[-1])
    spread = np.zeros(shape, dtype=rows.dtype)
    if rows.dtype.kind == "f":
        spread[np.isnan(rows).any(axis=(-2, -1))] = np.nan
    elif rows.min(initial=0) == UNKNOWN:
        spread[(rows == UNKNOWN).any(axis=(-2, -1))] = UNKNOWN
    spread[..., layer_ids, :] = rows
    return spread


def align(
    routings: Sequence[Routing],
    length: int,
    *,
    padding: Padding = "right",
    num_tokens: Sequence[int] | None = None,
) -> NDArray[np.integer[Any]]:
    """Pads rows to a batch [B, length, L, K] of whole sequences: row p of a response gets the
    column of token p. Padding has -1, and so has a sequence's last token, which never enters the
    model.

    >>> routing = Routing(np.array([[[3, 1]], [[0, 2]]], np.int16))  # of three tokens
    >>> align([routing], length=5, padding="left")[0, :, 0].tolist()
    [[-1, -1], [-1, -1], [3, 1], [0, 2], [-1, -1]]

    Args:
        length: columns of the batch.
        padding: the side to pad; or the column of the first generated token, with prompts padded on
            the left and responses on the right.
        num_tokens: tokens of each sequence, if they were truncated; P + G by default.

    Returns:
        int16, or a wider type if rows have one.

    Raises:
        RoutingError: a sequence does not fit, or lacks rows before its last token.
    """
    arrays = [routing.rows for routing in routings]
    fill = np.array(UNKNOWN, np.result_type(np.int16, *arrays))
    return _aligned(arrays, _Batch(routings, length, padding, num_tokens), fill)


def align_weights(
    routings: Sequence[Routing],
    length: int,
    *,
    padding: Padding = "right",
    num_tokens: Sequence[int] | None = None,
) -> NDArray[np.float32]:
    """The weights [B, length, L, K] of a padded batch, each where `align` has its id, with the same
    arguments; NaN where `align` has -1.

    Raises:
        RoutingError: as `align`; a response has no weights.
    """
    arrays = [routing.weights for routing in routings if routing.weights is not None]
    if len(arrays) < len(routings):
        raise RoutingError(
            "a response has no weights: set return_routed_expert_weights in the request"
        )
    return _aligned(arrays, _Batch(routings, length, padding, num_tokens), UNKNOWN_WEIGHT)


def align_values(
    routings: Sequence[Routing],
    values: Sequence[ArrayLike],
    length: int,
    *,
    padding: Padding = "right",
    num_tokens: Sequence[int] | None = None,
    pad: float = 0,
) -> NDArray[Any]:
    """Values of tokens as a padded batch [B, length], each in the column where `align` has the row
    of its token.

    For token ids, masks, log-probabilities, rewards: whatever has one number for each token. The
    batch has their dtype, or one that also holds `pad`.

    >>> rows = np.zeros((3, 1, 1), np.int16)
    >>> routing = Routing(rows, prompt_len=2, prompt_token_ids=(5, 6), token_ids=(7, 8), logprobs=np.array([-0.5, -2]))
    >>> align_values([routing], [(*routing.prompt_token_ids, *routing.token_ids)], length=5, padding="left").tolist()
    [[0, 5, 6, 7, 8]]
    >>> align_values([routing], [routing.logprobs], length=5, padding="left").tolist()
    [[0.0, 0.0, 0.0, -0.5, -2.0]]
    >>> align_values([routing], [np.ones(len(routing.token_ids), bool)], length=5, padding="left").tolist()
    [[False, False, False, True, True]]

    Args:
        values: for each sequence, those of its P + G tokens or of its G generated ones; None
            becomes NaN.
        length, padding, num_tokens: as for `align`.
        pad: the value of padding, and of a prompt whose values were not given.

    Raises:
        RoutingError: as `align`; values of another number of tokens.
    """
    layout = _Batch(routings, length, padding, num_tokens)
    arrays = [
        _numbers(f"values of sequence {index}", numbers) for index, numbers in enumerate(values)
    ]
    if len(arrays) != len(routings):
        raise ValueError(f"values must be those of {len(routings)} sequences, not of {len(arrays)}")
    operands: list[Any] = [*arrays]
    if pad:  # 0 is in every dtype
        operands.append(pad)
    dtype = np.result_type(*operands)
    batch = np.full((len(routings), length), arguments.fitting("pad", pad, dtype), dtype)
    for index, routing in enumerate(routings):
        array = arrays[index]
        columns = layout.columns[index]
        num_without = num_without_values(index, routing, len(array))
        inside = array[: max(columns.num_tokens - num_without, 0)]
        end = columns.first + columns.num_tokens
        batch[index, end - len(inside) : end] = inside
    return batch


def align_generated(
    routings: Sequence[Routing],
    length: int,
    *,
    padding: Padding = "right",
    num_tokens: Sequence[int] | None = None,
) -> NDArray[np.bool_]:
    """The tokens of a padded batch [B, length] that were generated, in any of the turns that were
    joined: those that a loss is of. Each is in the column where `align` has its row.

    >>> routing = Routing(np.zeros((3, 1, 1), np.int16), prompt_len=2, prompt_token_ids=(5, 6), token_ids=(7, 8))
    >>> align_generated([routing], length=5, padding="left").tolist()
    [[False, False, False, True, True]]

    Args:
        length, padding, num_tokens: as for `align`.

    Raises:
        RoutingError: as `align`; a response has no token ids, or such that do not fit its rows.
    """
    masks = [generated_mask(routing) for routing in routings]
    return align_values(routings, masks, length, padding=padding, num_tokens=num_tokens)


def align_logprobs(
    routings: Sequence[Routing],
    length: int,
    *,
    padding: Padding = "right",
    num_tokens: Sequence[int] | None = None,
    pad: float = 0,
) -> NDArray[np.float64]:
    """Log-probabilities of a padded batch [B, length], each in the column of its token, in all of
    the turns that were joined.

    A generated token without one, as of a turn that was requested without, is NaN.

    >>> routing = Routing(
    ...     np.zeros((3, 1, 1), np.int16), prompt_len=2, prompt_token_ids=(5, 6), token_ids=(7, 8),
    ...     logprobs=np.array([-0.5, -2]),
    ... )
    >>> align_logprobs([routing], length=5, padding="left").tolist()
    [[0.0, 0.0, 0.0, -0.5, -2.0]]

    Args:
        length, padding, num_tokens: as for `align`.
        pad: the value of padding, and of tokens that were not generated and have none.

    Raises:
        RoutingError: as `align_generated`; a response has no log-probabilities.
    """
    values = [logprobs_of_tokens(routing, pad) for routing in routings]
    return align_values(routings, values, length, padding=padding, num_tokens=num_tokens, pad=pad)


def logprobs_of_tokens(routing: Routing, fill: float) -> NDArray[np.float64]:
    """[P + G]; NaN for a generated token without one, `fill` for another.

    Raises:
        RoutingError: the response has no token ids, no log-probabilities, or another number of
            them.
    """
    generated = generated_mask(routing)
    if routing.logprobs is None:
        raise RoutingError("a response has no log-probabilities: set logprobs in the request")
    num_generated = None if routing.token_ids is None else len(routing.token_ids)
    if len(routing.logprobs) not in (len(generated), num_generated):
        raise RoutingError(
            f"a response of {len(generated)} tokens has {len(routing.logprobs)} log-probabilities"
        )
    logprobs = _logprobs_of_all(routing, len(generated))
    assert logprobs is not None
    logprobs[~generated & np.isnan(logprobs)] = fill
    return logprobs


def num_without_values(index: int, routing: Routing, num_values: int) -> int:
    """How many tokens of a sequence, its first ones, have no values.

    Raises:
        RoutingError: values are neither of all tokens nor of the generated ones.
    """
    num_tokens = routing.end + 1
    num_generated = None if routing.prompt_len is None else num_tokens - routing.prompt_len
    if num_values not in (num_tokens, num_generated):
        generated = "unknown" if num_generated is None else num_generated
        raise RoutingError(
            f"sequence {index} of {num_tokens} tokens ({generated} generated) has {num_values} values"
        )
    return num_tokens - num_values


def _numbers(name: str, values: Any) -> NDArray[Any]:
    """Numbers [n]; None becomes NaN."""
    if isinstance(values, list | tuple) or getattr(values, "dtype", None) == np.dtype(object):
        values = [np.nan if value is None else value for value in values]
    return arguments.array(name, values, "biuf", "n")


class _Columns(NamedTuple):
    """Where the tokens of a sequence are in its row of a batch."""

    first: int
    num_tokens: int


class _Batch:
    """Sequences, and the columns of their tokens in a padded batch."""

    def __init__(
        self,
        routings: Sequence[Routing],
        length: int,
        padding: Padding,
        num_tokens: Sequence[int] | None,
    ) -> None:
        """Raises `RoutingError` if a sequence does not fit."""
        self.routings = routings
        self.length = arguments.integer("length", length)
        if padding not in ("left", "right"):
            padding = arguments.integer("padding, if it is no side,", padding)
        self._padding = padding
        counts = token_counts(routings, num_tokens)
        self.columns = [self._columns_of(index, count) for index, count in enumerate(counts)]

    def _columns_of(self, index: int, count: int) -> _Columns:
        first = self._first_column(self.routings[index], count)
        if first < 0 or first + count > self.length:
            raise RoutingError(
                f"sequence {index} of {count} tokens does not fit {self.length} columns with "
                f"padding={self._padding!r}"
            )
        return _Columns(first, count)

    def _first_column(self, routing: Routing, count: int) -> int:
        if self._padding == "right":
            return 0
        if self._padding == "left":
            return self.length - count
        if routing.prompt_len is None:
            raise RoutingError(PROMPT_END_UNKNOWN)
        assert isinstance(self._padding, int)
        return self._padding - routing.prompt_len


def _aligned(arrays: Sequence[NDArray[Any]], layout: _Batch, fill: NDArray[Any]) -> NDArray[Any]:
    """A batch [B, length, L, K] of arrays [n, L, K], ids or weights, one for each sequence of
    `layout`, and `fill` elsewhere."""
    check_rows(layout.routings)
    shape = layout.routings[0].rows.shape[1:]
    batch = np.full((len(arrays), layout.length, *shape), fill, fill.dtype)
    for index, array in enumerate(arrays):
        first, count = layout.columns[index]
        num_rows = min(count, len(array))
        batch[index, first : first + num_rows] = array[:num_rows]
    return batch


def token_counts(routings: Sequence[Routing], num_tokens: Sequence[int] | None = None) -> list[int]:
    """How many tokens each sequence has: `num_tokens`, or P + G.

    Raises:
        RoutingError: there is no sequence, or one has fewer tokens.
    """
    if not routings:
        raise RoutingError("no answers")
    counts = [routing.end + 1 for routing in routings]
    if num_tokens is not None:
        counts = arguments.integers("num_tokens", num_tokens, count=len(counts))
    for routing, count in zip(routings, counts, strict=True):
        if count > routing.end + 1:
            raise RoutingError(f"rows up to {routing.end} for {count} tokens")
    return counts


def check_rows(routings: Sequence[Routing]) -> None:
    """Raises `RoutingError` if the first rows of a sequence were left out, or the sequences' rows
    have other shapes."""
    for routing in routings:
        _check_same_shape(routings[0], routing)
        if routing.start:
            raise RoutingError(f"rows before {routing.start} were left out: join the turns first")
