"""`routed-experts export`: the rows of responses in files of other programs' formats.

Reads and writes part by part, so that memory does not grow with the number of responses.
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from routed_experts.protocol.codec import Rows, count_missing
from routed_experts.protocol.collect import Routing, RoutingError
from routed_experts.protocol.saved import ModelInfo, SavedAnswer, normalised, once, read
from routed_experts.server.cli.console import CommandError, progress
from routed_experts.server.tools import formats
from routed_experts.server.tools.formats import Span
from routed_experts.server.tools.running import RunningServer, add_server_flags, bodies_of
from routed_experts.server.tools.saved import add_flags, info_of, opened

TABLES = {"parquet": formats.write_parquet, "csv": formats.write_csv, "npz": formats.write_npz}
FORMATS = (*TABLES, "jsonl")
NOTHING = "Nothing to export: the responses have no rows."


@dataclass
class Exported:
    """What was read so far."""

    answers: int = 0
    rows: int = 0
    missing: int = 0  # rows with unknown ids
    model: ModelInfo = field(default_factory=ModelInfo)  # what the responses know about their model

    def count(self, rows: Rows) -> None:
        self.rows += len(rows)
        self.missing += count_missing(rows)

    def check(self, info: ModelInfo) -> None:
        """Refuses a response of another model than the first."""
        for name in ("num_layers", "top_k", "num_experts", "layer_ids"):
            now, before = getattr(info, name), getattr(self.model, name)
            if None not in (now, before) and now != before:
                raise RoutingError(f"{name} is {now} after {before}: export one model at a time")
        self.model = self.model.over(info)


# ---- rows ----


def routings_of(answer: SavedAnswer, server: RunningServer | None) -> list[Routing]:
    """The rows of a response, with the texts that the server has for tokens."""
    routings = answer.routings()
    if server is None:
        return routings
    tokens = [(*(each.prompt_token_ids or ()), *(each.token_ids or ())) for each in routings]
    texts = server.texts_of(chain.from_iterable(tokens))
    return [
        replace(routing, texts=tuple(map(texts.get, ids)) if texts and ids else None)
        for routing, ids in zip(routings, tokens, strict=True)
    ]


def spans_of(answer: SavedAnswer, routings: Sequence[Routing], with_weights: bool, request: int) -> Iterator[Span]:
    """The rows of a response. A prompt's come once, with the first of its choices."""
    name = answer.parts[0].get("id")
    for routing in once(routings):
        if with_weights and routing.weights is None:
            raise RoutingError("the response has no weights: set return_routed_expert_weights in the request")
        tokens = _tokens(routing)
        texts = None if routing.texts is None else routing.texts[routing.start : routing.end]
        yield Span(
            source=_writable(answer.file),
            request=request,
            id=_writable(name) if isinstance(name, str) else None,
            choice=routing.index,
            start=routing.start,
            prompt_len=routing.prompt_len,
            rows=routing.rows,
            weights=routing.weights if with_weights else None,
            token_ids=tokens,
            texts=None if texts is None else [None if text is None else _writable(text) for text in texts],
            info=replace(answer.info, num_layers=routing.rows.shape[1], top_k=routing.rows.shape[2]),
        )


def _tokens(routing: Routing) -> tuple[int, ...] | None:
    """The ids of the tokens that the rows belong to."""
    if routing.prompt_token_ids is None or routing.token_ids is None:
        return None
    return (*routing.prompt_token_ids, *routing.token_ids)[routing.start : routing.end]


def _writable(text: str) -> str:
    """`text` without halves of characters, which UTF-8 cannot have."""
    return text.encode(errors="replace").decode()


# ---- the command ----


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routed-experts export",
        description="Writes the experts in responses to a file for other programs. The file is complete or absent.",
    )
    parser.add_argument(
        "file",
        nargs="*",
        help="responses to requests with return_routed_experts, or folders of them; - for standard input",
    )
    parser.add_argument("--url", help="URL of a running server; sends the requests of --prompts to it")
    add_server_flags(parser)
    parser.add_argument("--output", "-o", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--format", choices=FORMATS, help="format of the file (default: as its name ends); jsonl: responses"
    )
    parser.add_argument(
        "--per",
        choices=("layer", "token"),
        default="layer",
        help="with parquet: one row per token and layer (default), or per token",
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="also write the router's weights; needs return_routed_expert_weights in the requests",
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    args.format = args.format or args.output.suffix[1:]
    if args.format not in FORMATS:
        parser.error(f"--output {args.output} names no format: set --format")
    if args.per == "token" and args.format != "parquet":
        parser.error("--per token is for parquet")
    if bool(args.file) == bool(args.url) or bool(args.url) != bool(args.prompts):
        parser.error("give files, or --url and --prompts")
    return args


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts export`; returns the exit status."""
    args = parse(argv)
    server = RunningServer(args.url, args.api_key) if args.url else None
    bodies = bodies_of(args) if server else []
    answers = server.ask_all(bodies, args.weights) if server else read(opened(args.file), info_of(args))
    total = len(bodies) if server else None
    with aside(args.output) as path:
        shown = progress(answers, desc="exporting", unit=" responses", total=total)
        found = write_lines(path, shown, server) if args.format == "jsonl" else write(path, shown, args, server)
    print(f"Wrote {args.output}: {found.answers} responses, {found.rows} rows, {found.missing} of them unknown.")
    return 0


@contextmanager
def aside(output: Path) -> Iterator[Path]:
    """A file beside `output`, which takes its name if all goes well."""
    path = output.with_name(f".{output.name}.{os.getpid()}.part")
    if output.is_dir():
        raise CommandError(f"--output {output} is a folder.")
    try:
        path.touch()
    except OSError as error:
        raise CommandError(f"--output {output} cannot be written: {error.strerror}.") from error
    try:
        yield path
        path.replace(output)
    finally:
        path.unlink(missing_ok=True)


def write(
    path: Path, answers: Iterable[SavedAnswer], args: argparse.Namespace, server: RunningServer | None
) -> Exported:
    """Writes the rows of responses."""
    found = Exported()

    def spans() -> Iterator[Span]:
        for answer in answers:
            routings = routings_of(answer, server)
            with answer.located():
                for span in spans_of(answer, routings, args.weights, found.answers):
                    if len(span.rows):
                        found.check(span.info)
                        found.count(span.rows)
                        yield span
            found.answers += 1

    rest = spans()
    first = next(rest, None)
    if first is None:
        raise CommandError(NOTHING)
    options = {"per_token": True} if args.per == "token" else {}
    TABLES[args.format](path, chain([first], rest), first, **options)
    return found


def write_lines(path: Path, answers: Iterable[SavedAnswer], server: RunningServer | None) -> Exported:
    """Writes the responses themselves, a line for each prompt."""
    found = Exported()
    with path.open("w", encoding="ascii") as file:
        for answer in answers:
            routings = routings_of(answer, server)
            file.writelines(f"{json.dumps(body)}\n" for body in normalised(answer, routings))
            for routing in once(routings):
                found.count(routing.rows)
            found.answers += 1
    if not found.answers:
        raise CommandError(NOTHING)
    return found
