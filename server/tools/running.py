"""A running server, as `compare` and `export` ask it."""

import argparse
import http.client
import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from msgspec import structs

from routed_experts.protocol.answers import read_fields
from routed_experts.protocol.routing import Routing
from routed_experts.protocol.saved import ModelInfo, SavedAnswer
from routed_experts.server.cli.console import CommandError
from routed_experts.server.tools.saved import open_text

AT_ONCE = 8  # requests
TEXTS_AT_ONCE = 16_384  # token ids, as many as the server takes
_TEXTS = "/v1/routed_experts/texts"
_HAS_NONE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
FIELDS_FOR_SAVED = {
    "return_routed_experts": True,
    "return_token_ids": True,
    "routed_experts_delivery": "inline",
    "routed_experts_dtype": "int16",
    "routed_experts_format": "object",
    "routed_experts_layers": "moe",
    "routed_experts_layout": "split",
}
"""Fields of every request that is sent here: whatever the server's defaults are, the responses are in
the one form that the reader of saved responses needs no flags for."""

Body = Mapping[str, Any]


class Source(NamedTuple):
    """Where a prompt comes from."""

    file: str  # or the server's URL, for a prompt that is in no file
    line: int  # 0 if it is in no file

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


def base_of(url: str) -> str:
    """The base URL of a server: `localhost:8000` and `http://localhost:8000/v1` are both
    accepted."""
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1").rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise CommandError(
            f"--url {url} is not the URL of a server: use one such as http://localhost:8000."
        )
    return base


