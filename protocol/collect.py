"""Collects the rows of a response, streamed or not, into arrays and checks every position.

Imports numpy and the standard library only. A stream may consist of chunk objects of the OpenAI
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
import operator
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from reprlib import repr as shown
from typing import Any, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol import arguments
from routed_experts.protocol.codec import NUMPY_DTYPES, Rows, count_missing, decode, decode_weights
from routed_experts.protocol.expert_load import Histogram
from routed_experts.protocol.sse import EventError, EventReader

PROMPT_END_UNKNOWN = (
    "where the prompt ends is not known: give prompt_len, or ask with return_token_ids, "
    "or for the split layout"
)
_GIVE_N = "for several prompts, give n, the choices of each prompt (for files, set --n)"

_LARGEST = (1 << 31) - 1
"""Of indices, token ids and positions, none of which are larger in a real response."""
_LARGEST_COUNT = (1 << 53) - 1
_TOKEN_BYTES = 8
"""What a token takes in a tuple of ids or texts."""
_ARRAY_BYTES = 128
"""What an array takes besides its elements."""
_LARGEST_NUMBER = float(np.finfo(np.float32).max)

_PLAIN = (str, bytes, bytearray, memoryview, int, float, list, tuple)
"""Values of JSON in place of an object. Python's have attributes that are not fields."""


class RoutingError(ValueError):
    """An incomplete or impossible response."""


class Texts(Sequence[str | None]):
    """The texts of tokens by position. Unknown ones before the first take no memory: a response may
    say that its prompt is longer than any is."""

    def __init__(self, num_absent: int, texts: Sequence[str | None]) -> None:
        self._num_absent = num_absent
        self._texts = tuple(texts)

    def __len__(self) -> int:
        return self._num_absent + len(self._texts)

    def __iter__(self) -> Iterator[str | None]:
        return chain(repeat(None, self._num_absent), self._texts)

    @overload
    def __getitem__(self, at: int) -> str | None: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[str | None, ...]: ...
    def __getitem__(self, at: int | slice) -> str | tuple[str | None, ...] | None:
        places = range(len(self))[at]
        if isinstance(places, range):
            return tuple(map(self._text, places))
        return self._text(places)

    def _text(self, position: int) -> str | None:
        return self._texts[position - self._num_absent] if position >= self._num_absent else None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def known(self) -> tuple[int, tuple[str | None, ...]]:
        """The position of the first text that came, and those from there on."""
        return self._num_absent, self._texts


@dataclass(frozen=True, eq=False)
class Routing:
    """The rows of one choice, including its prompt's.

    Attributes:
        rows: [n, L, K] expert ids of the positions `start` to `end`; -1 in unknown rows. None of
            them if the response has histograms only.
        start: absolute position of the first row.
        prompt_len: P, tokens of the prompt; None if neither the response contains it (joined layout
            without token ids) nor the caller of `collect` gave it.
        index: the choice's index in the response.
        prompt_token_ids, token_ids: if the response has them (`return_token_ids`).
        finish_reason: None if the response was cut off.
        weights: [n, L, K] the router's weights of the ids, if the response has them; NaN where
            unknown.
        logprobs: log-probabilities of the G generated tokens, with `echo` of all P + G, if the
            response has them; NaN for a token without one (the first of a prompt).
        texts: of the P + G tokens, None where unknown; if log-probabilities tell them.
        prompt_histogram, histogram: counts of the rows of the prompt and of the generated tokens,
            if the response has them (`routed_experts_histogram`).
        media: the hash of each picture, sound and block of embeddings of the prompt, in their
            order, or other names that differ where what the model sees differs; () if the prompt
            has none, None if nobody said.
    """

    rows: Rows
    start: int = 0
    prompt_len: int | None = None
    index: int = 0
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    weights: NDArray[np.float32] | None = None
    logprobs: NDArray[np.float64] | None = None
    texts: Sequence[str | None] | None = None
    prompt_histogram: Histogram | None = None
    histogram: Histogram | None = None
    media: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", arguments.array("rows", self.rows, "iu", "nLK"))
        arguments.integer("start", self.start)
        if self.prompt_len is not None:
            arguments.integer("prompt_len", self.prompt_len)
        if self.media is not None:
            arguments.sequence_of("media", self.media, str)
        if self.weights is not None:
            object.__setattr__(
                self, "weights", arguments.array("weights", self.weights, "f", "nLK")
            )
            if self.weights.shape != self.rows.shape:
                raise ValueError(
                    f"weights must have the shape of rows {self.rows.shape}, not {self.weights.shape}"
                )

    @property
    def end(self) -> int:
        """The position after the last row. In a finished response that is the position of the last
        token."""
        return self.start + len(self.rows)

    @property
    def missing(self) -> int:
        """Number of rows with an unknown id."""
        return count_missing(self.rows)

    @property
    def prompt_rows(self) -> Rows:
        """[P - start, L, K]"""
        return self.rows[: self._split]

    @property
    def generated_rows(self) -> Rows:
        """[G - 1, L, K]"""
        return self.rows[self._split :]

    @property
    def _split(self) -> int:
        if self.prompt_len is None:
            raise RoutingError(PROMPT_END_UNKNOWN)
        return max(self.prompt_len - self.start, 0)


