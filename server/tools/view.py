"""`routed-experts view`: the page for saved responses. Needs no model and no vLLM."""

import argparse
import json
import re
import shutil
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from routed_experts.protocol.files import open_file
from routed_experts.server.cli.console import CommandError
from routed_experts.server.page import HEADERS, PAGE_PATH, page_file
from routed_experts.server.tools.saved import STDIN, files_in, open_text

SAVED_PATH = f"{PAGE_PATH}/saved"
HOST = "127.0.0.1"
ELSEWHERE = "Open this page at the address that the command printed."
_NAMED = 5  # files in the sentence that the command prints
_PLACE = re.compile("[0-9]{1,15}")


@dataclass(frozen=True)
class ViewedFile:
    """A file with responses, which the page reads."""

    name: str  # as the page shows it
    path: Path


class ViewServer(ThreadingHTTPServer):
    """Serves the page and files of responses to browsers on this machine."""

    daemon_threads = True

    def __init__(self, viewed: Sequence[ViewedFile], port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self.viewed = viewed
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

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        folder, _, index = path.rpartition("/")
        if not self._is_from_our_page():
            self._refuse(403, ELSEWHERE)
        elif (
            folder == SAVED_PATH
            and _PLACE.fullmatch(index)
            and int(index) < len(self.server.viewed)
        ):
            self._send_saved(self.server.viewed[int(index)].path)
        elif file := page_file(path, self.server.page_config):
            content, kind = file
            self._respond(200, kind, content)
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

    def _send_saved(self, path: Path) -> None:
        try:
            file = open(path, "rb", opener=open_file)  # noqa: SIM115
        except OSError as error:
            self._refuse(404, f"{path} cannot be read: {error.strerror}.")
            return
        with file:
            self._begin(200, "application/octet-stream")
            shutil.copyfileobj(file, self.wfile)

    def _refuse(self, status: int, message: str) -> None:
        self._respond(
            status, "application/json", json.dumps({"error": {"message": message}}).encode()
        )

    def _respond(self, status: int, kind: str, content: bytes) -> None:
        self._begin(status, kind)
        self.wfile.write(content)

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routed-experts view", description="Shows saved responses in a browser."
    )
    parser.add_argument(
        "file",
        nargs="*",
        help="responses to requests with return_routed_experts, or folders of them; - for standard input; without any, "
        "the page has an example",
    )
    parser.add_argument("--port", type=int, default=0, help="local port (default: any free port)")
    parser.add_argument("--no-browser", action="store_true", help="only print the URL")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts view` until it is interrupted; returns the exit status."""
    args = parse(argv)
    with ExitStack() as stack:
        viewed = viewed_files(args.file, stack)
        try:
            server = ViewServer(viewed, args.port)
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


def viewed_files(paths: Sequence[str], stack: ExitStack) -> list[ViewedFile]:
    """The files, which exist. `stack` keeps a copy of standard input."""
    viewed: list[ViewedFile] = []
    for path in files_in(paths):
        name = "standard input" if path == STDIN else path
        file = _copy_of_stdin(stack) if path == STDIN else Path(path)
        with open_text(file, name):
            viewed.append(ViewedFile(name, file))
    return viewed


def _copy_of_stdin(stack: ExitStack) -> Path:
    copy = stack.enter_context(NamedTemporaryFile())  # noqa: SIM115
    with open(0, "rb", closefd=False) as source:
        shutil.copyfileobj(source, copy)
    copy.flush()
    return Path(copy.name)
