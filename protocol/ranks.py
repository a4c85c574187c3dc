"""Cuts rows as a trainer cuts its layers and tokens. Imports numpy and msgspec.

Everywhere, a rank is given as `(rank, size)`, and tokens are the first dimension: packed sequences
[T, L, K], or a padded batch as Megatron has it, [S, B, L, K]: `align(…).swapaxes(0, 1)`, with
`cu_seqlens` [0, S].
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol import arguments
from routed_experts.protocol.batch import (
    check_rows,
    generated_mask,
    logprobs_of_tokens,
    num_without_values,
    token_counts,
)
from routed_experts.protocol.codec import UNKNOWN, UNKNOWN_WEIGHT
from routed_experts.protocol.routing import Routing, RoutingError

Scalar = TypeVar("Scalar", bound=np.generic)
Span = tuple[int, int]
"""First index, and the index after the last."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences one after the other, each with its padding behind it.

    Attributes:
        rows: [T, L, K] ids; -1, which means "do not replay", where a row is not known: in padding
            and for the last token of a sequence too.
        cu_seqlens: int32 [B + 1], where the sequences begin and end with their padding.
            TransformerEngine calls it `cu_seqlens_padded`.
        num_tokens: int32 [B], tokens of each sequence without its padding.
        weights: [T, L, K] of the ids, NaN where unknown; None if the responses have none.
        generated: [T], the tokens that were generated, in any of the turns that were joined; None
            if a response has no token ids.
        logprobs: [T], log-probabilities of these tokens in all turns: NaN where a turn has none,
            and 0 elsewhere, if `echo` did not ask for the prompt's. None if the responses have
            none, or one has no token ids.
    """

    rows: NDArray[np.integer[Any]]
    cu_seqlens: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None
    generated: NDArray[np.bool_] | None = None
    logprobs: NDArray[np.float64] | None = None

    @property
    def known(self) -> NDArray[np.bool_]:
        """[T], whether all ids of a token are known."""
        known: NDArray[np.bool_] = (self.rows != UNKNOWN).all(axis=(1, 2))
        return known


def pack(
    routings: Sequence[Routing],
    *,
    multiple: int = 1,
    length: int | None = None,
    num_tokens: Sequence[int] | None = None,
) -> Packed:
    """Packs whole sequences: row p of a response becomes that of the sequence's token p.

    >>> routing = Routing(np.array([[[3, 1]], [[0, 2]]], np.int16))  # of three tokens
    >>> packed = pack([routing, routing], multiple=4)
    >>> packed.rows[:, 0].tolist()
    [[3, 1], [0, 2], [-1, -1], [-1, -1], [3, 1], [0, 2], [-1, -1], [-1, -1]]
    >>> packed.cu_seqlens.tolist(), packed.known.tolist()
    ([0, 4, 8], [True, True, False, False, True, True, False, False])

    Args:
        multiple: each sequence is padded to a multiple of it. Context parallelism needs one of 2 ·
            CP, sequence parallelism one of TP, both together 2 · CP · TP.
        length: T; what is left is padding of the last sequence.
        num_tokens: tokens of each sequence, if they were truncated; P + G by default.

    Raises:
        RoutingError: a sequence lacks rows before its last token, the sequences do not fit
            `length`, only some have weights or log-probabilities, or token ids do not fit rows.
    """
    multiple = arguments.integer("multiple", multiple, least=1)
    counts = token_counts(routings, num_tokens)
    check_rows(routings)
    starts = _padded_starts(counts, multiple, length)
    ids = [routing.rows for routing in routings]
    dtype = np.result_type(np.int16, *ids)
    rows = _packed(ids, counts, starts, np.array(UNKNOWN, dtype))
    weights = [routing.weights for routing in routings if routing.weights is not None]
    if weights and len(weights) < len(routings):
        raise RoutingError("some responses have weights, others have none")
    its_weights = _packed(weights, counts, starts, UNKNOWN_WEIGHT) if weights else None
    generated, logprobs = _values_of_tokens(routings)
    return Packed(
        rows,
        starts,
        np.array(counts, np.int32),
        its_weights,
        generated=_packed(generated, counts, starts, np.array(False)) if generated else None,
        logprobs=_packed(logprobs, counts, starts, np.array(0.0)) if logprobs else None,
    )


def _padded_starts(counts: Sequence[int], multiple: int, length: int | None) -> NDArray[np.int32]:
    """`Packed.cu_seqlens` of sequences of `counts` tokens."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum([-(-count // multiple) * multiple for count in counts], out=starts[1:])
    if length is not None:
        if starts[-1] > arguments.integer("length", length):
            raise RoutingError(f"{starts[-1]} tokens with padding do not fit length {length}")
        starts[-1] = length
    return starts


