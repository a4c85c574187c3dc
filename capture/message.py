"""What the engine and the API process say to each other, in fields that vLLM sends anyway: the opt-in and the rows."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.rows import row_shape
from routed_experts.protocol.codec import Rows

OPT_IN_ARG = "routed_experts.opt_in"
"""Key in `SamplingParams.extra_args` that opts a request in; its value is `OptIn.encode()`."""

ROWS_OUTPUT_ID = "routed_experts.rows"
"""Request id of the output that comes before all others of a message with rows, and says what rows they have. vLLM
passes over outputs of requests that it does not know."""

CAUSES_OUTPUT_ID = "routed_experts.causes"
"""Request id of the output that says why rows are unknown, in a list of `UnknownRows` in its `kv_transfer_params`. It
comes before the rows."""

SMALL_ARRAY_BYTES = 16 << 10
"""Rows up to this size are packed. Larger ones, those of prompts, are cheaper to send without a copy."""

_HEADER_TYPE = np.dtype(np.int32)
_WORDS = _HEADER_TYPE.itemsize // np.dtype(np.int16).itemsize
_NO_ROWS, _ALONE, _WIDER = -1, -2, -3
"""In place of the number of an output's packed rows: it has none at all; they are in an array of their own; or they are
wider than those of others, as they have weights: then it is `_WIDER` less the number of narrow rows that they fill."""
_NOTHING = (_NO_ROWS, 0)


@dataclass(frozen=True, slots=True)
class OptIn:
    """That a request's rows are to be sent. All requests of one prompt (`n` > 1) carry the same one.

    The prompt's rows come once, on outputs of their own (`prompt_output_id`), before the first tokens of any of the
    prompt's requests.

    Attributes:
        prompt_start: position of the first prompt row to send.
        prompt_id: 16 random bytes, which tell prompts apart.
        shared: whether the prompt has several requests.
        weights: whether rows are to have weights, where the engine captures them.
        at_end: whether generated rows may come in groups, as nobody needs them before the request ends.
        best_effort: whether rows that are not there may stay unknown. Then nothing is computed again for them.
    """

    prompt_start: int
    prompt_id: bytes
    shared: bool
    weights: bool = False
    at_end: bool = False
    best_effort: bool = False

    _FORM: ClassVar[struct.Struct] = struct.Struct("<q16sB")

    def encode(self) -> bytes:
        """As bytes, because `extra_args` is a client's to fill at some endpoints, and JSON cannot say bytes."""
        flags = self.shared | self.weights << 1 | self.at_end << 2 | self.best_effort << 3
        return self._FORM.pack(self.prompt_start, self.prompt_id, flags)

    @classmethod
    def decode(cls, value: object) -> "OptIn | None":
        """What `encode` gave; None for anything else."""
        if not isinstance(value, bytes) or len(value) != cls._FORM.size:
            return None
        prompt_start, prompt_id, flags = cls._FORM.unpack(value)
        return cls(prompt_start, prompt_id, bool(flags & 1), bool(flags & 2), bool(flags & 4), bool(flags & 8))


_PROMPT_OF = "routed-experts-prompt-of-"


def prompt_output_id(request_id: str) -> str:
    """The id of the outputs that bring a prompt's rows, and no tokens, before the first token of a request.

    vLLM drops outputs of requests that it does not know, so that nobody else takes it for one of a request's.
    """
    return _PROMPT_OF + request_id


def request_of_prompt(output_id: str) -> str | None:
    """What `prompt_output_id` was given; None for the id of any other output."""
    return output_id[len(_PROMPT_OF) :] if output_id.startswith(_PROMPT_OF) else None


class PlacedRows(NamedTuple):
    """Rows of a sequence, and where in it they are.

    Attributes:
        start: absolute position of the first row.
        rows: [n, L, K], with weights [n, 3L, K].
    """

    start: int
    rows: Rows


class UnknownRows(NamedTuple):
    """Why some of a request's rows are unknown.

    Attributes:
        request_id: of a prompt's rows, the request that they are sent with.
        is_prompt: whether they are the prompt's.
        cause: a `Cause` other than `FAULT`.
        num_rows: how many.
    """

    request_id: str
    is_prompt: bool
    cause: int
    num_rows: int


class Output(Protocol):
    """A request's part of the engine's message for a step; vLLM's `EngineCoreOutput`."""

    request_id: str
    routed_experts: Any