class RunningServer:
    """A server that returns routing."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = base_of(url)
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._texts: dict[int, str] = {}

    @cached_property
    def document(self) -> dict[str, Any]:
        """The object of `GET /v1/routed_experts`."""
        document = self._call("/v1/routed_experts")
        if "model" not in document:
            raise self._is_other("/v1/routed_experts")
        return document

    def ask(self, source: Source, body: Body, with_weights: bool = False) -> SavedAnswer:
        """The response to a request with the prompt or messages in `body`."""
        request = {"model": self.document["model"], **body, **FIELDS_FOR_SAVED, "stream": False}
        if with_weights:
            if self.document.get("weights") is False:
                raise CommandError(
                    f"{self.url} captures no weights: start it with --enable-return-routed-expert-weights, or leave "
                    "out --weights."
                )
            request["return_routed_expert_weights"] = True
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        try:
            info = structs.replace(read_fields(self.document, ModelInfo), n=body.get("n") or 1)
        except ValueError as error:
            raise self._is_other("/v1/routed_experts") from error
        answer = self._call(path, request, where=str(source))
        return SavedAnswer(source.file, source.line, [answer], info)

    def ask_all(
        self, bodies: Iterable[tuple[Source, Body]], with_weights: bool
    ) -> Iterator[SavedAnswer]:
        """The responses to requests, in their order. Some are sent ahead."""
        running = deque[Future[SavedAnswer]]()
        for source, body in bodies:
            running.append(_in_background(self.ask, source, body, with_weights))
            if len(running) == AT_ONCE:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    def with_texts(self, routings: Sequence[Routing]) -> list[Routing]:
        """The rows of a response with the texts of their tokens, if the server has them."""
        ids_of = [
            (*(routing.prompt_token_ids or ()), *(routing.token_ids or ())) for routing in routings
        ]
        texts = self._texts_of(chain.from_iterable(ids_of))
        return [
            replace(routing, texts=tuple(map(texts.get, ids)) if texts and ids else None)
            for routing, ids in zip(routings, ids_of, strict=True)
        ]

    def _texts_of(self, tokens: Iterable[int]) -> Mapping[int, str]:
        """The texts of tokens, and of those before; empty if the server has none."""
        unknown = sorted(set(tokens) - self._texts.keys())
        for first in range(0, len(unknown), TEXTS_AT_ONCE):
            ids = unknown[first : first + TEXTS_AT_ONCE]
            try:
                texts = self._call(_TEXTS, {"token_ids": ids}).get("texts")
            except CommandError as error:
                if getattr(error.__cause__, "code", None) not in _HAS_NONE:
                    raise
                break
            if not isinstance(texts, list) or len(texts) != len(ids):
                raise self._is_other(_TEXTS)
            self._texts |= zip(ids, map(str, texts), strict=True)
        return self._texts

    def _call(self, path: str, body: Body | None = None, where: str = "") -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace")
            is_unknown = body is None and error.code in _HAS_NONE
            doubt = "; is it a routed-experts server?" if is_unknown else ""
            raise CommandError(
                f"{where or self.url}: the server returned status {error.code}: {' '.join(text.split())}{doubt}"
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise CommandError(
                f"{self.url} cannot be reached: {getattr(error, 'reason', error)}; does a server run there?"
            ) from error
        if not isinstance(answer, dict):
            raise self._is_other(path)
        return answer

    def _is_other(self, path: str) -> CommandError:
        return CommandError(
            f"{self.url} is not a routed-experts server: its response to {path} has another form."
        )


def _in_background(call: Callable[..., SavedAnswer], *args: Any) -> Future[SavedAnswer]:
    """Runs a call in a thread that nobody waits for: the interpreter's end waits for those of an
    executor, and a request may take ten minutes."""
    future: Future[SavedAnswer] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001 raised where the result is waited for
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def bodies_of(args: argparse.Namespace, default: Sequence[str] = ()) -> list[tuple[Source, Body]]:
    """Source and request of each prompt of `--prompts` (without files, `default`): one per line, or
    JSON if a file's name ends in `.jsonl`.

    A JSON line is a prompt or the body of a request, with a prompt or messages, whose fields take
    precedence.
    """
    prompts: Iterable[tuple[Source, str | Body]] = [
        (Source(args.url, 0), prompt) for prompt in default
    ]
    if args.prompts:
        prompts = chain.from_iterable(map(_prompts_in, _prompt_files(args.prompts)))
    bodies: list[tuple[Source, Body]] = []
    for source, prompt in prompts:
        body = {"prompt": prompt} if isinstance(prompt, str) else prompt
        # vLLM: not for several choices
        greedy = {"temperature": 0.0} if body.get("n", 1) == 1 else {}
        bodies.append((source, {**greedy, "max_tokens": args.max_tokens, **body}))
    return bodies


def _prompt_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Files, and in place of a folder its files *.txt and *.jsonl, by name."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = [
            file
            for file in sorted(path.rglob("*"))
            if file.suffix in (".txt", ".jsonl") and file.is_file()
        ]
        if not inside:
            raise CommandError(f"{path} has no files *.txt or *.jsonl with prompts.")
        yield from inside


def _prompts_in(path: Path) -> Iterator[tuple[Source, str | Body]]:
    try:
        with open_text(path, is_read_once=True) as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} cannot be read: {error}.") from error
    lines = text.split("\n")
    if not any(map(str.strip, lines)):
        raise CommandError(f"{path} has no prompts: write one per line.")
    for number, line in enumerate(lines, 1):
        if line.strip():
            source = Source(str(path), number)
            yield source, _json_prompt(source, line) if path.suffix == ".jsonl" else line


def _json_prompt(source: Source, line: str) -> str | Body:
    try:
        prompt: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{source} is not valid JSON: {error}.") from error
    is_body = isinstance(prompt, dict) and prompt.keys() & {"prompt", "messages"}
    if not isinstance(prompt, str) and not is_body:
        raise CommandError(
            f"{source} is not a prompt: write a string, or an object with a prompt or messages."
        )
    checked: str | Body = prompt
    return checked


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for requests, besides `--url`."""
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        help="with --url: files with one prompt per line, or folders of them; in *.jsonl, each line is a JSON string "
        "or the body of a request",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=64,
        help="with --url: maximum tokens per response (default 64)",
    )
    parser.add_argument("--api-key", help="with --url: API key of the server")
