"""The bytes of arrays, against the plain statement of the forms."""

import base64
import itertools
import random
from itertools import pairwise
from typing import Any, get_args

import msgspec
import numpy as np
import orjson
import pytest

from routed_experts.capture.wire.envelope import RunRows
from routed_experts.capture.wire.rows import combined, with_steps
from routed_experts.protocol import codec
from routed_experts.server.http.encoding.encoding import LINE_BYTES, Encoder
from routed_experts.server.http.encoding.wire_form import LostRowsError, WireForm
from tests.protocol.forms import encode

SHAPES = [(48, 8, 128), (2, 3, 300)]  # L, K, experts
FORMATS: list[Any] = list(get_args(codec.Format))


def rows_of(count: int, shape: tuple[int, int, int], unknown: bool) -> np.ndarray:
    layers, top_k, experts = shape
    rows = np.random.default_rng(count).integers(
        0, experts, size=(count, layers, top_k), dtype=np.int16
    )
    if unknown and count > 2:
        rows[1] = -1
        rows[2, 0, -1] = -1
    return rows


def parts_of(rows: np.ndarray) -> list[np.ndarray]:
    """`rows` as they come from an engine: long parts, single rows and empty ones."""
    rng, count = random.Random(len(rows)), len(rows)
    cuts = {0, count, *(rng.randrange(count + 1) for _ in range(4)), min(1, count), min(2, count)}
    return [rows[:0], *(rows[first:end] for first, end in pairwise(sorted(cuts)))]


def spread(rows: np.ndarray) -> np.ndarray:
    """`rows` in a model of twice as many decoder layers and one more: every other has experts."""
    count, layers, top_k = rows.shape
    every = np.zeros((count, 2 * layers + 1, top_k), dtype=rows.dtype)
    every[:, 1::2] = rows
    every[(rows == -1).any(axis=(1, 2)), ::2] = -1
    return every


def encoder(fmt: Any, dtype: str, shape: tuple[int, int, int], layers: str = "moe") -> Encoder:
    dense = (list(range(1, 2 * shape[0], 2)), 2 * shape[0] + 1)
    form = WireForm(
        format=fmt,
        dtype=dtype,
        ids_shape=shape[:2],
        num_experts=shape[2],
        decoder_layers=dense if layers == "all" else None,
    )
    return Encoder(form)


def text_of(own: Encoder, rows: np.ndarray, start: int) -> bytes:
    return b"".join(own.parts([rows], start))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_encoding_is_that_of_the_codec(shape: tuple[int, int, int], fmt: Any) -> None:
    dtypes = ("int16", "int32", "uint8") if shape[2] <= 256 else ("int16", "int32")
    many = 150  # of more than one part
    for dtype, layers, count in itertools.product(dtypes, ("moe", "all"), (0, 3, many)):
        rows = rows_of(count, shape, unknown=dtype != "uint8")
        expected = encode(
            spread(rows) if layers == "all" else rows, fmt=fmt, dtype=dtype, start=70_000
        )
        for parts, packed in (([rows], False), (parts_of(rows), False), (parts_of(rows), True)):
            own = encoder(fmt, dtype, shape, layers)
            content = b"".join(own.parts(parts, 70_000, packed=packed))
            if packed:
                assert msgspec.msgpack.decode(content) == as_bytes(expected)
            else:
                assert content == orjson.dumps(expected)
                assert len(content) <= own.form.text_bytes(count)
            assert own.counts.rows == count
            assert own.counts.missing == codec.count_missing(rows)
            assert own.counts.num_bytes == len(content)


def as_bytes(array: Any) -> Any:
    """An array of JSON as it stands in MessagePack: base64 is bytes there."""
    if isinstance(array, dict):
        return {**array, "data": base64.b64decode(array["data"])}
    return base64.b64decode(array) if isinstance(array, str) else array


