"""Reads JSON bodies with long arrays.

A parser needs 100 ms and more for an array of 25 MB, and Python runs nothing else meanwhile, so
that all streams would stop. The text of such an array is cut out by its quotation marks, which
takes a few milliseconds, and put back behind the parser.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from routed_experts.protocol.models import BIAS, REPLAY

LONG_BYTES = 1 << 20
"""Of texts that are cut out, and of bodies that are looked at."""
_KEY = b'"data"'
_VALUE = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*"')


class _Cut(NamedTuple):
    """A text that was cut out of a body, without its quotation marks."""

    start: int
    end: int
    marker: str  # what stands in its place


def parse(body: bytes) -> Any:
    """As `json.loads`."""
    cuts = list(_cuts(body)) if len(body) >= LONG_BYTES else []
    if not cuts:
        return json.loads(body)
    parts: list[bytes] = []
    at = 0
    for cut in cuts:
        parts += [body[at : cut.start], cut.marker.encode()]
        at = cut.end
    parsed = json.loads(b"".join([*parts, body[at:]]))
    try:
        texts = {cut.marker: str(memoryview(body)[cut.start : cut.end], "ascii") for cut in cuts}
    except UnicodeDecodeError:
        return json.loads(body)
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
    while at >= 0:
        behind_key = at + len(_KEY)
        value = _VALUE.match(body, behind_key)
        if value is None or body[at - 1 : at] == b"\\":
            at = body.find(_KEY, behind_key)
            continue
        start = value.end()
        end = body.find(b'"', start)
        if end - start >= LONG_BYTES and body.find(b"\\", start, end) < 0:
            yield _Cut(start, end, f"cut out at {start}")
        at = body.find(_KEY, max(end, behind_key))


def _put_back(parsed: Any, texts: dict[str, str]) -> int:
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
    for name in (REPLAY, BIAS):
        value = body.get(name) if isinstance(body, dict) else None
        for array in value if isinstance(value, list) else [value]:
            if isinstance(array, dict):
                yield array