class Asked(TypedDict, total=False):
    """Values of the request that the response does not repeat.

    Attributes:
        prompt_start: `routed_experts_prompt_start`, 0 by default. The forms `npy`, `raw` and `list`
            have no positions; the form `object` does, and is checked against it. None accepts any,
            for responses whose request is unknown.
        prompt_len: P, tokens of the prompt (of each prompt, if there are several). Needed to tell
            prompt rows from generated ones where the response does not say where the prompt ends:
            in the joined layout without token ids, and from `/inference/v1/generate`.
        n: choices per prompt. Needed for several prompts, and to notice absent choices.
        dtype, num_layers, top_k: needed for the form `raw`, which is bare bytes.
        media: of the prompt (of each prompt, if there are several), as in `Routing`.
    """

    prompt_start: int | None
    prompt_len: int
    n: int
    dtype: str
    num_layers: int
    top_k: int
    media: Sequence[str]


def _check_asked(asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        if name == "media":
            arguments.sequence_of(name, value, str)
        elif name == "dtype":
            arguments.one_of(name, value, NUMPY_DTYPES)
        elif name not in Asked.__annotations__:
            raise TypeError(f"{name} is none of {', '.join(Asked.__annotations__)}")
        elif name != "prompt_start" or value is not None:
            arguments.integer(name, value, least=0 if name.startswith("prompt") else 1)


def collect(source: Any, **asked: Unpack[Asked]) -> list[Routing]:
    """The rows of each choice of a response, in the order of their indices.

    Args:
        source: a response (dict, object of the OpenAI client, or JSON body as text or bytes; also a
            line of a batch's output file), or an iterator over a stream's chunks or lines, whose
            ends may be absent.
        asked: see `Asked`.

    Raises:
        RoutingError: rows are missing, doubled or of another shape; the response is an error or was
            cut short.
    """
    collector = Collector(**asked)
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    if isinstance(source, bytes | str):
        try:
            source = json.loads(source) if source.lstrip()[:1] in ("{", b"{") else [source]
        except (ValueError, RecursionError) as error:
            raise RoutingError(f"the answer is not JSON, or was cut short: {error}") from error
    is_answer = isinstance(source, Mapping) or hasattr(source, "choices")
    for item in [source] if is_answer else arguments.instance("source", source, Iterable):
        collector.take(item)
    return collector.finish()


async def collect_async(source: AsyncIterable[Any], **asked: Unpack[Asked]) -> list[Routing]:
    """`collect` for an asynchronous iterator over a stream's chunks or lines."""
    collector = Collector(**asked)
    async for item in arguments.instance("source", source, AsyncIterable):
        collector.take(item)
    return collector.finish()


class Collector:
    """Collects a response chunk by chunk, for programs that also use the chunks themselves."""

    def __init__(self, **asked: Unpack[Asked]) -> None:
        _check_asked(asked)
        self._asked = asked
        self._shape: tuple[int, ...] | None = None  # of the rows; what was asked is for bare bytes
        self._prompts: dict[int, _Part] = {}  # by their place in the request
        self._prompts_have_rows = False
        self._choices: dict[int, _Choice] = {}
        self._prompt_token_ids: tuple[int, ...] | None = None
        self._events: EventReader | None = None  # of a stream of lines

    def take(self, item: Any) -> None:
        """Takes a chunk (dict or object), or a line or several of a stream.

        Raises:
            RoutingError: a gap, an overlap or another shape; an error event of the server.
        """
        if not isinstance(item, str | bytes):
            self._take_chunk(item)
            return
        self._events = self._events or EventReader()
        try:
            for event in self._events.feed(item):
                self._take_chunk(event)
        except (EventError, RecursionError) as error:
            raise RoutingError(str(error)) from error

    def finish(self) -> list[Routing]:
        """The rows of each choice of a finished response.

        Raises:
            RoutingError: the response was cut short, or has fewer or more rows than its tokens
                need.
        """
        return list(self.each_finished())

    def so_far(self) -> list[Routing]:
        """The rows received so far, for streams that the caller stops early."""
        return list(self.each_so_far())

    def each_finished(self) -> Iterator[Routing]:
        """`finish`, one choice after another: the rows of a prompt, which each of its choices has,
        take memory once."""
        if self._events is not None and not self._events.done:
            raise RoutingError("the stream ended without [DONE]")
        if not self._choices:
            raise RoutingError(
                "the answer has no choices: it is no response of an endpoint that returns routing"
            )
        indices = sorted(self._choices)
        if "n" in self._asked and (
            indices != list(range(len(indices))) or len(indices) % self._asked["n"]
        ):
            raise RoutingError(f"choices {shown(indices)} are not all of the answer's")
        for routing in self.each_so_far():
            if routing.finish_reason is None:
                raise RoutingError(f"choice {routing.index} was not finished")
            _check_length(routing)
            yield routing

    def each_so_far(self) -> Iterator[Routing]:
        """`so_far`, one choice after another."""
        return map(self._routing_of, sorted(self._choices))

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has a finish reason."""
        return all(choice.finish_reason is not None for choice in self._choices.values())

    @property
    def num_bytes(self) -> int:
        """Size of what `so_far` returns: the rows and tokens of a prompt are in those of each of
        its choices."""
        return sum(self._num_bytes_of(index) for index in self._choices)

    def _num_bytes_of(self, index: int) -> int:
        choice = self._choices[index]
        prompt_token_ids = choice.prompt_token_ids or self._prompt_token_ids or ()
        num_tokens = len(prompt_token_ids) + len(choice.token_ids or ()) + len(choice.texts)
        return choice.num_bytes + self._prompt_of(index).num_bytes + num_tokens * _TOKEN_BYTES

    def _take_chunk(self, chunk: Any) -> None:
        chunk = without_envelope(chunk)
        error = _get(chunk, "error")
        if error is not None:
            raise RoutingError(f"the server answered with an error: {_get_message(error)}")
        choices = _listed(_get(chunk, "choices"), "choices")
        self._prompt_token_ids = _ids(_get(chunk, "prompt_token_ids")) or self._prompt_token_ids
        for choice in choices:
            self._take_choice(choice)
        if (counted := _get(chunk, "prompt_routed_experts_histogram")) is not None:
            histograms = counted if isinstance(counted, list) else [counted]
            for prompt, histogram in zip(
                self._prompts_of(choices, len(histograms), "histogram"), histograms, strict=True
            ):
                prompt.histogram = _histogram(histogram)
        prompts, weights = (
            _get(chunk, "prompt_routed_experts"),
            _get(chunk, "prompt_routed_expert_weights"),
        )
        if prompts is None:
            return
        self._prompts_have_rows = True
        arrays = _arrays_of_prompts(prompts)
        weighed = [None] * len(arrays) if weights is None else _arrays_of_prompts(weights)
        if len(weighed) != len(arrays):
            raise RoutingError(f"rows of {len(arrays)} prompts, but weights of {len(weighed)}")
        for prompt, array, weight in zip(
            self._prompts_of(choices, len(arrays), "rows"), arrays, weighed, strict=True
        ):
            self._add(prompt, array, weight)

    def _prompts_of(self, choices: Sequence[Any], count: int, what: str) -> list["_Part"]:
        """The prompts that a chunk has, each with the first of its choices there."""
        n = len(choices) if count == 1 else self._asked.get("n")
        if not choices or n is None or len(choices) != count * n:
            raise RoutingError(f"{len(choices)} choices for {count} prompts: {_GIVE_N}")
        found = []
        for carrier in map(_index, choices[::n]):
            prompt = self._prompts.setdefault(
                self._place(carrier), _Part(f"the prompt of choice {carrier}")
            )
            before = prompt.carriers.setdefault(what, carrier)
            if before != carrier:
                why = "it comes once" if "n" in self._asked else _GIVE_N
                raise RoutingError(
                    f"a prompt's {what} came with choice {before} and with choice {carrier}: {why}"
                )
            found.append(prompt)
        return found

    def _place(self, index: int) -> int:
        """Of the prompt of a choice."""
        return index // self._asked["n"] if "n" in self._asked else 0

    def _take_choice(self, choice: Any) -> None:
        index = _index(choice)
        state = self._choices.setdefault(index, _Choice(f"choice {index}"))
        state.prompt_token_ids = _ids(_get(choice, "prompt_token_ids")) or state.prompt_token_ids
        token_ids = _ids(_get(choice, "token_ids"))
        if token_ids is not None:
            state.token_ids = state.token_ids or []
            state.token_ids += token_ids
        finish_reason = _get(choice, "finish_reason")
        if finish_reason is not None and not isinstance(finish_reason, str):
            raise RoutingError(f"choice {index}: not a finish reason: {shown(finish_reason)}")
        state.finish_reason = finish_reason or state.finish_reason
        if (counted := _get(choice, "routed_experts_histogram")) is not None:
            state.histogram = _histogram(counted)
        logprobs, texts = _logprobs(_get(choice, "logprobs"))
        state.logprobs += logprobs
        # Only these: with stop strings and within characters of several tokens, a chunk has the
        # text of other tokens.
        state.texts += texts or [None] * len(token_ids or ())
        value = _get(choice, "routed_experts")
        if value is not None:
            self._add(state, value, _get(choice, "routed_expert_weights"))

    def _add(self, part: "_Part", value: Any, beside: Any) -> None:
        """Adds an array of rows, and the one of their weights if there is one."""
        shape = {name: self._asked[name] for name in ("num_layers", "top_k") if name in self._asked}
        try:
            rows = decode(value, dtype=self._asked.get("dtype", "int16"), **shape)
            weights = None if beside is None else decode_weights(beside, **shape)
        except ValueError as error:
            raise RoutingError(f"{part.name}: {error}") from error
        if len(rows):  # an empty list has no shape
            if self._shape not in (None, rows.shape[1:]):
                raise RoutingError(
                    f"{part.name}: rows of shape {rows.shape[1:]}, not {self._shape}"
                )
            self._shape = rows.shape[1:]
        part.add(value, rows, beside, weights)

    def _routing_of(self, index: int) -> Routing:
        choice, prompt = self._choices[index], self._prompt_of(index)
        prompt_token_ids = choice.prompt_token_ids or self._prompt_token_ids
        said, asked = (
            (prompt if prompt.arrays else choice).start,
            self._asked.get("prompt_start", 0),
        )
        if None not in (said, asked) and said != asked:
            raise RoutingError(f"choice {index}: rows from {said} on, asked for from {asked} on")
        start = said if said is not None else asked or 0
        ends = {
            "rows": start + prompt.length if prompt.arrays else None,
            "histogram": None if prompt.histogram is None else start + prompt.histogram["rows"],
            "tokens": None if prompt_token_ids is None else len(prompt_token_ids),
            "prompt_len": self._asked.get("prompt_len"),
        }
        prompt_len = _same_end(index, {name: end for name, end in ends.items() if end is not None})
        if prompt.arrays and choice.start not in (None, prompt_len):
            raise RoutingError(
                f"choice {index}: rows from {choice.start} on after a prompt of {prompt_len} tokens"
            )
        arrays = prompt.arrays + choice.arrays
        weights = [each for each in prompt.weights + choice.weights if each is not None]
        if weights and len(weights) < len(arrays):
            raise RoutingError(f"choice {index}: weights of some of its rows only")
        if not arrays and choice.histogram is not None:
            if prompt.histogram is None:
                raise RoutingError(f"choice {index}: the histogram of its prompt did not come")
            start += prompt.histogram["rows"] + choice.histogram["rows"]  # all rows were left out
        elif not arrays and (prompt_len is None or start < prompt_len):
            raise RoutingError(
                f"choice {index} has no routed_experts: the request must ask with return_routed_experts"
            )
        shape = self._shape or (self._asked.get("num_layers", 0), self._asked.get("top_k", 0))
        # which can hold every id and -1, for any type on the wire
        rows: Rows = _joined(arrays, shape, np.int16)
        return Routing(
            rows=rows,
            start=start,
            prompt_len=prompt_len,
            index=index,
            prompt_token_ids=prompt_token_ids,
            token_ids=None if choice.token_ids is None else tuple(choice.token_ids),
            finish_reason=choice.finish_reason,
            weights=_joined(weights, shape, np.float32) if weights else None,
            logprobs=np.array(choice.logprobs, dtype=np.float64) if choice.logprobs else None,
            texts=choice.texts_of_all(prompt_len, start + len(rows) + 1),
            prompt_histogram=prompt.histogram,
            histogram=choice.histogram,
            media=tuple(self._asked["media"]) if "media" in self._asked else None,
        )

    def _prompt_of(self, index: int) -> "_Part":
        """The prompt of a choice; an empty one if no prompt's rows or histogram came."""
        choice, place = self._choices[index], self._place(index)
        first = self._choices.get(place * self._asked.get("n", 1), choice)
        prompt = self._prompts.get(place) or _Part("")
        # Prompts of equal length differ in their token ids only.
        is_other = (
            None not in (ids := (first.prompt_token_ids, choice.prompt_token_ids))
            and ids[0] != ids[1]
        )
        if self._prompts_have_rows and (is_other or not prompt.arrays):
            raise RoutingError(f"choice {index}: the rows of its prompt did not come")
        return prompt


@dataclass
class _Part:
    """Rows of a prompt, or those that were generated: arrays that follow each other without gap or
    overlap."""

    name: str
    start: int | None = None  # of the first row, once an array says it
    length: int = 0  # rows of all arrays
    arrays: list[NDArray[np.integer[Any]]] = field(default_factory=list)
    weights: list[NDArray[np.float32] | None] = field(default_factory=list)  # of the arrays
    histogram: Histogram | None = None
    # indices of the choices that a prompt came with
    carriers: dict[str, int] = field(default_factory=dict)
    # of all arrays, as int16 with float32 weights, and what an array takes besides
    num_bytes: int = 0

    def add(
        self,
        value: Any,
        rows: NDArray[np.integer[Any]],
        beside: Any,
        weights: NDArray[np.float32] | None,
    ) -> None:
        """Appends `rows` and their weights, which were decoded from `value` and `beside`."""
        start = value.get("start") if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            if type(start) is not int or not 0 <= start <= _LARGEST - len(rows):
                raise RoutingError(f"{self.name}: its first row is at {shown(start)}")
            self.start = start if self.start is None else self.start
            if (end := self.start + self.length) != start:
                what = "overlap" if start < end else "a gap"
                raise RoutingError(f"{self.name}: {what}: rows from {start} on after {end}")
            if (said := value.get("missing")) != (missing := count_missing(rows)):
                raise RoutingError(
                    f"{self.name}: {missing} rows are not known, said to be {shown(said)}"
                )
        if weights is not None:
            if weights.shape != rows.shape and len(weights) + len(rows):
                raise RoutingError(
                    f"{self.name}: weights of shape {weights.shape} beside ids of {rows.shape}"
                )
            if isinstance(beside, Mapping) and (
                beside.get("start") != start or beside.get("missing") != count_missing(weights)
            ):
                raise RoutingError(f"{self.name}: weights that are not of the ids beside them")
        if self.arrays and not len(rows):
            # a stream may have any number of these, and each choice has all arrays of its prompt
            return
        self.arrays.append(rows)
        self.weights.append(weights)
        self.length += len(rows)
        self.num_bytes += 2 * rows.size + (0 if weights is None else weights.nbytes) + _ARRAY_BYTES


@dataclass
class _Choice(_Part):
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: list[float | None] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)  # of tokens, in the order of the chunks

    def texts_of_all(self, prompt_len: int | None, num_tokens: int) -> Texts | None:
        """The texts of all tokens; None if there are none, or their places are unknown."""
        if not any(self.texts):
            return None
        if prompt_len is not None and self.token_ids is not None:
            num_tokens = prompt_len + len(self.token_ids)
        num_absent = num_tokens - len(self.texts)
        # with `echo`, log-probabilities have the prompt's texts too
        if num_absent not in (0, prompt_len):
            return None
        return Texts(num_absent, self.texts)


