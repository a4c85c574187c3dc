"""`routed-experts export`: the rows of responses as Parquet or `.npz`.

Reads part by part, and writes Parquet so: its memory does not grow with the number of responses.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from routed_experts.protocol.codec import UNKNOWN, UNKNOWN_STEP, Rows, count_missing
from routed_experts.protocol.routing import Routing, RoutingError
from routed_experts.protocol.saved import ModelInfo, SavedAnswer, read
from routed_experts.server.cli.console import CommandError, progress
from routed_experts.server.tools.running import RunningServer, add_server_flags, bodies_of
from routed_experts.server.tools.saved import atomic_file, opened

SUFFIXES = (".parquet", ".npz")
NO_PYARROW = (
    "Parquet needs pyarrow: pip install 'routed-experts-server[export]', or choose an .npz file."
)
_LISTS = ("experts", "weights")
"""The columns with a value for each of the K experts."""
_CUT = 1 << 16  # rows of a table that are converted at once
_GROUP = 1 << 18  # rows of a table in a row group of Parquet

Values = dict[str, Any]
"""For n tokens, n values of each of `COLUMNS`, and `experts` and `weights` [n, L, K]; no weights if
they are not written."""
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
        info = structs.replace(info, num_layers=rows.shape[1], top_k=rows.shape[2])
        for name in ("num_layers", "top_k", "num_experts", "layer_ids"):
            now = getattr(info, name)
            before = getattr(self.model, name)
            if now is not None and before is not None and now != before:
                raise RoutingError(f"{name} is {now} after {before}: export one model at a time")
        self.model = self.model.over(info)


# ---- columns ----


@dataclass(frozen=True)
class _Choice:
    """What the columns are made from."""

    answer: SavedAnswer
    request: int  # number of the response
    routing: Routing

    @property
    def source(self) -> str:
        return _writable(self.answer.file)

    @property
    def group(self) -> str | None:
        """The folder of the file, if the command named it."""
        return self.source.rpartition("/")[0] or None

    @property
    def answer_id(self) -> str | None:
        answer_id = self.answer.parts[0].get("id")
        return _writable(answer_id) if isinstance(answer_id, str) else None

    @property
    def label(self) -> str | None:
        """That the request had, in a recorded response."""
        label = self.answer.parts[0].get("routed_experts_label")
        return _writable(label) if isinstance(label, str) else None

    @property
    def positions(self) -> range:
        return range(self.routing.start, self.routing.end)

    def is_prompt(self) -> Sequence[bool | None]:
        prompt_len = self.routing.prompt_len
        if prompt_len is None:
            return self._unknown()
        return [position < prompt_len for position in self.positions]

    def token_ids(self) -> Sequence[int | None]:
        routing = self.routing
        if routing.prompt_token_ids is None or routing.token_ids is None:
            return self._unknown()
        return (*routing.prompt_token_ids, *routing.token_ids)[routing.start : routing.end]

    def tokens(self) -> Sequence[str | None]:
        if not self.routing.texts:
            return self._unknown()
        texts = self.routing.texts[self.routing.start : self.routing.end]
        return [None if text is None else _writable(text) for text in texts] or self._unknown()

    def steps(self) -> Sequence[int | None]:
        if self.routing.steps is None:
            return self._unknown()
        return [None if step == UNKNOWN_STEP else step for step in self.routing.steps.tolist()]

    def same(self, value: Any) -> list[Any]:
        """`value` in each row."""
        return [value] * len(self.routing.rows)

    def _unknown(self) -> list[None]:
        return self.same(None)


class Column(NamedTuple):
    """A column that says which token a row belongs to.

    Attributes:
        values: the values of a choice, one for each of its rows; None where unknown.
        arrow: its type in Parquet, by its name in pyarrow.
        npz: its type in `.npz`, where -1 is for None; None if it is left out there.
    """

    values: Callable[[_Choice], Sequence[Any]]
    arrow: str
    npz: str | None = None


COLUMNS: dict[str, Column] = {
    # in .npz, numbers of the names in `sources`
    "source": Column(lambda choice: choice.same(choice.source), "string", "<i4"),
    "group": Column(lambda choice: choice.same(choice.group), "string"),
    "request": Column(lambda choice: choice.same(choice.request), "int32", "<i4"),
    "id": Column(lambda choice: choice.same(choice.answer_id), "string"),
    "label": Column(lambda choice: choice.same(choice.label), "string"),
    "choice": Column(lambda choice: choice.same(choice.routing.index), "int32", "<i4"),
    "position": Column(lambda choice: choice.positions, "int32", "<i4"),
    "is_prompt": Column(_Choice.is_prompt, "bool_", "|i1"),
    "token_id": Column(_Choice.token_ids, "int32", "<i4"),
    "token": Column(_Choice.tokens, "string"),
    "step": Column(_Choice.steps, "int64", "<i8"),
}
"""By their names, in their order. A new column is a line here and one in docs/study.md."""


def columns_of(answers: Answers, exported: Exported, with_weights: bool) -> Iterator[Values]:
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
                    exported.check(answer.info, routing.rows)
                    exported.count(routing.rows)
                    yield from _parts_of(_Choice(answer, exported.answers, routing), with_weights)
        exported.answers += 1


def _parts_of(choice: _Choice, with_weights: bool) -> Iterator[Values]:
    """The values of a choice, some rows at a time."""
    routing = choice.routing
    values: Values = {name: column.values(choice) for name, column in COLUMNS.items()}
    values["experts"] = routing.rows
    if with_weights:
        values["weights"] = routing.weights
    _, num_layers, _ = routing.rows.shape
    step = max(_CUT // max(num_layers, 1), 1)
    for first in range(0, len(routing.rows), step):
        yield {name: of_column[first : first + step] for name, of_column in values.items()}


def _without_repeated_prompts(routings: Iterable[Routing]) -> Iterator[Routing]:
    """The rows of each choice. Those of a prompt come with the first of its choices only."""
    prompts = set[tuple[Any, ...]]()
    for routing in routings:
        num_prompt_rows = 0 if routing.prompt_len is None else len(routing.prompt_rows)
        if num_prompt_rows == 0:
            yield routing
            continue
        prompt = _prompt_of(routing)
        if prompt not in prompts:
            prompts.add(prompt)
            yield routing
            continue
        weights = None if routing.weights is None else routing.weights[num_prompt_rows:]
        steps = None if routing.steps is None else routing.steps[num_prompt_rows:]
        start = routing.start + num_prompt_rows
        rows = routing.generated_rows
        yield replace(routing, rows=rows, weights=weights, steps=steps, start=start)


def _prompt_of(routing: Routing) -> tuple[Any, ...]:
    """Equal for equal prompts: of one length, with the same rows and, as far as they are known,
    token ids."""
    rows = sha256(routing.prompt_rows.tobytes()).digest()
    return routing.prompt_len, routing.start, routing.prompt_token_ids, rows


def _writable(text: str) -> str:
    """`text` without halves of characters, which UTF-8 cannot have."""
    return text.encode(errors="replace").decode()


# ---- files ----


def write_parquet(path: Path, parts: Iterator[Values], exported: Exported) -> None:
    """A table with a row per token and layer."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise CommandError(NO_PYARROW) from error

    batches = (_batch(pa, part, exported.model.layer_ids) for part in parts)
    first = next(batches)
    metadata = {
        name: getattr(exported.model, name)
        for name in ("num_layers", "top_k", "num_experts", "layer_ids")
    }
    schema = first.schema.with_metadata({"routed_experts": json.dumps(metadata)})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        waiting: list[Any] = []
        for batch in chain([first], batches):
            waiting.append(batch.replace_schema_metadata(schema.metadata))
            if sum(table.num_rows for table in waiting) >= _GROUP:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting = []
        writer.write_table(pa.Table.from_batches(waiting, schema))


