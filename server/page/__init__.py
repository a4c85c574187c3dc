"""The page that shows the experts of a response: static files. It reads saved responses itself."""

from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files

PAGE_PATH = "/routed_experts"
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
