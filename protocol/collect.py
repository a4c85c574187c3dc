"""Collects the rows of a response, streamed or not, into arrays and checks every position.

Imports numpy and msgspec. A stream may consist of chunk objects of the OpenAI
client, dicts, or lines of server-sent events.

>>> answer = {
...     "prompt_routed_experts": {
...         "data": "AwABAAAAAgA=", "shape": [2, 1, 2], "dtype": "int16", "start": 0, "missing": 0,
...     },
...     "choices": [{
...         "index": 0,
...         "routed_experts": {"data": "AQACAA==", "shape": [1, 1, 2], "dtype": "int16", "start": 2, "missing": 0},
...         "finish_reason": "length",
...     }],
... }
>>> (routing,) = collect(answer)
>>> routing.rows.tolist()
[[[3, 1]], [[0, 2]], [[1, 2]]]
>>> routing.prompt_rows.shape, routing.generated_rows.shape, routing.missing
((2, 1, 2), (1, 1, 2), 0)
"""

import json
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown  # a short one
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol import arguments
from routed_experts.protocol.answers import (
    Answer,
    Choice,
    RowsArray,
    arrays_of_prompts,
    read_answer,
    read_array,
)
from routed_experts.protocol.codec import Steps
from routed_experts.protocol.routing import Routing, RoutingError
from routed_experts.protocol.sse import EventError, EventReader

__all__ = [
    "Collector",
    "RequestValues",
    "Routing",
    "RoutingError",
    "collect",
    "collect_async",
]

_GIVE_N = "for several prompts, give n, the choices of each prompt (for files, set --n)"


class RequestValues(TypedDict, total=False):
    """Values of the request that the response does not repeat.

    Attributes:
        prompt_start: `routed_experts_prompt_start`, 0 by default. The forms `npy`, `raw` and `list`
            have no positions; the form `object` does, and is checked against it. None accepts any,
            for responses whose request is unknown.
        prompt_len: P, tokens of the prompt (of each prompt, if there are several). Needed to tell
            prompt rows from generated ones where the response does not say where the prompt ends:
            in the joined layout without token ids, and from `/inference/v1/generate`.
        n: choices per prompt. Needed for several prompts, and to notice absent choices.
        dtype: name of the element type, needed for the form `raw`, which is bare bytes.
        num_layers: L, likewise.
        top_k: K, likewise.
        media: of the prompt (of each prompt, if there are several), as in `Routing`.
    """

    prompt_start: int | None
    prompt_len: int
    n: int
    dtype: str
    num_layers: int
    top_k: int
    media: Sequence[str]


def collect(source: Any, **request: Unpack[RequestValues]) -> list[Routing]:
    """The rows of each choice of a response, in the order of their indices.

    Args:
        source: a response (dict, object of the OpenAI client, or JSON body as text or bytes; also a
            line of a batch's output file), or an iterator over a stream's chunks or lines, whose
            ends may be absent.
        request: see `RequestValues`.

    Raises:
        RoutingError: rows are missing, doubled or of another shape; the response is an error or was
            cut short.
        TypeError: `source`, or a value of the request, has another type.
        ValueError: a value of the request is out of range.
    """
    collector = Collector(**request)
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    if isinstance(source, bytes | str):
        source = _parsed(source)
    is_answer = isinstance(source, Mapping) or hasattr(source, "choices")
    for chunk in [source] if is_answer else source:
        collector.take(chunk)
    return collector.finish()