def _batch(pa: Any, part: Values, layer_ids: Sequence[int | None] | None) -> Any:
    count, layers, top_k = part["experts"].shape
    repeats = pa.array(np.repeat(np.arange(count), layers))
    columns = {
        name: pa.array(part[name], getattr(pa, column.arrow)()).take(repeats)
        for name, column in COLUMNS.items()
    }
    columns["layer"] = pa.array(np.tile(np.arange(layers, dtype=np.int16), count))
    columns["layer_id"] = pa.array(list(layer_ids or [None] * layers) * count, pa.int16())
    offsets = np.arange(0, (count * layers + 1) * top_k, top_k, dtype=np.int32)
    for name in _LISTS:
        if name in part:
            columns[name] = pa.ListArray.from_arrays(offsets, np.asarray(part[name]).ravel())
    return pa.RecordBatch.from_pydict(columns)


def write_npz(path: Path, parts: Iterator[Values], exported: Exported) -> None:
    """One array per column, with an element per token: `experts` and `weights` are [N, L, K].
    Unknown values are -1.

    `source` has places in `sources`, the names of files.
    """
    types = {name: column.npz for name, column in COLUMNS.items() if column.npz is not None}
    types |= {"experts": "<i2", "weights": "<f4"}
    sources: dict[Any, int] = {}
    columns = defaultdict[str, list[NDArray[Any]]](list)
    for part in parts:
        part["source"] = [sources.setdefault(name, len(sources)) for name in part["source"]]
        for name in types.keys() & part.keys():
            columns[name].append(_npz_values(name, part[name], types[name]))
    arrays = {name: np.concatenate(columns.pop(name)) for name in [*columns]}
    of_all_tokens = {
        "num_experts": exported.model.num_experts,
        "layer_ids": exported.model.layer_ids,
        "sources": [*sources],
    }
    for name, value in of_all_tokens.items():
        if value is not None:
            arrays[name] = np.asarray(value)
    with path.open("wb") as file:  # of a name without `.npz`, which numpy would add
        np.savez(file, **arrays)