def _values_of_tokens(
    routings: Sequence[Routing],
) -> tuple[list[NDArray[np.bool_]], list[NDArray[np.float64]]]:
    """Of each sequence, which tokens were generated, and log-probabilities [P + G]. Empty if they
    are not known."""
    generated: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float64]] = []
    for index, routing in enumerate(routings):
        has_ids = routing.prompt_token_ids is not None and routing.token_ids is not None
        if routing.generated is None and not has_ids:
            return [], []
        mask = generated_mask(routing)
        num_before = num_without_values(index, routing, len(mask))
        generated.append(np.concatenate([np.zeros(num_before, bool), mask]))
        if routing.logprobs is not None:
            logprobs.append(logprobs_of_tokens(routing, fill=0))
    if logprobs and len(logprobs) < len(routings):
        raise RoutingError("some responses have log-probabilities, others have none")
    return generated, logprobs


def _packed(
    arrays: Sequence[NDArray[Any]],
    counts: Sequence[int],
    starts: NDArray[np.int32],
    pad: NDArray[Any],
) -> NDArray[Any]:
    packed = np.empty((starts[-1], *arrays[0].shape[1:]), pad.dtype)
    for array, count, (first, end) in zip(arrays, counts, pairwise(starts.tolist()), strict=True):
        known = first + min(count, len(array))
        packed[first:known] = array[: known - first]
        packed[known:end] = pad
    return packed


