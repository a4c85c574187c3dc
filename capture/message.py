"""What the engine and the API process say to each other, in fields that vLLM sends anyway: the opt-in and the rows."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.rows import Rows

OPT_IN_ARG = "routed_experts.opt_in"
"""Key in `SamplingParams.extra_args` that opts a request in; its value is `OptIn.encode()`."""

SMALL_ARRAY_BYTES = 16 << 10
"""Rows up to this size are packed. Larger ones, those of prompts, are cheaper to send without a copy, and apart."""

_HEADER_TYPE = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class OptIn:
    """That a request's rows are to be sent. All requests of one prompt (`n` > 1) carry the same one.

    The prompt's rows come once, on an output of their own (`prompt_output_id`), before the first tokens of any of the
    prompt's requests.

    Attributes:
        prompt_start: position of the first prompt row to send.
        prompt_id: 16 random bytes, which tell prompts apart.
        shared: whether the prompt has several requests.
    """

    prompt_start: int
    prompt_id: bytes
    shared: bool

    _FORM: ClassVar[struct.Struct] = struct.Struct("<q16s?")

    def encode(self) -> bytes:
        """As bytes, because `extra_args` is a client's to fill at some endpoints, and JSON cannot say bytes."""
        return self._FORM.pack(self.prompt_start, self.prompt_id, self.shared)

    @classmethod
    def decode(cls, value: object) -> "OptIn | None":
        """What `encode` gave; None for anything else."""
        if not isinstance(value, bytes) or len(value) != cls._FORM.size:
            return None
        return cls(*cls._FORM.unpack(value))


_PROMPT_OF = "routed-experts-prompt-of-"


def prompt_output_id(request_id: str) -> str:
    """The id of the output that brings a prompt's rows, and no tokens, with the first token of a request.

    vLLM drops outputs of requests that it does not know, so that nobody else takes it for one of a request's.
    """
    return _PROMPT_OF + request_id


def request_of_prompt(output_id: str) -> str | None:
    """What `prompt_output_id` was given; None for the id of any other output."""
    return output_id[len(_PROMPT_OF) :] if output_id.startswith(_PROMPT_OF) else None


class Output(Protocol):
    """A request's part of the engine's message for a step; vLLM's `EngineCoreOutput`."""

    routed_experts: Rows | None


AnyOutput = TypeVar("AnyOutput", bound=Output)


def is_large(output: Output) -> bool:
    """Whether the rows are too many to be packed."""
    return output.routed_experts is not None and output.routed_experts.nbytes > SMALL_ARRAY_BYTES


def pack(outputs: Sequence[Output]) -> None:
    """Puts the small arrays ([n, L, K]) of a message into one, a flat one on the first output that had one.

    At hundreds of requests with a row each, an array costs much more to encode and decode than its contents.
    """
    small: list[int] = []
    arrays: list[Rows] = []
    for index, output in enumerate(outputs):
        rows = output.routed_experts
        if rows is not None and not is_large(output):
            small.append(index)
            arrays.append(rows)
            output.routed_experts = None
    if not small:
        return
    counts = np.zeros(small[-1] - small[0] + 1, dtype=_HEADER_TYPE)  # 0 for none, n + 1 for n rows
    counts[np.array(small) - small[0]] = [len(rows) + 1 for rows in arrays]
    header = np.array([len(counts), *arrays[0].shape[1:]], dtype=_HEADER_TYPE)
    outputs[small[0]].routed_experts = np.concatenate(
        [header.view(np.int16), counts.view(np.int16), np.concatenate(arrays).reshape(-1)]
    )


class Unpacker:
    """Undoes `pack`, for messages whose outputs come in one slice or in several.

    Attributes:
        is_known: whether all rows of the message are known that were packed, or came alone.
    """

    def __init__(self) -> None:
        self.is_known = True
        self._message: object = None
        self._counts: Iterator[int] = iter(())
        self._rows: Rows | None = None
        self._first = 0

    def unpack(self, outputs: Iterable[AnyOutput], message: object) -> Iterator[tuple[AnyOutput, Rows]]:
        """Takes the rows off `outputs`: each output that has some, and its own. Those that were packed are views of
        what came from the engine, so that whoever keeps one keeps the message.

        Args:
            outputs: the next slice of a message.
            message: tells messages apart, so that what is left of one is never taken for another's.
        """
        if message != self._message:
            self._message, self._counts, self.is_known = message, iter(()), True
        for output in outputs:
            rows = output.routed_experts
            if rows is not None:
                output.routed_experts = None
                if rows.ndim == 1:
                    self._begin(rows)
                elif len(rows) == 1:
                    self.is_known &= is_known(rows)
            if count := next(self._counts, 0):
                assert self._rows is not None
                end = self._first + count - 1
                rows, self._first = self._rows[self._first : end], end
            if rows is not None:
                yield output, rows

    def _begin(self, packed: NDArray[np.int16]) -> None:
        words = _HEADER_TYPE.itemsize // packed.itemsize
        num_outputs, num_layers, top_k = packed[: 3 * words].view(_HEADER_TYPE).tolist()
        counts, body = np.split(packed[3 * words :], [num_outputs * words])
        self._counts = iter(counts.view(_HEADER_TYPE).tolist())
        self._rows, self._first = body.reshape(-1, num_layers, top_k), 0
        self.is_known &= is_known(body)


def is_known(rows: NDArray[np.int16]) -> bool:
    """Whether none of `rows` is -1."""
    return bool(rows.min(initial=0) >= 0)
