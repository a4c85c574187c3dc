"""The page that shows the experts of a response: static files, and a reader of saved responses."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from io import StringIO

from routed_experts.protocol.saved import ModelInfo, page_lines

PAGE_PATH = "/routed_experts"
READ_PATH = "/v1/routed_experts/saved"
MAX_BYTES = 32 << 20
TOO_LARGE = f"Files of more than {MAX_BYTES >> 20} MiB at once: open them with routed-experts view."
MOST_SIGNS = {"[": 5 << 19, "{": 1 << 19, "\n": 1 << 22}
"""Of files that are read at once. An empty list of three bytes takes 64 bytes of memory and a
microsecond, an object with two fields 280 bytes. Rows of four experts as lists have a bracket per 13
bytes, log-probabilities a brace per 70, and JSON over lines a line per 8. Commas have no limit: such
rows have as many as fit, and the values between them take at most 16 times the bytes of the
file."""
TOO_MANY_SIGNS = (
    "These files have more lists, objects or lines than are read at once: "
    "open them with routed-experts view."
)
INDEX = "index.html"

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json",
}

HEADERS = {
    # Nothing from other hosts and no inline scripts, because the tokens of a model are untrusted.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """The content and media type of each file of the page."""
    static = files(__name__) / "static"
    return {
        file.name: (file.read_bytes(), CONTENT_TYPES[file.name.rpartition(".")[2]])
        for file in static.iterdir()
        if file.name.rpartition(".")[2] in CONTENT_TYPES
    }


def page_file(path: str, page_config: Mapping[str, str]) -> tuple[bytes, str] | None:
    """The content and media type of the file at a URL path; None if there is none.

    `page_config` becomes `data-` attributes of the page.
    """
    if path == PAGE_PATH:
        content, kind = page_files()[INDEX]
        attributes = "".join(
            f' data-{name}="{escape(value)}"' for name, value in page_config.items()
        )
        return content.replace(b"<html", f"<html{attributes}".encode(), 1), kind
    folder, _, name = path.rpartition("/")
    return page_files().get(name) if folder == PAGE_PATH and name != INDEX else None


def read_saved(body: bytes | bytearray) -> Iterator[str]:
    """The lines of `page_lines` for files in a request's body, `[[name, text], …]`. Raises
    `ValueError` for another, and for one that takes too much to parse."""
    _check_signs(lambda sign: body.count(sign.encode()))
    named_texts = _named_texts(body)
    if named_texts is None:
        raise ValueError("The body must be a list of files, each [name, text].")
    # Again, as a body can have them escaped.
    _check_signs(lambda sign: sum(text.count(sign) for _, text in named_texts))
    files = ((name, StringIO(text)) for name, text in named_texts)
    return page_lines(files, ModelInfo(), is_upload=True)


def _check_signs(count: Callable[[str], int]) -> None:
    """Raises `ValueError` if there are too many of a sign."""
    if any(count(sign) > most for sign, most in MOST_SIGNS.items()):
        raise ValueError(TOO_MANY_SIGNS)


def _named_texts(body: bytes | bytearray) -> list[tuple[str, str]] | None:
    """The files in a body; None if it has another form. An error from here would hold all that was
    parsed, until Python looks for cycles."""
    try:
        named_texts = [(str(name), text) for name, text in json.loads(body)]
    except (TypeError, ValueError, RecursionError):
        return None
    are_texts = all(isinstance(text, str) for _, text in named_texts)
    return named_texts if are_texts else None
