"""The page with its responses as one file of HTML, which needs no server: to be sent, or put beside
a paper."""

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from routed_experts.server.page import INDEX, page_files

MAX_FILE_BYTES = 64 << 20
TOO_LARGE = f"More than {MAX_FILE_BYTES >> 20} MiB of responses: choose fewer, or show them with routed-experts view."
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
"""Nothing from other hosts, as on a server; and what is in the file itself."""
_IMPORT = re.compile(r'from "\./([a-z_]+\.js)"')


def page_with(files: Sequence[tuple[str, Path]], title: str) -> str:
    """The page with files of responses, each with its name. Raises `ValueError` if they are too many,
    or no text."""
    if sum(path.stat().st_size for _, path in files) > MAX_FILE_BYTES:
        raise ValueError(TOO_LARGE)
    named_texts = [(name, _text_of(name, path)) for name, path in files]
    page = page_files()[INDEX][0].decode()
    page = page.replace("<html", "<html data-one-file", 1)
    page = page.replace("<title>Routed experts", f"<title>{escape(title)}", 1)
    page = re.sub(
        r'<link rel="stylesheet"[^>]*>', lambda _: f"<style>{_text('style.css')}</style>", page
    )
    page = page.replace("routed_experts/icon.svg", _data_url("icon.svg", _text("icon.svg")))
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}" />'
    page = page.replace('<meta charset="utf-8" />', f'<meta charset="utf-8" />\n    {policy}', 1)
    return re.sub(r"<script [^>]*></script>", lambda _: _scripts(named_texts), page)


def _text_of(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} cannot be read: it is not UTF-8 text.") from error


def _scripts(named_texts: list[tuple[str, str]]) -> str:
    """The modules by their names, the responses, and the start."""
    imports = {
        name: _data_url(name, _IMPORT.sub(r'from "\1"', content.decode()))
        for name, (content, _) in page_files().items()
        if name.endswith(".js")
    }
    return (
        f'<script type="importmap">{_in_html({"imports": imports})}</script>\n'
        f'    <script type="application/json" id="responses">{_in_html(named_texts)}</script>\n'
        '    <script type="module">import "main.js";</script>'
    )


def _in_html(value: object) -> str:
    """JSON that ends no element, whatever tokens it has."""
    return json.dumps(value).replace("<", "\\u003c")


def _data_url(name: str, content: str) -> str:
    kind = page_files()[name][1].replace(" ", "")
    return f"data:{kind};base64,{b64encode(content.encode()).decode()}"


def _text(name: str) -> str:
    return page_files()[name][0].decode()
