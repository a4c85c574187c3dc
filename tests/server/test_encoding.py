"""The bytes of arrays, against the plain statement of the forms in `protocol.codec.encode`."""

import base64
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from routed_experts.protocol import codec
from routed_experts.server.http.encoding import LINE_BYTES, Encoder, LostRowsError

SHAPES = [(48, 8, 128), (5, 4, 16), (2, 3, 300)]  # L, K, experts
COUNTS = [0, 1, 2, 3, 100, 1000]
FORMS: list[Any] = ["object", "npy", "raw", "list"]
DTYPES = ["int16", "int32", "uint8"]


def rows_of(count: int, shape: tuple[int, int, int], unknown: bool) -> np.ndarray:
    layers, top_k, experts = shape
    rows = np.random.default_rng(count).integers(0, experts, size=(count, layers, top_k), dtype=np.int16)
    if unknown and count > 2:
        rows[1] = -1
        rows[2, 0, -1] = -1
    return rows


def parts_of(rows: np.ndarray) -> list[np.ndarray]:
    """`rows` as they come from an engine: a long piece, empty ones, single ones."""
    cuts = sorted({0, len(rows), *(min(len(rows), cut) for cut in (1, 2, 3, 700, 701))})
    return [rows[:0], *(rows[first:end] for first, end in pairwise(cuts))]


def dense_before_each(shape: tuple[int, int, int]) -> tuple[list[int], int]:
    """Layers of a model of twice as many decoder layers and one more: every other has experts."""
    return list(range(1, 2 * shape[0], 2)), 2 * shape[0] + 1


def spread(rows: np.ndarray) -> np.ndarray:
    """`rows` in all layers of such a model."""
    count, layers, top_k = rows.shape
    every = np.zeros((count, 2 * layers + 1, top_k), dtype=rows.dtype)
    for layer in range(layers):
        every[:, 2 * layer + 1] = rows[:, layer]
    for row in every:
        if (row == -1).any():
            row[::2] = -1
    return every


def encoder(fmt: Any, dtype: str, shape: tuple[int, int, int], layers: str = "moe") -> Encoder:
    return Encoder(fmt, dtype, shape[:2], shape[2], dense_before_each(shape) if layers == "all" else None)


