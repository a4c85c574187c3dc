"""Decoding of arrays, against numpy and the decoder in docs/train.md."""

import base64
import io
import json
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.protocol import codec
from routed_experts.protocol.codec import CodecError, Format, decode, decode_weights, resolve_dtype
from tests.protocol.answers import peak_of
from tests.protocol.forms import encode

SETTINGS = settings(max_examples=60, deadline=None, database=None, derandomize=True)
FORMATS = get_args(Format)
DTYPES = ("int16", "uint8", "int32")


@st.composite
def arrays(draw: Any) -> np.ndarray:
    """Rows [n, L, K], contiguous or not, with ids up to each dtype's limit."""
    shape = draw(st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 4)))
    ids = st.integers(
        draw(st.sampled_from((-1, 0))), draw(st.sampled_from((1, 127, 128, 255, 256, 32767)))
    )
    count = int(np.prod(shape))
    rows = np.array(
        draw(st.lists(ids, min_size=count, max_size=count)),
        dtype=draw(st.sampled_from(("<i2", ">i2"))),
    )
    return rows.reshape(shape[::-1]).T if draw(st.booleans()) else rows.reshape(shape)


def numpy_decode(value: Any, fmt: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The decoder of docs/train.md, for each format."""
    if fmt == "list":
        return np.array(value).reshape(shape)
    if fmt == "npy":
        return np.load(io.BytesIO(base64.b64decode(value)), allow_pickle=False)
    data = value["data"] if fmt == "object" else value
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype).newbyteorder("<")).reshape(shape)


def test_a_format_that_requests_know_is_in_the_table_of_readers() -> None:
    """A reader that did not know it would take its text for `raw`, and return other ids."""
    assert set(codec.FORMATS) == set(FORMATS), "add the format to FORMATS in protocol/codec.py"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_no_format_can_be_taken_for_another(fmt: Format, num_rows: int) -> None:
    """A response does not say its format."""
    rows = np.arange(num_rows * 2 * 2, dtype=np.int16).reshape(num_rows, 2, 2)
    value = encode(rows, fmt=fmt)
    matching = [name for name in codec.FORMATS if codec.FORMATS[name].matches(value)]
    assert matching == [fmt], (
        f"FORMATS in protocol/codec.py: an array in {fmt} would be taken for {matching}"
    )


def test_a_value_that_two_formats_match_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as hexadecimal text, which is base64, too."""
    as_hex = np.array([[[0x12]], [[0x34]], [[0x56]], [[0x78]]], np.uint8).tobytes().hex()
    text = codec.ArrayFormat(lambda value: isinstance(value, str), lambda value, *_: np.empty(0))
    monkeypatch.setitem(codec.FORMATS, "hex", text)
    with pytest.raises(CodecError, match="raw and hex"):
        decode(as_hex, dtype="uint8", num_layers=1, top_k=1)


@SETTINGS
@given(arrays(), st.sampled_from(FORMATS), st.sampled_from(DTYPES), st.integers(0, 1 << 40))
def test_every_form_is_little_endian_and_comes_back(
    rows: np.ndarray, fmt: Format, dtype: str, start: int
) -> None:
    missing = sum(bool((row == -1).any()) for row in rows)
    assert codec.count_missing(rows) == missing
    if dtype == "uint8" and (missing or rows.max(initial=0) > 255):
        return
    value = json.loads(json.dumps(encode(rows, fmt=fmt, dtype=dtype, start=start)))
    decoded = decode(value, dtype=dtype, num_layers=rows.shape[1], top_k=rows.shape[2])
    for back in (decoded, numpy_decode(value, fmt, dtype, rows.shape)):
        assert np.array_equal(back, rows)
        assert back.shape == rows.shape
        assert fmt == "list" or back.dtype == np.dtype(dtype)
    if fmt in ("object", "npy"):
        assert decode(value).shape == rows.shape


@SETTINGS
@given(arrays(), st.sampled_from(["int16", "int32"]), st.integers(0, 1 << 40))
def test_an_object_says_what_it_is(rows: np.ndarray, dtype: str, start: int) -> None:
    value = json.loads(json.dumps(encode(rows, fmt="object", dtype=dtype, start=start)))
    assert [*value.items()] == [*codec.encode(rows.astype(dtype), start).items()]
    assert (value["shape"], value["dtype"]) == ([*rows.shape], dtype)
    assert (value["start"], value["missing"]) == (start, codec.count_missing(rows))


BITS = np.array([0x7FC00001, -(1 << 31), 0x3F000000, 1, -65536, -1], np.int32).view(np.float32)
"""NaN, -0, 0.5, the smallest number, another NaN; the last is unknown."""


def packed(value: Any) -> Any:
    """An array of JSON as it stands in MessagePack: base64 is bytes there."""
    if isinstance(value, dict):
        return {**value, "data": base64.b64decode(value["data"])}
    return base64.b64decode(value) if isinstance(value, str) else value


@SETTINGS
@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(BITS), max_size=36))
def test_weights(fmt: Format, values: list[np.float32]) -> None:
    """Bit for bit, in base64 and as bytes; in lists, all NaN are unknown. No array of weights is
    one of ids."""
    weights = np.array(values[: len(values) // 6 * 6], np.float32).reshape(-1, 2, 3)
    assert codec.count_missing(weights) == sum(
        bool((row.view(np.int32) == -1).any()) for row in weights
    )
    value = encode(weights, fmt=fmt)
    may_differ = fmt == "list" and np.isnan(weights).any()
    for encoded in (value, packed(value)):
        back = decode_weights(encoded, num_layers=2, top_k=3)
        assert (back.shape, back.dtype) == (weights.shape, np.float32)
        assert np.array_equal(back, weights, equal_nan=True)
        assert may_differ or back.tobytes() == weights.tobytes()
    if fmt != "raw" and len(weights):
        with pytest.raises(CodecError):
            decode(value)


IDS = np.arange(6, dtype=np.int16).reshape(1, 2, 3)


@pytest.mark.parametrize(
    "value",
    [
        7,
        None,
        "*",
        *(encode(IDS, fmt=fmt) for fmt in ("raw", "npy", "object")),
        [[1.0]],
        [[["x"]]],
        {},
    ],
)
def test_what_is_no_array_of_weights(value: Any) -> None:
    with pytest.raises(CodecError):
        decode_weights(value)


def test_resolve_dtype() -> None:
    for requested, num_experts, dtype in (
        *(
            ("auto", 256, "uint8"),
            ("auto", 257, "int16"),
            ("vllm", 256, "uint8"),
            ("vllm", 257, "uint16"),
        ),
        *(("uint8", 256, "uint8"), ("int16", 1 << 15, "int16"), ("int32", 512, "int32")),
        *(("uint8", 257, None), ("int16", (1 << 15) + 1, None)),
    ):
        if dtype is None:
            with pytest.raises(
                CodecError, match=f"{requested} cannot hold the ids of {num_experts} experts"
            ):
                resolve_dtype(requested, num_experts)  # type: ignore[arg-type]
        else:
            assert resolve_dtype(requested, num_experts) == dtype  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", FORMATS)
def test_ids_out_of_range(fmt: Format) -> None:
    for id_ in (-2, -70_000, 40_000):
        value = encode(np.array([[[0, id_]]], dtype=np.int32), fmt=fmt, dtype="int32", start=0)
        with pytest.raises(CodecError, match=f"not an expert id: {id_}"):
            decode(value, dtype="int32", num_layers=1, top_k=2)


def test_invalid_and_empty_arrays() -> None:
    for data in ("AQ-AC_AA==", "AQAC\nAA==", "!!!!", "AQACAA"):
        for value in (data, {"data": data, "shape": [1, 1, 2], "dtype": "int16"}):
            with pytest.raises(CodecError, match="not an array of expert ids"):
                decode(value, num_layers=1, top_k=2)
    for value, message in (
        ({"data": "AQACAA==", "shape": [1, 2], "dtype": "int16"}, "in 2 dimensions"),
        ("AQACAA==", "pass num_layers and top_k"),
        (3, "not an array of expert ids: int"),
    ):
        with pytest.raises(CodecError, match=message):
            decode(value)  # type: ignore[arg-type]
    assert decode([]).shape == (0, 0, 0)
    assert decode([], num_layers=2, top_k=4).shape == (0, 2, 4)


@SETTINGS
@given(st.sampled_from(["object", "npy", "raw"]), st.integers(1, 160))
def test_truncated_arrays(fmt: Format, cut: int) -> None:
    if fmt == "raw" and cut % 16 == 0:
        return  # whole rows: nothing in the raw format tells how many there were
    value: Any = encode(np.zeros((10, 2, 3), np.int16), fmt=fmt, dtype="int16", start=0)
    value = {**value, "data": value["data"][:-cut]} if fmt == "object" else value[:-cut]
    with pytest.raises(CodecError):
        decode(value, num_layers=2, top_k=3)


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"'shape': {shape}, }}\n"
            for shape in ("(1073741824, 1048576, 8)", "(1073741824, 0, 0)", "(2, 3)", "(-1, 1, 1)")
        ),
        *(f"'shape': ({'-' * count}1, 1, 1), }}\n" for count in (1, 9_000)),
        *("'shape': (1, 1, 1)" + "[" * 9_000, "'shape': (1, 1, 1), }\n" + " " * 9_000),
    ],
    ids=range(8),
)
def test_a_header_of_npy_allocates_nothing(text: str) -> None:
    """numpy's parser evaluates any literal in it, and an array of its shape is made before
    there are any data."""
    header = "{'descr': '<i2', 'fortran_order': False, " + text
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0\0"

    def refused() -> None:
        for value in (data, base64.b64encode(data).decode()):
            with pytest.raises(CodecError):
                decode(value)

    assert peak_of(refused)[1] < 200_000
    huge = {"data": "", "shape": [2**30, 0, 0], "dtype": "int16", "start": 0, "missing": 0}
    for value in (huge, [[[["a"]]]], [[["a"]]], [[[True]]], [[[1.5]]], [[[2**70]]]):
        with pytest.raises(CodecError):
            decode(value)


def test_arrays_in_fortrans_order() -> None:
    rows = np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4))
    buffer = io.BytesIO()
    np.save(buffer, rows)
    assert np.array_equal(decode(buffer.getvalue()), rows)