def _same_end(index: int, ends: Mapping[str, int]) -> int | None:
    """Where the prompt ends, from all that say so."""
    if len(set(ends.values())) > 1:
        said = ", ".join(f"at {end} by its {name}" for name, end in ends.items())
        raise RoutingError(f"choice {index}: the prompt ends {said}")
    return next(iter(ends.values()), None)


def _check_length(routing: Routing) -> None:
    """Raises `RoutingError` if the rows do not fit the number of tokens or the histogram that the
    response has."""
    if routing.prompt_len is None:
        return
    if (
        routing.histogram is not None
        and routing.prompt_len + routing.histogram["rows"] != routing.end
    ):
        raise RoutingError(
            f"choice {routing.index}: rows up to {routing.end}, but a histogram of {routing.histogram['rows']} rows "
            f"after {routing.prompt_len} prompt tokens"
        )
    expected, tokens = routing.prompt_len, f"{routing.prompt_len} prompt"
    if routing.token_ids is not None:
        expected = max(routing.prompt_len + len(routing.token_ids) - 1, routing.start)
        tokens += f" and {len(routing.token_ids)} generated"
    is_short = routing.end < expected and routing.finish_reason != "abort"
    if is_short or (routing.end > expected and routing.token_ids is not None):
        raise RoutingError(
            f"choice {routing.index}: rows up to {routing.end}, but {tokens} tokens have rows up to {expected}"
        )


