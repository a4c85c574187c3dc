"""`routed-experts export`: the rows of responses as Parquet, CSV or `.npz`.

Reads and writes part by part, so that memory does not grow with the number of responses.
"""

import argparse
import json
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from routed_experts.protocol.codec import UNKNOWN, Rows, count_missing
from routed_experts.protocol.routing import Routing, RoutingError
from routed_experts.protocol.saved import ModelInfo, SavedAnswer, read
from routed_experts.server.cli.console import CommandError, Parser, progress
from routed_experts.server.tools.running import RunningServer, add_server_flags, bodies_of
from routed_experts.server.tools.saved import add_flags, atomic_file, info_of, opened

FORMATS = ("parquet", "csv", "npz")
NO_PYARROW = "Parquet and CSV need pyarrow: pip install 'routed-experts-server[export]', or choose --format npz."
KINDS = {
    "source": "string",
    "group": "string",
    "request": "int32",
    "id": "string",
    "choice": "int32",
}
KINDS |= {"position": "int32", "is_prompt": "bool_", "token_id": "int32", "token": "string"}
"""The columns that say which token a row belongs to, and their types in pyarrow."""
_ARRAYS = ("experts", "weights")
_CUT = 1 << 16  # rows of a table that are converted at once
_GROUP = 1 << 18  # rows of a table in a row group of Parquet

Columns = dict[str, Any]
"""For n tokens, those of `KINDS` and `experts` and `weights` [n, L, K]; no weights if they are not
written."""
Answers = Iterable[tuple[SavedAnswer, Iterable[Routing]]]


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

    def check(self, info: ModelInfo, rows: Rows) -> None:
        """Refuses a response of another model than the first."""
        info = replace(info, num_layers=rows.shape[1], top_k=rows.shape[2])
        for name in ("num_layers", "top_k", "num_experts", "layer_ids"):
            now, before = getattr(info, name), getattr(self.model, name)
            if None not in (now, before) and now != before:
                raise RoutingError(f"{name} is {now} after {before}: export one model at a time")
        self.model = self.model.over(info)


# ---- columns ----


