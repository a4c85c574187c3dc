"""Parses lines of server-sent events."""

import json
from collections.abc import Iterator
from typing import Any

FIELDS = (b"data", b"event", b"id", b"retry", b"")  # the last begins comments


class EventError(ValueError):
    """The stream does not consist of JSON events and a final `[DONE]`."""


class _NotJsonError(EventError):
    pass


class EventReader:
    """Server-sent events from whole lines, with or without their ends.

    A line without its end may be cut within its JSON: httpx takes U+2028 and the like for ends of
    lines. The event then comes with the line after it, so that its pieces are parsed once, however
    many there are.
    """

    def __init__(self) -> None:
        self.done = False
        self._pieces: list[bytes] = []  # of the JSON of an event that was cut

    def feed(self, text: str | bytes) -> Iterator[Any]:
        """The JSON of the events in a line or several."""
        if not isinstance(text, str | bytes):
            raise TypeError(f"text must be str or bytes, not {type(text).__name__}")
        as_bytes = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        for line in as_bytes.split(b"\n"):
            yield from self._feed_line(line)

    def _feed_line(self, line: bytes) -> Iterator[Any]:
        name, _, payload = line.strip().partition(b":")
        payload = payload.strip()
        is_rest_of_event = bool(self._pieces) and line and name != b"data"
        if is_rest_of_event:
            self._pieces.append(line)
            return
        if self._pieces:  # here the next event begins
            whole = b"".join(self._pieces)
            self._pieces = []
            yield self._event(whole)
        if name not in FIELDS:
            raise EventError(f"not a whole line: {line[:80]!r}")
        if name != b"data" or not payload:
            return
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            event = self._event(payload)
        except _NotJsonError:
            self._pieces = [payload]
            return
        yield event

    def _event(self, payload: bytes) -> Any:
        try:
            event = json.loads(payload)
        except ValueError as error:
            raise _NotJsonError(f"an event is not JSON: {payload[:80]!r}") from error
        if self.done:
            raise EventError("an event after [DONE]")
        return event
