"""`routed-experts export`: the rows of responses, or the load of their experts, in files of other programs' formats.

Reads and writes part by part, so that memory does not grow with the number of responses.
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from routed_experts.protocol.codec import count_missing
from routed_experts.protocol.collect import Routing, RoutingError
from routed_experts.server.cli import formats
from routed_experts.server.cli.console import CommandError, progress
from routed_experts.server.cli.formats import Span
from routed_experts.server.cli.running import RunningServer, add_server_flags, bodies_of
from routed_experts.server.cli.saved import ModelInfo, SavedAnswer, add_flags, choices_of, info_of, once, opened, read
from routed_experts.server.cli.stats import Tally

ROWS = {
    "parquet": formats.write_parquet,
    "csv": formats.write_csv,
    "npz": formats.write_npz,
    "moe-trace": formats.write_moe_trace,
}
LOADS = {"sglang": formats.write_sglang_json, "eplb": formats.write_eplb}
SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".npz": "npz", ".json": "sglang", ".pt": "sglang", ".npy": "eplb"}
NEEDS_LAYERS = ("moe-trace", "sglang")
NOTHING = "Nothing to export: the responses have no rows."
LAYERS_NEED = (
    "the decoder layers of its rows are unknown: put the response of GET /v1/routed_experts into a file before it"
)
EXPERTS_NEED = (
    "the number of experts is unknown: put the response of GET /v1/routed_experts into a file before it, or set "
    "--num-experts"
)


@dataclass
class Exported:
    """What was read so far.

    Attributes:
        missing: rows with unknown ids.
        model: what the responses know about their model.
    """

    answers: int = 0
    rows: int = 0
    missing: int = 0
    model: ModelInfo = field(default_factory=ModelInfo)

    def check(self, info: ModelInfo, needs_layers: bool) -> None:
        """
        Raises:
            RoutingError: a response of another model than the first, or with unknown layers.
        """
        if needs_layers and info.layer_ids is None:
            raise RoutingError(LAYERS_NEED)
        for name in ("num_layers", "top_k", "num_experts", "layer_ids"):
            now, before = getattr(info, name), getattr(self.model, name)
            if None not in (now, before) and now != before:
                raise RoutingError(f"{name} is {now} after {before}: export one model at a time")
        self.model = self.model.over(info)


# ---- rows ----


def spans_of(answer: SavedAnswer, server: RunningServer | None, with_weights: bool, request: int) -> Iterator[Span]:
    """The rows of a response. A prompt's come once, with the first of its choices.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the response is incomplete, or of another form or model.
    """
    texts = _texts(answer)
    for routing in once(answer.routings()):
        if with_weights and routing.weights is None:
            raise RoutingError("the response has no weights: set return_routed_expert_weights in the request")
        tokens = _tokens(routing)
        if tokens is not None and server is not None:
            own: list[str | None] | None = [server.text_of(token) for token in tokens]
        else:
            own = _own_texts(routing, texts)
        info = replace(answer.info, num_layers=routing.rows.shape[1], top_k=routing.rows.shape[2])
        yield Span(
            request=request,
            id=None if (name := answer.parts[0].get("id")) is None else str(name),
            choice=routing.index,
            start=routing.start,
            prompt_len=routing.prompt_len,
            rows=routing.rows,
            weights=routing.weights if with_weights else None,
            token_ids=tokens,
            texts=own,
            info=info,
        )


def _tokens(routing: Routing) -> tuple[int, ...] | None:
    """The ids of the tokens that the rows belong to."""
    if routing.prompt_token_ids is None or routing.token_ids is None:
        return None
    return (*routing.prompt_token_ids, *routing.token_ids)[routing.start : routing.end]


def _texts(answer: SavedAnswer) -> dict[int | None, list[str | None]]:
    """The texts of tokens: of the prompt (None), and of each choice by its index.

    Log-probabilities have them, and responses that the page saved.
    """
    page = answer.parts[0].get("routed_experts_page") or {}
    found = {None: page.get("prompt_tokens") or [], 0: page.get("tokens") or []}
    for part in answer.parts:
        for choice in choices_of(part):
            logprobs = choice.get("logprobs") or {}
            tokens = logprobs.get("tokens") or [one["token"] for one in logprobs.get("content") or ()]
            found.setdefault(choice.get("index") or 0, []).extend(tokens)
    return found


def _own_texts(routing: Routing, texts: dict[int | None, list[str | None]]) -> list[str | None] | None:
    """The texts of the tokens that the rows belong to."""
    if routing.prompt_len is None:
        return None
    prompt = texts[None] or [None] * routing.prompt_len
    found = [*prompt, *texts.get(routing.index, ())][routing.start : routing.end]
    found += [None] * (len(routing.rows) - len(found))
    return [None if text is None else text.encode(errors="replace").decode() for text in found]


# ---- the command ----


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routed-experts export",
        description="Writes the experts in responses to a file for other programs. The file is complete or absent.",
    )
    parser.add_argument(
        "file",
        nargs="*",
        help="responses to requests with return_routed_experts, or folders with files *.jsonl; - for standard input",
    )
    parser.add_argument("--url", help="URL of a running server; sends the requests of --prompts to it")
    add_server_flags(parser)
    parser.add_argument("--output", "-o", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--format",
        choices=(*ROWS, *LOADS),
        help=f"format of the file (default: by its name: {', '.join(map(' '.join, SUFFIXES.items()))})",
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
    args.format = args.format or SUFFIXES.get(args.output.suffix)
    if args.format is None:
        parser.error(f"--output {args.output} names no format: set --format")
    if args.format == "sglang" and args.output.suffix not in (".json", ".pt"):
        parser.error("SGLang reads files that end in .json or .pt")
    if args.per == "token" and args.format != "parquet":
        parser.error("--per token is for parquet")
    if args.weights and args.format not in ("parquet", "csv", "npz"):
        parser.error(f"--weights is for parquet, csv and npz: {args.format} has no weights")
    if bool(args.file) == bool(args.url) or bool(args.url) != bool(args.prompts):
        parser.error("give files, or --url and --prompts")
    return args


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts export`; returns the exit status.

    Raises:
        CommandError: the command cannot run.
    """
    args = parse(argv)
    server = RunningServer(args.url, args.api_key) if args.url else None
    bodies = bodies_of(args.prompts, args.max_tokens) if server else []
    answers = server.ask_all(bodies, args.weights) if server else read(opened(args.file), info_of(args))
    total = len(bodies) if server else None
    with aside(args.output) as path:
        shown = progress(answers, desc="exporting", unit=" responses", total=total)
        found = write_load(path, shown, args) if args.format in LOADS else write_rows(path, shown, args, server)
    print(f"Wrote {args.output}: {found.answers} responses, {found.rows} rows, {found.missing} of them unknown.")
    return 0


