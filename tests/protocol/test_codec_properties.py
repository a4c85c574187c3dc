"""Any rows there and back, and anything else refused."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.protocol import codec

SETTINGS = settings(max_examples=200, deadline=None, database=None, derandomize=True)
FORMS: list[codec.Format] = ["object", "npy", "raw", "list"]


@st.composite
def rows(draw: Any) -> np.ndarray:
    shape = draw(st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 4)))
    ids = st.integers(-1, draw(st.sampled_from((1, 127, 128, 255, 256, 32767))))
    count = int(np.prod(shape))
    return np.array(draw(st.lists(ids, min_size=count, max_size=count)), dtype=np.int16).reshape(shape)


@SETTINGS
@given(rows(), st.sampled_from(FORMS), st.sampled_from(["int16", "int32", "uint8"]), st.integers(0, 1 << 40))
def test_there_and_back(array: np.ndarray, fmt: codec.Format, dtype: str, start: int) -> None:
    _, layers, top_k = array.shape
    if dtype == "uint8" and array.max(initial=0) > 255:
        return
    if dtype == "uint8" and (array == -1).any():
        with pytest.raises(codec.CodecError):
            codec.encode(array, fmt=fmt, dtype=dtype, start=start)
        return
    sent = json.loads(json.dumps(codec.encode(array, fmt=fmt, dtype=dtype, start=start)))
    back = codec.decode(sent, dtype=dtype, num_layers=layers, top_k=top_k)
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    if fmt == "object":
        assert sent["missing"] == sum(bool((row == -1).any()) for row in array)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 20), 1 << 20) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@SETTINGS
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "data": st.text() | st.sampled_from(["AAAA", "AAE=", "AA"]) | JSON,
            "dtype": st.sampled_from(["int16", "uint8", "float64", "O", ""]) | JSON,
            "shape": st.lists(st.integers(-2, 4), max_size=4) | JSON,
            "start": JSON,
        },
    )
    | JSON
)
def test_anything_else_is_a_codec_error(value: Any) -> None:
    try:
        decoded = codec.decode(value)
    except codec.CodecError:
        return
    assert isinstance(decoded, np.ndarray)
    assert decoded.dtype.kind in "iu"


@pytest.mark.parametrize("fmt", ["object", "npy", "raw"])
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 7, 100])
def test_what_was_cut_short_is_a_codec_error(fmt: codec.Format, cut: int) -> None:
    sent: Any = codec.encode(np.zeros((10, 2, 3), np.int16), fmt=fmt, dtype="int16", start=0)
    if fmt == "object":
        sent["data"] = sent["data"][:-cut]
    else:
        sent = sent[:-cut]
    with pytest.raises(codec.CodecError):
        codec.decode(sent, num_layers=2, top_k=3)
