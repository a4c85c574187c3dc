"""`routed-experts view`: the page for saved responses. Needs no model and no vLLM."""

import argparse
import json
import re
import shutil
import sys
import webbrowser
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile, SpooledTemporaryFile
from threading import Lock
from typing import IO, Any, TextIO

from routed_experts.protocol.files import open_file
from routed_experts.protocol.saved import MAX_PAGE_BYTES, ModelInfo, Reader, check_shown, page_lines
from routed_experts.server.cli.console import CommandError, Parser, progress
from routed_experts.server.page import (
    HEADERS,
    MAX_BYTES,
    PAGE_PATH,
    READ_PATH,
    TOO_LARGE,
    page_file,
    read_saved,
)
from routed_experts.server.page.one_file import page_with
from routed_experts.server.tools.saved import (
    STDIN,
    add_flags,
    atomic_file,
    files_in,
    info_of,
    open_text,
)

SAVED_PATH = f"{PAGE_PATH}/saved"
HOST = "127.0.0.1"
ELSEWHERE = "Open this page at the address that the command printed."
_NAMED = 5  # files in the sentence that the command prints
_LENGTH = re.compile("[0-9]{1,15}")
_MOST_SKIPPED = 1 << 30
_PIECE_BYTES = 1 << 16
_BYTES_IN_MEMORY = 1 << 20  # of what comes and what goes, each; more is on disk


@dataclass(frozen=True)
class ViewedFile:
    """A file with responses. It is read anew whenever the page asks for it, as it may be larger
    than the memory."""

    name: str  # as the page shows it
    path: Path
    info_before: ModelInfo  # what the files before it say about their model

    def lines(self, model_info: ModelInfo) -> Iterator[str]:
        """The responses as the page shows them."""
        return page_lines(self._open(), model_info, self.info_before)

    def _open(self) -> Iterator[tuple[str, TextIO]]:
        with open(self.path, encoding="utf-8-sig", opener=open_file) as file:
            yield self.name, file


class ViewServer(ThreadingHTTPServer):
    """Serves the page and the responses in files to browsers on this machine."""

    daemon_threads = True
    reading = Lock()
    """Files that are opened in the page are read one after another, as each may take much
    memory. What a client sends and takes, as slowly as it likes, is in files meanwhile."""

    def __init__(
        self, viewed: Sequence[ViewedFile], port: int, model_info: ModelInfo | None = None
    ) -> None:
        super().__init__((HOST, port), _Handler)
        self.viewed = viewed
        self.model_info = model_info or ModelInfo()
        names_and_sizes = [[file.name, file.path.stat().st_size] for file in viewed]
        self.page_config = {"saved": json.dumps(names_and_sizes)}
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that leave or say nothing more."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}{PAGE_PATH}"


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    timeout = 60  # seconds in which a client says nothing

    def do_POST(self) -> None:
        """Reads files that are opened in the page."""
        length = self.headers.get("Content-Length")
        if not self._is_from_our_page():
            self._refuse(403, ELSEWHERE)
        elif self.path != READ_PATH:
            self._refuse(404, "File not found.")
        elif length is None:
            self._refuse(411, "The request needs a Content-Length.")
        elif not _LENGTH.fullmatch(length):
            self._refuse(400, "Content-Length must be a number.")
        elif int(length) > MAX_BYTES:
            self._skip(int(length))
            self._refuse(413, TOO_LARGE)
        else:
            self._read_files(int(length))

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        folder, _, index = path.rpartition("/")
        if not self._is_from_our_page():
            self._refuse(403, ELSEWHERE)
        elif (
            folder == SAVED_PATH
            and _LENGTH.fullmatch(index)
            and int(index) < len(self.server.viewed)
        ):
            lines = self.server.viewed[int(index)].lines(self.server.model_info)
            self._respond(200, "application/jsonl", map(str.encode, lines))
        elif file := page_file(path, self.server.page_config):
            content, kind = file
            self._respond(200, kind, [content])
        else:
            self._refuse(404, "File not found.")

    def _is_from_our_page(self) -> bool:
        """Another site could have its own name lead to this address, or send requests here from its
        own page."""
        hosts = self.server.hosts
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in hosts and origin in {
            None,
            *(f"http://{host}" for host in hosts),
        }

    def _read_files(self, length: int) -> None:
        with (
            SpooledTemporaryFile(_BYTES_IN_MEMORY) as body,
            SpooledTemporaryFile(_BYTES_IN_MEMORY) as answer,
        ):
            _write(body, self._pieces(length))
            body.seek(0)
            try:
                with self.server.reading:
                    _write(answer, map(str.encode, read_saved(body.read())))
            except ValueError as error:
                self._refuse(400, str(error))
                return
            answer.seek(0)
            pieces = iter(partial(answer.read, _PIECE_BYTES), b"")
            self._respond(200, "application/jsonl", pieces)

    def _skip(self, length: int) -> None:
        """Reads a body and keeps none of it, as browsers hear of the error at its end only."""
        for _ in self._pieces(min(length, _MOST_SKIPPED)):
            pass

    def _pieces(self, length: int) -> Iterator[bytes]:
        """A body, as far as it comes."""
        left = length
        while left and (piece := self.rfile.read(min(left, _PIECE_BYTES))):
            left -= len(piece)
            yield piece

    def _refuse(self, status: int, message: str) -> None:
        self._respond(
            status, "application/json", [json.dumps({"error": {"message": message}}).encode()]
        )

    def _respond(self, status: int, kind: str, parts: Iterable[bytes]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.writelines(parts)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def _write(file: IO[bytes], pieces: Iterable[bytes]) -> None:
    """`writelines` would leave all in memory: in Python 3.11 it looks at the size at the end."""
    for piece in pieces:
        file.write(piece)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="routed-experts view", description="Shows saved responses in a browser.")
    parser.add_argument(
        "file",
        nargs="*",
        help="responses to requests with return_routed_experts, or folders of them; - for standard input; without any, "
        "the page has an example",
    )
    parser.add_argument("--port", type=int, default=0, help="local port (default: any free port)")
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        help="write the page with these responses to an HTML file that needs no server, and end",
    )
    parser.add_argument("--no-browser", action="store_true", help="only print the URL")
    add_flags(parser)
    args = parser.parse_args(argv)
    if args.output and not args.file:
        parser.error("--output needs files with responses")
    return args


