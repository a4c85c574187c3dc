"""Names of fields in forms, which come with files: they are read as their bytes pass."""

import codecs
import re
from collections.abc import Iterator
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Message, Receive, Send

from routed_experts.protocol.models import PREFIXES
from routed_experts.server.http.misplaced import unread_fields

_BRACKETS = re.compile(r"[][]")
_NESTED = re.compile(r"[^][]+(?:\[[^][]*\])+")
"""The name of a field of an object or list, as clients write it: `object[field]`, `list[]`."""
_DEEPEST = 200
"""Parts of a name that are looked into as an object."""


def routing_fields_of(name: str) -> Iterator[str]:
    """The routing fields in the name of a form's field, by the rule of JSON bodies."""
    parts = _BRACKETS.split(name)
    ours = [part for part in parts if part.startswith(PREFIXES)]
    if not ours:
        return
    if len(parts) <= _DEEPEST and _NESTED.fullmatch(name):
        yield from unread_fields(_nested(parts[0], parts[1::2]))
    else:
        yield from ours


def _nested(name: str, keys: list[str]) -> dict[str, Any]:
    """The object of a form in which a field `name` has something at these keys."""
    value: Any = ""
    for key in reversed(keys):
        is_index = key == "" or key.isdecimal()
        value = [value] if is_index else {key: value}
    return {name: value}


def _charset_of(options: dict[bytes, bytes]) -> str:
    """In which the form's parser reads names: as the content type says, else UTF-8."""
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    try:
        codecs.lookup(charset)
    except (LookupError, ValueError):  # at which FastAPI ends the request
        return "utf-8"
    return charset


def _decoded(name: bytes, charset: str) -> str:
    """As the form's parser reads it."""
    try:
        return name.decode(charset)
    except (UnicodeError, LookupError):  # of a codec that is none of text, too
        return name.decode("latin-1")


class FormNames:
    """Finds the names of fields in a form of several parts, with the parser that FastAPI reads the
    form with. It keeps no more than the headers of one part."""

    def __init__(self, content_type: str) -> None:
        self._names: list[str] = []
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""  # a part's last, as FastAPI takes it
        _, options = parse_options_header(content_type)
        self._charset = _charset_of(options)
        self._parser = self._parser_of(options.get(b"boundary", b""))

    def _parser_of(self, boundary: bytes) -> MultipartParser | None:
        try:
            return MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._read_header_name,
                    "on_header_value": self._read_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                },
            )
        except FormParserError:  # of a boundary, which FastAPI reports
            return None

    def read(self, chunk: bytes) -> list[str]:
        """The names whose headers end in the next bytes of the body."""
        self._names = []
        if self._parser is not None:
            try:
                self._parser.write(chunk)
            except FormParserError:  # which FastAPI reports
                self._parser = None
        return self._names

    def _begin_part(self) -> None:
        self._disposition = b""

    def _read_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _read_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = b""
        self._header_value = b""

    def _end_headers(self) -> None:
        name = parse_options_header(self._disposition)[1].get(b"name", b"")
        self._names.append(_decoded(name, self._charset))


class CheckedForm:
    """What an application receives and sends while it reads a form. A form with a routing field is
    read to its end, so that the client hears of the error, and the application's answer is
    dropped."""

    def __init__(self, content_type: str, receive: Receive, send: Send) -> None:
        self.routing_field: str | None = None  # the first that was found
        self._names = FormNames(content_type)
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        message = await self._receive()
        self._look_into(message)
        if self.routing_field is None:
            return message
        while message.get("more_body", False):
            message = await self._receive()
        raise RoutingFieldError

    async def send(self, message: Message) -> None:
        if self.routing_field is None:
            await self._send(message)

    def _look_into(self, message: Message) -> None:
        for name in self._names.read(message.get("body", b"")):
            for field in routing_fields_of(name):
                self.routing_field = self.routing_field or field


class RoutingFieldError(Exception):
    """Ends the reading of a form that has a routing field."""
