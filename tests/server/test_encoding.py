"""The bytes of arrays, against the plain statement of the forms in `protocol.codec.encode`."""

import base64
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from routed_experts.protocol import codec
from routed_experts.server.encoding import LINE_BYTES, Encoder, LostRowsError

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


def encoder(fmt: Any, dtype: str, shape: tuple[int, int, int]) -> Encoder:
    return Encoder(fmt, dtype, shape[:2], shape[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_ways_say_the_same(shape: tuple[int, int, int], fmt: Any, dtype: str) -> None:
    if dtype == "uint8" and shape[2] > 256:
        pytest.skip("uint8 cannot hold the ids of that many experts")
    for count in COUNTS:
        rows = rows_of(count, shape, unknown=dtype != "uint8")
        expected = codec.encode(rows, fmt=fmt, dtype=dtype, start=7)
        own = encoder(fmt, dtype, shape)
        assert orjson.loads(own.text(rows, 7)) == expected
        assert own.text(rows, 7).encode() == orjson.dumps(expected)
        assert b"".join(own.json_parts(parts_of(rows), 7)) == orjson.dumps(expected)
        assert len(own.text(rows, 7)) <= own.text_bytes(count)
        packed = msgspec.msgpack.decode(b"".join(own.msgpack_parts(parts_of(rows), 7)))
        if isinstance(expected, dict):
            assert packed == {**expected, "data": base64.b64decode(expected["data"])}
        else:
            assert packed == (base64.b64decode(expected) if isinstance(expected, str) else expected)


@pytest.mark.parametrize("fmt", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_array_fits_the_line_that_it_was_cut_for(shape: tuple[int, int, int], fmt: Any) -> None:
    own = encoder(fmt, "int32", shape)
    count = own.rows_in(LINE_BYTES)
    assert count > 1
    widest = np.full((count, *shape[:2]), shape[2] - 1, dtype=np.int16)
    assert LINE_BYTES * 0.95 < len(own.text(widest, 1 << 40)) <= LINE_BYTES
    assert own.rows_in(1) == 1


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_what_a_type_cannot_say_is_an_error(dtype: str) -> None:
    rows = rows_of(10, SHAPES[1], unknown=True)
    own = encoder("object", dtype, SHAPES[1])
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
