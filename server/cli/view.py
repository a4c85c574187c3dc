"""`routed-experts view`: the page for answers in a file, without a model and without vLLM."""

import argparse
import io
import json
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from routed_experts.server.cli.console import CommandError
from routed_experts.server.cli.saved import ModelInfo, add_flags, info_of, opened, read
from routed_experts.server.page import HEADERS, PAGE_PATH, page_file

SAVED_PATH = f"{PAGE_PATH}/saved"
HOST = "127.0.0.1"


class ViewServer(ThreadingHTTPServer):
    """Serves the page and the texts of files to browsers on this machine.

    Attributes:
        page_config: the files' names, and what the command line states about the model.
    """

    daemon_threads = True

    def __init__(self, texts: Mapping[str, str], port: int, given: ModelInfo | None = None) -> None:
        """`texts` are the files' by their names, as `saved.read` takes them."""
        super().__init__((HOST, port), _Handler)
        self.texts = [text.encode() for text in texts.values()]
        known = {name: value for name, value in asdict(given or ModelInfo()).items() if value is not None}
        self.page_config = {"saved": json.dumps(list(texts)), "given": json.dumps(known)}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}{PAGE_PATH}"


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer

    def do_GET(self) -> None:
        # A site elsewhere can give a name of its own this address, and would read the file as if it were from there.
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}:
            self._answer(403, b"Open this page by the address that the command printed.", "text/plain")
            return
        path = self.path.partition("?")[0]
        folder, _, place = path.rpartition("/")
        if folder == SAVED_PATH and place.isdecimal() and int(place) < len(self.server.texts):
            self._answer(200, self.server.texts[int(place)], "text/plain; charset=utf-8")
            return
        if (found := page_file(path, self.server.page_config)) is None:
            self._answer(404, b"There is no such file.", "text/plain")
        else:
            self._answer(200, *found)

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody wants to read this."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routed-experts view",
        description="Shows saved responses in a browser.",
    )
    parser.add_argument(
        "file", nargs="+", help="responses to requests with return_routed_experts; - for standard input"
    )
    parser.add_argument("--port", type=int, default=0, help="local port (default: any free port)")
    parser.add_argument("--no-browser", action="store_true", help="only print the URL")
    add_flags(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts view` until it is interrupted; returns the exit status.

    Raises:
        CommandError: it cannot be carried out.
    """
    args = parse(argv)
    given = info_of(args)
    texts = read_texts(args.file, given)
    try:
        server = ViewServer(texts, args.port, given)
    except (OSError, OverflowError) as error:
        raise CommandError(
            f"Port {args.port} cannot be used ({error}): choose another with --port, or leave it out."
        ) from error
    try:
        print(f"Showing {', '.join(texts)} at {server.url} until Ctrl + C.", flush=True)
        if not args.no_browser:
            webbrowser.open(server.url)
        server.serve_forever()
    except KeyboardInterrupt:  # how it is ended
        print()
    return 0


def read_texts(paths: Sequence[str], given: ModelInfo) -> dict[str, str]:
    """The texts of files, by their names.

    Raises:
        CommandError: one of them cannot be read, or holds something else than answers with rows.
    """
    texts = {}
    for name, file in opened(paths):
        try:
            texts[name] = file.read()
        except UnicodeDecodeError as error:
            raise CommandError(f"{name} cannot be read: it is not UTF-8 text.") from error
    for answer in read(((name, io.StringIO(text)) for name, text in texts.items()), given):
        try:
            answer.routings()
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{answer.where}: {error}.") from error
    return texts
