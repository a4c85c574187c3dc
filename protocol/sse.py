"""Parses lines of server-sent events."""

import json
from collections.abc import Iterator
from typing import Any

_FIELDS = (b"data", b"event", b"id", b"retry", b"")  # the last begins comments


class EventError(ValueError):
    """The stream does not consist of JSON events and a final `[DONE]`."""


class EventReader:
    """Server-sent events from whole lines, with or without their ends.

    A line without its end may be cut within its JSON: httpx takes U+2028 and the like for ends of lines.
    """

    def __init__(self) -> None:
        self.done = False
        self._cut = b""  # the JSON of an event, so far

    def feed(self, text: str | bytes) -> Iterator[Any]:
        """The JSON of the events in a line or several."""
        if not isinstance(text, str | bytes):
            raise TypeError(f"text must be str or bytes, not {type(text).__name__}")
        for line in (text.encode(errors="surrogatepass") if isinstance(text, str) else text).split(b"\n"):
            name, _, payload = line.strip().partition(b":")
            if self._cut and (not line or name == b"data"):
                raise EventError(f"an event is not JSON: {self._cut[:80]!r}")
            if not self._cut and name not in _FIELDS:
                raise EventError(f"not a whole line: {line[:80]!r}")
            payload = self._cut + line if self._cut else payload.strip()
            if payload == b"[DONE]":
                self.done = True
            elif payload and (self._cut or name == b"data"):
                try:
                    event, self._cut = json.loads(payload), b""
                except ValueError:
                    self._cut = payload
                    continue
                if self.done:
                    raise EventError("an event after [DONE]")
                yield event