@contextmanager
def aside(output: Path) -> Iterator[Path]:
    """A file beside `output`, which takes its name if all goes well.

    Raises:
        CommandError: `output` cannot be written.
    """
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


def write_rows(
    path: Path, answers: Iterable[SavedAnswer], args: argparse.Namespace, server: RunningServer | None
) -> Exported:
    """Writes the rows of responses.

    Raises:
        CommandError: a response cannot be exported, or none has rows.
    """
    found = Exported()

    def spans() -> Iterator[Span]:
        for answer in answers:
            try:
                for span in spans_of(answer, server, args.weights, found.answers):
                    if not len(span.rows):
                        continue
                    found.check(span.info, args.format in NEEDS_LAYERS)
                    found.rows += len(span.rows)
                    found.missing += count_missing(span.rows)
                    yield span
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CommandError(f"{answer.where}: {error}.") from error
            found.answers += 1

    rest = spans()
    first = next(rest, None)
    if first is None:
        raise CommandError(NOTHING)
    options = {"per_token": True} if args.per == "token" else {}
    try:
        ROWS[args.format](path, chain([first], rest), first, **options)
    except (ValueError, TypeError, OverflowError) as error:  # a number that no program would have sent
        raise CommandError(f"Response {found.answers + 1} cannot be written: {error}.") from error
    return found


def write_load(path: Path, answers: Iterable[SavedAnswer], args: argparse.Namespace) -> Exported:
    """Writes how often each expert was chosen.

    Raises:
        CommandError: a response cannot be counted.
    """
    found, tally = Exported(), Tally()
    for answer in answers:
        try:
            if answer.info.num_experts is None:
                raise RoutingError(EXPERTS_NEED)
            found.check(answer.info, args.format in NEEDS_LAYERS)
            tally.add(answer)
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{answer.where}: {error}.") from error
    if tally.counts is None or not tally.rows:
        raise CommandError(NOTHING)
    write = formats.write_sglang_pt if args.output.suffix == ".pt" else LOADS[args.format]
    write(path, tally.counts, tally.layer_ids or ())
    return Exported(tally.answers, tally.rows, tally.missing)
