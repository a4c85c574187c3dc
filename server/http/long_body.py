"""Reads JSON bodies with long arrays.

A parser needs 100 ms and more for an array of 25 MB, and Python runs nothing else meanwhile, so
that all streams would stop. So the text of such an array is cut out by its quotation marks. What
stands in its place is put back behind the parser, and is no copy: where the text is in the body.
All of this runs in a thread, in pieces.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from routed_experts.protocol.input_fields import LongText
from routed_experts.protocol.models import BIAS, REPLAY
from routed_experts.server.outputs.threads import Threads, pause

LONG_BYTES = 1 << 20
"""Of texts that are cut out, and of bodies that are looked at."""
FIELDS = (REPLAY, BIAS)
"""Of requests, whose arrays may be long."""
_PIECE_BYTES = 1 << 21
"""Searched at once, in a fraction of a millisecond."""
_READER = Threads(1, "routed-experts-body")
_KEY = b'"data"'
_VALUE = re.compile(rb'[ \t\r\n]{0,64}:[ \t\r\n]{0,64}"')
"""More blanks than that are the parser's."""
_MOST_KEYS = 1 << 12
"""More than a request has arrays. A body with more of them is the parser's: it is the faster."""
_MARKER = secrets.token_hex(16)
"""No client can know it, so that no text of a body is taken for a marker."""


class _Cut(NamedTuple):
    """A text that was cut out of a body, without its quotation marks."""

    start: int
    end: int
    marker: str  # what stands in its place


async def joined(parts: Sequence[bytes]) -> bytes:
    """The body that came in these parts."""
    if sum(map(len, parts)) < LONG_BYTES:
        return b"".join(parts)
    return await _READER.run(b"".join, parts)  # which lets other threads run


async def read(body: bytes, function: Callable[[bytes], Any]) -> Any:
    """What `function` reads in a body, for the event loop: a long one in a thread."""
    if len(body) < LONG_BYTES:
        return function(body)
    return await _READER.run(function, body)


def parse(body: bytes) -> Any:
    """As `json.loads`, but for long texts of arrays, in whose place a `LongText` is."""
    cuts = list(_cuts(body)) if len(body) >= LONG_BYTES else []
    if not cuts:
        return json.loads(body)
    parts: list[bytes] = []
    at = 0
    for cut in cuts:
        parts += [body[at : cut.start], cut.marker.encode()]
        at = cut.end
    parsed = json.loads(b"".join([*parts, body[at:]]))
    texts = {cut.marker: LongText(memoryview(body)[cut.start : cut.end]) for cut in cuts}
    if _put_back(parsed, texts) != len(cuts):
        # Something else has such a key, or a field is there twice.
        return json.loads(body)
    return parsed


def _cuts(body: bytes) -> Iterator[_Cut]:
    """The long texts under the key `data`.

    A quotation mark without a backslash before it begins or ends a text. It does not end one here,
    as `data` would then stand outside of a text. So the key is one.
    """
    at = body.find(_KEY)
    for _ in range(_MOST_KEYS):
        if at < 0:
            break
        behind_key = at + len(_KEY)
        value = _VALUE.match(body, behind_key)
        if value is None or body[at - 1 : at] == b"\\":
            at = body.find(_KEY, behind_key)
            continue
        start = value.end()
        end = _end_of_text(body, start)
        if end - start >= LONG_BYTES:
            yield _Cut(start, end, f"{_MARKER} {start}")
        at = body.find(_KEY, max(end, behind_key))


def _end_of_text(body: bytes, start: int) -> int:
    """Where the next quotation mark is; -1 if there is none, or a backslash before it."""
    for first in range(start, len(body), _PIECE_BYTES):
        end = body.find(b'"', first, first + _PIECE_BYTES)
        if body.find(b"\\", first, end if end >= 0 else first + _PIECE_BYTES) >= 0:
            return -1
        if end >= 0:
            return end
        pause()
    return -1


def _put_back(parsed: Any, texts: dict[str, LongText]) -> int:
    """Puts texts in the place of their markers, in the fields whose arrays may be long. Returns in
    how many places."""
    count = 0
    for array in arrays_of(parsed):
        marker = array.get("data")
        if isinstance(marker, str) and marker in texts:
            array["data"] = texts[marker]
            count += 1
    return count


def arrays_of(body: Any) -> Iterator[dict[str, Any]]:
    """The objects in a request's body, of any form, that may hold long arrays under `data`."""
    for name in FIELDS:
        value = body.get(name) if isinstance(body, dict) else None
        for array in value if isinstance(value, list) else [value]:
            if isinstance(array, dict):
                yield array
