"""Parses server-sent events from text that may be cut anywhere."""

import json
from collections.abc import Iterator
from typing import Any

_DATA = b"data:"


class EventError(ValueError):
    """The stream does not consist of JSON events and a final `[DONE]`."""


class EventReader:
    """Server-sent events from lines, with or without their ends, or from bytes cut anywhere."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""
        # Whether lines come with their ends. Until one of these is true, a piece may be a line or the beginning of one.
        self._with_ends = self._without_ends = False
        self._has_dropped = False

    def feed(self, text: str | bytes) -> Iterator[Any]:
        """The JSON of the events that `text` completes."""
        if not isinstance(text, str | bytes):
            raise TypeError(f"text must be str or bytes, not {type(text).__name__}")
        self._rest += text.encode(errors="surrogatepass") if isinstance(text, str) else text
        *lines, self._rest = self._rest.split(b"\n")
        if lines and not self._with_ends:
            self._with_ends = True
            if self._has_dropped and not self._without_ends:
                del lines[0]  # the end of a comment whose beginning was dropped
        for line in lines:
            yield from self._read(line, whole=True)
        # The rest is a line without its end, or the beginning of one. Complete JSON parses; incomplete JSON does not.
        if self._rest.startswith(_DATA[: len(self._rest)]):
            if self._rest.rstrip().endswith((b"}", b"]")):
                yield from self._read(self._rest, whole=False)
        elif self._without_ends or not self._with_ends:
            self._rest = b""  # a comment or another field
            self._has_dropped = True

    def _read(self, line: bytes, *, whole: bool) -> Iterator[Any]:
        payload = line.removeprefix(_DATA).strip() if line.startswith(_DATA) else b""
        if payload == b"[DONE]":
            self.done = True
        elif payload:
            try:
                event = json.loads(payload)
            except ValueError as error:
                if whole:
                    raise EventError(f"an event is not JSON: {payload[:80]!r}") from error
                return
            if self.done:
                raise EventError("an event after [DONE]")
            yield event
        if not whole:
            self._rest = b""
            self._without_ends = not self._with_ends