def stage_layers(
    layer_ids: Sequence[int],
    num_hidden_layers: int,
    *,
    pipeline: Span = (0, 1),
    virtual: Span = (0, 1),
    counts: Sequence[int] | None = None,
) -> slice:
    """Which of the L layers of rows a stage of a pipeline has. As they follow each other, `rows[:,
    slice]` is a view.

    >>> stage_layers([1, 2, 3, 4, 5], 6, pipeline=(0, 2))  # decoder layers 0 to 2, of which 0 is dense
    slice(0, 2, None)
    >>> [stage_layers(range(8), 8, pipeline=(1, 2), virtual=(v, 2)) for v in (0, 1)]
    [slice(2, 4, None), slice(6, 8, None)]

    Args:
        layer_ids: decoder layer of each of the L layers, from `GET /v1/routed_experts`.
        num_hidden_layers: decoder layers of the model, from there too: layers of multi-token
            prediction are none.
        virtual: the virtual stage, of so many per rank.
        counts: decoder layers of each stage in the model's order: all ranks' first virtual stages,
            then all ranks' second ones. Equally many by default.

    Raises:
        ValueError: the layers cannot be split in this way.
    """
    num_hidden_layers = arguments.integer("num_hidden_layers", num_hidden_layers)
    ids = arguments.integers("layer_ids", layer_ids)
    if ids != sorted(set(ids)) or max(ids, default=-1) >= num_hidden_layers:
        raise ValueError(
            f"layer_ids must ascend within the {num_hidden_layers} decoder layers, not {ids}"
        )
    stage, stages = _rank("pipeline", pipeline)
    chunk, chunks = _rank("virtual", virtual)
    total = stages * chunks
    if counts is None:
        if num_hidden_layers % total:
            stated = f"{stages} pipeline · {chunks} virtual stages"
            raise ValueError(
                f"{num_hidden_layers} decoder layers are not equally many for {stated}: give counts"
            )
        counts = [num_hidden_layers // total] * total
    sizes = arguments.integers("counts", counts, total)
    if sum(sizes) != num_hidden_layers:
        raise ValueError(
            f"counts must add up to the {num_hidden_layers} decoder layers, not to {sum(sizes)}"
        )
    index = chunk * stages + stage  # in the model's order
    first = sum(sizes[:index])
    return slice(bisect_left(ids, first), bisect_left(ids, first + sizes[index]))


def token_spans(
    cu_seqlens: Sequence[int], *, context: Span = (0, 1), sequence: Span = (0, 1)
) -> list[Span]:
    """Which tokens a rank has, in its order, as spans of the first dimension.

    With context parallelism each sequence is cut into 2 · CP equal parts, and a rank has the one at
    its place and the one as far from the end (zigzag, as in TransformerEngine). With sequence
    parallelism, what a context-parallel rank has is cut into TP equal parts.

    >>> token_spans([0, 8, 16], context=(0, 2))
    [(0, 2), (6, 10), (14, 16)]
    >>> token_spans([0, 8, 16], context=(0, 2), sequence=(1, 2))
    [(8, 10), (14, 16)]

    Args:
        cu_seqlens: where sequences begin and end, with their padding.
        sequence: of the tensor-parallel rank, if the trainer uses sequence parallelism.

    Raises:
        ValueError: a sequence cannot be cut in this way: its padding is missing.
    """
    bounds = arguments.integers("cu_seqlens", cu_seqlens)
    if bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens must ascend, not {bounds}")
    rank, size = _rank("context", context)
    part, parts = _rank("sequence", sequence)
    pieces = list(pairwise(bounds))
    if size > 1:
        chunks = [(first, _share(end - first, 2 * size, "2 · CP")) for first, end in pieces]
        of_rank = (rank, 2 * size - 1 - rank)
        pieces = [
            (first + index * chunk, first + (index + 1) * chunk)
            for first, chunk in chunks
            for index in of_rank
        ]
    share = _share(sum(end - first for first, end in pieces), parts, "TP")
    return _merged(_within(pieces, part * share, (part + 1) * share))


def take(array: NDArray[Scalar], spans: Sequence[Span]) -> NDArray[Scalar]:
    """The tokens of `spans`, of rows, weights or masks; a view if it is one span.

    >>> take(np.arange(16), token_spans([0, 8, 16], context=(0, 2))).tolist()
    [0, 1, 6, 7, 8, 9, 14, 15]

    Raises:
        ValueError: `array` ends before the spans do.
    """
    if (most := max((end for _, end in spans), default=0)) > len(array):
        raise ValueError(
            f"spans up to token {most} of an array of {len(array)}: give the one that cu_seqlens is of"
        )
    parts = [array[first:end] for first, end in spans]
    return parts[0] if len(parts) == 1 else np.concatenate([array[:0], *parts])


def _rank(name: str, of: Span) -> Span:
    rank, size = arguments.integers(name, of, 2)
    if rank >= size:
        raise ValueError(f"{name} must be a rank and the number of ranks, not {(rank, size)}")
    return rank, size


def _share(tokens: int, parts: int, what: str) -> int:
    share, rest = divmod(tokens, parts)
    if rest:
        raise ValueError(
            f"{tokens} tokens cannot be cut into {parts} ({what}) equal parts: pad them to a multiple"
        )
    return share


def _within(pieces: Iterable[Span], begin: int, end: int) -> Iterable[Span]:
    """The part of `pieces` from their `begin`-th token to before their `end`-th."""
    for first, last in pieces:
        yield first + max(begin, 0), min(last, first + end)
        begin -= last - first
        end -= last - first


def _merged(pieces: Iterable[Span]) -> list[Span]:
    """`pieces` without empty ones; those that touch are one."""
    spans: list[Span] = []
    for first, end in pieces:
        if first >= end:
            continue
        if spans and spans[-1][1] == first:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((first, end))
    return spans
