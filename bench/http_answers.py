"""Reads the bytes of an answer back, after the run: when its tokens came, and that every row is
there."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from routed_experts.protocol import codec

Arrivals = list[tuple[float, bytes]]
"""What the socket gave: when, and which bytes."""


@dataclass(frozen=True)
class Routing:
    """What every row of the served model looks like."""

    layers: int
    top_k: int
    num_experts: int


OURS = ("split", "narrow", "at_end", "reference")
"""What `Expected.rows` says of this project's answers: int16 in chunks, uint8 in chunks, at the end,
and by reference."""


@dataclass(frozen=True)
class Expected:
    """What one request must bring back."""

    prompt_len: int
    new_tokens: int
    choices: int
    rows: str  # one of OURS, "joined" (vLLM's own form) or "none"


@dataclass
class Answer:
    """One answer as the client saw it."""

    first: float  # when its first event came, or, if it was not streamed, its first byte
    last: float  # when its last byte came
    size: int  # bytes received, headers included
    # when each came, of each choice; empty if not streamed
    tokens: list[list[float]] = field(default_factory=list)
    rows: int = 0  # of all choices and the prompt together
    fault: str = ""  # what is wrong with it


class Fault(Exception):
    """An answer is not what it must be."""


def read(arrivals: Arrivals, expected: Expected, routing: Routing, token_chars: int) -> Answer:
    """The answer in `arrivals`; what is wrong with it stands in `fault`."""
    if not arrivals:
        return Answer(0.0, 0.0, 0, fault="no answer")
    answer = Answer(arrivals[0][0], arrivals[-1][0], sum(len(data) for _, data in arrivals))
    try:
        _read(answer, arrivals, expected, routing, token_chars)
    except (Fault, KeyError, TypeError, ValueError) as error:
        answer.fault = f"{type(error).__name__}: {error}"[:300]
    return answer


def _read(
    answer: Answer, arrivals: Arrivals, expected: Expected, routing: Routing, token_chars: int
) -> None:
    raw = b"".join(data for _, data in arrivals)
    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not separator or b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise Fault(raw[:300].decode(errors="replace"))
    head = head.lower()
    start = len(head) + 4
    rows = _Rows(expected, routing)
    if b"text/event-stream" in head:
        answer.tokens = [[] for _ in range(expected.choices)]
        _read_events(answer, _events(raw, start, arrivals), rows, token_chars)
        counts = [len(times) for times in answer.tokens]
    else:
        content = raw[start:]
        if b"transfer-encoding: chunked" in head:  # a large answer, in parts
            content = b"".join(raw[begin:end] for begin, end in _chunks(raw, start))
        body = orjson.loads(content)
        rows.add(body)
        counts = [_num_tokens(choice, token_chars) for choice in body["choices"]]
    if counts != [expected.new_tokens] * expected.choices:
        raise Fault(f"{counts} tokens, not {expected.choices} times {expected.new_tokens}")
    answer.rows = rows.check()


def _read_events(
    answer: Answer, events: list[tuple[float, Any]], rows: "_Rows", token_chars: int
) -> None:
    """Takes down when each token of each choice came."""
    answer.first = events[0][0] if events else answer.last  # the head comes long before
    for when, event in events:
        rows.add(event)
        for choice in event["choices"]:
            answer.tokens[choice["index"]] += [when] * _num_tokens(choice, token_chars)


def _num_tokens(choice: dict[str, Any], token_chars: int) -> int:
    """How many a choice brings, as text or, from `/inference/v1/generate`, as ids."""
    if choice.get("text") is None:
        return len(choice["token_ids"] or ())
    num_tokens, rest = divmod(len(choice["text"]), token_chars)
    if rest:
        raise Fault(f"text of another length than tokens have: {choice['text']!r}")
    return num_tokens


def _events(raw: bytes, start: int, arrivals: Arrivals) -> list[tuple[float, Any]]:
    """The JSON of the server-sent events of a chunked answer, each with the time when its last byte
    came."""
    ends, total = [], 0
    for _, data in arrivals:
        total += len(data)
        ends.append(total)
    payload, payload_ends, raw_ends = bytearray(), [], []
    for begin, end in _chunks(raw, start):
        payload += raw[begin:end]
        payload_ends.append(len(payload))
        raw_ends.append(end)
    events, position, done = [], 0, False
    while (end := payload.find(b"\n\n", position)) >= 0:
        text, position = bytes(payload[position:end]), end + 2
        if done or not text.startswith(b"data: "):
            raise Fault(f"not an event: {text[:300]!r}")
        if text == b"data: [DONE]":
            done = True
            continue
        event = orjson.loads(text[6:])
        if "error" in event:
            raise Fault(str(event)[:300])
        raw_end = raw_ends[bisect_left(payload_ends, end + 2)]
        events.append((arrivals[bisect_left(ends, raw_end)][0], event))
    if not done or position != len(payload):
        raise Fault("the stream was cut off")
    return events


def _chunks(raw: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Where the chunks of a body in chunked transfer encoding begin and end; ValueError where it is
    cut off."""
    while True:
        line_end = raw.index(b"\r\n", start)
        size = int(raw[start:line_end], 16)
        if size == 0:
            return
        start = line_end + 2 + size + 2
        yield line_end + 2, start - 2


class _Rows:
    """Counts the rows of one answer, whichever way they are spread over its events."""

    def __init__(self, expected: Expected, routing: Routing) -> None:
        self._expected = expected
        self._routing = routing
        self._prompt = 0
        self._choices = [0] * expected.choices

    def add(self, event: dict[str, Any]) -> None:
        p = self._expected.prompt_len
        if event.get("prompt_routed_experts") is not None:
            self._prompt += self._count(event["prompt_routed_experts"], self._prompt)
        for choice in event["choices"]:
            if choice.get("routed_experts") is not None:
                index = choice["index"]
                start = self._choices[index] + (0 if self._expected.rows == "joined" else p)
                self._choices[index] += self._count(choice["routed_experts"], start)

    def check(self) -> int:
        """How many rows came, which must be as many as the tokens have."""
        e = self._expected
        wanted = {
            "none": (0, 0),
            **dict.fromkeys(OURS, (e.prompt_len, e.new_tokens - 1)),
            "joined": (0, e.prompt_len + e.new_tokens - 1),
        }
        if (self._prompt, self._choices) != (wanted[e.rows][0], [wanted[e.rows][1]] * e.choices):
            raise Fault(f"rows of the prompt and the choices: {self._prompt} and {self._choices}")
        return self._prompt + sum(self._choices)

    def _count(self, array: Any, start: int) -> int:
        """Rows of an array, ours or vLLM's own, after a look at all that can be seen in it."""
        if isinstance(array, dict) and (array["start"] != start or array["missing"]):
            raise Fault(f"start {array['start']} instead of {start}, missing {array['missing']}")
        shape = self._routing.layers, self._routing.top_k
        by_reference = isinstance(array, dict) and "url" in array  # what it names is not fetched
        ids = np.zeros(array["shape"], np.int8) if by_reference else codec.decode(array)
        if ids.shape[1:] != shape or (
            ids.size and not 0 <= ids.min() <= ids.max() < self._routing.num_experts
        ):
            raise Fault(f"no expert ids of {shape}: {ids.shape}")
        return len(ids)
