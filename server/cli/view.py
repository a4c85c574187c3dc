"""`routed-experts view`: the page for saved responses. Needs no model and no vLLM."""

import argparse
import io
import json
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from routed_experts.server.cli.console import CommandError
from routed_experts.server.cli.saved import ModelInfo, add_flags, info_of, opened, read
from routed_experts.server.page import HEADERS, PAGE_PATH, page_file

SAVED_PATH = f"{PAGE_PATH}/saved"
HOST = "127.0.0.1"


class ViewServer(ThreadingHTTPServer):
    """Serves the page and the contents of files to browsers on this machine.

    Attributes:
        page_config: names of the files, and facts about the model from the command line.
    """

    daemon_threads = True

    def __init__(self, texts: Mapping[str, str], port: int, given: ModelInfo | None = None) -> None:
        """`texts` maps file names to contents."""
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
        # Against DNS rebinding: another site could point its own name to this address and read the files.
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}:
            self._respond(403, b"Open this page at the address that the command printed.", "text/plain")
            return
        path = self.path.partition("?")[0]
        folder, _, place = path.rpartition("/")
        if folder == SAVED_PATH and place.isdecimal() and int(place) < len(self.server.texts):
            self._respond(200, self.server.texts[int(place)], "text/plain; charset=utf-8")
            return
        if (found := page_file(path, self.server.page_config)) is None:
            self._respond(404, b"File not found.", "text/plain")
        else:
            self._respond(200, *found)

    def _respond(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routed-experts view",
        description="Shows saved responses in a browser.",
    )
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
    """Runs `routed-experts view` until it is interrupted; returns the exit status.

    Raises:
        CommandError: the command cannot run.
    """
    args = parse(argv)
    given = info_of(args)
    texts = read_texts(args.file, given)
    try:
        server = ViewServer(texts, args.port, given)
    except (OSError, OverflowError) as error:
        raise CommandError(
            f"Port {args.port} cannot be used ({error}): choose another with --port, or omit --port."
        ) from error
    try:
        print(f"Showing {', '.join(texts) or 'the page'} at {server.url} until Ctrl + C.", flush=True)
        if not args.no_browser:
            webbrowser.open(server.url)
        server.serve_forever()
    except KeyboardInterrupt:  # the normal end
        print()
    return 0


def read_texts(paths: Sequence[str], given: ModelInfo) -> dict[str, str]:
    """The contents of files by name, and of the files `*.json` and `*.jsonl` in folders.

    Raises:
        CommandError: a file cannot be read, or has other contents than responses with rows.
    """
    texts: dict[str, str] = {}
    for name, file in opened([file for path in paths for file in files_in(path)]):
        try:
            texts[name] = file.read()
        except UnicodeDecodeError as error:
            raise CommandError(f"{name} cannot be read: it is not UTF-8 text.") from error
    if not texts:
        return texts
    for answer in read(((name, io.StringIO(text)) for name, text in texts.items()), given):
        try:
            answer.routings()
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{answer.where}: {error}.") from error
    return texts


def files_in(path: str) -> list[str]:
    """The files of a folder and its folders, in order; a file alone.

    Raises:
        CommandError: a folder without files of responses.
    """
    if not Path(path).is_dir():
        return [path]
    files = sorted(str(file) for file in Path(path).rglob("*.json*") if file.suffix in (".json", ".jsonl"))
    if not files:
        raise CommandError(f"{path} has no files *.json or *.jsonl.")
    return files