def _parsed(text: bytes | str) -> Any:
    """A JSON body as an object, and the lines of a stream as a list with them."""
    is_body = text.lstrip()[:1] in ("{", b"{")
    if not is_body:
        return [text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RoutingError(f"the answer is not JSON, or was cut short: {error}") from error


async def collect_async(
    source: AsyncIterable[Any], **request: Unpack[RequestValues]
) -> list[Routing]:
    """`collect` for an asynchronous iterator over a stream's chunks or lines.

    Raises:
        RoutingError, TypeError, ValueError: as `collect`.
    """
    collector = Collector(**request)
    async for chunk in source:
        collector.take(chunk)
    return collector.finish()


class Collector:
    """Collects a response chunk by chunk, for programs that also use the chunks themselves.

    Each chunk goes three ways: its choices into `_Choice`, its prompts' rows into `_Prompt`, and at
    the end both of a choice into a `Routing`.

    Args:
        prompt_start, prompt_len, n, dtype, num_layers, top_k, media: see `RequestValues`.
    """

    def __init__(
        self,
        *,
        prompt_start: int | None = 0,
        prompt_len: int | None = None,
        n: int | None = None,
        dtype: str = "int16",
        num_layers: int | None = None,
        top_k: int | None = None,
        media: Sequence[str] | None = None,
    ) -> None:
        if prompt_start is not None:
            prompt_start = arguments.integer("prompt_start", prompt_start)
        if prompt_len is not None:
            prompt_len = arguments.integer("prompt_len", prompt_len)
        self._prompt_start = prompt_start
        self._prompt_len = prompt_len
        self._n = None if n is None else arguments.integer("n", n, least=1)
        self._raw_dtype = dtype
        self._raw_shape = {"num_layers": num_layers, "top_k": top_k}
        self._media = None if media is None else tuple(media)
        self._shape: tuple[int, ...] | None = None  # [L, K] of the rows, once there are any
        self._prompts: dict[int, _Prompt] = {}  # by their index in the request
        self._prompts_have_rows = False
        self._choices: dict[int, _Choice] = {}  # by their index in the response
        self._prompt_token_ids: tuple[int, ...] | None = None
        self._events: EventReader | None = None  # of a stream of lines

    # ---- chunks come ----

    def take(self, item: Any) -> None:
        """Takes a chunk (dict or object), or a line or several of a stream.

        Raises:
            RoutingError: a gap, an overlap or another shape; an error event of the server.
        """
        if not isinstance(item, str | bytes):
            self._take_answer(read_answer(item))
            return
        if self._events is None:
            self._events = EventReader()
        try:
            for event in self._events.feed(item):
                self._take_answer(read_answer(event))
        except (EventError, RecursionError) as error:
            raise RoutingError(str(error)) from error

    def _take_answer(self, answer: Answer) -> None:
        self._prompt_token_ids = answer.prompt_token_ids or self._prompt_token_ids
        for choice in answer.choices:
            self._take_choice(choice)
        if answer.prompt_routed_experts is not None:
            self._take_prompt_rows(answer)

    def _take_prompt_rows(self, answer: Answer) -> None:
        self._prompts_have_rows = True
        rows = arrays_of_prompts(answer.prompt_routed_experts)
        weights = _beside(rows, answer.prompt_routed_expert_weights, "weights")
        steps = _beside(rows, answer.prompt_routed_experts_steps, "steps")
        prompts = self._prompts_of(answer, len(rows))
        for prompt, *arrays in zip(prompts, rows, weights, steps, strict=True):
            self._append(prompt, *arrays)

    def _take_choice(self, part: Choice) -> None:
        index = part.index or 0
        choice = self._choices.setdefault(index, _Choice(f"choice {index}", index=index))
        choice.prompt_token_ids = part.prompt_token_ids or choice.prompt_token_ids
        if part.token_ids is not None:
            choice.token_ids = choice.token_ids or []
            choice.token_ids += part.token_ids
        choice.finish_reason = part.finish_reason or choice.finish_reason
        texts: list[str | None] = []
        if part.logprobs is not None:
            choice.logprobs += part.logprobs.numbers
            texts = part.logprobs.texts
        # The text of the chunk itself would not do: with stop strings and within characters of
        # several tokens, a chunk has the text of other tokens.
        choice.texts += texts or [None] * len(part.token_ids or ())
        if part.routed_experts is not None:
            self._append(
                choice, part.routed_experts, part.routed_expert_weights, part.routed_experts_steps
            )

    def _prompts_of(self, answer: Answer, num_prompts: int) -> list["_Prompt"]:
        """The prompts that a chunk has rows of, each beside the first of its choices."""
        num_choices = len(answer.choices)
        n = num_choices if num_prompts == 1 else self._n
        if num_choices == 0 or n is None or num_choices != num_prompts * n:
            raise RoutingError(f"{num_choices} choices for {num_prompts} prompts: {_GIVE_N}")
        return [self._prompt_beside(choice.index or 0) for choice in answer.choices[::n]]

    def _prompt_beside(self, choice: int) -> "_Prompt":
        prompt = self._prompts.setdefault(
            self._prompt_index(choice), _Prompt(f"the prompt of choice {choice}", choice=choice)
        )
        if prompt.choice != choice:
            why = _GIVE_N if self._n is None else "it comes once"
            raise RoutingError(
                f"a prompt's rows came with choice {prompt.choice} and with choice {choice}: {why}"
            )
        return prompt

    def _append(self, segment: "_Segment", rows: Any, weights: Any, steps: Any) -> None:
        """Appends an array of rows, and those of their weights and steps if there are any."""
        try:
            array = read_array(rows, weights, self._raw_dtype, self._raw_shape, steps)
            if len(array.rows):  # an empty list has no shape
                self._check_shape(array.rows.shape[1:])
            segment.append(array)
        except ValueError as error:
            raise RoutingError(f"{segment.name}: {error}") from error

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if self._shape is None:
            self._shape = shape
        if self._shape != shape:
            raise RoutingError(f"rows of shape {shape}, not {self._shape}")

    # ---- what has come ----

    def finish(self) -> list[Routing]:
        """The rows of each choice of a finished response.

        Raises:
            RoutingError: the response was cut short, or has fewer or more rows than its tokens
                need.
        """
        return list(self.each_finished())

    def so_far(self) -> list[Routing]:
        """The rows received so far, for streams that the caller stops early.

        Raises:
            RoutingError: what came so far does not fit together.
        """
        return list(map(self._routing_of, sorted(self._choices)))

    def each_finished(self) -> Iterator[Routing]:
        """`finish`, one choice after another: the rows of a prompt, which each of its choices has,
        take memory once."""
        if self._events is not None and not self._events.done:
            raise RoutingError("the stream ended without [DONE]")
        if not self._choices:
            raise RoutingError(
                "the answer has no choices: it is no response of an endpoint that returns routing"
            )
        self._check_all_choices_came()
        for routing in map(self._routing_of, sorted(self._choices)):
            if routing.finish_reason is None:
                raise RoutingError(f"choice {routing.index} was not finished")
            _check_length(routing)
            yield routing

    def _check_all_choices_came(self) -> None:
        """Raises `RoutingError` if some are absent, as far as the request's `n` tells."""
        if self._n is None:
            return
        indices = sorted(self._choices)
        has_gap = indices != list(range(len(indices)))
        if has_gap or len(indices) % self._n:
            raise RoutingError(f"choices {shown(indices)} are not all of the answer's")

    # ---- one choice, with its prompt ----

    def _routing_of(self, index: int) -> Routing:
        choice = self._choices[index]
        prompt = self._prompt_of(index)
        prompt_token_ids = choice.prompt_token_ids or self._prompt_token_ids
        start = self._start_of(choice, prompt)
        prompt_len = self._prompt_len_of(choice, prompt, start, prompt_token_ids)
        if prompt.arrays and choice.start not in (None, prompt_len):
            raise RoutingError(
                f"choice {index}: rows from {choice.start} on after a prompt of {prompt_len} tokens"
            )
        arrays = prompt.arrays + choice.arrays
        if not arrays:
            _check_none_expected(choice, start, prompt_len)
        shape = self._shape or (self._raw_shape["num_layers"] or 0, self._raw_shape["top_k"] or 0)
        # int16 can hold every id and -1, for any type on the wire.
        rows: NDArray[np.int16] = _concatenated([array.rows for array in arrays], shape, np.int16)
        return Routing(
            rows=rows,
            start=start,
            prompt_len=prompt_len,
            index=index,
            prompt_token_ids=prompt_token_ids,
            token_ids=None if choice.token_ids is None else tuple(choice.token_ids),
            finish_reason=choice.finish_reason,
            weights=_weights_of(index, arrays, shape),
            steps=_steps_of(index, arrays),
            logprobs=np.array(choice.logprobs, dtype=np.float64) if choice.logprobs else None,
            texts=choice.texts_of_all(prompt_len, start + len(rows) + 1),
            media=self._media,
        )

    def _prompt_of(self, index: int) -> "_Prompt":
        """The prompt of a choice; an empty one if no prompt's rows came."""
        choice = self._choices[index]
        prompt_index = self._prompt_index(index)
        first = self._choices.get(prompt_index * (self._n or 1), choice)
        prompt = self._prompts.get(prompt_index) or _Prompt("")
        # Prompts of equal length differ in their token ids only.
        have_ids = first.prompt_token_ids is not None and choice.prompt_token_ids is not None
        is_other = have_ids and first.prompt_token_ids != choice.prompt_token_ids
        if self._prompts_have_rows and (is_other or not prompt.arrays):
            raise RoutingError(f"choice {index}: the rows of its prompt did not come")
        return prompt

    def _prompt_index(self, choice: int) -> int:
        """The index in the request of the prompt of a choice."""
        return 0 if self._n is None else choice // self._n

    def _start_of(self, choice: "_Choice", prompt: "_Prompt") -> int:
        """The position of the first row: as the arrays say, or else as the request said."""
        of_arrays = prompt.start if prompt.arrays else choice.start
        if of_arrays is None:
            return self._prompt_start or 0
        if self._prompt_start not in (None, of_arrays):
            raise RoutingError(
                f"choice {choice.index}: rows from {of_arrays} on, asked for from {self._prompt_start} on"
            )
        return of_arrays

    def _prompt_len_of(
        self,
        choice: "_Choice",
        prompt: "_Prompt",
        start: int,
        prompt_token_ids: tuple[int, ...] | None,
    ) -> int | None:
        """Where the prompt ends; None if nothing says so.

        Raises:
            RoutingError: what says so disagrees.
        """
        ends: dict[str, int] = {}  # by what says so
        if prompt.arrays:
            ends["rows"] = start + prompt.length
        if prompt_token_ids is not None:
            ends["tokens"] = len(prompt_token_ids)
        if self._prompt_len is not None:
            ends["prompt_len"] = self._prompt_len
        if len(set(ends.values())) > 1:
            stated = ", ".join(f"at {end} by its {name}" for name, end in ends.items())
            raise RoutingError(f"choice {choice.index}: the prompt ends {stated}")
        return next(iter(ends.values()), None)


@dataclass
class _Segment:
    """Rows of a prompt, or those that were generated for a choice: arrays that follow each other
    without gap or overlap."""

    name: str  # for messages
    start: int | None = None  # position of the first row, once an array says it
    length: int = 0  # rows of all arrays
    arrays: list[RowsArray] = field(default_factory=list)

    def append(self, array: RowsArray) -> None:
        """Appends an array, or raises `RoutingError` if it does not begin where the last one
        ends."""
        if array.start is not None:
            if self.start is None:
                self.start = array.start
            end = self.start + self.length
            if array.start != end:
                fault = "overlap" if array.start < end else "a gap"
                raise RoutingError(f"{fault}: rows from {array.start} on after {end}")
        if self.arrays and not len(array.rows):
            # a stream may have any number of these, and each choice has all arrays of its prompt
            return
        self.arrays.append(array)
        self.length += len(array.rows)


@dataclass
class _Prompt(_Segment):
    choice: int = 0  # beside which its rows came


@dataclass
class _Choice(_Segment):
    index: int = 0
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: list[float | None] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)  # of tokens, in the order of the chunks

    def texts_of_all(
        self, prompt_len: int | None, num_tokens: int
    ) -> tuple[str | None, ...] | None:
        """The texts of all tokens; None if there are none, or their positions are unknown."""
        if not any(self.texts):
            return None
        if prompt_len is not None and self.token_ids is not None:
            num_tokens = prompt_len + len(self.token_ids)
        num_absent = num_tokens - len(self.texts)
        # with `echo`, log-probabilities have the prompt's texts too
        if num_absent not in (0, prompt_len):
            return None
        return (None,) * num_absent + tuple(self.texts)


