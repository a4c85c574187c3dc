"""Writes rows as tables and arrays. Needs numpy only, and pyarrow for Parquet."""

import csv
import json
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import UNKNOWN, Rows
from routed_experts.protocol.saved import ModelInfo
from routed_experts.server.cli.console import CommandError

NO_PYARROW = "Parquet needs pyarrow: pip install 'routed-experts-server[export]', or choose --format csv or npz."
KINDS = {"source": "string", "group": "string", "request": "int32", "id": "string", "choice": "int32"}
KINDS |= {"position": "int32", "is_prompt": "bool_", "token_id": "int32", "token": "string"}
"""The columns of tables that say which token it is, and their types in pyarrow."""
_CUT = 1 << 16  # rows of a table that are converted at once
_GROUP = 1 << 18  # rows of a table in a row group of Parquet


@dataclass(frozen=True)
class Span:
    """Rows of consecutive positions of a choice."""

    source: str  # file that has the response, or the prompt that was sent
    request: int  # number of the response, counted from 0
    id: str | None  # the response's own
    choice: int
    start: int  # position of the first row
    prompt_len: int | None
    rows: Rows  # [n, L, K]
    weights: NDArray[np.float32] | None  # [n, L, K]; None if they are not written
    token_ids: Sequence[int] | None  # of the n tokens
    texts: Sequence[str | None] | None  # likewise
    info: ModelInfo

    @property
    def columns(self) -> dict[str, Sequence[Any]]:
        """What tables say of each of the n tokens, by the names in `KINDS`."""
        group = self.source.rpartition("/")[0] or None  # the folder of the file, if the command named it
        positions, nothing = range(self.start, self.start + len(self.rows)), [None] * len(self.rows)
        values = (self.source, group, self.request, self.id, self.choice)
        return {
            **{name: [value] * len(self.rows) for name, value in zip(KINDS, values, strict=False)},
            "position": positions,
            "is_prompt": nothing if self.prompt_len is None else [at < self.prompt_len for at in positions],
            "token_id": self.token_ids or nothing,
            "token": self.texts or nothing,
        }

    @property
    def layer_ids(self) -> list[int | None]:
        """Decoder layer of each of the L layers."""
        return list(self.info.layer_ids or [None] * self.rows.shape[1])

    def cut(self) -> Iterator["Span"]:
        """Spans that are small tables."""
        step = max(_CUT // max(self.rows.shape[1], 1), 1)
        for first in range(0, len(self.rows), step):
            part = slice(first, first + step)
            yield replace(
                self,
                start=self.start + first,
                rows=self.rows[part],
                weights=None if self.weights is None else self.weights[part],
                token_ids=None if self.token_ids is None else self.token_ids[part],
                texts=None if self.texts is None else self.texts[part],
            )


def _cut(spans: Iterator[Span]) -> Iterator[Span]:
    return (part for span in spans for part in span.cut())


# ---- tables ----


def write_csv(path: Path, spans: Iterator[Span], first: Span) -> None:
    """One row per token and layer, with a header. Unknown experts are -1, unknown weights nan, other values empty."""
    places = range(first.rows.shape[2])
    head = [*KINDS, "layer", "layer_id"]
    head += [f"expert_{place}" for place in places]
    head += [] if first.weights is None else [f"weight_{place}" for place in places]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        for span in _cut(spans):
            writer.writerows(_lines(span))


def _lines(span: Span) -> Iterator[list[Any]]:
    layers = list(enumerate(span.layer_ids))
    for place, token in enumerate(zip(*span.columns.values(), strict=True)):
        experts = span.rows[place].tolist()
        weights: list[list[float]] = [[]] * len(layers) if span.weights is None else span.weights[place].tolist()
        for (layer, layer_id), chosen, weighed in zip(layers, experts, weights, strict=True):
            yield [*token, layer, layer_id, *chosen, *weighed]


def write_parquet(path: Path, spans: Iterator[Span], first: Span, per_token: bool = False) -> None:
    """One row per token and layer, or per token."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise CommandError(NO_PYARROW) from error

    schema = _schema(pa, first, per_token)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        waiting: list[Any] = []
        for span in _cut(spans):
            waiting.append(pa.RecordBatch.from_arrays(_columns(pa, span, per_token), schema=schema))
            if sum(batch.num_rows for batch in waiting) >= _GROUP:
                writer.write_table(pa.Table.from_batches(waiting, schema))
                waiting = []
        writer.write_table(pa.Table.from_batches(waiting, schema))


def _schema(pa: Any, first: Span, per_token: bool) -> Any:
    experts, weights = pa.list_(pa.int16()), pa.list_(pa.float32())
    fields = [(name, getattr(pa, kind)()) for name, kind in KINDS.items()]
    if per_token:
        experts, weights = pa.list_(experts), pa.list_(weights)
    else:
        fields += [("layer", pa.int16()), ("layer_id", pa.int16())]
    fields += [("experts", experts)] + ([] if first.weights is None else [("weights", weights)])
    model = {"num_layers": first.rows.shape[1], "top_k": first.rows.shape[2]}
    model |= {"num_experts": first.info.num_experts, "layer_ids": first.info.layer_ids}
    return pa.schema(fields, metadata={"routed_experts": json.dumps(model)})


def _columns(pa: Any, span: Span, per_token: bool) -> list[Any]:
    count, layers, _ = span.rows.shape
    repeats = pa.array(np.repeat(np.arange(count), 1 if per_token else layers))
    columns = [pa.array(values, getattr(pa, KINDS[name])()).take(repeats) for name, values in span.columns.items()]
    if not per_token:
        columns += [pa.array(np.tile(np.arange(layers, dtype=np.int16), count))]
        columns += [pa.array(span.layer_ids * count, pa.int16())]
    return columns + [_lists(pa, values, per_token) for values in (span.rows, span.weights) if values is not None]


def _lists(pa: Any, values: NDArray[Any], per_token: bool) -> Any:
    """Lists of K, or lists of L lists of K, of values [n, L, K]."""
    count, layers, top_k = values.shape
    inner = pa.ListArray.from_arrays(np.arange(count * layers + 1, dtype=np.int32) * top_k, values.ravel())
    if not per_token:
        return inner
    return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * layers, inner)


# ---- arrays ----


def write_npz(path: Path, spans: Iterator[Span], first: Span) -> None:
    """One array per column, with an element per token: `experts` and `weights` are [N, L, K]. Unknown values are -1.

    `source` has places in `sources`, the names of files.
    """
    info, (_, layers, top_k) = first.info, first.rows.shape
    sources: dict[str, int] = {}
    columns: dict[str, tuple[str, tuple[int, ...]]] = {"source": ("<i4", ())}
    columns |= {name: ("<i4", ()) for name, kind in KINDS.items() if kind in ("int32", "bool_")}
    columns |= {"is_prompt": ("|i1", ()), "experts": ("<i2", (layers, top_k))}
    columns |= {} if first.weights is None else {"weights": ("<f4", (layers, top_k))}
    count = 0
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {name: stack.enter_context(TemporaryFile(dir=path.parent)) for name in columns}
        for span in _cut(spans):
            count += len(span.rows)
            source = sources.setdefault(span.source, len(sources))
            about: dict[str, Any] = span.columns | {
                "source": [source] * len(span.rows),
                "experts": span.rows,
                "weights": span.weights,
            }
            for name, (dtype, shape) in columns.items():
                values = about[name] if shape else [UNKNOWN if one is None else one for one in about[name]]
                files[name].write(np.asarray(values, dtype).tobytes())
        archive = stack.enter_context(zipfile.ZipFile(path, "w"))
        for name, (dtype, shape) in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = {"descr": dtype, "fortran_order": False, "shape": (count, *shape)}
                np.lib.format.write_array_header_1_0(member, header)  # type: ignore[no-untyped-call]
                files[name].seek(0)
                shutil.copyfileobj(files[name], member)
        whole = {"num_experts": info.num_experts, "layer_ids": info.layer_ids, "sources": list(sources)}
        for name, value in whole.items():
            if value is not None:
                with archive.open(f"{name}.npy", "w") as member:
                    np.save(member, np.asarray(value))
