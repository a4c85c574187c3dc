"""The four forms of the wire: what is encoded comes back, and what cannot be encoded raises."""

import base64
import io
from typing import Any, get_args

import numpy as np
import pytest

from routed_experts.protocol import codec
from routed_experts.protocol.codec import CodecError, Format, decode, encode, resolve_dtype

SHAPE = (3, 2, 4)
DTYPES = ("int16", "uint8", "int32")
FORMATS = get_args(Format)


def rows_of(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape)) % 100).astype(np.int16).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_round_trip(fmt: Format, dtype: str, count: int) -> None:
    rows = rows_of(count, 2, 4)
    value = encode(rows, fmt=fmt, dtype=dtype, start=5)
    back = decode(value, dtype=dtype, num_layers=2, top_k=4)
    assert np.array_equal(back, rows)
    if fmt != "list":
        assert back.dtype == np.dtype(dtype)


@pytest.mark.parametrize("fmt", ["object", "npy"])
@pytest.mark.parametrize("count", [0, 2])
def test_forms_that_carry_their_shape_need_no_help(fmt: Format, count: int) -> None:
    assert decode(encode(rows_of(count, 2, 4), fmt=fmt, dtype="int16", start=0)).shape == (count, 2, 4)


def test_object_is_as_the_contract_says() -> None:
    value = encode(rows_of(*SHAPE), fmt="object", dtype="int16", start=37)
    assert isinstance(value, dict)
    assert list(value) == ["data", "shape", "dtype", "start", "missing"]
    assert value["shape"] == list(SHAPE)
    assert all(type(size) is int for size in value["shape"])
    assert (value["dtype"], value["start"], value["missing"]) == ("int16", 37, 0)
    # the decoder of the documentation
    back = np.frombuffer(base64.b64decode(value["data"]), dtype=value["dtype"]).reshape(value["shape"])
    assert np.array_equal(back, rows_of(*SHAPE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_little_endian(dtype: str) -> None:
    rows = np.array([[[1, 2, 3]]], dtype=">i2")  # whatever the order in memory
    raw = encode(rows, fmt="raw", dtype=dtype, start=0)
    assert isinstance(raw, str)
    width = np.dtype(dtype).itemsize
    assert base64.b64decode(raw) == b"".join(value.to_bytes(width, "little") for value in (1, 2, 3))


def test_npy_is_a_file_that_numpy_loads() -> None:
    value = encode(rows_of(*SHAPE), fmt="npy", dtype="int32", start=0)
    assert isinstance(value, str)
    loaded = np.load(io.BytesIO(base64.b64decode(value)), allow_pickle=False)
    assert loaded.dtype == np.dtype("<i4")
    assert np.array_equal(loaded, rows_of(*SHAPE))


@pytest.mark.parametrize("fmt", FORMATS)
def test_arrays_above_a_slice(fmt: Format) -> None:
    """Encoded in several slices, with no padding in between."""
    rows = np.random.default_rng(1).integers(-1, 300, (codec._SLICE // 24 + 1, 3, 5)).astype(np.int16)
    assert rows.nbytes > codec._SLICE
    sent = encode(rows, fmt=fmt, dtype="int16", start=0)
    assert np.array_equal(decode(sent, num_layers=3, top_k=5), rows)
    if fmt == "raw":
        assert sent == base64.b64encode(rows.tobytes()).decode()


@pytest.mark.parametrize("fmt", FORMATS)
def test_arrays_that_are_not_contiguous(fmt: Format) -> None:
    """A step's rows are slices, and transposed on their way from the device."""
    rows = rows_of(2, 4, 6).transpose(1, 0, 2)[1:3, :, ::2]
    assert not rows.flags["C_CONTIGUOUS"]
    value = encode(rows, fmt=fmt, dtype="int16", start=0)
    assert np.array_equal(decode(value, num_layers=2, top_k=3), rows)


@pytest.mark.parametrize("dtype", ["int16", "int32"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_unknown_rows_stay_minus_one(fmt: Format, dtype: str) -> None:
    rows = rows_of(*SHAPE)
    rows[1] = codec.UNKNOWN
    value = encode(rows, fmt=fmt, dtype=dtype, start=0)
    assert np.array_equal(decode(value, dtype=dtype, num_layers=2, top_k=4), rows)
    if isinstance(value, dict):
        assert value["missing"] == 1


def test_missing_counts_rows_and_not_ids() -> None:
    rows = rows_of(*SHAPE)
    rows[0] = codec.UNKNOWN
    rows[2, 1, 3] = codec.UNKNOWN
    assert codec.count_missing(rows) == 2
    assert codec.count_missing(rows[:0]) == 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_uint8_cannot_say_that_a_row_is_not_known(fmt: Format) -> None:
    rows = rows_of(*SHAPE)
    rows[1] = codec.UNKNOWN
    with pytest.raises(CodecError, match=r"1 rows are not known.*ask for int16"):
        encode(rows, fmt=fmt, dtype="uint8", start=0)
    codec.check_encodable(rows, "int16")
    codec.check_encodable(rows[2:], "uint8")


@pytest.mark.parametrize(
    ("asked", "num_experts", "given"),
    [
        ("auto", 16, "uint8"),
        ("auto", 256, "uint8"),
        ("auto", 257, "int16"),
        ("uint8", 256, "uint8"),
        ("int16", 16, "int16"),
        ("int16", 512, "int16"),
        ("int32", 512, "int32"),
    ],
)
def test_dtypes_wide_enough(asked: Any, num_experts: int, given: str) -> None:
    assert resolve_dtype(asked, num_experts) == given


@pytest.mark.parametrize(("asked", "num_experts"), [("uint8", 257), ("int16", (1 << 15) + 1)])
def test_dtypes_too_narrow(asked: Any, num_experts: int) -> None:
    with pytest.raises(CodecError, match=f"{asked} cannot hold the ids of {num_experts} experts"):
        resolve_dtype(asked, num_experts)


def test_highest_id_of_256_experts_survives_uint8() -> None:
    rows = np.array([[[0, 255]]], dtype=np.int16)
    assert decode(encode(rows, fmt="object", dtype="uint8", start=0)).tolist() == [[[0, 255]]]


@pytest.mark.parametrize("fmt", ["object", "npy", "raw"])
@pytest.mark.parametrize(("dtype", "id_"), [("uint8", 300), ("int16", 40_000), ("uint16", 70_000), ("int16", -40_000)])
def test_ids_that_a_type_cannot_hold(fmt: Format, dtype: str, id_: int) -> None:
    with pytest.raises(CodecError, match=f"{dtype} cannot hold ids"):
        encode(np.array([[[0, id_]]], dtype=np.int32), fmt=fmt, dtype=dtype, start=0)


@pytest.mark.parametrize("fmt", ["object", "npy", "raw", "list"])
@pytest.mark.parametrize("id_", [-2, -70_000, 40_000])
def test_what_is_no_id_is_not_read(fmt: Format, id_: int) -> None:
    sent = encode(np.array([[[0, id_]]], dtype=np.int32), fmt=fmt, dtype="int32", start=0)
    with pytest.raises(CodecError, match=f"not an expert id: {id_}"):
        decode(sent, dtype="int32", num_layers=1, top_k=2)


def test_vllms_type_above_256_experts() -> None:
    rows = np.array([[[0, 299]]], dtype=np.int16)
    assert decode(encode(rows, fmt="object", dtype=resolve_dtype("vllm", 300), start=0)).tolist() == rows.tolist()


@pytest.mark.parametrize("data", ["AQ-AC_AA==", "AQAC\nAA==", "!!!!", "AQACAA"])
def test_what_is_no_base64(data: str) -> None:
    with pytest.raises(CodecError, match="not an array of expert ids"):
        decode({"data": data, "shape": [1, 1, 2], "dtype": "int16"})
    with pytest.raises(CodecError, match="not an array of expert ids"):
        decode(data, num_layers=1, top_k=2)


def test_an_array_of_rows_has_three_dimensions() -> None:
    with pytest.raises(CodecError, match="in 2 dimensions"):
        decode({"data": "AQACAA==", "shape": [1, 2], "dtype": "int16"})


def test_raw_needs_its_shape() -> None:
    raw = encode(rows_of(*SHAPE), fmt="raw", dtype="int16", start=0)
    with pytest.raises(CodecError, match="give num_layers and top_k"):
        decode(raw)


def test_a_list_without_rows_has_three_dimensions() -> None:
    assert decode([]).shape == (0, 0, 0)
    assert decode([], num_layers=2, top_k=4).shape == (0, 2, 4)


def test_other_things_are_not_arrays() -> None:
    with pytest.raises(CodecError, match="not an array of expert ids: int"):
        decode(3)  # type: ignore[arg-type]