AnyOutput = TypeVar("AnyOutput", bound=Output)


def pack(outputs: Sequence[Output]) -> NDArray[np.int16] | None:
    """Prepares the rows of a message: `PlacedRows` on `outputs` become arrays that vLLM can send.

    Gives what goes on an output before all others (`ROWS_OUTPUT_ID`); None if none of them has rows. It is a header of
    int32: the number of outputs and the shape of a row (without weights if some have none); for each output the number
    of its packed rows; for each the position of its first row. The small arrays follow: at hundreds of requests with a
    row each, an array costs much more to encode and decode than its contents. Large arrays stay on their outputs, and
    are not copied.
    """
    counts, starts = [_NO_ROWS] * len(outputs), [0] * len(outputs)
    shape: tuple[int, ...] | None = None
    small: list[Rows] = []
    is_mixed = False
    for index, output in enumerate(outputs):
        if output.routed_experts is None:
            continue
        starts[index], rows = output.routed_experts
        if (of_rows := rows.shape[1:]) != shape:
            is_mixed = shape is not None
            shape = of_rows if shape is None else min(shape, of_rows)
        if rows.nbytes > SMALL_ARRAY_BYTES:
            counts[index] = _ALONE
            output.routed_experts = np.ascontiguousarray(rows)
        else:
            counts[index] = len(rows)
            small.append(rows)
            output.routed_experts = None
    if shape is None:
        return None
    if is_mixed:
        _mark_wider(counts, small, shape)
        small = [rows.reshape(-1, *shape) for rows in small]
    body = np.concatenate(small).reshape(-1) if small else np.empty(0, dtype=np.int16)
    header = np.array([len(outputs), *shape, *counts, *starts], dtype=_HEADER_TYPE)
    packed: NDArray[np.int16] = np.concatenate([header.view(np.int16), body])
    return packed


def _mark_wider(counts: list[int], small: Sequence[Rows], shape: tuple[int, ...]) -> None:
    """Puts into `counts` which of the packed arrays have rows wider than `shape`."""
    packed = [index for index, count in enumerate(counts) if count >= 0]
    for index, rows in zip(packed, small, strict=True):
        if rows.shape[1:] != shape:
            counts[index] = _WIDER - len(rows) * (rows.shape[1] // shape[0])


class Unpacker:
    """Undoes `pack`, for messages whose outputs come in one slice or in several."""

    def __init__(self) -> None:
        self._message: object = None
        self._entries: Iterator[tuple[int, int]] = repeat(_NOTHING)
        self._rows: Rows | None = None
        self._first = 0

    def unpack(self, outputs: list[AnyOutput], message: object) -> Iterator[tuple[AnyOutput, int, Rows]]:
        """Takes the rows off `outputs`. Gives each output that has some, the position of its first row, and its rows.
        Rows that were packed are views of the message, so that whoever keeps one keeps the message. Rows without a
        header before them have no position and are dropped.

        Args:
            outputs: the next slice of a message, from which the output that `pack` has added is removed.
            message: tells messages apart, so that what is left of one is never taken for another's.
        """
        if message != self._message:
            self._message, self._entries = message, repeat(_NOTHING)
        if outputs and outputs[0].request_id == ROWS_OUTPUT_ID:
            self._begin(outputs.pop(0).routed_experts)
        for output, (count, start) in zip(outputs, self._entries, strict=False):
            alone, output.routed_experts = output.routed_experts, None
            if count >= 0:
                assert self._rows is not None
                end = self._first + count
                rows, self._first = self._rows[self._first : end], end
                yield output, start, rows
            elif count == _ALONE and alone is not None:
                yield output, start, alone
            elif count <= _WIDER:
                assert self._rows is not None
                end = self._first + _WIDER - count
                rows, self._first = self._rows[self._first : end], end
                layers, top_k = rows.shape[1:]
                yield output, start, rows.reshape(-1, *row_shape(layers, top_k, with_weights=True))

    def _begin(self, packed: NDArray[np.int16]) -> None:
        num_outputs, num_layers, top_k = packed[: 3 * _WORDS].view(_HEADER_TYPE).tolist()
        table, body = np.split(packed[3 * _WORDS :], [2 * num_outputs * _WORDS])
        self._entries = chain(zip(*table.view(_HEADER_TYPE).reshape(2, -1).tolist(), strict=True), repeat(_NOTHING))
        self._rows, self._first = body.reshape(-1, num_layers, top_k), 0