def _check_none_expected(choice: _Choice, start: int, prompt_len: int | None) -> None:
    """Raises `RoutingError` if rows of a choice that has no array should have come."""
    if prompt_len is None or start < prompt_len:
        raise RoutingError(
            f"choice {choice.index} has no routed_experts: the request must ask with return_routed_experts"
        )


def _beside(rows: Sequence[Any], json: Any, what: str) -> Sequence[Any]:
    """The arrays of weights or steps beside the arrays of rows of as many prompts; None for each if
    there are none."""
    if json is None:
        return [None] * len(rows)
    beside = arrays_of_prompts(json)
    if len(beside) != len(rows):
        raise RoutingError(f"rows of {len(rows)} prompts, but {what} of {len(beside)}")
    return beside


def _steps_of(index: int, arrays: Sequence[RowsArray]) -> Steps | None:
    steps = [array.steps for array in arrays if array.steps is not None]
    if not steps:
        return None
    if len(steps) < len(arrays):
        raise RoutingError(f"choice {index}: steps of some of its rows only")
    return np.concatenate(steps)


def _weights_of(
    index: int, arrays: Sequence[RowsArray], shape: tuple[int, ...]
) -> NDArray[np.float32] | None:
    weights = [array.weights for array in arrays if array.weights is not None]
    if not weights:
        return None
    if len(weights) < len(arrays):
        raise RoutingError(f"choice {index}: weights of some of its rows only")
    return _concatenated(weights, shape, np.float32)


def _concatenated(
    arrays: Sequence[NDArray[Any]], shape: tuple[int, ...], dtype: Any
) -> NDArray[Any]:
    """[n, L, K]; an array of no rows has no shape."""
    filled = [array for array in arrays if len(array)]
    if not filled:
        return np.empty((0, *shape), dtype=dtype)
    together: NDArray[Any] = np.concatenate(filled).astype(dtype, copy=False)
    return together


def _check_length(routing: Routing) -> None:
    """Raises `RoutingError` if the rows do not fit the number of tokens that the response has."""
    if routing.prompt_len is None:
        return
    expected_end = routing.prompt_len
    tokens = f"{routing.prompt_len} prompt"
    if routing.token_ids is not None:
        expected_end = max(routing.prompt_len + len(routing.token_ids) - 1, routing.start)
        tokens += f" and {len(routing.token_ids)} generated"
    is_short = routing.end < expected_end and routing.finish_reason != "abort"
    is_long = routing.end > expected_end and routing.token_ids is not None
    if is_short or is_long:
        raise RoutingError(
            f"choice {routing.index}: rows up to {routing.end}, but {tokens} tokens have rows up to {expected_end}"
        )