def _npz_values(name: str, values: Any, dtype: str) -> NDArray[Any]:
    if name not in _LISTS:
        values = [UNKNOWN if value is None else value for value in values]
    return np.asarray(values, dtype)


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
    parser.add_argument(
        "--url", help="URL of a running server; sends the requests of --prompts to it"
    )
    add_server_flags(parser)
    parser.add_argument(
        "--output", "-o", type=Path, required=True, help="file to write, *.parquet or *.npz"
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="also write the router's weights; needs return_routed_expert_weights in the requests",
    )
    args = parser.parse_args(argv)
    if args.output.suffix not in SUFFIXES:
        parser.error(f"--output {args.output} must end in {' or '.join(SUFFIXES)}")
    if bool(args.file) == bool(args.url) or bool(args.url) != bool(args.prompts):
        parser.error("give files, or --url and --prompts")
    return args


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts export`; returns the exit status."""
    args = parse(argv)
    exported = Exported()
    bodies = bodies_of(args) if args.url else None
    shown: Any = partial(
        progress, desc="exporting", unit=" responses", total=None if bodies is None else len(bodies)
    )
    answers: Answers
    if bodies is None:
        saved_answers = shown(read(opened(args.file), ModelInfo()))
        answers = ((answer, answer.each_routing()) for answer in saved_answers)
    else:
        server = RunningServer(args.url, args.api_key)
        new_answers = shown(server.ask_all(bodies, args.weights))
        answers = ((answer, server.with_texts(answer.routings())) for answer in new_answers)
    with atomic_file(args.output, "--output") as path:
        parts = columns_of(answers, exported, args.weights)
        first = next(parts, None)
        if first is None:
            raise CommandError("Nothing to export: the responses have no rows.")
        write = write_npz if args.output.suffix == ".npz" else write_parquet
        write(path, chain([first], parts), exported)
    print(
        f"Wrote {args.output}: {exported.answers} responses, {exported.rows} tokens with experts, "
        f"{exported.missing} of them unknown."
    )
    return 0