def _histogram(value: Any) -> Histogram:
    found: Histogram = value
    if not isinstance(value, Mapping) or not all(
        _is_count(value.get(name)) for name in ("rows", "missing")
    ):
        raise RoutingError(f"not a histogram: {shown(value)}")
    if not _is_table(value.get("counts"), _is_count):
        raise RoutingError(
            "not a histogram: its counts are not lists of counts, one for each layer"
        )
    if "weights" in value and not (
        _is_table(value["weights"], is_number)
        and [len(row) for row in value["weights"]] == [len(row) for row in found["counts"]]
    ):
        raise RoutingError(
            "not a histogram: its weights are not lists of numbers beside its counts"
        )
    return found


def _is_table(value: Any, holds: Callable[[Any], bool]) -> bool:
    """Whether `value` is a list of lists of one length, of such values."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(row, list) and 0 < len(row) == len(value[0]) and all(map(holds, row))
            for row in value
        )
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number that float32 can hold."""
    return type(value) in (int, float) and abs(value) <= _LARGEST_NUMBER


def _logprobs(value: Any) -> tuple[list[float | None], list[str | None]]:
    """Numbers and texts of tokens: of a completion, or of a chat or `/inference/v1/generate`."""
    content = _get(value, "content")
    if content is None:
        numbers, texts = (_listed(_get(value, name), name) for name in ("token_logprobs", "tokens"))
    else:
        tokens = _listed(content, "log-probabilities")
        numbers, texts = ([_get(token, name) for token in tokens] for name in ("logprob", "token"))
    if not all(one is None or is_number(one) for one in numbers):
        raise RoutingError("not log-probabilities")
    return list(numbers), [one if isinstance(one, str) else None for one in texts]