def write_page(viewed: Sequence[ViewedFile], model_info: ModelInfo, output: Path) -> None:
    """Writes the page with all responses to one file."""
    lines = chain.from_iterable(file.lines(model_info) for file in viewed)
    title = viewed[0].name if len(viewed) == 1 else f"{viewed[0].name} and {len(viewed) - 1} more"
    with atomic_file(output, "--output") as path:
        try:
            path.write_text(page_with(lines, title), encoding="utf-8")
        except ValueError as error:
            raise CommandError(str(error)) from error
    print(f"Wrote {output}.")


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts view` until it is interrupted; returns the exit status."""
    args = parse(argv)
    model_info = info_of(args)
    with ExitStack() as stack:
        viewed = viewed_files(args.file, model_info, stack)
        if args.output:
            write_page(viewed, model_info, args.output)
            return 0
        try:
            server = ViewServer(viewed, args.port, model_info)
        except (OSError, OverflowError) as error:
            raise CommandError(
                f"Port {args.port} cannot be used ({error}): choose another with --port, or omit --port."
            ) from error
        try:
            names = ", ".join(file.name for file in viewed[:_NAMED]) or "the page"
            more = f" and {len(viewed) - _NAMED} more files" if len(viewed) > _NAMED else ""
            print(f"Showing {names}{more} at {server.url} until Ctrl + C.", flush=True)
            if not args.no_browser:
                webbrowser.open(server.url)
            server.serve_forever()
        except KeyboardInterrupt:  # the normal end
            print()
    return 0


def viewed_files(paths: Sequence[str], model_info: ModelInfo, stack: ExitStack) -> list[ViewedFile]:
    """The files that have responses, each read once, one response at a time. `stack` keeps a copy
    of standard input."""
    viewed: list[ViewedFile] = []
    info = ModelInfo()  # what the files so far say about their model
    for path in progress(files_in(paths), desc="reading", unit=" files"):
        name = "standard input" if path == STDIN else path
        reader = Reader(model_info, info)
        is_empty = True
        file = _copy_of_stdin(stack) if path == STDIN else Path(path)
        with open_text(file, name) as text:
            for answer in reader.read(name, text):
                is_empty = False
                collector = answer.collected(most_bytes=MAX_PAGE_BYTES)
                for routing in answer.choices_in(collector, unfinished=True):
                    check_shown(answer, routing)
        if not is_empty:
            viewed.append(ViewedFile(name, file, info))
        info = reader.info
    if paths and not viewed:
        raise CommandError(f"{name} has no responses.")
    return viewed


def _copy_of_stdin(stack: ExitStack) -> Path:
    copy = stack.enter_context(NamedTemporaryFile())  # noqa: SIM115
    with open(0, "rb", closefd=False) as source:
        shutil.copyfileobj(source, copy)
    copy.flush()
    return Path(copy.name)
