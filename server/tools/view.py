"""`routed-experts view`: the page for saved responses. Needs no model and no vLLM."""

import argparse
import json
import shutil
import webbrowser
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TextIO

from routed_experts.protocol.saved import MAX_PAGE_BYTES, ModelInfo, Reader, check_shown, page_lines
from routed_experts.server.cli.console import CommandError, progress
from routed_experts.server.page import HEADERS, PAGE_PATH, page_file, read_saved
from routed_experts.server.tools.saved import STDIN, add_flags, files_in, info_of

SAVED_PATH = f"{PAGE_PATH}/saved"
HOST = "127.0.0.1"
_NAMED = 5  # files in the sentence that the command prints


@dataclass(frozen=True)
class ViewedFile:
    """A file with responses. It is read anew whenever the page asks for it, as it may be larger than the memory."""

    name: str  # as the page shows it
    path: Path
    about: ModelInfo  # what the files before it say about their model

    def lines(self, given: ModelInfo) -> Iterator[str]:
        """The responses as the page shows them."""
        return page_lines(self._open(), given, self.about)

    def _open(self) -> Iterator[tuple[str, TextIO]]:
        with self.path.open(encoding="utf-8-sig") as file:
            yield self.name, file


class ViewServer(ThreadingHTTPServer):
    """Serves the page and the responses in files to browsers on this machine."""

    daemon_threads = True

    def __init__(self, viewed: Sequence[ViewedFile], port: int, given: ModelInfo | None = None) -> None:
        super().__init__((HOST, port), _Handler)
        self.viewed, self.given = viewed, given or ModelInfo()
        self.page_config = {"saved": json.dumps([[each.name, each.path.stat().st_size] for each in viewed])}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}{PAGE_PATH}"


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer

    def do_POST(self) -> None:
        """Reads files that are opened in the page."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            self._respond(200, "application/jsonl", map(str.encode, read_saved(body)))
        except ValueError as error:
            self._respond(400, "application/json", [json.dumps({"error": {"message": str(error)}}).encode()])

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        folder, _, place = path.rpartition("/")
        if folder == SAVED_PATH and place.isdecimal() and int(place) < len(self.server.viewed):
            lines = self.server.viewed[int(place)].lines(self.server.given)
            self._respond(200, "application/jsonl", map(str.encode, lines))
        elif found := page_file(path, self.server.page_config):
            content, kind = found
            self._respond(200, kind, [content])
        else:
            self._respond(404, "text/plain", [b"File not found."])

    def _respond(self, status: int, kind: str, parts: Iterable[bytes]) -> None:
        # Against DNS rebinding: another site could point its own name to this address and read the files.
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}:
            address = b"Open this page at the address that the command printed."
            status, kind, parts = 403, "text/plain", [address]
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.writelines(parts)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="routed-experts view", description="Shows saved responses in a browser.")
    parser.add_argument(
        "file",
        nargs="*",
        help="responses to requests with return_routed_experts, or folders of them; - for standard input; without any, "
        "the page has an example",
    )
    parser.add_argument("--port", type=int, default=0, help="local port (default: any free port)")
    parser.add_argument("--no-browser", action="store_true", help="only print the URL")
    add_flags(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts view` until it is interrupted; returns the exit status."""
    args = parse(argv)
    given = info_of(args)
    with ExitStack() as stack:
        viewed = viewed_files(args.file, given, stack)
        try:
            server = ViewServer(viewed, args.port, given)
        except (OSError, OverflowError) as error:
            raise CommandError(
                f"Port {args.port} cannot be used ({error}): choose another with --port, or omit --port."
            ) from error
        try:
            names = ", ".join(each.name for each in viewed[:_NAMED]) or "the page"
            more = f" and {len(viewed) - _NAMED} more files" if len(viewed) > _NAMED else ""
            print(f"Showing {names}{more} at {server.url} until Ctrl + C.", flush=True)
            if not args.no_browser:
                webbrowser.open(server.url)
            server.serve_forever()
        except KeyboardInterrupt:  # the normal end
            print()
    return 0


def viewed_files(paths: Sequence[str], given: ModelInfo, stack: ExitStack) -> list[ViewedFile]:
    """The files that have responses, each read once, one response at a time. `stack` keeps a copy of standard input."""
    viewed, about = [], ModelInfo()
    for path in progress(files_in(paths), desc="reading", unit=" files"):
        name = "standard input" if path == STDIN else path
        reader, found = Reader(given, about), False
        try:
            file = _kept(stack) if path == STDIN else Path(path)
            with file.open(encoding="utf-8-sig") as text:
                for answer in reader.read(name, text):
                    found = True
                    collector = answer.collected(most_bytes=MAX_PAGE_BYTES)
                    for routing in answer.choices_in(collector, unfinished=True):
                        check_shown(answer, routing)
        except OSError as error:
            raise CommandError(f"{name} cannot be read: {error.strerror}.") from error
        viewed += [ViewedFile(name, file, about)] if found else []
        about = reader.about
    if paths and not viewed:
        raise CommandError(f"{name} has no responses.")
    return viewed


def _kept(stack: ExitStack) -> Path:
    """A copy of standard input."""
    copy = stack.enter_context(NamedTemporaryFile())  # noqa: SIM115
    with open(0, "rb", closefd=False) as source:
        shutil.copyfileobj(source, copy)
    copy.flush()
    return Path(copy.name)