def without_envelope(chunk: Any) -> Any:
    """The response in a line of a batch's output file, `{"custom_id", "response": {"body"},
    "error"}`; else `chunk`."""
    if isinstance(chunk, _PLAIN) or _get(chunk, "custom_id") is None:
        return chunk
    response = _get(chunk, "response")
    body = None if response is None else _get(response, "body")
    return chunk if body is None else body


def _get(thing: Any, name: str) -> Any:
    """A field of a JSON object or of an object of the OpenAI client; also one that LiteLLM put
    aside."""
    # the usual case, and much faster
    if type(thing) is dict and "provider_specific_fields" not in thing:
        return thing.get(name)
    if isinstance(thing, _PLAIN):
        raise RoutingError(f"{shown(thing)} in place of an object")
    found, aside = (
        thing.get(each) if isinstance(thing, Mapping) else getattr(thing, each, None)
        for each in (name, "provider_specific_fields")
    )
    return aside.get(name) if found is None and isinstance(aside, Mapping) else found


def _get_message(error: Any) -> Any:
    return (
        error
        if isinstance(error, str)
        else shown(error)
        if isinstance(error, _PLAIN)
        else _get(error, "message")
    )


def _listed(value: Any, name: str) -> Sequence[Any]:
    """A list that may be absent."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RoutingError(f"not an answer: its {name} are {type(value).__name__}")
    return value


def _index(choice: Any) -> int:
    value = _get(choice, "index")
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise RoutingError(f"not the index of a choice: {shown(value)}")
    return value


def _ids(value: Any) -> tuple[int, ...] | None:
    """Token ids, which may be absent."""
    if value is None:
        return None
    try:
        ids = tuple(map(operator.index, value))
    except TypeError as error:
        raise RoutingError(f"not token ids: {shown(value)}") from error
    if ids and not 0 <= min(ids) <= max(ids) <= _LARGEST:
        raise RoutingError(f"not token ids: from {min(ids)} to {max(ids)}")
    return ids


def _arrays_of_prompts(value: Any) -> list[Any]:
    """One array for each prompt: the field is an array, or a list of them for a list of prompts."""
    depth, inner = 0, value
    while isinstance(inner, list) and inner:
        depth, inner = depth + 1, inner[0]
    return [value] if depth in (0, 3) else value  # an array as nested lists has three levels


def _joined(arrays: list[NDArray[Any]], shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """[n, L, K]; an array of no rows has no shape."""
    arrays = [array for array in arrays if len(array)]
    return (
        np.concatenate(arrays).astype(dtype, copy=False)
        if arrays
        else np.empty((0, *shape), dtype=dtype)
    )