@pytest.mark.parametrize("layers", ["moe", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_ways_say_the_same(shape: tuple[int, int, int], fmt: Any, dtype: str, layers: str) -> None:
    if dtype == "uint8" and shape[2] > 256:
        pytest.skip("uint8 cannot hold the ids of that many experts")
    for count in COUNTS:
        rows = rows_of(count, shape, unknown=dtype != "uint8")
        sent = spread(rows) if layers == "all" else rows
        expected = codec.encode(sent, fmt=fmt, dtype=dtype, start=7)
        own = encoder(fmt, dtype, shape, layers)
        assert orjson.loads(own.text(rows, 7)) == expected
        assert own.text(rows, 7).encode() == orjson.dumps(expected)
        assert b"".join(own.json_parts(parts_of(rows), 7)) == orjson.dumps(expected)
        assert len(own.text(rows, 7)) <= own.text_bytes(count)
        packed = msgspec.msgpack.decode(b"".join(own.msgpack_parts(parts_of(rows), 7)))
        if isinstance(expected, dict):
            assert packed == {**expected, "data": base64.b64decode(expected["data"])}
        else:
            assert packed == (base64.b64decode(expected) if isinstance(expected, str) else expected)


@pytest.mark.parametrize("layers", ["moe", "all"])
@pytest.mark.parametrize("fmt", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_array_fits_the_line_that_it_was_cut_for(shape: tuple[int, int, int], fmt: Any, layers: str) -> None:
    own = encoder(fmt, "int32", shape, layers)
    count = own.rows_in(LINE_BYTES)
    assert count > 1
    widest = np.full((count + 1, *shape[:2]), shape[2] - 1, dtype=np.int16)
    assert len(own.text(widest[:-1], 1 << 40)) <= LINE_BYTES
    if fmt != "list" or layers == "moe":  # zeros are shorter than ids
        assert len(own.text(widest, 1 << 40)) > LINE_BYTES * 0.99
    assert own.rows_in(1) == 1


@pytest.mark.parametrize("layers", ["moe", "all"])
@pytest.mark.parametrize("fmt", FORMS)
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_what_a_type_cannot_say_is_an_error(dtype: str, fmt: Any, layers: str) -> None:
    rows = rows_of(10, SHAPES[1], unknown=True)
    own = encoder(fmt, dtype, SHAPES[1], layers)
    for encode in (
        lambda: own.text(rows, 0),
        lambda: own.check([rows[3:], rows[:3]]),
        lambda: list(own.json_parts([rows], 0)),
        lambda: list(own.msgpack_parts([rows], 0)),
    ):
        with pytest.raises(LostRowsError, match=f"2 rows are not known .* {dtype} cannot hold: ask for int16"):
            encode()
    own.check([rows[3:]])
    encoder("object", "int16", SHAPES[1]).check([rows])


def test_ids_whose_bytes_look_like_an_unknown_one() -> None:
    """255 and 32767 end or begin with the bytes that the search for -1 looks for."""
    rows = np.array([[[255, 32767], [32767, 255]]] * 5, dtype=np.int16)
    own = Encoder("object", "int16", (2, 2), 32768)
    assert orjson.loads(own.text(rows, 0))["missing"] == 0
    assert (codec.decode(orjson.loads(own.text(rows, 0))) == rows).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fmt", FORMS)
def test_what_is_sent_is_counted(fmt: Any, packed: bool) -> None:
    own = encoder(fmt, "int16", SHAPES[0])
    rows = rows_of(1000, SHAPES[0], unknown=True)
    parts = list((own.msgpack_parts if packed else own.json_parts)(parts_of(rows), 0))
    assert (own.sent.rows, own.sent.missing, own.sent.num_bytes) == (1000, 2, sum(map(len, parts)))


@pytest.mark.parametrize("count", [0, 1, 9])
def test_limits_hold_where_unknown_rows_are_the_longest(count: int) -> None:
    own = Encoder("list", "int16", (2, 3), 8)
    assert len(own.text(np.full((count, 2, 3), -1, dtype=np.int16), 0)) <= own.text_bytes(count)


@pytest.mark.parametrize("fmt", FORMS)
def test_arrays_of_any_size_come_in_parts(fmt: Any) -> None:
    """Many small ones, and rows that are larger than a part each, behind an empty array."""
    for shape, count in (((48, 8), 2000), ((200, 200), 3)):
        rows = np.ones((count, *shape), dtype=np.int16)
        arrays = [rows[:0], *(rows[at : at + 1] for at in range(count))]
        own = Encoder(fmt, "int16", shape, 8)
        for parts in (list(own.json_parts(arrays, 0)), list(own.msgpack_parts(arrays, 0))):
            assert len(parts) > 3
            assert max(map(len, parts)) < rows.nbytes
        assert orjson.loads(b"".join(own.json_parts(arrays, 0))) == codec.encode(rows, fmt=fmt, dtype="int16", start=0)


def test_histograms_count_all_blocks() -> None:
    layers, _, experts = SHAPES[0]
    rows = rows_of(1000, SHAPES[0], unknown=True)
    counted = encoder("object", "int16", SHAPES[0]).histogram(parts_of(rows))
    assert (counted["rows"], counted["missing"]) == (1000, 2)
    for layer in (0, layers - 1):
        ids = rows[:, layer].ravel()
        assert counted["counts"][layer] == np.bincount(ids[ids >= 0], minlength=experts).tolist()


def test_histograms_of_all_layers_count_nothing_in_dense_ones() -> None:
    rows = rows_of(100, SHAPES[1], unknown=True)
    counts = encoder("object", "int16", SHAPES[1]).histogram([rows])["counts"]
    every = encoder("object", "int16", SHAPES[1], "all").histogram([rows])
    assert (every["rows"], every["missing"]) == (100, 2)
    assert every["counts"][1::2] == counts
    assert every["counts"][::2] == [[0] * SHAPES[1][2]] * 6