def columns_of(answers: Answers, found: Exported, with_weights: bool) -> Iterator[Columns]:
    """The rows of responses, in parts that are small tables. A prompt's come once, with the first
    of its choices."""
    for answer, routings in answers:
        with answer.located():
            for routing in _without_repeated_prompts(routings):
                if with_weights and routing.weights is None:
                    raise RoutingError(
                        "the response has no weights: set return_routed_expert_weights in the request"
                    )
                if len(routing.rows):
                    found.check(answer.info, routing.rows)
                    found.count(routing.rows)
                    columns = _columns(answer, routing, found.answers)
                    columns |= (
                        {"weights": routing.weights}
                        if with_weights and routing.weights is not None
                        else {}
                    )
                    step = max(_CUT // max(routing.rows.shape[1], 1), 1)
                    for first in range(0, len(routing.rows), step):
                        yield {
                            name: values[first : first + step] for name, values in columns.items()
                        }
        found.answers += 1


def _without_repeated_prompts(routings: Iterable[Routing]) -> Iterator[Routing]:
    """The rows of each choice. Those of a prompt come with the first of its choices only."""
    prompts = set[tuple[Any, ...]]()
    for routing in routings:
        prompt_len = 0 if routing.prompt_len is None else len(routing.prompt_rows)
        if prompt_len and (prompt := _prompt_of(routing)) in prompts:
            weights = None if routing.weights is None else routing.weights[prompt_len:]
            routing = replace(
                routing,
                rows=routing.generated_rows,
                weights=weights,
                start=routing.start + prompt_len,
            )
        elif prompt_len:
            prompts.add(prompt)
        yield routing


def _prompt_of(routing: Routing) -> tuple[Any, ...]:
    """Equal for equal prompts: of one length, with the same rows and, as far as they are known,
    token ids."""
    rows = sha256(routing.prompt_rows.tobytes()).digest()
    return routing.prompt_len, routing.start, routing.prompt_token_ids, rows


def _columns(answer: SavedAnswer, routing: Routing, request: int) -> Columns:
    count, positions, nothing = (
        len(routing.rows),
        range(routing.start, routing.end),
        [None] * len(routing.rows),
    )
    name, source, of_rows = (
        answer.parts[0].get("id"),
        _writable(answer.file),
        slice(routing.start, routing.end),
    )
    tokens: Sequence[Any] = nothing
    if routing.prompt_token_ids is not None and routing.token_ids is not None:
        tokens = (*routing.prompt_token_ids, *routing.token_ids)[of_rows]
    group = source.rpartition("/")[0] or None  # the folder of the file, if the command named it
    values = (
        source,
        group,
        request,
        _writable(name) if isinstance(name, str) else None,
        routing.index,
    )
    return {
        **{name: [value] * count for name, value in zip(KINDS, values, strict=False)},
        "position": positions,
        "is_prompt": nothing
        if routing.prompt_len is None
        else [at < routing.prompt_len for at in positions],
        "token_id": tokens,
        "token": [
            None if text is None else _writable(text) for text in (routing.texts or ())[of_rows]
        ]
        or nothing,
        "experts": routing.rows,
    }


def _writable(text: str) -> str:
    """`text` without halves of characters, which UTF-8 cannot have."""
    return text.encode(errors="replace").decode()


# ---- files ----


def write_table(path: Path, parts: Iterator[Columns], found: Exported, form: str) -> None:
    """A table with a row per token and layer; per token if `form` is `token`.

    As `csv` it has a column for each of K experts, and weights; otherwise columns of lists.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from pyarrow import csv
    except ImportError as error:
        raise CommandError(NO_PYARROW) from error

    batches = (_batch(pa, part, found.model.layer_ids, form) for part in parts)
    first = next(batches)
    about = {
        name: getattr(found.model, name)
        for name in ("num_layers", "top_k", "num_experts", "layer_ids")
    }
    schema = first.schema.with_metadata({"routed_experts": json.dumps(about)})
    with (
        csv.CSVWriter(path, schema)
        if form == "csv"
        else pq.ParquetWriter(path, schema, compression="zstd") as writer
    ):
        waiting: list[Any] = []
        for batch in chain([first], batches):
            waiting.append(batch.replace_schema_metadata(schema.metadata))
            if sum(each.num_rows for each in waiting) >= _GROUP:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting = []
        writer.write_table(pa.Table.from_batches(waiting, schema))


def _batch(pa: Any, part: Columns, layer_ids: Sequence[int | None] | None, form: str) -> Any:
    count, layers, top_k = part["experts"].shape
    repeats = pa.array(np.repeat(np.arange(count), 1 if form == "token" else layers))
    columns = {
        name: pa.array(part[name], getattr(pa, kind)()).take(repeats)
        for name, kind in KINDS.items()
    }
    if form != "token":
        columns["layer"] = pa.array(np.tile(np.arange(layers, dtype=np.int16), count))
        columns["layer_id"] = pa.array(list(layer_ids or [None] * layers) * count, pa.int16())
    for name in _ARRAYS:
        if name not in part:
            continue
        values = np.asarray(part[name])
        if form == "csv":
            columns |= {
                f"{name[:-1]}_{slot}": pa.array(values[:, :, slot].ravel()) for slot in range(top_k)
            }
        else:
            lists = _lists(pa, values.ravel(), top_k)
            columns[name] = _lists(pa, lists, layers) if form == "token" else lists
    return pa.RecordBatch.from_pydict(columns)


def _lists(pa: Any, values: Any, size: int) -> Any:
    """Lists of `size` of the values each."""
    return pa.ListArray.from_arrays(np.arange(0, len(values) + 1, size, dtype=np.int32), values)


def write_npz(path: Path, parts: Iterator[Columns], found: Exported) -> None:
    """One array per column, with an element per token: `experts` and `weights` are [N, L, K].
    Unknown values are -1.

    `source` has places in `sources`, the names of files.
    """
    types = {
        "source": "<i4",
        **{name: "<i4" for name, kind in KINDS.items() if kind == "int32"},
        "is_prompt": "|i1",
    }
    types |= {"experts": "<i2", "weights": "<f4"}
    sources: dict[Any, int] = {}
    count, shape = 0, (0, 0, 0)
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for part in parts:
            shape, count = np.shape(part["experts"]), count + len(part["experts"])
            part["source"] = [sources.setdefault(name, len(sources)) for name in part["source"]]
            for name in types.keys() & part.keys():
                if name not in files:
                    files[name] = stack.enter_context(TemporaryFile(dir=path.parent))
                values = (
                    part[name]
                    if name in _ARRAYS
                    else [UNKNOWN if one is None else one for one in part[name]]
                )
                files[name].write(np.asarray(values, types[name]).tobytes())
        archive = stack.enter_context(zipfile.ZipFile(path, "w"))
        for name, file in files.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = {"descr": types[name], "fortran_order": False}
                header |= {"shape": (count, *shape[1:]) if name in _ARRAYS else (count,)}
                np.lib.format.write_array_header_1_0(member, header)  # type: ignore[no-untyped-call]
                file.seek(0)
                shutil.copyfileobj(file, member)
        about = {
            "num_experts": found.model.num_experts,
            "layer_ids": found.model.layer_ids,
            "sources": [*sources],
        }
        for name, value in about.items():
            if value is not None:
                with archive.open(f"{name}.npy", "w") as member:
                    np.save(member, np.asarray(value))


# ---- the command ----


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="routed-experts export",
        description="Writes the experts in responses to a file for other programs. The file is complete or absent.",
    )
    parser.add_argument(
        "file",
        nargs="*",
        help="responses to requests with return_routed_experts, or folders of them; - for standard input",
    )
    parser.add_argument(
        "--url", help="URL of a running server; sends the requests of --prompts to it"
    )
    add_server_flags(parser)
    parser.add_argument("--output", "-o", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--format", choices=FORMATS, help="format of the file (default: as its name ends)"
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
        formats = ", ".join(f".{name}" for name in FORMATS)
        parser.error(
            f"--output {args.output} names no format: let it end in one of {formats}, or set --format"
        )
    if args.per == "token" and args.format != "parquet":
        parser.error("--per token is for parquet")
    if bool(args.file) == bool(args.url) or bool(args.url) != bool(args.prompts):
        parser.error("give files, or --url and --prompts")
    return args


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts export`; returns the exit status."""
    args, found = parse(argv), Exported()
    bodies = bodies_of(args) if args.url else None
    shown: Any = partial(
        progress, desc="exporting", unit=" responses", total=None if bodies is None else len(bodies)
    )
    answers: Answers
    if bodies is None:
        answers = (
            (each, each.each_routing()) for each in shown(read(opened(args.file), info_of(args)))
        )
    else:
        server = RunningServer(args.url, args.api_key)
        asked = shown(server.ask_all(bodies, args.weights))
        answers = ((each, server.with_texts(each.routings())) for each in asked)
    with atomic_file(args.output, "--output") as path:
        parts = columns_of(answers, found, args.weights)
        if (first := next(parts, None)) is None:
            raise CommandError("Nothing to export: the responses have no rows.")
        form = args.format if args.per == "layer" else args.per
        write: Any = write_npz if form == "npz" else partial(write_table, form=form)
        write(path, chain([first], parts), found)
    print(f"Wrote {args.output}: {found.answers} responses, {_what_was_written(found, form)}.")
    return 0


def _what_was_written(found: Exported, form: str) -> str:
    tokens = f"{found.rows} tokens with experts, {found.missing} of them unknown"
    if form == "npz":
        return f"{tokens}; arrays of {found.rows}"
    if form == "token":
        return f"{tokens}; {found.rows} rows, one for each token"
    return (
        f"{tokens}; {found.rows * (found.model.num_layers or 0)} rows, one for each token and layer"
    )