@pytest.mark.parametrize("layers", ["moe", "all"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_many_rows_as_fit_a_line(shape: tuple[int, int, int], fmt: Any, layers: str) -> None:
    own = encoder(fmt, "int32", shape, layers)
    count = own.form.rows_in(LINE_BYTES)
    assert count > 1
    widest = np.full((count + 1, *shape[:2]), shape[2] - 1, dtype=np.int16)
    assert len(text_of(own, widest[:-1], 1 << 40)) <= LINE_BYTES
    if fmt != "list" or layers == "moe":  # zeros are shorter than ids
        assert len(text_of(own, widest, 1 << 40)) > LINE_BYTES * 0.99
    for limit in range(own.form.text_bytes(2), own.form.text_bytes(4)):
        assert own.form.text_bytes(own.form.rows_in(limit)) <= limit
    assert own.form.rows_in(1) == 1
    for few in (0, 1, 9):  # in a list, unknown ids are the longest of a model with few experts
        narrow = Encoder(WireForm(format="list", ids_shape=(2, 3), num_experts=8))
        assert len(
            text_of(narrow, np.full((few, 2, 3), -1, dtype=np.int16), 0)
        ) <= narrow.form.text_bytes(few)


@pytest.mark.parametrize("fmt", FORMATS)
def test_unsigned_dtypes_cannot_hold_unknown_rows(fmt: Any) -> None:
    rows = rows_of(10, SHAPES[0], unknown=True)
    for dtype, layers in itertools.product(("uint8", "uint16"), ("moe", "all")):
        own = encoder(fmt, dtype, SHAPES[0], layers)
        for packed in (False, True):
            with pytest.raises(
                LostRowsError, match=f"2 rows are unknown .* {dtype} cannot hold: set"
            ):
                own.parts([rows], 0, packed=packed)


def test_an_id_whose_bytes_are_those_of_an_unknown_one_is_told_from_it() -> None:
    for ids, num_experts, dtype, missing in (
        ([[255, 32767], [32767, 255]], 32768, "int16", 0),
        ([[255, 255], [255, 255]], 256, "int16", 0),
        ([[255, 255], [255, 255]], 256, "int32", 0),
        ([[255, 255], [255, 255]], 256, "uint8", 0),
        ([[255, 255], [-1, 255]], 256, "int16", 1),
    ):
        row = np.array([ids], np.int16)
        own = Encoder(WireForm(dtype=dtype, ids_shape=(2, 2), num_experts=num_experts))
        fields = own.fields("rows", row, 7)
        expected = encode(row, fmt="object", dtype=dtype, start=7)
        assert orjson.loads(f"{{{fields[:-1]}}}") == {"rows": expected}
        assert expected["missing"] == own.counts.missing == missing


def run_of(rows: np.ndarray) -> RunRows:
    """Single rows beside each other in a message, which begins at an odd address there."""
    data = b"x" + rows.tobytes()
    array = np.frombuffer(data, dtype=np.int16, offset=1).reshape(rows.shape)
    return RunRows(array[:, np.newaxis])


SINGLE_ROWS = [*itertools.product(["object", "npy", "raw"], ["int16", "uint8"])]
"""Formats and types in which a single row is taken from the text of its message."""


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("shape", [(48, 8), (2, 3), (1, 1), (1, 2), (5, 5)])
def test_a_single_row_of_a_message_is_that_of_the_codec(
    shape: tuple[int, int], num_rows: int
) -> None:
    """Streams of different forms share a message, and what is made of it."""
    rows = np.random.default_rng(num_rows).integers(0, 256, (num_rows, *shape), np.int16)
    rows[-1, -1, -1] = 255  # its byte is that of -1
    run = run_of(rows)
    for (fmt, dtype), place in itertools.product(SINGLE_ROWS, range(num_rows)):
        own = encoder(fmt, dtype, (*shape, 256))
        text = own.single_row(run, place, 7)
        expected: Any = encode(rows[place : place + 1], fmt=fmt, dtype=dtype, start=7)
        assert text is not None
        assert orjson.loads(f"{{{text[:-1]}}}") == {"routed_experts": expected}
        # counted as the general way does
        general = encoder(fmt, dtype, (*shape, 256))
        assert general.fields("routed_experts", rows[place : place + 1], 7) == text
        assert (own.counts, own.num_bytes) == (general.counts, general.num_bytes)


@pytest.mark.parametrize("has_steps", [False, True])
@pytest.mark.parametrize("shape", [(4, 2), (1, 1), (5, 5)])
def test_a_single_row_of_a_message_has_its_weights_and_step(
    shape: tuple[int, int], has_steps: bool
) -> None:
    num_rows = 3
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 256, (num_rows, *shape), np.int16)
    weights = rng.standard_normal(ids.shape, np.float32)
    weights[0, 0, 0] = -np.inf  # its bytes are those of NaN, but for one
    rows = combined(ids, weights)
    if has_steps:
        rows = with_steps(rows, np.arange(70_000, 70_000 + num_rows, dtype=np.uint32))
    run = run_of(rows)
    for (fmt, dtype), place in itertools.product(SINGLE_ROWS, range(num_rows)):
        form = WireForm(
            format=fmt,
            dtype=dtype,
            ids_shape=shape,
            num_experts=256,
            has_weights=True,
            has_steps=has_steps,
        )
        own, general = Encoder(form), Encoder(form)
        text = own.single_row(run, place, 7)
        assert text == general.fields("routed_experts", run.of(place), 7)
        assert own.counts == general.counts
        assert own.num_bytes == general.num_bytes
        if has_steps:
            steps = orjson.loads(f"{{{text[:-1]}}}")["routed_experts_steps"]
            assert codec.decode_steps(steps).tolist() == [70_000 + place]


def test_a_single_row_that_is_unknown_in_part_goes_the_general_way() -> None:
    ids = np.full((4, 2, 2), 255, dtype=np.int16)
    weights = np.ones(ids.shape, np.float32)
    ids[1, 1, 0] = -1
    ids[2] = -1
    weights[2] = np.nan
    weights[3, 0, 1] = np.nan
    for has_weights in (False, True):
        run = run_of(combined(ids, weights) if has_weights else ids)
        form = WireForm(ids_shape=(2, 2), num_experts=256, has_weights=has_weights)
        own = Encoder(form)
        known = [own.single_row(run, place, 7) is not None for place in range(4)]
        assert known == [True, False, False, not has_weights]
        assert own.counts.rows == sum(known)
        assert all(encoder.counts.rows == sum(known) for encoder in own.named_encoders().values())


@pytest.mark.parametrize(
    ("fmt", "dtype", "layers"),
    [("list", "int16", "moe"), ("object", "int32", "moe"), ("object", "int16", "all")],
)
def test_what_has_to_be_converted_goes_the_general_way(fmt: Any, dtype: Any, layers: str) -> None:
    rows = rows_of(1, SHAPES[0], unknown=False)
    own = encoder(fmt, dtype, SHAPES[0], layers)
    assert own.single_row(run_of(rows), 0, 7) is None
    assert own.counts.rows == 0


@pytest.mark.parametrize("has_weights", [False, True])
def test_captured_ids_are_not_copied_before_they_are_stored(has_weights: bool) -> None:
    form = WireForm(ids_shape=(4, 2), num_experts=8, has_weights=has_weights)
    rows = np.arange(7 * 12 * 2, dtype=np.int16).reshape(7, 12, 2)[:, : form.captured_shape[0]]
    rows = np.ascontiguousarray(rows)
    array, missing = Encoder(form).layers_first([rows])
    assert np.shares_memory(array, rows)
    assert np.array_equal(array, rows[:, :4].swapaxes(0, 1))
    assert missing == 0
