"""`routed-experts view`: the page for answers in a file, without a model and without vLLM."""

import argparse
import webbrowser
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from routed_experts.server.complaint import complain
from routed_experts.server.page import HEADERS, PAGE_PATH, page_file

SAVED_PATH = f"{PAGE_PATH}/saved"
HOST = "127.0.0.1"


class ViewServer(ThreadingHTTPServer):
    """Serves the page and one file to browsers on this machine.

    Attributes:
        told: what the page is told: the file's name, and how many experts a layer has where that was said.
    """

    daemon_threads = True

    def __init__(self, file: Path, port: int, num_experts: int | None = None) -> None:
        super().__init__((HOST, port), _Handler)
        self.file = file
        self.told = {"saved": file.name} | ({"experts": str(num_experts)} if num_experts else {})

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
        if path == SAVED_PATH:
            try:
                self._answer(200, self.server.file.read_bytes(), "text/plain; charset=utf-8")
            except OSError as error:
                self._answer(404, str(error).encode(), "text/plain")
            return
        if (found := page_file(path, self.server.told)) is None:
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
        description="Opens the page with answers of the server from a file: JSON bodies on a line each, one JSON body, "
        "or the text of a stream.",
    )
    parser.add_argument("file", type=Path, help="answers that were asked for with return_routed_experts")
    parser.add_argument("--port", type=int, default=0, help="of this machine (default: any that is free)")
    parser.add_argument("--num-experts", type=int, help="of a layer (default: as many as the answers show)")
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts view` until it is interrupted; returns the exit status."""
    args = parse(argv)
    try:
        args.file.open("rb").close()
    except OSError as error:
        return complain(f"{args.file} cannot be read: {error.strerror}.")
    try:
        server = ViewServer(args.file, args.port, args.num_experts)
    except (OSError, OverflowError) as error:
        return complain(f"Port {args.port} cannot be used ({error}): choose another with --port, or leave it out.")
    print(f"Showing {args.file} at {server.url} until Ctrl + C.", flush=True)
    if not args.no_browser:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    return 0
